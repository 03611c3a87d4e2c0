"""Byte-level BPE over a model folder's own vocabulary: ids, labels and a streaming decoder.

A vocabulary file spells every byte as one printable character, its *symbol* (a space is `Ġ`). The
merges are ranked here, bytes first and then in the order of the list, and `tiktoken.Encoding` does
the merging; a table turns ranks into the vocabulary's ids. `tiktoken`'s own file loader is not
used: it caches local files by path under the system's temporary folder and drops lines.

`tiktoken` merges whatever neighbours spell a token, Hugging Face only listed pairs. The two agree
when every token, merged from its bytes under the listed pairs, becomes itself; that is checked when
a vocabulary is loaded. Nothing is ever stripped, cleaned up or prepended: the ids are those of
transformers' fast tokenizer with `add_special_tokens=False`.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import tiktoken

from .files import replacing
from .untrusted import local_file

END_OF_TEXT = "<|endoftext|>"

# GPT-2's pattern in tiktoken's faster, equivalent spelling (tiktoken_ext/openai_public.py).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

_PAIR_NAMES = ("vocab.json", "merges.txt")
_SIDE_NAMES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_TOKENIZERS = {
    "spiece.model": "SentencePiece",
    "sentencepiece.bpe.model": "SentencePiece",
    "tokenizer.model": "SentencePiece",
    "vocab.txt": "WordPiece",
}
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

# \s of both reference tokenizers; Python's \s also takes U+001C to U+001F.
_BLANK = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# `\s+(?!\S)` overflows the regex engine's stack, a panic that `except Exception` does not catch, on
# a million blanks before a visible character. The pattern always splits before the last of them.
_LONG_BLANK_LIMIT = 100_000
_LONG_BLANK = re.compile(rf"(?<![{_BLANK}])[{_BLANK}]{{{_LONG_BLANK_LIMIT},}}+(?=[^{_BLANK}])")

_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE_SURROGATE = re.compile(
    "[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]"
)

_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
# Printable for Python, but drawn as nothing: fillers, the blank Braille cell, variation selectors.
_DRAWN_AS_NOTHING = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_BYTE_FORM = re.compile("<0x[0-9A-F]{2}>")


def _byte_symbols() -> list[str]:
    """The symbol of each byte: itself if printable, else the next free one from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = itertools.count(0x100)
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]


_SYMBOL_BYTES = {symbol: bytes([byte]) for byte, symbol in enumerate(_byte_symbols())}
_TO_LATIN_1 = {ord(symbol): byte[0] for symbol, byte in _SYMBOL_BYTES.items()}

_Documents = dict[str, dict[str, Any]]  # parsed JSON files by name, empty where there is none


@dataclass(frozen=True)
class _AddedToken:
    id: int
    special: bool
    normalized: bool


