"""The tokenizer against transformers' fast one and tiktoken's own loader, and its refusals."""

import hashlib
import inspect
import json
import os
import random
import re
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext import openai_public
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2TokenizerFast

import gpt2attn.tokenizer
from gpt2attn.tokenizer import END_OF_TEXT, GPT2_PATTERN, Tokenizer

SHIPPED = Path(gpt2attn.tokenizer.__file__).parent / "data" / "pocket"
END_OF_TEXT_AS_TEXT = [27, 91, 437, 1659, 5239, 91, 29]

# Ids published for GPT-2 or read off both reference tokenizers.
PUBLISHED_IDS = {
    "": [],
    "hello world": [31373, 995],
    " ?": [5633],
    "a  b": [64, 220, 275],
    "x   ": [87, 220, 220, 220],
    "  \n  x": [220, 220, 198, 220, 2124],
    "\r\n\r\n": [201, 198, 201, 198],
    "\n\n\n": [628, 198],
    "I'll 'LL": [40, 1183, 705, 3069],
    "he''ll": [258, 7061, 297],
    "a\u3000 b": [64, 5099, 222, 275],
    "a\xa0b": [64, 1849, 65],
    "\ufeffa": [171, 119, 123, 64],
    "😀": [47249, 222],
    "\x00": [188],
    "a<|endoftext|> b": [64, *END_OF_TEXT_AS_TEXT, 275],
}

TRICKY_TEXTS = [
    *PUBLISHED_IDS,
    "²½",
    "١٢٣",
    "e\u0301",
    "\u200b",
    "Hello , world ? yes . do n't",
    " 's",
    "The",
    " The",
    "The ",
    "The\n",
    "  leading and trailing  \n",
    "Ġ Ċ ĉ typed",
    "😀é漢",
    "\x1c\x1f a\x85b\u2028c",
    "don't I'd we'Re you'll've",
    "3.14 1,000\t\t\tx",
]

# Characters around which the split pattern decides.
PATTERN_TEXTS = st.text(
    st.sampled_from(" \t\n\r\x1c\x85\xa0\u3000'aSl\u00e9\u0301漢1²\u0661.,^😀\u200b\x00")
)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.gpt2()


@pytest.fixture(scope="module")
def fast_gpt2() -> GPT2TokenizerFast:
    return GPT2TokenizerFast.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def tiktoken_gpt2() -> tiktoken.Encoding:
    """tiktoken's own reading of the shipped files, without its cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
        ranks = data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(SHIPPED / "merges.txt"),
            encoder_json_file=str(SHIPPED / "vocab.json"),
        )
    return tiktoken.Encoding(
        "reference",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: 50256},
        explicit_n_vocab=50257,
    )


def reference_ids(fast: GPT2TokenizerFast, text: str, *, special: bool = False) -> list[int]:
    # verbose=False: no warning about texts longer than the model.
    return fast.encode(
        text, add_special_tokens=False, split_special_tokens=not special, verbose=False
    )


SYMBOLS = sorted(ByteLevel.alphabet())
SMALL_MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("#", "#"), ("Ġ", "abcd"), ("Ġ", "ab")]


def small_vocab(merges: list[tuple[str, str]] = SMALL_MERGES) -> dict[str, int]:
    tokens = [*SYMBOLS, *(left + right for left, right in merges), END_OF_TEXT]
    return {token: id for id, token in enumerate(tokens)}


def merges_text(merges: list[tuple[str, str]] = SMALL_MERGES) -> str:
    return "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)


def tokenizer_json(**changes: object) -> dict[str, object]:
    """A byte-level tokenizer.json; a change `a__b=value` sets key b of section a."""
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(END_OF_TEXT, small_vocab()[END_OF_TEXT], special=True)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": small_vocab(), "merges": list(map(list, SMALL_MERGES))},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            spec[section] = spec[section] | {key: value}
        else:
            spec[section] = value
    return spec


def added_token(content: str, id: int | None = None, **options: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    token = {"content": content, **flags, "special": False, **options}
    return token if id is None else {"id": id, **token}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a folder of tokenizer files; a dict is written as JSON."""

    def write(**files: object) -> Path:
        for name, content in files.items():
            path = tmp_path / ".".join(name.rsplit("_", 1))
            if not isinstance(content, bytes):
                content = content if isinstance(content, str) else json.dumps(content)
                content = content.encode("utf-8", "surrogatepass")
            path.write_bytes(content)
        return tmp_path

    return write


@pytest.fixture
def small_folder(folder: Callable[..., Path]) -> Callable[..., Path]:
    """The same, with the small vocabulary's vocab.json and merges.txt unless given."""
    return lambda **files: folder(
        **{"vocab_json": small_vocab(), "merges_txt": merges_text()} | files
    )


def test_shipped_files_are_those_that_tiktoken_pins() -> None:
    pins = inspect.getsource(openai_public.gpt2)
    for name, pin in (("vocab.json", "encoder_json_hash"), ("merges.txt", "vocab_bpe_hash")):
        digest = hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest()
        assert f'{pin}="{digest}"' in pins


