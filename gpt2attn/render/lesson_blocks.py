"""What a lesson is written in, before it becomes text, Markdown or HTML: chapters of blocks.

In prose, backticks mark code and tokens; `code` puts any text between them. All other text is plain
and is escaped by what writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .look import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Stands for a backtick inside code; `visible` leaves no such character in any text of a user's.
BACKTICK = "\ue000"


@dataclass(frozen=True)
class Prose:
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under headers; columns that are not `text_columns` are numbers.

    `shares` (rows, columns), for the last columns, shade their cells where there is colour.
    `marked` is a row that the words around it speak of.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: tuple[int, ...] = (0,)
    title: str = ""
    shares: Sequence[Sequence[float]] | None = None
    marked: int | None = None


@dataclass(frozen=True)
class Beside:
    """Two tables to compare, next to each other where there is room."""

    left: Table
    right: Table


@dataclass(frozen=True)
class Listing:
    """Lines to be shown as they are, in a typewriter's font."""

    text: str


@dataclass(frozen=True)
class Picture:
    """`draw` makes it; `alt` says what it shows. Left out of plain text."""

    draw: Callable[[], Figure]
    alt: str


Block = Prose | Table | Beside | Listing | Picture


@dataclass(frozen=True)
class Chapter:
    number: int
    title: str
    shapes: list[str]
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """A whole lesson in words; `about` says what model and text it is about."""

    title: str
    about: list[Block]
    chapters: list[Chapter]


def code(text: str) -> str:
    """Any text as code within prose."""
    return f"`{visible(text).replace('`', BACKTICK)}`"


def spans(text: str) -> list[tuple[bool, str]]:
    """Prose in pieces, each with whether it is code."""
    pieces = enumerate(text.split("`"))
    return [(number % 2 == 1, piece.replace(BACKTICK, "`")) for number, piece in pieces if piece]
