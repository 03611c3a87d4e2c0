"""`gpt2attn verify`: compare the model with transformers, or with published figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    AllowPickle,
    Debug,
    DType,
    Json,
    Kernels,
    Model,
    Revision,
    Threads,
    note,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..verify import Report
    from ..verify.published import PublishedReport


def verify(
    model: Model = "gpt2",
    quick: Annotated[
        bool, typer.Option("--quick", help="Texts of at most 64 tokens, not 1,000.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random token ids.")] = 0,
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="Compare with published figures of GPT-2 small instead; transformers is not "
            "needed.",
        ),
    ] = False,
    wikitext2: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --published: wiki.test.raw of WikiText-2, for the figures that need it.",
        ),
    ] = None,
    lambada: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --published: LAMBADA's test passages, .jsonl or .txt."
        ),
    ] = None,
    revision: Revision = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to compute.")] = "cpu",
    dtype: DType = "float32",
    kernels: Kernels = "torch",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare every stage with Hugging Face transformers; exit status 1 if one is wrong.

    Needs the extra `verify`. Differences of rounding are judged by a float64 run.

    With --published: texts, logits, losses, head scores and attention maps that others have
    published of GPT-2 small, each with its source, and what this model gives for them. Exit status
    1 if a row fails. What is not run is listed with the reason, and counts as neither.

    Example:  gpt2attn verify --model pocket
    """
    import torch

    for option, value in (("--wikitext2", wikitext2), ("--lambada", lambada)):
        if value is not None and not published:
            raise ValueError(f"{option} goes with --published.")
    if published and (quick or dtype != "float32"):
        raise ValueError(
            "Published figures are compared whole and in float32: leave out --quick and --dtype."
        )
    if kernels != "torch" and not published:
        raise ValueError(
            "It is PyTorch's kernels that are compared with transformers; --kernels goes with "
            "--published."
        )
    if threads is not None:
        torch.set_num_threads(threads)
    report: Report | PublishedReport
    if published:
        from ..verify.published import verify_published

        report = verify_published(
            model,
            revision=revision,
            device=device,
            kernels=kernels,
            allow_pickle=allow_pickle,
            wikitext2=wikitext2,
            lambada=lambada,
            notify=note,
        )
    else:
        from ..verify import verify as compare

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
        report.print(_console())
    raise typer.Exit(0 if report.ok else 1)


def _console() -> Console:
    from rich.console import Console

    # In a file or a pipe nothing need be squeezed into 80 columns.
    width = None if sys.stdout.isatty() else 140
    return Console(highlight=False, emoji=False, markup=False, width=width)
