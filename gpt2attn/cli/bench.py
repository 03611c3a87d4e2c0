"""`gpt2attn bench`: speed on this machine, beside other programs on the same checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .common import Debug, DType, Json, Kernels, Model, Revision, Threads, note, print_json


def bench(
    model: Model = "gpt2",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Programs to compare with, of transformers, ctranslate2, llama-cpp and torch "
            "(this package's torch kernels), with commas; NAME:FORMAT chooses the weights' "
            "format: ctranslate2:int8, llama-cpp:q8_0.",
        ),
    ] = None,
    kernels: Kernels = "auto",
    dtype: DType = "float32",
    threads: Threads = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Turns of each program.", show_default="5")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One round, and 16 new tokens instead of 128.")
    ] = False,
    first_run: Annotated[
        bool,
        typer.Option(
            "--first-run",
            help="Also start once with nothing compiled yet, as the first run ever does.",
        ),
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the checkpoints converted for other programs here, to use them again.",
        ),
    ] = None,
    revision: Revision = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure tokens/s, prefill, start, memory and capture, in turns with other programs.

    What is measured, and how, is in docs/speed.md. Nothing is installed: a program that is not
    here is named with the line that installs it. Exit status 1 if prompt lookup chose another token
    than plain decoding.

    Example:  gpt2attn bench --model pocket --quick
    """
    from ..benchmark import Program, benchmark

    programs = [Program.parse(f"{'torch' if kernels == 'torch' else 'gpt2attn'}:{dtype}")]
    programs += [Program.parse(name.strip(), dtype) for name in (against or "").split(",") if name]
    report = benchmark(
        model,
        programs,
        revision=revision,
        threads=threads,
        rounds=rounds,
        quick=quick,
        first_run=first_run,
        work=work,
        notify=note,
    )
    if as_json:
        print_json(report.to_dict())
        for fault in report.faults():
            note(fault)
    else:
        from rich.console import Console

        # In a file or a pipe nothing need be squeezed into 80 columns.
        width = None if sys.stdout.isatty() else 140
        console = Console(highlight=False, emoji=False, markup=False, width=width)
        for part in report.parts():
            console.print(part)
    raise typer.Exit(1 if report.faults() else 0)