class Tokenizer:
    """Text to ids and back, exactly, over one byte-level BPE vocabulary; immutable, thread-safe.

    `vocab_size` is the highest id plus one, added tokens included; `end_of_text_id` is None where
    the vocabulary has no `<|endoftext|>`; `special_ids` are the ids that `skip_special` drops;
    `files` holds the files read, by name, byte for byte.
    """

    vocab_size: int
    end_of_text_id: int | None
    special_ids: frozenset[int]
    files: dict[str, bytes]

    def __init__(self, files: dict[str, bytes]) -> None:
        """Build from the contents of tokenizer.json, or of vocab.json and merges.txt.

        tokenizer_config.json, special_tokens_map.json and added_tokens.json add their tokens.
        Raises ValueError for a vocabulary whose ids could differ from transformers'.
        """
        self.files = dict(files)
        documents = {
            name: _parse_json(name, files.get(name, b"{}"))
            for name in ("tokenizer.json", "vocab.json", *_SIDE_NAMES)
        }
        vocab, merges, source = _read_bpe(documents, files.get("merges.txt"))
        ranked, token_bytes = _rank_tokens(vocab, merges, source)
        self._id_of_rank = [vocab[token] for token in ranked]
        self._encoding = tiktoken.Encoding(
            "gpt2attn",
            pat_str=GPT2_PATTERN,
            mergeable_ranks={token_bytes[token]: rank for rank, token in enumerate(ranked)},
            special_tokens={},
        )
        self._bytes = {id: token_bytes.get(token) or _spell(token) for token, id in vocab.items()}
        self._added = _read_added_tokens(documents, vocab)
        self._bytes |= {token.id: content.encode() for content, token in self._added.items()}
        # Two passes, as Hugging Face does them: raw tokens first, then the "normalized" ones.
        self._added_patterns = [
            _any_of([content for content, token in self._added.items() if token.normalized is flag])
            for flag in (False, True)
        ]
        self._has_ordinary_added = not all(token.special for token in self._added.values())
        self.special_ids = frozenset(token.id for token in self._added.values() if token.special)
        self.vocab_size = max(self._bytes) + 1
        ids = vocab | {content: token.id for content, token in self._added.items()}
        self.end_of_text_id = ids.get(END_OF_TEXT)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load a model folder's tokenizer; no network, no fallback to another vocabulary.

        tokenizer.json is used alone when it is there, as transformers does, even if vocab.json and
        merges.txt say something else. Raises FileNotFoundError naming the missing file, or
        ValueError naming what is not byte-level BPE as GPT-2 does it.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder} to load a tokenizer from.")
        names = ("tokenizer.json",) if local_file(folder, "tokenizer.json") else _PAIR_NAMES
        paths = {name: local_file(folder, name) for name in (*names, *_SIDE_NAMES)}
        if missing := [name for name in names if not paths[name]]:
            raise FileNotFoundError(_describe_missing(folder, missing))
        try:
            return cls({name: path.read_bytes() for name, path in paths.items() if path})
        except ValueError as error:
            raise ValueError(f"the tokenizer in {folder} cannot be used: {error}") from None

    @classmethod
    @functools.cache
    def gpt2(cls) -> Tokenizer:
        """GPT-2's own vocabulary of 50,257 ids, shipped with the package; built once."""
        return cls.from_folder(Path(__file__).parent / "data" / "gpt2_vocab")

    def __repr__(self) -> str:
        return f"<Tokenizer of {len(self._bytes):,} tokens>"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; `[]` for the empty one.

        With `special`, special tokens written in the text (`<|endoftext|>`) become their ids; by
        default they are plain text. Added tokens that are not special are always recognised. The
        two halves of a surrogate pair become the character they encode; a lone half, which no
        UTF-8 text can hold, raises ValueError with its position.
        """
        text = _join_surrogates(text)
        if not (special or self._has_ordinary_added):
            return self._merge(text)
        pieces: Iterable[str | int] = [text]
        for pattern in self._added_patterns:
            pieces = [part for piece in pieces for part in self._cut(piece, pattern, special)]
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._merge(piece)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD, everything else is exact.

        Raises ValueError for an id that the vocabulary does not have.
        """
        if skip_special:
            ids = [id for id in map(self._checked, ids) if id not in self.special_ids]
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, joined. Raises ValueError for an id that the vocabulary lacks."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token. Raises ValueError for an id that the vocabulary lacks."""
        return self._bytes[self._checked(id)]

    def label(self, id: int) -> str:
        """One token as it is drawn on an axis; tokens of different bytes have different labels.

        A space is `␣`, a newline `⏎`, a tab `⇥`. Every other byte that is not part of a visible
        character is `<0xHH>`: half characters, controls, exotic spaces. So are those marks when
        they are typed, and the `<` of a typed `<0xHH>`. All else stands for itself.
        """
        text = self.token_bytes(id).decode("utf-8", errors="surrogateescape")
        return "".join(
            _MARKS.get(char) or (char if _is_plain(text, place) else _as_bytes(char))
            for place, char in enumerate(text)
        )

    def labels(self, ids: Iterable[int]) -> list[str]:
        """The label of every id, in order."""
        return [self.label(id) for id in ids]

    def id_of(self, text: str) -> int | None:
        """The id of the token whose bytes are exactly this text, or None."""
        return self._id_of_bytes.get(_join_surrogates(text).encode())

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        return StreamDecoder(self.token_bytes)

    def save(self, folder: str | Path) -> None:
        """Copy the files this tokenizer was read from, byte for byte, into a folder.

        Raises ValueError if the folder holds another tokenizer file, which would change the ids.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # What would be read before or beside our files; next to tokenizer.json the pair is not.
        for name in ("tokenizer.json", *_SIDE_NAMES):
            if name not in self.files and (folder / name).exists():
                raise ValueError(
                    f"{folder} already holds a {name} of another tokenizer, which would change "
                    "the ids of this one; remove it or save into another folder."
                )
        for name, content in self.files.items():
            with replacing(folder / name) as path:
                path.write_bytes(content)

    @functools.cached_property
    def _id_of_bytes(self) -> dict[bytes, int]:
        # Entries that merging cannot make come first, so that an id which encode gives wins.
        merged = {self._bytes[id]: id for id in self._id_of_rank}
        added = {self._bytes[token.id]: token.id for token in self._added.values()}
        return {content: id for id, content in self._bytes.items()} | merged | added

    def _checked(self, id: int) -> int:
        """The id as a plain integer (NumPy and torch scalars too), if the vocabulary has it."""
        try:
            number = index(id)
        except TypeError:
            number = None
        if number not in self._bytes:
            raise ValueError(
                f"{id!r} is not a token id: this vocabulary has ids from 0 to "
                f"{self.vocab_size - 1}; was the text encoded with another tokenizer?"
            )
        return number

    def _merge(self, text: str) -> list[int]:
        """The ids of a text without added tokens."""
        ranks: list[int] = []
        start = 0
        if len(text) > _LONG_BLANK_LIMIT:
            for run in _LONG_BLANK.finditer(text):
                ranks += self._encoding.encode_ordinary(text[start : run.end() - 1])
                start = run.end() - 1
        ranks += self._encoding.encode_ordinary(text[start:])
        return list(map(self._id_of_rank.__getitem__, ranks))

    def _cut(
        self, piece: str | int, pattern: re.Pattern[str], special: bool
    ) -> Iterator[str | int]:
        """Split a piece at added tokens, which come out as ids.

        Done here because tiktoken tries special tokens in no fixed order, where Hugging Face takes
        the longest. A special token that is to stay text still hides shorter ones inside it.
        """
        if isinstance(piece, int):
            yield piece
            return
        start = 0
        for match in pattern.finditer(piece):
            token = self._added[match[0]]
            if token.special and not special:
                continue
            if start < match.start():
                yield piece[start : match.start()]
            yield token.id
            start = match.end()
        if start < len(piece):
            yield piece[start:]


class StreamDecoder:
    """Turns ids into text one at a time, holding back only the bytes of an unfinished character.

    All pushes and the finish, joined, equal `Tokenizer.decode` of all the ids, for any ids.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that this id makes certain; may be empty. Raises ValueError as decode does."""
        return self._decoder.decode(self._token_bytes(id))

    def finish(self) -> str:
        """What an unfinished character comes to (U+FFFD), or the empty string."""
        return self._decoder.decode(b"", final=True)


def _join_surrogates(text: str) -> str:
    """Replace surrogate pairs by their characters; refuse a surrogate that has no partner."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    if lone := _LONE_SURROGATE.search(text):
        code = ord(lone[0])
        # Python decodes an argument's stray byte 0xHH to U+DCHH.
        stray = f"the stray byte 0x{code & 0xFF:02X}" if 0xDC80 <= code <= 0xDCFF else "half a pair"
        raise ValueError(
            f"the text has a lone surrogate, U+{code:04X} ({stray}), at position {lone.start()}, "
            "which UTF-8 cannot hold; remove it or replace it by U+FFFD."
        )
    return _SURROGATE_PAIR.sub(
        lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text
    )