def test_licence_lies_beside_the_shipped_files() -> None:
    licence = (SHIPPED / "LICENSE-GPT2.txt").read_text(encoding="utf-8")
    assert licence.startswith("Modified MIT License")
    assert "OpenAI" in licence


def test_pattern_is_tiktokens() -> None:
    assert openai_public.r50k_pat_str == GPT2_PATTERN


def test_gpt2_has_50257_ids_and_is_built_once(gpt2: Tokenizer) -> None:
    assert gpt2.vocab_size == 50257
    assert gpt2.end_of_text_id == 50256
    assert gpt2.special_ids == {50256}
    assert Tokenizer.gpt2() is gpt2
    assert repr(gpt2) == "<Tokenizer of 50,257 tokens>"


def test_every_token_has_the_bytes_that_tiktoken_reads(
    gpt2: Tokenizer, tiktoken_gpt2: tiktoken.Encoding
) -> None:
    assert [gpt2.token_bytes(id) for id in range(50257)] == [
        tiktoken_gpt2.decode_single_token_bytes(id) for id in range(50257)
    ]


def test_loading_needs_no_network_and_leaves_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setattr(socket, "socket", None)
    assert Tokenizer.from_folder(SHIPPED).encode("hello world") == [31373, 995]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "ids"), PUBLISHED_IDS.items())
def test_published_ids(gpt2: Tokenizer, text: str, ids: list[int]) -> None:
    """Those of D42 and D47 are among them."""
    assert gpt2.encode(text) == ids


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_ids_equal_both_references_and_round_trip(
    gpt2: Tokenizer,
    fast_gpt2: GPT2TokenizerFast,
    tiktoken_gpt2: tiktoken.Encoding,
    text: str,
) -> None:
    """The inputs of D42 and D50 are among them."""
    ids = gpt2.encode(text)
    assert ids == reference_ids(fast_gpt2, text)
    assert ids == tiktoken_gpt2.encode_ordinary(text)
    assert gpt2.decode(ids) == text
    assert gpt2.decode_bytes(ids) == text.encode()


@settings(max_examples=300, deadline=None)
@given(st.text() | PATTERN_TEXTS)
def test_any_text_round_trips_with_the_references_ids(
    gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast, tiktoken_gpt2: tiktoken.Encoding, text: str
) -> None:
    ids = gpt2.encode(text)
    assert ids == reference_ids(fast_gpt2, text) == tiktoken_gpt2.encode_ordinary(text)
    assert gpt2.decode(ids) == text


CODE_POINTS = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]


def test_every_code_point_round_trips(gpt2: Tokenizer) -> None:
    text = "".join(map(chr, CODE_POINTS))
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.parametrize(
    "codes",
    [
        pytest.param([c for c in CODE_POINTS if c < 0x3100 or c % 41 == 0], id="sample"),
        # Beyond, only a few tags and private use; all of it takes the reference two minutes.
        pytest.param(
            [c for c in CODE_POINTS if c < 0x32400], id="assigned", marks=pytest.mark.slow
        ),
    ],
)
def test_code_points_have_the_references_ids(
    gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast, codes: list[int]
) -> None:
    # After a letter, before a digit, and around a space: every branch of the pattern.
    texts = [f"x{char}1 {char} {char}{char}" for char in map(chr, codes)]
    encodings = fast_gpt2.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    assert [gpt2.encode(text) for text in texts] == [encoding.ids for encoding in encodings]


def test_neighbours_of_a_space_keep_their_own_ids(gpt2: Tokenizer) -> None:
    texts = ["The", " The", "The ", "The\n", "  The"]
    assert [gpt2.decode(gpt2.encode(text)) for text in texts] == texts
    assert len({tuple(gpt2.encode(text)) for text in texts}) == len(texts)


@pytest.mark.parametrize("unit", ["a", " ", "^", "\n", "漢"])
def test_long_runs_take_linear_time_and_have_the_references_ids(
    gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast, unit: str
) -> None:
    """D43."""

    def best_time(length: int) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            gpt2.encode(unit * length)
            times.append(time.process_time() - start)
        return min(times)

    ids = gpt2.encode(unit * 100_000)
    assert ids == reference_ids(fast_gpt2, unit * 100_000)
    # Five times the text: linear is 5, quadratic 25; a few milliseconds are noise.
    assert best_time(100_000) <= 12 * best_time(20_000) + 0.01


def test_published_counts_of_long_runs(gpt2: Tokenizer) -> None:
    assert len(gpt2.encode("a" * 100_000)) == 25_000
    assert len(gpt2.encode(" " * 100_000)) == 100_000


def test_a_million_blanks_do_not_overflow_the_pattern(gpt2: Tokenizer) -> None:
    text = " " * 1_000_001 + "x"
    ids = gpt2.encode(text)
    assert ids == [220] * 1_000_000 + [2124]
    assert gpt2.decode(ids) == text
    assert gpt2.encode(" \n" * 600_000) == [220, 198] * 600_000


