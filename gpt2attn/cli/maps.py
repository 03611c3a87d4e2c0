"""Where attention maps go: a dump, a picture, a page, or the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import check_output

if TYPE_CHECKING:
    from torch import Tensor

    from ..capture import AttentionMaps

SUFFIXES_HELP = "a dump (.safetensors, .npz, .json, .csv), a picture (.png, .svg) or a page (.html)"
PICTURES = (".png", ".svg")
PAGE = ".html"


def check_out(path: Path, *, force: bool, source: Path | None) -> None:
    """Raise ValueError for a suffix that no format has, or a file that could not be written.

    `source` is the file that the text is read from, if it is.
    """
    from ..dump import SUFFIXES

    if path.suffix.lower() not in (*SUFFIXES, *PICTURES, PAGE):
        raise ValueError(f"{path} must end in what it is to be: {SUFFIXES_HELP}.")
    if path.exists() and not force:
        raise ValueError(f"{path} is already there; --force replaces it.")
    check_output(path, [source])


def write_maps(maps: AttentionMaps, path: Path, *, value_norms: Tensor | None = None) -> None:
    """Write `maps` as the suffix says; a picture is of the one layer or head that was captured."""
    from ..files import replacing

    suffix = path.suffix.lower()
    if suffix == PAGE:
        from ..render.html import render_page

        content = render_page(maps, value_norms=value_norms).encode("utf-8")
    elif suffix in PICTURES:
        from ..render.image import figure_bytes

        layer, head = _one(maps)
        show = "stages" if len(maps.stages) > 1 else next(iter(maps.stages))
        figure = maps.figure(layer, head, show=show)
        content = figure_bytes(figure, "svg" if suffix == ".svg" else "png")
    else:
        maps.save(path)
        return
    with replacing(path) as part:
        part.write_bytes(content)


def print_maps(maps: AttentionMaps) -> None:
    """Show `maps` in the terminal: all heads, one layer's, or one with its percentages."""
    from rich.console import Console

    from ..render.terminal import Screen, maps_text

    console = Console(highlight=False, emoji=False, markup=False)
    text = maps_text(maps, *_one(maps), screen=Screen.of(console))
    console.print(text, end="", soft_wrap=True)


def _one(maps: AttentionMaps) -> tuple[Any, Any]:
    """The layer, if only one was captured, and then the head, if only one was."""
    layer = maps.layers[0] if len(maps.layers) == 1 else None
    head = maps.heads[0] if layer is not None and len(maps.heads) == 1 else None
    return layer, head