def _is_plain(text: str, place: int) -> bool:
    char = text[place]
    return (
        char.isprintable()
        and char not in _MARKS.values()
        and not _DRAWN_AS_NOTHING.match(char)
        and not _BYTE_FORM.match(text, place)
    )


def _as_bytes(char: str) -> str:
    return "".join(f"<0x{byte:02X}>" for byte in char.encode("utf-8", "surrogateescape"))


def _spell(token: str) -> bytes:
    """The bytes of a vocabulary entry; one that is not spelt in symbols is taken as text."""
    if all(char in _SYMBOL_BYTES for char in token):
        return token.translate(_TO_LATIN_1).encode("latin-1")
    return token.encode()


def _any_of(contents: list[str]) -> re.Pattern[str]:
    """A pattern for the leftmost, longest of some strings; of none, one that never matches."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _describe_missing(folder: Path, missing: list[str]) -> str:
    other = [
        f"{name} is a {kind} vocabulary, which is not implemented"
        for name, kind in _OTHER_TOKENIZERS.items()
        if (folder / name).is_file()
    ]
    return (
        f"{folder} has no {' and no '.join(missing)} (and no tokenizer.json): "
        f"{'; '.join(other) or 'text needs a byte-level BPE vocabulary'}; use ids instead."
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse_json(name: str, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON ({error}); download it again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold a JSON object, not {_short(value)}.")
    return value


def _section(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict | None):
        raise ValueError(f"{key} must be a JSON object, not {_short(value)}.")
    return value or {}


def _items(parent: dict[str, Any], key: str) -> list[Any]:
    value = parent.get(key) or []
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a JSON list, not {_short(value)}.")
    return value


def _read_bpe(
    documents: _Documents, merges_txt: bytes | None
) -> tuple[dict[str, int], list[tuple[int, str, str]], str]:
    """The vocabulary, the merges as (number, left, right), and what a number counts."""
    _refuse_other_pipelines(documents["tokenizer.json"], documents["tokenizer_config.json"])
    if merges_txt is None:
        model = _section(documents["tokenizer.json"], "model")
        vocab, merges = _section(model, "vocab"), _merge_pairs(model)
        source = "tokenizer.json merge"
    else:
        vocab, merges = documents["vocab.json"], _merge_lines(merges_txt)
        source = "merges.txt line"
    if not all(type(id) is int and id >= 0 for id in vocab.values()):
        raise ValueError("the vocabulary must give every token an integer id of 0 or more.")
    if len(set(vocab.values())) != len(vocab):
        raise ValueError("the vocabulary gives two tokens the same id.")
    return vocab, merges, source


def _refuse_other_pipelines(spec: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse, all at once and by name, every setting that would give other ids than GPT-2's."""
    # name, value, GPT-2's value
    rules = [("add_prefix_space", config.get("add_prefix_space") or False, False)]
    if spec:
        model, before = _section(spec, "model"), _section(spec, "pre_tokenizer")
        rules += [
            ("model.type", model.get("type", "BPE"), "BPE"),
            ("model.dropout", model.get("dropout") or None, None),
            ("model.continuing_subword_prefix", model.get("continuing_subword_prefix") or "", ""),
            ("model.end_of_word_suffix", model.get("end_of_word_suffix") or "", ""),
            ("model.byte_fallback", model.get("byte_fallback", False), False),
            ("model.ignore_merges", model.get("ignore_merges", False), False),
            ("normalizer", spec.get("normalizer"), None),
            ("pre_tokenizer.type", before.get("type"), "ByteLevel"),
            ("pre_tokenizer.add_prefix_space", before.get("add_prefix_space"), False),
            ("pre_tokenizer.use_regex", before.get("use_regex", True), True),
        ]
    other = [
        f"{name} is {_short(value)}, not {expected!r}"
        for name, value, expected in rules
        if value != expected
    ]
    if other:
        raise ValueError(
            f"{'; '.join(other)}: only GPT-2's byte-level BPE is implemented; use ids instead."
        )