@settings(deadline=None)
@given(PATTERN_TEXTS)
def test_long_blanks_are_cut_where_the_pattern_splits(
    gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast, text: str
) -> None:
    short = gpt2attn.tokenizer._LONG_BLANK.pattern.replace("{100000,}", "{2,}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2attn.tokenizer, "_LONG_BLANK_LIMIT", 0)
        patch.setattr(gpt2attn.tokenizer, "_LONG_BLANK", re.compile(short))
        assert gpt2.encode(text) == reference_ids(fast_gpt2, text)


def test_surrogate_pair_becomes_its_character(gpt2: Tokenizer) -> None:
    assert gpt2.encode("\ud83d\ude00") == [47249, 222]
    assert gpt2.encode("a\ud83d\ude00<|endoftext|>", special=True) == [64, 47249, 222, 50256]
    assert gpt2.id_of("\ud83d\ude00") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ud83d", r"U\+D83D \(half a pair\), at position 0"),
        ("ab\ude00\ud83d", r"U\+DE00 \(half a pair\), at position 2"),
        ("\ud83d\ude00\ude00", r"U\+DE00 \(half a pair\), at position 2"),
        ("\ud83d\ud83d\ude00", r"U\+D83D \(half a pair\), at position 0"),
        (b"caf\xe9".decode("utf-8", "surrogateescape"), r"stray byte 0xE9\), at position 3"),
    ],
)
def test_lone_surrogate_is_refused_with_its_position(
    gpt2: Tokenizer, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        gpt2.encode(text)
    assert type(caught.value) is ValueError


def test_end_of_text_is_text_unless_asked_for(
    gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast
) -> None:
    assert gpt2.encode(END_OF_TEXT) == END_OF_TEXT_AS_TEXT
    assert gpt2.encode(END_OF_TEXT, special=True) == [50256]
    text = "a<|endoftext|> b"
    assert gpt2.encode(text) == [64, *END_OF_TEXT_AS_TEXT, 275]
    assert gpt2.encode(text, special=True) == [64, 50256, 275]
    for special in (False, True):
        assert gpt2.encode(text, special=special) == reference_ids(fast_gpt2, text, special=special)
        assert gpt2.decode(gpt2.encode(text, special=special)) == text


def test_skip_special_drops_the_special_id_only(gpt2: Tokenizer) -> None:
    ids = [*gpt2.encode(END_OF_TEXT), 50256, 64]
    assert gpt2.decode(ids) == "<|endoftext|><|endoftext|>a"
    assert gpt2.decode(ids, skip_special=True) == "<|endoftext|>a"
    assert gpt2.decode(torch.tensor(ids), skip_special=True) == "<|endoftext|>a"


@settings(deadline=None)
@given(st.lists(st.sampled_from([END_OF_TEXT, "<|end", "oftext|>", " ", "\n", "a", " b"])))
def test_special_tokens_split_as_in_transformers(
    gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast, parts: list[str]
) -> None:
    text = "".join(parts)
    assert gpt2.encode(text, special=True) == reference_ids(fast_gpt2, text, special=True)


def test_nothing_is_cleaned_up(gpt2: Tokenizer) -> None:
    text = "Hello , world ? yes . do n't  's"
    assert gpt2.decode(gpt2.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 50256)))
def test_stream_joins_to_the_full_decode(
    gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast, ids: list[int]
) -> None:
    stream = gpt2.stream()
    streamed = "".join(map(stream.push, ids)) + stream.finish()
    assert streamed == gpt2.decode(ids)
    assert streamed == fast_gpt2.decode(ids, clean_up_tokenization_spaces=False)


@settings(deadline=None)
@given(st.binary())
def test_stream_joins_to_the_full_decode_for_any_bytes(gpt2: Tokenizer, content: bytes) -> None:
    id_of_byte = {gpt2.token_bytes(id): id for id in range(256)}
    ids = [id_of_byte[bytes([byte])] for byte in content]
    stream = gpt2.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == gpt2.decode(ids)
    assert gpt2.decode_bytes(ids) == content


def test_stream_holds_back_half_characters_only(gpt2: Tokenizer) -> None:
    stream = gpt2.stream()
    assert [stream.push(id) for id in (47249, 222)] == ["", "😀"]
    assert [stream.push(id) for id in gpt2.encode("é a")] == ["é", " a"]
    assert stream.finish() == ""


def test_stream_ends_an_unfinished_character_as_decode_does(gpt2: Tokenizer) -> None:
    stream = gpt2.stream()
    assert stream.push(64) == "a"
    assert stream.push(47249) == ""
    assert stream.finish() == "\ufffd" == gpt2.decode([47249])
    assert stream.push(64) == "a"


