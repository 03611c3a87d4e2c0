"""A scored text in the terminal: surprising tokens coloured, or marked without colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .common import visible

if TYPE_CHECKING:
    from rich.text import Text

    from ..language_model import LanguageModel
    from ..scoring import Score

# From this rank on: a colour, and marks where there is no colour. The bounds are GLTR's.
_LEVELS = (
    (1001, "bold magenta reverse", ("««", "»»")),
    (101, "bold red", ("«", "»")),
    (11, "yellow", None),
)
_COLOUR_LEGEND = "rank 1 to 10 plain, 11 to 100 yellow, 101 to 1,000 red, above magenta"
_MARK_LEGEND = "rank above 100 in « », above 1,000 in «« »»"


def print_view(lm: LanguageModel, result: Score) -> None:
    """Print the text of `result`, and what its colours or marks mean."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    coloured = console.color_system is not None and not console.no_color
    console.print(_view(lm, result, coloured), soft_wrap=True)
    print(f"\n{_COLOUR_LEGEND if coloured else _MARK_LEGEND}")


def _view(lm: LanguageModel, result: Score, coloured: bool) -> Text:
    from rich.text import Text

    view = Text()
    for piece, rank in _pieces(lm, result):
        style, marks = next(
            ((style, marks) for lowest, style, marks in _LEVELS if rank >= lowest), ("", None)
        )
        if style and piece.isspace():
            piece = "⏎" * piece.count("\n") + piece  # a newline has no colour of its own
        if coloured:
            view.append(piece, style)
            continue
        bare = piece.strip() or piece
        before, after = piece.split(bare, 1)
        view.append(f"{before}{bare.join(marks)}{after}" if marks else piece)
    return view


def _pieces(lm: LanguageModel, result: Score) -> Iterator[tuple[str, int]]:
    """Text and rank of each token; those that share a character are one, of the worst rank."""
    decoder = lm.tokenizer.stream()
    worst = 0
    for id, rank in zip(result.ids, result.ranks.tolist(), strict=True):
        worst = max(worst, rank)
        if piece := decoder.push(id):
            yield visible(piece), worst
            worst = 0
    if piece := decoder.finish():
        yield visible(piece), worst