def _merge_pairs(model: dict[str, Any]) -> list[tuple[int, str, str]]:
    """tokenizer.json's merges, written as "a b" or as ["a", "b"]; numbers count from 1."""
    merges = []
    for number, merge in enumerate(_items(model, "merges"), start=1):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or [type(part) for part in parts] != [str, str]:
            raise ValueError(f"tokenizer.json merge {number} is {_short(merge)}, not a pair.")
        merges.append((number, *parts))
    return merges


def _merge_lines(content: bytes) -> list[tuple[int, str, str]]:
    """The merges of merges.txt by line number; only a line that begins `#version` is a header."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"merges.txt is not UTF-8: {error}; download it again.") from None
    if lines[0].startswith("\ufeff"):
        raise ValueError("merges.txt line 1 begins with a byte order mark; save it without one.")
    if lines[-1] == "":
        lines.pop()
    merges = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("#version"):
            continue
        parts = line.removesuffix("\r").split(" ")
        if len(parts) != 2:
            raise ValueError(
                f"merges.txt line {number} is {_short(line)}, but a merge is two symbols with one "
                "space between them."
            )
        merges.append((number, *parts))
    return merges


def _rank_tokens(
    vocab: dict[str, int], merges: list[tuple[int, str, str]], source: str
) -> tuple[list[str], dict[str, bytes]]:
    """The tokens that merging can make, in order of rank, and the bytes of each."""
    lacking = [byte[0] for symbol, byte in _SYMBOL_BYTES.items() if symbol not in vocab]
    if lacking:
        raise ValueError(
            f"the vocabulary is not byte-level BPE: it lacks {len(lacking)} of the 256 bytes, "
            f"the first being 0x{lacking[0]:02X}; use ids instead."
        )
    token_bytes = dict(_SYMBOL_BYTES)
    ranks = {symbol: rank for rank, symbol in enumerate(_SYMBOL_BYTES)}
    parts = [(rank, rank) for rank in range(256)]
    rank_of_pair: dict[tuple[int, int], int] = {}
    for number, left, right in merges:
        token = left + right
        pair = (ranks.get(left), ranks.get(right))
        if None in pair or token not in vocab or token in ranks:
            raise ValueError(f"{source} {number}: {_merge_fault(left, right, vocab, ranks)}")
        rank = len(ranks)
        ranks[token] = rank
        token_bytes[token] = token_bytes[left] + token_bytes[right]
        rank_of_pair[pair] = rank
        parts.append(pair)
        if not _becomes_itself(rank, parts, rank_of_pair):
            raise ValueError(
                f"{source} {number}: the token {token!r} can never appear, because earlier merges "
                "split it otherwise; the reference tokenizers disagree on such a vocabulary."
            )
    return list(ranks), token_bytes


def _merge_fault(left: str, right: str, vocab: dict[str, int], ranks: dict[str, int]) -> str:
    for part in (left, right):
        if not all(char in _SYMBOL_BYTES for char in part):
            return f"{part!r} is not spelt in byte symbols, so this is not byte-level BPE."
        if part not in ranks:
            return f"{part!r} is neither a byte nor made by an earlier merge."
    if left + right not in vocab:
        return f"{left!r} and {right!r} make {left + right!r}, which is not in the vocabulary."
    return f"{left!r} and {right!r} make {left + right!r}, which an earlier merge makes already."


def _becomes_itself(
    rank: int, parts: list[tuple[int, int]], rank_of_pair: dict[tuple[int, int], int]
) -> bool:
    """Whether a token's bytes merge back to it, given that those of both its parts do.

    Merges happen in order of rank, so time is rank. Walking back from the last merge, `left` and
    `right` are the two neighbours at the boundary between the parts, and `limit` is when the first
    of them is used up: a listed pair of a lower rank would have merged across the boundary.
    """
    left, right = parts[rank]
    limit = rank
    while True:
        if rank_of_pair.get((left, right), limit) < limit:
            return False
        if max(left, right) < 256:
            return True
        if left > right:
            limit, left = left, parts[left][1]
        else:
            # Of two overlapping merges of one rank the left one happens, here the crossing one.
            limit, right = right + 1, parts[right][0]


def _entry(value: Any, source: str) -> dict[str, Any]:
    """An added token as a file spells it: its bare content, or an object with options."""
    entry = value if isinstance(value, dict) else {"content": value}
    if not isinstance(entry.get("content"), str) or not entry["content"]:
        raise ValueError(f"{source} lists {_short(value)}, which has no text, as an added token.")
    for option in ("lstrip", "rstrip", "single_word"):
        if entry.get(option):
            raise ValueError(
                f"{source}: the added token {entry['content']!r} has {option}, which is not "
                "implemented because it loses or ignores text; set it to false."
            )
    return entry


def _listed_tokens(documents: _Documents) -> list[tuple[int, dict[str, Any]]]:
    """The added tokens that a file lists with an id, as (id, entry), in order of id."""
    listed = []
    for value in _items(documents["tokenizer.json"], "added_tokens"):
        entry = _entry(value, "tokenizer.json")
        listed.append((entry.get("id"), entry))
    config = documents["tokenizer_config.json"]
    for id, value in _section(config, "added_tokens_decoder").items():
        entry = _entry(value, "tokenizer_config.json")
        listed.append((int(id) if id.isdecimal() else None, entry))
    if "added_tokens_decoder" not in config:
        for content, id in documents["added_tokens.json"].items():
            listed.append((id, _entry(content, "added_tokens.json")))
    for id, entry in listed:
        if type(id) is not int:
            raise ValueError(f"the added token {entry['content']!r} has no integer id.")
    return sorted(listed, key=lambda item: item[0])


def _named_tokens(documents: _Documents, vocab: dict[str, int]) -> list[dict[str, Any]]:
    """The tokens that have a role (bos, pad, ...), all special, in transformers' order."""
    config = documents["tokenizer_config.json"]
    names: dict[str, Any] = {}
    if END_OF_TEXT in vocab:  # GPT-2's default for three roles
        names |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    names |= config
    if "added_tokens_decoder" not in config:
        names |= documents["special_tokens_map.json"]
    values = [names.get(f"{role}_token") for role in _ROLES]
    values += _items(names, "extra_special_tokens") or _items(names, "additional_special_tokens")
    return [
        _entry(value, "the list of special tokens") | {"special": True} for value in values if value
    ]