def test_streams_are_independent(gpt2: Tokenizer) -> None:
    first, second = gpt2.stream(), gpt2.stream()
    assert first.push(47249) == ""
    assert second.push(64) == "a"
    assert first.push(222) == "😀"


@pytest.mark.parametrize("id", [-1, 50257, 2**40, 1.0, "64", None])
def test_unknown_id_is_refused_by_name(gpt2: Tokenizer, id: object) -> None:
    for use in (
        lambda: gpt2.decode([64, id]),
        lambda: gpt2.decode([64, id], skip_special=True),
        lambda: gpt2.decode_bytes([id]),
        lambda: gpt2.token_bytes(id),
        lambda: gpt2.label(id),
        lambda: gpt2.stream().push(id),
    ):
        with pytest.raises(ValueError, match=r"not a token id.* from 0 to 50256") as caught:
            use()
        assert repr(id) in str(caught.value)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, iter])
def test_ids_may_be_arrays_and_tensors(gpt2: Tokenizer, kind: Callable) -> None:
    assert gpt2.decode(kind([31373, 995])) == "hello world"


def test_labels_show_what_a_token_is(gpt2: Tokenizer) -> None:
    assert gpt2.labels(gpt2.encode("Apple raised\n")) == ["Apple", "␣raised", "⏎"]
    assert gpt2.labels([628, 198, 188, 220, 197]) == ["⏎⏎", "⏎", "<0x00>", "␣", "⇥"]
    assert gpt2.labels([47249, 222]) == ["<0xF0><0x9F><0x98>", "<0x80>"]
    assert gpt2.labels(gpt2.encode("é\ufffd")) == ["é", "\ufffd"]
    assert gpt2.labels(gpt2.encode("a\xa0\u200b\ufe0f")) == [
        "a",
        "<0xC2><0xA0>",
        "<0xE2><0x80><0x8B>",
        "<0xEF><0xB8><0x8F>",
    ]
    assert gpt2.label(50256) == END_OF_TEXT


def test_labels_tell_all_tokens_apart_and_are_visible(gpt2: Tokenizer) -> None:
    labels = gpt2.labels(range(50257))
    assert len(set(labels)) == 50257
    assert all(label.isprintable() and label.split() == [label] for label in labels)
    # The byte symbols of a space, a newline and a tab; GPT-2 has no token that is one of them.
    assert not [label for label in labels if set(label) & set("ĠĊĉ")]


def test_typed_marks_are_told_from_the_real_thing(small_folder: Callable[..., Path]) -> None:
    typed = ["␣", "⏎", "⇥", "<0x41>", " ", "\n", "\t", "ĠĠ", "\ufffd", "<0x4"]
    added = {text: len(small_vocab()) + place for place, text in enumerate(typed)}
    tokenizer = Tokenizer.from_folder(small_folder(added_tokens_json=added))
    assert tokenizer.labels(added.values()) == [
        "<0xE2><0x90><0xA3>",
        "<0xE2><0x8F><0x8E>",
        "<0xE2><0x87><0xA5>",
        "<0x3C>0x41>",
        "␣",
        "⏎",
        "⇥",
        "ĠĠ",
        "\ufffd",
        "<0x4",
    ]


def test_typed_byte_symbols_round_trip(gpt2: Tokenizer) -> None:
    assert gpt2.decode(gpt2.encode("ĠĊĉ")) == "ĠĊĉ"
    assert gpt2.decode(gpt2.encode(" a\n\t")) == " a\n\t"


def test_id_of_is_the_token_of_exactly_that_text(gpt2: Tokenizer) -> None:
    assert gpt2.id_of("hello") == 31373
    assert gpt2.id_of(" world") == 995
    assert gpt2.id_of("hello world") is None
    assert gpt2.id_of("") is None
    assert gpt2.id_of(END_OF_TEXT) == 50256
    assert gpt2.id_of("é") == gpt2.encode("é")[0]


@pytest.mark.parametrize(
    "merges",
    [
        merges_text(),
        merges_text().removeprefix("#version: 0.2\n"),
        merges_text().replace("\n", "\r\n"),
        merges_text().removesuffix("\n"),
    ],
    ids=["header", "no header", "CRLF", "no final newline"],
)
def test_merges_files_that_read_alike(small_folder: Callable[..., Path], merges: str) -> None:
    """D40; the merge `# #` is one of them."""
    path = small_folder(merges_txt=merges)
    fast = GPT2TokenizerFast.from_pretrained(path)
    tokenizer = Tokenizer.from_folder(path)
    vocab = small_vocab()
    assert tokenizer.encode("abcd abcd##") == [vocab["abcd"], vocab["Ġabcd"], vocab["##"]]
    assert tokenizer.encode("abcd abcd##") == reference_ids(fast, "abcd abcd##")


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ("#version: 0.2\na b\nab\n", r"line 3 is 'ab', but a merge is two symbols"),
        ("#version: 0.2\na b\nab c d\n", r"line 3 is 'ab c d'"),
        ("a b\n\nc d\n", r"line 2 is ''"),
        ("# merges\n# #\nx y\n", r"line 1: 'merges' is neither a byte nor"),
        ("a b\nx y\n", r"line 2: 'x' and 'y' make 'xy', which is not in the vocabulary"),
        ("c d\na b\na b\n", r"line 3: 'a' and 'b' make 'ab', which an earlier merge makes"),
        ("ab cd\na b\nc d\n", r"line 1: 'ab' is neither a byte nor made by an earlier merge"),
        ("a b\n▁ t\n", r"line 2: '▁' is not spelt in byte symbols"),
        ("\ufeff#version: 0.2\na b\n", r"line 1 begins with a byte order mark"),
        (b"a b\n\xff b\n", r"merges.txt is not UTF-8"),
    ],
)
def test_bad_merges_are_refused_with_their_line(
    small_folder: Callable[..., Path], merges: str | bytes, message: str
) -> None:
    """D40."""
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(small_folder(merges_txt=merges))


