"""Reading a vocabulary: the files of a GPT-2 tokenizer, checked and put in order.

A vocabulary file spells every byte as one printable character, its *symbol* (a space is `Ġ`). The
merges are ranked here, bytes first and then in the order of the list. `tiktoken` merges whatever
neighbours spell a token, Hugging Face only listed pairs. The two agree when every token, merged
from its bytes under the listed pairs, becomes itself; a vocabulary where one does not is refused,
and so is every setting that would give other ids than GPT-2's tokenizer.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .untrusted import json_object, local_file, read_bytes

END_OF_TEXT = "<|endoftext|>"

# GPT-2's largest file has 2 MB, one with 250,000 tokens 15 MB.
FILE_LIMIT = 16_000_000
LARGEST_ID = 2**24
# Python's regular expressions try them one after the other.
MOST_ADDED = 10_000

_PAIR_NAMES = ("vocab.json", "merges.txt")
SIDE_NAMES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_TOKENIZERS = {
    "spiece.model": "SentencePiece",
    "sentencepiece.bpe.model": "SentencePiece",
    "tokenizer.model": "SentencePiece",
    "vocab.txt": "WordPiece",
}
_OLDER_NAMES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}  # OpenAI's own
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def _byte_symbols() -> list[str]:
    """The symbol of each byte: itself if printable, else the next free one from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = itertools.count(0x100)
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]


_SYMBOL_BYTES = {symbol: bytes([byte]) for byte, symbol in enumerate(_byte_symbols())}
_TO_LATIN_1 = {ord(symbol): byte[0] for symbol, byte in _SYMBOL_BYTES.items()}

_Documents = dict[str, dict[str, Any]]  # parsed JSON files by name, empty where there is none


@dataclass(frozen=True)
class AddedToken:
    """A token outside the merges, such as `<|endoftext|>`."""

    id: int
    special: bool
    normalized: bool


# OpenAI's own file, of which this has been checked: a tenth of a second of every start.
PROVEN_MERGES = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary.

    `ids` gives every entry's id; `ranked` lists the entries that merging can make, by rank;
    `token_bytes` holds the bytes of every id, added tokens included; `added` the added tokens by
    their text.
    """

    ids: dict[str, int]
    ranked: list[str]
    token_bytes: dict[int, bytes]
    added: dict[str, AddedToken]


def read_vocabulary(files: dict[str, bytes]) -> Vocabulary:
    """The vocabulary in the contents of tokenizer.json, or of vocab.json and merges.txt.

    tokenizer_config.json, special_tokens_map.json and added_tokens.json add their tokens. Raises
    ValueError for a vocabulary whose ids could differ from transformers'.
    """
    documents = {
        name: json_object(files.get(name, b"{}"), name)
        for name in ("tokenizer.json", "vocab.json", *SIDE_NAMES)
    }
    ids, merges, source = _read_bpe(documents, files.get("merges.txt"))
    is_proven = hashlib.sha256(files.get("merges.txt", b"")).hexdigest() == PROVEN_MERGES
    ranked, merged_bytes = _rank_tokens(ids, merges, source, is_proven=is_proven)
    token_bytes = {id: merged_bytes.get(token) or _spell(token) for token, id in ids.items()}
    added = _read_added_tokens(documents, ids)
    token_bytes |= {token.id: _utf8(content) for content, token in added.items()}
    return Vocabulary(ids, ranked, token_bytes, added)


def vocabulary_files(folder: Path) -> dict[str, bytes]:
    """The contents of a model folder's tokenizer files, by name.

    tokenizer.json is used alone when it is there, as transformers does, even if vocab.json and
    merges.txt say something else. Raises FileNotFoundError naming what is missing, and ValueError
    for a link that leads out of the folder and for a file that cannot be a vocabulary.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} to load a tokenizer from.")
    names = ("tokenizer.json",) if local_file(folder, "tokenizer.json") else _PAIR_NAMES
    paths = {name: local_file(folder, name) for name in (*names, *SIDE_NAMES)}
    if missing := [name for name in names if not paths[name]]:
        raise FileNotFoundError(_describe_missing(folder, missing))
    return {name: read_bytes(path, FILE_LIMIT) for name, path in paths.items() if path}


def _spell(token: str) -> bytes:
    """The bytes of a vocabulary entry; one that is not spelt in symbols is taken as text."""
    if all(char in _SYMBOL_BYTES for char in token):
        return token.translate(_TO_LATIN_1).encode("latin-1")
    return _utf8(token)


def _utf8(token: str) -> bytes:
    try:
        return token.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the token {_short(token)} has a lone surrogate, which UTF-8 cannot hold."
        ) from None


