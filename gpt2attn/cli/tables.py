"""Tables as the commands print them: no colour to miss, and no wider than the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: Sequence[int] = (0,)
) -> None:
    """Print `rows` under `headers`, numbers to the right and `text_columns` to the left."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, header in enumerate(headers):
        left = column in text_columns
        table.add_column(header, justify="left" if left else "right", no_wrap=left)
    for row in rows:
        table.add_row(*row)
    # No markup: "[b]" is a token here.
    Console(highlight=False, emoji=False, markup=False).print(table)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def token_label(tokenizer: Tokenizer, id: int) -> str:
    """A token's label; a padded vocabulary has rows that no token owns, which are named by id."""
    try:
        return tokenizer.label(id)
    except ValueError:
        return f"#{id}"
