"""`gpt2attn verify`: compare the model with transformers, stage by stage."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .common import (
    AllowPickle,
    Debug,
    DType,
    Json,
    Model,
    Revision,
    Threads,
    note,
    print_json,
)


def verify(
    model: Model = "gpt2",
    quick: Annotated[
        bool, typer.Option("--quick", help="Texts of at most 64 tokens, not 1,000.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random token ids.")] = 0,
    revision: Revision = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to compute.")] = "cpu",
    dtype: DType = "float32",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare every stage with Hugging Face transformers; exit status 1 if one is wrong.

    Needs the extra `verify`. Differences of rounding are judged by a float64 run.

    Example:  gpt2attn verify --model pocket
    """
    import torch

    from ..verify import verify as compare

    if threads is not None:
        torch.set_num_threads(threads)
    report = compare(
        model,
        revision=revision,
        quick=quick,
        device=device,
        dtype=getattr(torch, dtype),
        seed=seed,
        allow_pickle=allow_pickle,
        notify=note,
    )
    if as_json:
        print_json(report.to_dict())
    else:
        from rich.console import Console

        # In a file or a pipe nothing need be squeezed into 80 columns.
        width = None if sys.stdout.isatty() else 140
        console = Console(highlight=False, emoji=False, markup=False, width=width)
        for line in report.header():
            console.print(line)
        console.print(report.table())
        console.print(report.summary())
    raise typer.Exit(0 if report.ok else 1)
