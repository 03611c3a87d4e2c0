"""Write a random GPT-2 checkpoint of a published size, to measure and verify with no download.

    python scripts/make_checkpoint.py gpt2 out/gpt2-random
    python scripts/make_checkpoint.py gpt2-xl out/xl-short --n-layer 2

The same seed gives the same file. GPT-2's vocabulary is written beside the weights if the config
has its size.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from gpt2attn.checkpoint import save_model
from gpt2attn.cli import run_script
from gpt2attn.config import GPT2Config
from gpt2attn.model import GPT2
from gpt2attn.tokenizer import Tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"

Size = StrEnum("Size", {path.stem: path.stem for path in sorted(CONFIGS.glob("*.json"))})


class DType(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def random_model(config: GPT2Config, seed: int = 0, std: float | None = None) -> GPT2:
    """N(0, std) matrices and N(0, 0.2) elsewhere, LayerNorm weights around 1.

    `std` None is 1.7 / sqrt(n_embd). GPT-2's own initial 0.02 would hide faults: queries and keys
    are then so small that every row of a map is nearly uniform, and the wrong GELU moves a logit by
    1e-5 only. A LayerNorm's output has a norm of about sqrt(n_embd), so this std gives q, k and v
    of 1.8 and scaled scores of 3 at every width from 32 to 1,600: one key of 1,000 gets up to half
    of the last row in the first layer, residual values stay near 10, logits below 50, and float32
    rounding of the logits below 1e-4.
    """
    with torch.device("meta"):
        model = GPT2(config)
    model.to_empty(device="cpu").requires_grad_(False).eval()
    matrices = 1.7 * config.n_embd**-0.5 if std is None else std
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm_weight = "ln_" in name and name.endswith("weight")
        is_matrix = name.startswith("h.") and parameter.dim() == 2
        parameter.normal_(
            float(is_norm_weight), matrices if is_matrix else 0.2, generator=generator
        )
    return model


def main(
    size: Annotated[Size, typer.Argument(help="A file of configs/, without its suffix.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    n_layer: Annotated[
        int | None, typer.Option(min=1, help="Layers, for a shortened copy.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="What the file holds.")] = DType.float32,
    std: Annotated[
        float | None,
        typer.Option(min=0, help="Of the matrices.", show_default="1.7 / sqrt(n_embd)"),
    ] = None,
) -> None:
    """Write a seeded random checkpoint in Hugging Face format."""
    config = GPT2Config.from_file(CONFIGS / f"{size.value}.json")
    if n_layer is not None:
        config = dataclasses.replace(config, n_layer=n_layer)
    model = random_model(config, seed, std).to(getattr(torch, dtype.value))
    save_model(model, folder)
    if Tokenizer.gpt2().vocab_size == config.vocab_size:
        Tokenizer.gpt2().save(folder)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    typer.echo(f"{folder}: {n_parameters:,} parameters in {dtype.value}")


if __name__ == "__main__":
    run_script(main)