def random_merges(seed: int) -> list[tuple[str, str]]:
    """Merges over two letters without regard to whether they can ever happen."""
    draw = random.Random(seed)
    tokens, merges = ["a", "b"], []
    while len(merges) < draw.randint(3, 12):
        left, right = draw.choice(tokens), draw.choice(tokens)
        if left + right not in tokens and len(left + right) < 9:
            tokens.append(left + right)
            merges.append((left, right))
    return merges


@pytest.mark.parametrize("seed_block", range(4))
def test_vocabulary_is_refused_exactly_where_a_token_does_not_merge_to_itself(
    seed_block: int,
) -> None:
    accepted = 0
    for seed in range(100 * seed_block, 100 * seed_block + 100):
        merges = random_merges(seed)
        vocab = small_vocab(merges)
        files = {
            "vocab.json": json.dumps(vocab).encode(),
            "merges.txt": merges_text(merges).encode(),
        }
        reference = BPE(vocab, merges)
        broken = [
            token
            for token in (left + right for left, right in merges)
            if [part.value for part in reference.tokenize(token)] != [token]
        ]
        if broken:
            with pytest.raises(ValueError, match=f"the token '{broken[0]}' can never appear"):
                Tokenizer(files)
            continue
        accepted += 1
        tokenizer = Tokenizer(files)
        draw = random.Random(seed)
        for _ in range(40):
            text = "".join(draw.choices("ab", k=draw.randint(1, 30)))
            assert tokenizer.encode(text) == [part.id for part in reference.tokenize(text)]
    assert 20 < accepted < 80


def test_ids_in_any_order_and_with_gaps(small_folder: Callable[..., Path]) -> None:
    ids = random.Random(0).sample(range(2000), len(small_vocab()))
    vocab = dict(zip(small_vocab(), ids, strict=True))
    tokenizer = Tokenizer.from_folder(small_folder(vocab_json=vocab))
    assert tokenizer.vocab_size == max(ids) + 1
    assert tokenizer.end_of_text_id == vocab[END_OF_TEXT]
    text = "abcd abcd## z<|endoftext|>é"
    expected = [vocab[token] for token in ("abcd", "Ġabcd", "##", "Ġ", "z", END_OF_TEXT, "Ã", "©")]
    assert tokenizer.encode(text, special=True) == expected
    assert tokenizer.decode(expected) == text
    gap = next(id for id in range(2000) if id not in ids)
    with pytest.raises(ValueError, match=f"{gap} is not a token id"):
        tokenizer.decode([gap])


def test_entries_that_merging_cannot_make_decode_but_are_never_encoded(
    small_folder: Callable[..., Path],
) -> None:
    vocab = small_vocab() | {"xyz": 500, "<s>": 501, "日本": 502}
    path = small_folder(vocab_json=vocab)
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.encode("xyz<s>") == reference_ids(
        GPT2TokenizerFast.from_pretrained(path), "xyz<s>"
    )
    assert tokenizer.decode([500, 501, 502]) == "xyz<s>日本"
    assert tokenizer.id_of("xyz") == 500


