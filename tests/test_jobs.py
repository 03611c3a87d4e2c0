"""Result files: what a killed, interrupted or failed job leaves, and how it goes on."""

import json
import subprocess
import sys
from unittest import mock

import pytest

import gpt2attn
from gpt2attn.files import sha256
from gpt2attn.jobs import ResultFile, check_result_path, job_record

JOB = {"command": "test", "input_sha256": ["00"], "sizes": (1, 2)}
# Bytes and characters that could end a line, or that have no UTF-8.
ROWS = [{"n": n, "text": text} for n, text in enumerate(["a", "día 😀", "\u2028\n\r\0", "\ud800"])]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "rows.jsonl"


def part(out):
    return out.with_name("rows.jsonl.part")


def read(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def complete(out, job=JOB, **options):
    """Run the job to its end; returns how many rows were there."""
    with ResultFile(out, job, **options) as results:
        results.append(*ROWS[results.n_done :])
        return results.n_done


def stop(out, *rows, error=RuntimeError):
    """Run the job until `error` ends it after `rows`."""
    with ResultFile(out, JOB) as results:
        results.append(*rows)
        raise error


class TestWhole:
    def test_the_rows_and_nothing_else(self, out):
        assert complete(out) == 0
        assert read(out) == ROWS
        assert list(out.parent.iterdir()) == [out]

    def test_a_job_without_rows_is_an_empty_file(self, out):
        with ResultFile(out, JOB):
            pass
        assert out.read_bytes() == b""

    def test_nothing_is_under_the_final_name_before_the_end(self, out):
        with ResultFile(out, JOB) as results:
            for number, row in enumerate(ROWS):
                results.append(row)
                assert not out.exists()
                assert list(results.rows()) == ROWS[: number + 1]
                assert results.n_rows == number + 1

    def test_a_system_may_take_a_few_bytes_at_a_time(self, out):
        with ResultFile(out, JOB) as results:
            file = results._file
            results._file = mock.Mock(wraps=file, write=lambda raw: file.write(raw[:7]))
            results.append(*ROWS)
            results._file = file
        assert read(out) == ROWS

    def test_a_number_that_json_does_not_have_is_refused(self, out):
        with ResultFile(out, JOB) as results:
            with pytest.raises(ValueError, match="JSON"):
                results.append({"x": float("nan")})
            results.append(*ROWS)
        assert read(out) == ROWS


class TestStopped:
    def test_every_way_a_file_can_be_torn(self, out):
        """Cut at each byte after the first line: whole rows stay, the rest is done again."""
        with pytest.raises(RuntimeError):
            stop(out, *ROWS)
        whole = part(out).read_bytes()
        first = whole.index(b"\n") + 1
        for cut in range(first, len(whole) + 1):
            part(out).write_bytes(whole[:cut])
            assert complete(out, force=True) == whole[first:cut].count(b"\n")
            assert read(out) == ROWS
            assert not part(out).exists()

    def test_zeros_that_a_stopped_machine_leaves_are_dropped(self, out):
        with pytest.raises(RuntimeError):
            stop(out, *ROWS[:2])
        with part(out).open("ab") as file:
            file.write(b"\0" * 100 + b"\n" + b'{"n": 9}\n')
        assert complete(out) == 2
        assert read(out) == ROWS

    def test_a_killed_process_loses_nothing_that_it_appended(self, out):
        program = (
            "import os, signal, sys; from pathlib import Path\n"
            "from gpt2attn.jobs import ResultFile\n"
            "with ResultFile(Path(sys.argv[1]), {'command': 'test'}) as results:\n"
            "    results.append({'n': 0}, {'n': 1})\n"
            "    os.kill(os.getpid(), signal.SIGKILL)"
        )
        assert subprocess.run([sys.executable, "-c", program, str(out)]).returncode == -9
        with ResultFile(out, {"command": "test"}) as results:
            assert list(results.rows()) == [{"n": 0}, {"n": 1}]

    def test_an_interrupt_says_how_to_go_on(self, out):
        with pytest.raises(KeyboardInterrupt, match=r"Records done: 1, kept in .*\.part; the same"):
            stop(out, ROWS[0], error=KeyboardInterrupt)
        assert complete(out) == 1

    def test_where_nothing_was_done_nothing_is_left(self, out):
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            stop(out, error=KeyboardInterrupt)
        assert list(out.parent.iterdir()) == []


class TestRefused:
    def test_a_result_that_is_there(self, out):
        complete(out)
        for refusing in (check_result_path, lambda path: ResultFile(path, JOB)):
            with pytest.raises(ValueError, match="already there; --force replaces it"):
                refusing(out)
        check_result_path(out, force=True)
        with ResultFile(out, JOB, force=True) as results:
            results.append({"n": 5})
            assert read(out) == ROWS  # until the new one is whole
        assert read(out) == [{"n": 5}]

    def test_another_suffix(self, out):
        with pytest.raises(ValueError, match=r"must end in \.jsonl"):
            check_result_path(out.with_suffix(".csv"))

    def test_rows_of_another_job(self, out):
        with pytest.raises(RuntimeError):
            stop(out, ROWS[0])
        before = part(out).read_bytes()
        with pytest.raises(ValueError, match=r"another job \(it differs in: more, sizes\); remove"):
            ResultFile(out, {**JOB, "sizes": [3], "more": 1})
        assert part(out).read_bytes() == before

    @pytest.mark.parametrize("content", [b"", b"mine\n", b'{"n": 1}\n', b"[]\n", b'{"job": 1}'])
    def test_a_file_that_is_not_ours(self, out, content):
        part(out).write_bytes(content)
        with pytest.raises(ValueError, match="was not written by a job of this program; remove it"):
            ResultFile(out, JOB)
        assert part(out).read_bytes() == content

    def test_two_runs_at_once(self, out):
        with ResultFile(out, JOB) as results:
            with pytest.raises(ValueError, match="is being written by another process"):
                ResultFile(out, JOB)
            results.append(*ROWS)
        assert read(out) == ROWS


def test_what_makes_a_job(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    job = job_record("score", [path], {"model": "pocket", "revision": "abc"}, {"stride": 4})
    assert job == {
        "command": "score",
        "gpt2attn": gpt2attn.__version__,
        "input_sha256": [sha256(path)],
        "model": "pocket",
        "revision": "abc",
        "stride": 4,
    }
