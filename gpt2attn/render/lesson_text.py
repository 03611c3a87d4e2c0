"""A lesson as plain text: at most 100 columns, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from ..lesson import Lesson
from .lesson_blocks import Beside, Block, Listing, Picture, Prose, Table, spans
from .lesson_words import document
from .look import visible
from .trace_text import fit

WIDTH = 100
GAP = 2
LEAST_COLUMN = 6  # a column is not cut below this


def lesson_text(lesson: Lesson) -> str:
    """The lesson for a terminal; pictures are left to the other forms."""
    written = document(lesson)
    parts = [_title(visible(written.title), "="), *_blocks(written.about)]
    for chapter in written.chapters:
        parts.append(_title(f"{chapter.number}. {chapter.title}", "-"))
        parts += _blocks(chapter.blocks)
        parts.append("\n".join(_wrapped(_shapes(chapter.shapes), "   ")))
    return "\n\n".join(parts) + "\n"


def _title(text: str, rule: str) -> str:
    text = fit(text, WIDTH).rstrip()
    return f"{text}\n{rule * cell_len(text)}"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Picture):
            continue
        if isinstance(block, Prose):
            lines = _wrapped("".join(_piece(*span) for span in spans(block.text)).split(" "))
        elif isinstance(block, Listing):
            lines = [f"   {line}" for line in block.text.splitlines()]
        elif isinstance(block, Beside):
            lines = _beside(block)
        else:
            lines = _table(block, WIDTH - 3)
        yield "\n".join(lines)


def _shapes(shapes: Sequence[str]) -> list[str]:
    """Words that a line may break between, none of them within a shape."""
    return ["Shapes:", *(f"{shape}," for shape in shapes[:-1]), *shapes[-1:]]


def _piece(is_code: bool, text: str) -> str:
    """Code is marked only where the words around it would not set it off."""
    return f"`{text}`" if is_code and (" " in text or not any(map(str.isalnum, text))) else text


def _wrapped(words: Sequence[str], indent: str = "") -> list[str]:
    """Lines of whole words; a word wider than a line is cut."""
    lines = [indent]
    for word in map(visible, words):
        if lines[-1].strip() and cell_len(f"{lines[-1]} {word}") > WIDTH:
            lines.append(indent)
        joined = f"{lines[-1]} {word}" if lines[-1].strip() else f"{indent}{word}"
        lines[-1] = joined if cell_len(joined) <= WIDTH else fit(joined, WIDTH)
    return lines


def _beside(block: Beside) -> list[str]:
    """The two tables in the same lines if both fit there, else one below the other."""
    half = WIDTH // 2
    left, right = (_table(table, half - 4) for table in (block.left, block.right))
    if max(map(cell_len, [*left, *right])) > half:
        return [*_table(block.left, WIDTH - 3), "", *_table(block.right, WIDTH - 3)]
    return [f"{fit(a, half)}{b}".rstrip() for a, b in zip(left, right, strict=True)]


def _table(table: Table, room: int) -> list[str]:
    """Lines of a table, indented; wide text is cut until it fits into `room`, numbers are not."""
    headers = [visible(header) for header in table.headers]
    rows = [[visible(cell) for cell in row] for row in table.rows]
    widths = _widths(headers, rows, table.text_columns, room)

    def line(cells: Sequence[str], mark: str = " ") -> str:
        padded = (
            fit(cell, width, right=column not in table.text_columns)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f" {mark} {(' ' * GAP).join(padded)}".rstrip()

    lines = [f"   {visible(table.title)}"] if table.title else []
    lines += [line(headers), f"   {'─' * (sum(widths) + GAP * (len(widths) - 1))}"]
    return lines + [
        line(row, ">" if number == table.marked else " ") for number, row in enumerate(rows)
    ]


def _widths(
    headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int], room: int
) -> list[int]:
    columns = list(zip(*rows, strict=True))
    cells = [max(map(cell_len, column)) for column in columns]
    widths = [max(cell_len(head), cell) for head, cell in zip(headers, cells, strict=True)]
    least = [
        LEAST_COLUMN if column in text_columns else max(cell, min(LEAST_COLUMN, width))
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    while sum(widths) + GAP * (len(widths) - 1) > room:
        spare, widest = max(
            ((width, at) for at, width in enumerate(widths) if width > least[at]), default=(0, None)
        )
        if widest is None:
            break
        widths[widest] = spare - 1
    return widths
