"""A lesson as Markdown (CommonMark with tables), its pictures inside as PNG data."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence

from ..lesson import Lesson
from .image import figure_bytes
from .lesson_blocks import Beside, Block, Listing, Picture, Prose, Table, spans
from .lesson_words import document
from .look import visible


def lesson_markdown(lesson: Lesson) -> str:
    """The lesson as one file; text of the model's or the user's is escaped."""
    written = document(lesson)
    parts = [f"# {_text(written.title)}", *_blocks(written.about)]
    for chapter in written.chapters:
        parts.append(f"## {chapter.number}. {_text(chapter.title)}")
        parts += _blocks(chapter.blocks)
        parts.append(f"Shapes: {_text(', '.join(chapter.shapes))}")
    return "\n\n".join(parts) + "\n"


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Prose):
            yield "".join(
                _code(piece) if is_code else _text(piece) for is_code, piece in spans(block.text)
            )
        elif isinstance(block, Listing):
            yield f"```python\n{block.text}\n```"
        elif isinstance(block, Picture):
            # PNG: most readers of Markdown show no SVG that is given as data.
            data = base64.b64encode(figure_bytes(block.draw(), "png")).decode()
            yield f"![{_text(block.alt)}](data:image/png;base64,{data})"
        elif isinstance(block, Beside):
            yield f"{_table(block.left)}\n\n{_table(block.right)}"
        else:
            yield _table(block)


def _text(text: str) -> str:
    """Text that no reader of Markdown takes for markup, HTML or the end of a cell."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&$!])", r"\\\1", visible(text))


def _code(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row."""
    text = visible(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    if not longest:
        return f"`{text}`"
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}"


def _table(table: Table) -> str:
    rules = [":--" if at in table.text_columns else "--:" for at in range(len(table.headers))]
    lines = [_line(table.headers), f"| {' | '.join(rules)} |"]
    for number, row in enumerate(table.rows):
        cells = [_text(cell) for cell in row]
        if number == table.marked:
            cells[0] = f"**{cells[0]}**"
        lines.append(f"| {' | '.join(cells)} |")
    title = [f"*{_text(table.title)}*", ""] if table.title else []
    return "\n".join([*title, *lines])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"
