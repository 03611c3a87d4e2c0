"""Byte-level BPE over a model folder's own vocabulary: ids, labels and a streaming decoder.

`tiktoken.Encoding` does the merging over ranks that `vocabulary` makes of the folder's files; a
table turns ranks into the vocabulary's ids. `tiktoken`'s own file loader is not used: it caches
local files by path under the system's temporary folder and drops lines.

Nothing is ever stripped, cleaned up or prepended: the ids are those of
transformers' fast tokenizer with `add_special_tokens=False`.
"""

from __future__ import annotations

import codecs
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from operator import index
from pathlib import Path

import tiktoken

from .files import replacing
from .hub import resolve
from .vocabulary import END_OF_TEXT, SIDE_NAMES, read_vocabulary, vocabulary_files

# GPT-2's pattern in tiktoken's faster, equivalent spelling (tiktoken_ext/openai_public.py).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

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

OPENAI_SIZES = frozenset({"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"})


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
        vocabulary = read_vocabulary(files)
        ids, self._bytes, self._added = vocabulary.ids, vocabulary.token_bytes, vocabulary.added
        self._id_of_rank = [ids[token] for token in vocabulary.ranked]
        self._encoding = tiktoken.Encoding(
            "gpt2attn",
            pat_str=GPT2_PATTERN,
            mergeable_ranks={self._bytes[id]: rank for rank, id in enumerate(self._id_of_rank)},
            special_tokens={},
        )
        # Two passes, as Hugging Face does them: raw tokens first, then the "normalized" ones.
        self._added_patterns = [
            _any_of([content for content, token in self._added.items() if token.normalized is flag])
            for flag in (False, True)
        ]
        self._has_ordinary_added = not all(token.special for token in self._added.values())
        self.special_ids = frozenset(token.id for token in self._added.values() if token.special)
        self.vocab_size = max(self._bytes) + 1
        added_ids = {content: token.id for content, token in self._added.items()}
        self.end_of_text_id = (ids | added_ids).get(END_OF_TEXT)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load a model folder's tokenizer; no network, no fallback to another vocabulary.

        tokenizer.json is used alone when it is there, as transformers does, even if vocab.json and
        merges.txt say something else. Raises FileNotFoundError naming the missing file, or
        ValueError naming what is not byte-level BPE as GPT-2 does it.
        """
        folder = Path(folder)
        files = vocabulary_files(folder)
        try:
            return cls(files)
        except ValueError as error:
            raise ValueError(f"the tokenizer in {folder} cannot be used: {error}") from None

    @classmethod
    @functools.cache
    def gpt2(cls) -> Tokenizer:
        """GPT-2's own vocabulary of 50,257 ids, built once; it ships in `pocket`'s folder."""
        return cls.from_folder(Path(__file__).parent / "data" / "pocket")

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
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        # What would be read before or beside our files; next to tokenizer.json the pair is not.
        for name in ("tokenizer.json", *SIDE_NAMES):
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


def load_tokenizer(name: str | os.PathLike[str], *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a model's folder, found as `load` finds it.

    The vocabulary of OpenAI's four sizes ships with the package, so their names need no download.
    """
    if str(name).removeprefix("openai-community/") in OPENAI_SIZES and not os.path.exists(name):
        return Tokenizer.gpt2()
    return Tokenizer.from_folder(resolve(name, revision=revision).folder)


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


def _any_of(contents: list[str]) -> re.Pattern[str]:
    """A pattern for the leftmost, longest of some strings; of none, one that never matches."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
