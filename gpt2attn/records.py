"""Input files of many texts, one record a line: .txt, or .jsonl with a string or {"text": ...} on
each line.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Record(NamedTuple):
    """One text and the number of its line, counted from 1."""

    line: int
    text: str


def read_records(path: Path) -> Iterator[Record]:
    """The records of `path` in order; blank lines, and a mark of UTF-8 before the first, are passed
    over.

    Raises ValueError, naming file and line, for another suffix, text that is not UTF-8, or a line
    of .jsonl that holds no text or half a character.
    """
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise ValueError(
            f"{path} must end in .txt (one text a line) or .jsonl (one JSON value a line)."
        )
    is_json = path.suffix.lower() == ".jsonl"
    with path.open("rb") as file:
        # Lines end at a newline only: str.splitlines would also cut at form feeds and U+2028.
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = raw.removeprefix(BOM_UTF8)
            try:
                line = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                hint = utf16_hint(raw) if number == 1 else ""
                raise ValueError(
                    f"{path}, line {number}, is not UTF-8: {error.reason}{hint}."
                ) from None
            if line and not line.isspace():
                yield Record(number, _json_text(line, path, number) if is_json else line)


def utf16_hint(raw: bytes) -> str:
    """For the end of a message that `raw`, which begins a file, is not UTF-8."""
    # `>` of Windows PowerShell 5 writes such files.
    is_utf16 = raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    return "; it seems to be UTF-16, so save it as UTF-8" if is_utf16 else ""


def _json_text(line: str, path: Path, number: int) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}, is not JSON: {error}.") from None
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, str):
        raise ValueError(
            f'{path}, line {number}, needs a string or an object with a string "text".'
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ord(value[error.start])
        raise ValueError(
            f"{path}, line {number}, has \\u{half:04x} without the other half of its pair, which "
            "is no text; remove it or replace it by \\ufffd."
        ) from None
    return value


def in_lists(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """`items` in order, in lists whose sizes add up to `least` or more, but for the last."""
    found: list[T] = []
    held = 0
    for item in items:
        found.append(item)
        held += size(item) + 1  # an empty text takes room too
        if held >= least:
            yield found
            found, held = [], 0
    if found:
        yield found