def test_vocabulary_without_end_of_text(small_folder: Callable[..., Path]) -> None:
    vocab = small_vocab()
    del vocab[END_OF_TEXT]
    tokenizer = Tokenizer.from_folder(small_folder(vocab_json=vocab))
    assert tokenizer.end_of_text_id is None
    assert tokenizer.special_ids == frozenset()
    assert tokenizer.vocab_size == len(vocab)
    assert tokenizer.decode(tokenizer.encode(END_OF_TEXT, special=True)) == END_OF_TEXT


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        (small_vocab() | {"new": 0}, "two tokens the same id"),
        (small_vocab() | {"new": -1}, "integer id from 0 to"),
        (small_vocab() | {"new": True}, "integer id from 0 to"),
        (small_vocab() | {"new": "7"}, "integer id from 0 to"),
        ([["a", 0]], "vocab.json must be a JSON object"),
        ({"▁the": 0, "s": 1}, r"not byte-level BPE: it lacks 255 of the 256 bytes"),
        ({k: i for k, i in small_vocab().items() if k != "Ã"}, r"lacks 1 .* being 0xC3"),
        ("{", "vocab.json is not valid JSON"),
        ("[" * 100_000, "vocab.json is not valid JSON"),
        (b"\xff", "vocab.json is not valid JSON"),
        ('{"a": 0, "a": 1}', "vocab.json is not valid JSON: the key 'a' stands there twice"),
        (small_vocab() | {"\ud800": 900}, "lone surrogate, which UTF-8 cannot hold"),
        (small_vocab() | {"new": 2**24 + 1}, "integer id from 0 to 16,777,216"),
    ],
)
def test_bad_vocabularies_are_refused(
    small_folder: Callable[..., Path], vocab: object, message: str
) -> None:
    path = small_folder(vocab_json=vocab)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_folder(path)
    assert str(caught.value).startswith(f"the tokenizer in {path} cannot be used: ")


@pytest.mark.parametrize("spelling", [" ".join, list], ids=["strings", "pairs"])
def test_tokenizer_json_with_either_spelling_of_merges(
    folder: Callable[..., Path], spelling: Callable
) -> None:
    """D41."""
    path = folder(tokenizer_json=tokenizer_json(model__merges=list(map(spelling, SMALL_MERGES))))
    tokenizer = Tokenizer.from_folder(path)
    text = "abcd abcd##<|endoftext|>"
    for special in (False, True):
        assert tokenizer.encode(text, special=special) == reference_ids(
            GPT2TokenizerFast.from_pretrained(path), text, special=special
        )
    assert tokenizer.encode("abcd") == [small_vocab()["abcd"]]


def test_tokenizer_json_is_used_alone(folder: Callable[..., Path]) -> None:
    """D41."""
    fewer = SMALL_MERGES[:1]
    path = folder(
        tokenizer_json=tokenizer_json(),
        vocab_json=small_vocab(fewer),
        merges_txt=merges_text(fewer),
    )
    ids = Tokenizer.from_folder(path).encode("abcd")
    assert ids == [small_vocab()["abcd"]]
    assert ids == reference_ids(GPT2TokenizerFast.from_pretrained(path), "abcd")


def test_saved_by_transformers_and_read_back(
    tmp_path: Path, gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast
) -> None:
    fast_gpt2.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "".join(TRICKY_TEXTS)
    for special in (False, True):
        assert tokenizer.encode(text, special=special) == gpt2.encode(text, special=special)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__type": "Unigram"}, r"model.type is 'Unigram', not 'BPE'"),
        ({"model__dropout": 0.1}, "model.dropout is 0.1"),
        ({"model__continuing_subword_prefix": "##"}, "model.continuing_subword_prefix is '##'"),
        ({"model__end_of_word_suffix": "</w>"}, "model.end_of_word_suffix is '</w>'"),
        ({"model__byte_fallback": True}, "model.byte_fallback is True"),
        ({"model__ignore_merges": True}, "model.ignore_merges is True"),
        ({"normalizer": {"type": "NFC"}}, r"normalizer is \{'type': 'NFC'\}"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre_tokenizer.type is 'Metaspace'"),
        ({"pre_tokenizer": None}, "pre_tokenizer.type is None"),
        ({"pre_tokenizer__add_prefix_space": True}, "pre_tokenizer.add_prefix_space is True"),
        ({"pre_tokenizer__use_regex": False}, "pre_tokenizer.use_regex is False"),
        ({"model__merges": ["a b c"]}, "merge 1 is 'a b c', not a pair"),
        ({"model__merges": [["a", "b"], [1, 2]]}, r"merge 2 is \[1, 2\], not a pair"),
        ({"model__merges": "a b"}, "merges must be a JSON list"),
        ({"model__vocab": [["a", 0.5]]}, "vocab must be a JSON object"),
        ({"model": None}, "it lacks 256 of the 256 bytes"),
        ({"added_tokens": 3}, "added_tokens must be a JSON list"),
    ],
)
def test_other_pipelines_are_refused_by_name(
    folder: Callable[..., Path], changes: dict[str, object], message: str
) -> None:
    """D49."""
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(folder(tokenizer_json=tokenizer_json(**changes)))


def test_all_unsupported_settings_are_listed_at_once(folder: Callable[..., Path]) -> None:
    spec = tokenizer_json(normalizer={"type": "Lowercase"}, model__dropout=0.5)
    path = folder(tokenizer_json=spec, tokenizer_config_json={"add_prefix_space": True})
    with pytest.raises(ValueError, match=r"add_prefix_space is True.*dropout.*normalizer"):
        Tokenizer.from_folder(path)