def _read_added_tokens(documents: _Documents, vocab: dict[str, int]) -> dict[str, _AddedToken]:
    """The added tokens by content, with the ids that transformers gives them.

    Those are the vocabulary's own where it has the token, else the next free ones, whatever the
    file says; a file that says otherwise is refused.
    """
    named = [(None, entry) for entry in _named_tokens(documents, vocab)]
    entries = _listed_tokens(documents) + named
    special = {entry["content"] for _, entry in entries if entry.get("special")}
    added: dict[str, _AddedToken] = {}
    taken = set(vocab.values())
    next_id = len(vocab)
    for listed_id, entry in entries:
        content = entry["content"]
        if content not in added:
            id = vocab.get(content, next_id)
            next_id = max(next_id, id + 1)
            if content in vocab and _spell(content) != content.encode():
                raise ValueError(f"the added token {content!r} is the symbols of other bytes.")
            if content not in vocab and id in taken:
                raise ValueError(
                    f"the added token {content!r} gets id {id}, which another token has: the ids "
                    "of the vocabulary have gaps; renumber them."
                )
            is_special = content in special
            normalized = bool(entry.get("normalized", not is_special))
            added[content] = _AddedToken(id, is_special, normalized)
        if listed_id not in (None, added[content].id):
            raise ValueError(
                f"the added token {content!r} is listed with id {listed_id}, but transformers "
                f"gives it id {added[content].id}; correct the file or use ids instead."
            )
    return added
