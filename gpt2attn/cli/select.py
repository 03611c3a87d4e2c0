"""How options name layers, heads and tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

Layers = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Layers, such as 0,5-7.", show_default="all"),
]
Heads = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Heads, such as 0,5-7.", show_default="all"),
]


def parse_numbers(text: str | None, option: str) -> list[int] | None:
    """The numbers that `0,5-7` lists, None for None; raises ValueError naming the option."""
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{option} takes numbers and ranges such as 0,5-7, not {text!r}.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{option}: the range {part.strip()} runs backwards.")
        if last - first > 10_000:
            raise ValueError(f"{option}: the range {part.strip()} has too many numbers.")
        numbers += range(first, last + 1)
    return numbers


def find_token(spec: str, ids: Sequence[int], tokenizer: Tokenizer, option: str) -> int:
    """The position in `ids` that `spec` names: a position, `#id`, or the token's text.

    A text matches with or without the token's leading space, exact matches first. Raises
    ValueError, listing the tokens, if nothing or more than one fits.
    """
    if re.fullmatch(r"-?\d+", spec):
        position = int(spec)
        if not -len(ids) <= position < len(ids):
            raise ValueError(f"{option} {spec}: the text has the positions 0 to {len(ids) - 1}.")
        return position % len(ids)
    if match := re.fullmatch(r"#(\d+)", spec):
        fits = [i for i, id in enumerate(ids) if id == int(match[1])]
    else:
        texts = [tokenizer.decode([id]) for id in ids]
        fits = [i for i, text in enumerate(texts) if text == spec] or [
            i for i, text in enumerate(texts) if text.removeprefix(" ") == spec
        ]
    if len(fits) != 1:
        shown = fits or range(len(ids))
        listed = ", ".join(f"{i} {tokenizer.label(ids[i])}" for i in list(shown)[:40])
        problem = "fits several tokens" if fits else "fits no token"
        raise ValueError(f"{option} {spec!r} {problem}; give a position: {listed}.")
    return fits[0]
