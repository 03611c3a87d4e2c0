"""Files of many texts."""

import pytest

from gpt2attn.records import read_records


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_txt_lines_keep_their_spaces_and_numbers(tmp_path):
    path = write(tmp_path, "a.txt", "  one \n\n \t\ntwo\u2028\x0cstill two\r\nthree".encode())
    assert [tuple(r) for r in read_records(path)] == [
        (1, "  one "),
        (4, "two\u2028\x0cstill two"),
        (5, "three"),
    ]


def test_jsonl_takes_strings_and_objects(tmp_path):
    path = write(tmp_path, "a.jsonl", b'"a\\nb"\n{"id": 7, "text": "\\ud83d\\ude00"}\n')
    assert [r.text for r in read_records(path)] == ["a\nb", "\U0001f600"]


def test_a_mark_of_utf8_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    path = write(tmp_path, "a.jsonl", mark + b'"a"\n')
    assert [tuple(r) for r in read_records(path)] == [(1, "a")]
    path = write(tmp_path, "a.txt", mark + b"\n" + mark + b"b\n")
    assert [tuple(r) for r in read_records(path)] == [(2, "\ufeffb")]  # a character like others


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", r"must end in \.txt"),
        ("a.txt", b"ok\n\xff\n", "line 2, is not UTF-8"),
        ("a.txt", "ok\n".encode("utf-16"), "it seems to be UTF-16, so save it as UTF-8"),
        ("a.jsonl", b"{", "line 1, is not JSON"),
        ("a.jsonl", b'"a"\n{"prompt": "x"}', r"line 2, needs a string or an object"),
        ("a.jsonl", b"[" * 100_000, "line 1, is not JSON"),
        ("a.jsonl", b"3", "line 1, needs a string"),
        ("a.jsonl", b'"a"\n"b\\ud800"', r"line 2, has \\ud800 without the other half"),
    ],
)
def test_faults_are_named_with_their_line(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        list(read_records(write(tmp_path, name, content)))