def test_harmless_settings_are_accepted(folder: Callable[..., Path]) -> None:
    spec = tokenizer_json(
        model__dropout=None,
        model__continuing_subword_prefix="",
        model__end_of_word_suffix="",
        model__fuse_unk=False,
        model__byte_fallback=False,
        model__unk_token=None,
        post_processor={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
    )
    config = {"add_prefix_space": False, "tokenizer_class": "GPT2Tokenizer", "max_len": 1024}
    tokenizer = Tokenizer.from_folder(folder(tokenizer_json=spec, tokenizer_config_json=config))
    assert tokenizer.encode("abcd") == [small_vocab()["abcd"]]


SIZE = len(small_vocab())
ADDED_FOLDERS = {
    "added_tokens.json, named as pad": {
        "added_tokens_json": {"<|pad|>": SIZE},
        "special_tokens_map_json": {"pad_token": "<|pad|>", "eos_token": END_OF_TEXT},
    },
    "added_tokens.json, ordinary words": {"added_tokens_json": {"abc": SIZE, "<tag> x": SIZE + 1}},
    "named without an id": {
        "special_tokens_map_json": {
            "additional_special_tokens": ["<b>", "<c>"],
            "pad_token": added_token("<|pad|>", normalized=True),
            "bos_token": "<s>",
        }
    },
    "added_tokens_decoder": {
        "tokenizer_config_json": {
            "added_tokens_decoder": {
                str(SIZE - 1): added_token(END_OF_TEXT, special=True),
                str(SIZE): added_token("<|pad|>", special=True),
                str(SIZE + 1): added_token("cdc", normalized=True),
                str(SIZE + 2): added_token("abcdcd", normalized=True),
            },
            "pad_token": "<|pad|>",
            "unk_token": None,
        },
        "special_tokens_map_json": {"sep_token": "not read beside added_tokens_decoder"},
    },
    "one inside the other": {
        "added_tokens_json": {"<|": SIZE, "<|pad|>": SIZE + 1, "<|pad": SIZE + 2, "pad": SIZE + 3},
        "special_tokens_map_json": {"pad_token": "<|pad|>"},
    },
    "a token of the vocabulary": {
        "special_tokens_map_json": {"bos_token": "##", "additional_special_tokens": ["ab"]}
    },
}
ADDED_TEXT_PARTS = ["<|pad|>", "<|pad", "<|", "pad", "|>", "<s>", "<b>", "<c>", "<tag> x", "<tag>"]
ADDED_TEXT_PARTS += ["ab", "cd", "cdc", "abcd", "abc", "##", END_OF_TEXT, "é", " ", "  ", "\n"]


@pytest.mark.parametrize("files", ADDED_FOLDERS.values(), ids=ADDED_FOLDERS)
def test_added_tokens_have_transformers_ids(
    small_folder: Callable[..., Path], files: dict[str, object]
) -> None:
    path = small_folder(**files)
    fast = GPT2TokenizerFast.from_pretrained(path)
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.vocab_size == len(fast)
    assert tokenizer.special_ids == set(fast.all_special_ids)
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choices(ADDED_TEXT_PARTS, k=draw.randint(1, 8)))
        for special in (False, True):
            ids = tokenizer.encode(text, special=special)
            assert ids == reference_ids(fast, text, special=special), (text, special)
            assert tokenizer.decode(ids) == text


def test_added_tokens_in_tokenizer_json(folder: Callable[..., Path]) -> None:
    listed = [
        added_token(END_OF_TEXT, SIZE - 1, special=True),
        added_token("<|pad|>", SIZE, special=True),
        added_token("é漢", SIZE + 1),
    ]
    path = folder(tokenizer_json=tokenizer_json(added_tokens=listed))
    tokenizer = Tokenizer.from_folder(path)
    fast = GPT2TokenizerFast.from_pretrained(path)
    text = "abé漢 <|pad|>cd"
    assert tokenizer.encode(text, special=True) == reference_ids(fast, text, special=True)
    assert tokenizer.encode(text) == reference_ids(fast, text)
    assert tokenizer.decode(tokenizer.encode(text, special=True)) == text
    assert tokenizer.decode([SIZE, SIZE + 1], skip_special=True) == "é漢"


