"""All programs in all their number formats on one checkpoint: the table of docs/speed.md.

    python scripts/make_checkpoint.py gpt2 out/gpt2-random
    python scripts/bench_peers.py out/gpt2-random

Nothing is installed by this: a program that is not here is named with the line that installs it.
To have them all, in a virtual environment of their own with a C++ compiler at hand for llama.cpp:

    python3 -m venv peers
    peers/bin/pip install -e ".[verify]" ctranslate2 gguf llama-cpp-python
    peers/bin/python scripts/bench_peers.py out/gpt2-random

The checkpoints that the peers read are written beside it, in FOLDER-peers, and used again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gpt2attn.benchmark import Program, benchmark
from gpt2attn.benchmark.programs import FORMATS, TORCH
from gpt2attn.cli import run_script

# Every format of every program, but not torch's products of 16 bits, which are slow on a CPU.
PROGRAMS = [
    Program(name, format)
    for name, formats in FORMATS.items()
    for format in (formats if name != TORCH else ("float32",))
]


def main(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of each program.", show_default="one for each core")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each program.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Also write every run as JSON here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round, 16 new tokens.")] = False,
) -> None:
    """Print the comparison of this package with every program that is installed."""
    console = Console(highlight=False, width=140)
    report = benchmark(
        folder,
        PROGRAMS,
        threads=threads,
        rounds=1 if quick else rounds,
        quick=quick,
        work=folder.absolute().with_name(f"{folder.absolute().name}-peers"),
        notify=lambda line: typer.echo(line, err=True),
    )
    for part in report.parts():
        console.print(part)
    if out is not None:
        out.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
