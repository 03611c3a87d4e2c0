"""Draw the documentation's pictures: every kind of picture there is, once.

    python scripts/make_pictures.py docs/pictures
    python scripts/make_pictures.py out/pictures --model gpt2 --layer 5 --head 1

Pictures with many cells are PNG files, the others SVG. The same model gives the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gpt2attn
from gpt2attn.analysis import context_drift
from gpt2attn.capture import STAGES
from gpt2attn.cli import run_script
from gpt2attn.files import replacing
from gpt2attn.render.image import drift_figure, figure_bytes, maps_figure

SENTENCE = "Apple raised its price target."
LONGER = (
    "The animal was tired because it had been running. It lay down under the old tree by the "
    "river, and nobody who passed saw that it was asleep."
)
WORD, TEXTS = " bank", ("I deposited money in the bank.", "We sat on the bank of the river.")


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    model: Annotated[str, typer.Option(help="A name or a path.")] = "pocket",
    layer: Annotated[int, typer.Option(help="Of the pictures of one layer or head.")] = 1,
    head: Annotated[int, typer.Option(help="Of the pictures of one head.")] = 2,
) -> None:
    """Write a picture of each kind."""
    lm = gpt2attn.load(model, device="cpu", kernels="torch")
    short, long = lm.attention(SENTENCE, stages=STAGES), lm.attention(LONGER)
    ids = [lm.encode(text) for text in TEXTS]
    word = lm.tokenizer.id_of(WORD)
    drift = context_drift(lm.model, ids[0], ids[0].index(word), ids[1], ids[1].index(word))
    figures = {
        "head.svg": maps_figure(short, layer, head),
        "stages.svg": maps_figure(short, layer, head, show="stages"),
        "layer.png": maps_figure(long, layer),
        "heads.png": maps_figure(long),
        "measures.svg": maps_figure(long, show="measures"),
        "drift.svg": drift_figure(drift, lm.tokenizer.label(word), TEXTS, source=model),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with replacing(folder / name) as part:
            part.write_bytes(figure_bytes(figure, Path(name).suffix[1:]))
        typer.echo(folder / name)


if __name__ == "__main__":
    run_script(main)