def test_gpt2_fine_tuned_with_a_pad_token(tmp_path: Path, gpt2: Tokenizer) -> None:
    gpt2.save(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<|pad|>": 50257}')
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<|pad|>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 50258
    assert tokenizer.special_ids == {50256, 50257}
    assert tokenizer.encode("a<|pad|> b<|endoftext|>", special=True) == [64, 50257, 275, 50256]
    assert tokenizer.decode([64, 50257, 275], skip_special=True) == "a b"
    assert tokenizer.label(50257) == "<|pad|>"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens_json": {"<|pad|>": SIZE + 5}}, f"listed with id {SIZE + 5}.* id {SIZE};"),
        ({"added_tokens_json": {"ab": SIZE}}, "'ab' is listed with id"),
        ({"added_tokens_json": {"<|pad|>": "x"}}, "no integer id"),
        ({"added_tokens_json": {"": SIZE}}, "no text"),
        ({"added_tokens_json": {"Ã": SIZE}}, "symbols of other bytes"),
        ({"special_tokens_map_json": {"pad_token": 3}}, "3, which has no text"),
        ({"special_tokens_map_json": {"additional_special_tokens": 3}}, "must be a JSON list"),
        (
            {"special_tokens_map_json": {"mask_token": added_token("<mask>", lstrip=True)}},
            "'<mask>' has lstrip",
        ),
        (
            {"tokenizer_config_json": {"added_tokens_decoder": {"x": added_token("<p>")}}},
            "'<p>' has no integer id",
        ),
        (
            {"added_tokens_json": {"<|pad|>": 900}, "vocab_json": small_vocab() | {"z9": SIZE + 1}},
            f"'<|pad|>' gets id {SIZE + 1}, which another token has",
        ),
    ],
)
def test_added_tokens_that_would_have_other_ids_are_refused(
    small_folder: Callable[..., Path], files: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        Tokenizer.from_folder(small_folder(**files))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no vocab.json and no merges.txt"),
        ({"vocab_json": small_vocab()}, "has no merges.txt"),
        ({"merges_txt": merges_text()}, "has no vocab.json"),
        ({"spiece_model": b"\x0a"}, "spiece.model is a SentencePiece vocabulary"),
        ({"vocab_txt": "[PAD]\n"}, "vocab.txt is a WordPiece vocabulary"),
        (
            {"encoder_json": small_vocab(), "vocab_bpe": merges_text()},
            "rename encoder.json to vocab.json and vocab.bpe to merges.txt",
        ),
    ],
)
def test_folder_without_a_usable_tokenizer(
    folder: Callable[..., Path], files: dict[str, object], message: str
) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        Tokenizer.from_folder(folder(**files))


@pytest.mark.parametrize(
    "name",
    [
        "vocab.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ],
)
def test_link_out_of_the_folder_is_not_followed(
    small_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    path = small_folder()
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_text("{}")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(outside)
    with pytest.raises(ValueError, match=f"{name} is a link to"):
        Tokenizer.from_folder(path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.json"])
def test_d34_placeholders_and_files_of_any_size(
    small_folder: Callable[..., Path], name: str
) -> None:
    path = small_folder()
    for content, message in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
        (b"<!doctype html><title>404</title>", "HTML page"),
        (b"", "is empty"),
    ):
        (path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{path / name}.* {message}"):
            Tokenizer.from_folder(path)
    os.truncate(path / name, 2**40)  # a hole
    with pytest.raises(ValueError, match=f"{path / name} has more than 16,000,000 bytes"):
        Tokenizer.from_folder(path)


def test_a_first_merge_of_a_bracket_is_no_page(small_folder: Callable[..., Path]) -> None:
    vocab = small_vocab()
    vocab["<!"] = max(vocab.values()) + 1
    tokenizer = Tokenizer.from_folder(small_folder(vocab_json=vocab, merges_txt="< !\n"))
    assert tokenizer.encode("<!") == [vocab["<!"]]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Tokenizer.from_folder(tmp_path / "none")


def test_save_is_byte_identical_and_loads_in_transformers(
    tmp_path: Path, gpt2: Tokenizer, fast_gpt2: GPT2TokenizerFast
) -> None:
    gpt2.save(tmp_path / "new" / "folder")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "new" / "folder").iterdir()}
    assert saved == {name: (SHIPPED / name).read_bytes() for name in ("vocab.json", "merges.txt")}
    fast = GPT2TokenizerFast.from_pretrained(tmp_path / "new" / "folder")
    assert fast.get_vocab() == fast_gpt2.get_vocab()
    gpt2.save(tmp_path / "new" / "folder")


def test_save_keeps_the_files_that_decide_ids(
    small_folder: Callable[..., Path], tmp_path: Path
) -> None:
    files = ADDED_FOLDERS["added_tokens.json, named as pad"]
    tokenizer = Tokenizer.from_folder(small_folder(**files))
    tokenizer.save(tmp_path / "copy")
    copy = Tokenizer.from_folder(tmp_path / "copy")
    assert copy.files == tokenizer.files
    assert copy.encode("<|pad|>", special=True) == [SIZE]


def test_save_refuses_to_mix_tokenizers(
    folder: Callable[..., Path], gpt2: Tokenizer, tmp_path: Path
) -> None:
    folder(tokenizer_json=tokenizer_json())
    with pytest.raises(ValueError, match=r"already holds a tokenizer\.json"):
        gpt2.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_save_beside_a_vocabulary_that_is_not_read(
    folder: Callable[..., Path],
) -> None:
    path = folder(
        tokenizer_json=tokenizer_json(), vocab_json=small_vocab(), merges_txt=merges_text()
    )
    tokenizer = Tokenizer.from_folder(path)
    assert list(tokenizer.files) == ["tokenizer.json"]
    tokenizer.save(path)
    assert Tokenizer.from_folder(path).encode("abcd") == tokenizer.encode("abcd")