def _describe_missing(folder: Path, missing: list[str]) -> str:
    other = [
        f"{name} is a {kind} vocabulary, which is not implemented"
        for name, kind in _OTHER_TOKENIZERS.items()
        if (folder / name).is_file()
    ]
    older = [name for name, new in _OLDER_NAMES.items() if new in missing]
    if all((folder / name).is_file() for name in older):
        renamed = " and ".join(f"{name} to {_OLDER_NAMES[name]}" for name in older)
        return f"{folder} has no {' and no '.join(missing)}; rename {renamed}."
    return (
        f"{folder} has no {' and no '.join(missing)} (and no tokenizer.json): "
        f"{'; '.join(other) or 'text needs a byte-level BPE vocabulary'}; use ids instead."
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    if not all(type(id) is int and 0 <= id <= LARGEST_ID for id in vocab.values()):
        raise ValueError(
            f"the vocabulary must give every token an integer id from 0 to {LARGEST_ID:,}."
        )
    if len(set(vocab.values())) != len(vocab):
        raise ValueError("the vocabulary gives two tokens the same id.")
    return vocab, merges, source


def _refuse_other_pipelines(spec: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse, all at once and by name, every setting that would give other ids than GPT-2's."""
    # name, value, GPT-2's value
    rules: list[tuple[str, Any, Any]] = [
        ("add_prefix_space", config.get("add_prefix_space") or False, False)
    ]
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
        left, right = parts
        merges.append((number, left, right))
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
        left, right = parts
        merges.append((number, left, right))
    return merges


def _rank_tokens(
    vocab: dict[str, int], merges: list[tuple[int, str, str]], source: str, *, is_proven: bool
) -> tuple[list[str], dict[str, bytes]]:
    """The tokens that merging can make, in order of rank, and the bytes of each.

    `is_proven` merges make every token of theirs.
    """
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
        left_rank, right_rank = ranks.get(left), ranks.get(right)
        known = token in vocab and token not in ranks
        if left_rank is None or right_rank is None or not known:
            raise ValueError(f"{source} {number}: {_merge_fault(left, right, vocab, ranks)}")
        pair = left_rank, right_rank
        rank = len(ranks)
        ranks[token] = rank
        token_bytes[token] = token_bytes[left] + token_bytes[right]
        rank_of_pair[pair] = rank
        parts.append(pair)
        if not is_proven and not _becomes_itself(rank, parts, rank_of_pair):
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
    listed: list[tuple[Any, dict[str, Any]]] = []
    for value in _items(documents["tokenizer.json"], "added_tokens"):
        entry = _entry(value, "tokenizer.json")
        listed.append((entry.get("id"), entry))
    config = documents["tokenizer_config.json"]
    for key, value in _section(config, "added_tokens_decoder").items():
        entry = _entry(value, "tokenizer_config.json")
        listed.append((int(key) if key.isdecimal() else None, entry))
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


def _read_added_tokens(documents: _Documents, vocab: dict[str, int]) -> dict[str, AddedToken]:
    """The added tokens by content, with the ids that transformers gives them.

    Those are the vocabulary's own where it has the token, else the next free ones, whatever the
    file says; a file that says otherwise is refused.
    """
    named = [(None, entry) for entry in _named_tokens(documents, vocab)]
    entries = _listed_tokens(documents) + named
    if len(entries) > MOST_ADDED:
        raise ValueError(f"there are {len(entries):,} added tokens, more than {MOST_ADDED:,}.")
    special = {entry["content"] for _, entry in entries if entry.get("special")}
    added: dict[str, AddedToken] = {}
    taken = set(vocab.values())
    next_id = len(vocab)
    for listed_id, entry in entries:
        content = entry["content"]
        if content not in added:
            id = vocab.get(content, next_id)
            next_id = max(next_id, id + 1)
            if content in vocab and _spell(content) != _utf8(content):
                raise ValueError(f"the added token {content!r} is the symbols of other bytes.")
            if content not in vocab and id in taken:
                raise ValueError(
                    f"the added token {content!r} gets id {id}, which another token has: the ids "
                    "of the vocabulary have gaps; renumber them."
                )
            is_special = content in special
            normalized = bool(entry.get("normalized", not is_special))
            added[content] = AddedToken(id, is_special, normalized)
        if listed_id not in (None, added[content].id):
            raise ValueError(
                f"the added token {content!r} is listed with id {listed_id}, but transformers "
                f"gives it id {added[content].id}; correct the file or use ids instead."
            )
    return added
