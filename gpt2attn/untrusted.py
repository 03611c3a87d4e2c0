"""Files that strangers wrote: what is checked before a name, a JSON text or a header is believed.

Only the standard library, so that a config can be read without torch. Every ValueError raised here
carries the path and is fit to be shown to a user as it is.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Of a config, a shard index or a header: far above what a GPT-2 needs (48 layers: 60 kB of header,
# 70 kB of index), and low enough that no text within it, parsed, takes more than 50 MB.
JSON_LIMIT = 1_000_000
MAX_LISTED = 8
LONGEST_MESSAGE = 2_000
HTML = (b"<!doctype", b"<!--", b"<html", b"<head", b"<body", b"<?xml")

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 200
# repr for error messages: a hostile value may be megabytes long.
short = _shortened.repr


def local_file(folder: Path, name: str) -> Path | None:
    """The regular file `name` in `folder`, or None if there is none.

    Raises ValueError for a link that leads out of the folder. The links of the Hub cache, from
    snapshots/<commit>/ to blobs/ beside it, are not such links.
    """
    path = folder / name
    if not path.is_file():
        return None
    home, target = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs"
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(blobs)
    if not (target.is_relative_to(home) or in_cache):
        raise ValueError(
            f"{path} is a link to {target}, outside the model's folder, and is not followed; "
            "put the file itself there."
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises ValueError if it holds anything else, or a key twice."""
    return json_object(read_bytes(path, JSON_LIMIT), f"{path}: the file")


def read_bytes(path: Path, limit: int) -> bytes:
    """The bytes of a file; raises ValueError for a placeholder or for more than `limit` bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    if len(raw) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes; no such file of a GPT-2 has.")
    _refuse_placeholder(path, raw[:512])
    return raw


def json_object(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object that `raw` spells; raises ValueError, naming `what`, for anything else.

    So does a key that stands there twice: readers differ on which one counts.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, not a {type(value).__name__}.")
    return value


def check_header(path: Path) -> None:
    """Refuse a .safetensors file that is something else, is cut short, or names a tensor twice.

    The library checks the rest. Given a name twice it takes the last without a word; of the other
    faults here it says only that the header is wrong. Reads no more than the header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(512)
        _refuse_placeholder(path, start)
        length = int.from_bytes(start[:8], "little")
        if size >= 8 and length > JSON_LIMIT:
            if start.startswith((b"PK\x03\x04", b"\x80")):
                raise ValueError(f"{path} is a pickle, not safetensors, and is not opened.")
            raise ValueError(
                f"{path} ({size:,} bytes) is not safetensors: its header would have {length:,} "
                f"bytes, and that of a GPT-2 has less than {JSON_LIMIT:,}."
            )
        if size < 8 + length:
            raise ValueError(
                f"{path} is cut short within its header, at {size:,} bytes; download it again."
            )
        file.seek(8)
        header = json_object(file.read(length), f"{path}: its header")
    needed = 8 + length + _data_end(header)
    if size < needed:
        raise ValueError(f"{path} is cut short: {size:,} of {needed:,} bytes; download it again.")


def refuse_placeholder(path: Path) -> None:
    """Raise ValueError if `path` holds what a failed download leaves in place of the file."""
    with path.open("rb") as file:
        _refuse_placeholder(path, file.read(512))


def listed(names: Iterable[object], limit: int = MAX_LISTED) -> str:
    """Names in natural order (h.2 before h.10), safe to print, cut after `limit` with the count."""

    def order(name: str) -> list[tuple[int, str]]:
        return [
            (len(part), part) if part[:1].isdigit() else (0, part)
            for part in re.split(r"([0-9]+)", name)
        ]

    ordered = sorted(map(str, names), key=order)
    shown = [
        name if name.isprintable() and len(name) <= 200 else reprlib.repr(name)
        for name in ordered[:limit]
    ]
    more = len(ordered) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def one_line(text: str) -> str:
    """A message as a terminal may show it: no control characters, cut where it is far too long."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text[:LONGEST_MESSAGE]
    )
    more = len(text) - LONGEST_MESSAGE
    return f"{shown} ... ({more:,} more characters)" if more > 0 else shown


def _refuse_placeholder(path: Path, start: bytes) -> None:
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes); download it again.")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} ({size:,} bytes) is a Git LFS pointer; fetch the real file (`git lfs pull`)."
        )
    # More than "<": that may be a header's length, or the first merge of a tokenizer.
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(HTML):
        raise ValueError(
            f"{path} ({size:,} bytes) is an HTML page, not the file; download it again."
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"the key {reprlib.repr(twice)} stands there twice")
    return table


def _data_end(header: dict[str, Any]) -> int:
    """Where the last tensor ends, so far as the header is well formed; the library judges that."""
    offsets = (entry.get("data_offsets") for entry in header.values() if isinstance(entry, dict))
    ends = (pair[-1] for pair in offsets if isinstance(pair, list) and pair)
    return max((end for end in ends if isinstance(end, int) and end < 2**63), default=0)
