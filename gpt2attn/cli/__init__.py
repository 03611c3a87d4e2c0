"""The command line: parse, call, print, write. One file per command; nothing imports it.

Results go to stdout, notes and progress to stderr. Exit status: 0 done, 1 the check or the work
failed, 2 wrong usage or bad input, 130 interrupted. A user's mistake is one sentence; `--debug`
shows the traceback.
"""

from __future__ import annotations

import os
import sys
import warnings

import typer

from . import (
    attention,
    download,
    drift,
    explain,
    generate,
    heads,
    info,
    lens,
    neighbours,
    score,
    tokens,
    trace,
    verify,
)
from .common import debug_wanted, note

app = typer.Typer(
    name="gpt2attn",
    help=(
        "GPT-2, exact and fast, with every attention head in view.\n\n"
        "Start without a download:  gpt2attn generate 'Once upon a time' --model pocket"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (
    generate.generate,
    attention.attention,
    explain.explain,
    trace.trace,
    heads.heads,
    neighbours.neighbours,
    drift.drift,
    lens.lens,
    score.score,
    tokens.tokens,
    info.info,
    verify.verify,
    download.download,
):
    app.command(no_args_is_help=False)(command)


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        from .. import __version__

        typer.echo(f"gpt2attn {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the program; never shows a traceback for what a user can cause."""
    for stream in (sys.stdout, sys.stderr):
        # Files and pipes are always UTF-8; a terminal keeps its encoding and shows what it cannot
        # write as "?".
        stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    warnings.showwarning = lambda message, *_: note(f"note: {message}")
    try:
        app()
    except BrokenPipeError:
        # The reader went away (`| head`): not an error, and nothing may be flushed into the pipe at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        note("\ninterrupted")
        sys.exit(130)
    except (ValueError, OSError) as error:
        if debug_wanted():
            raise
        note(f"error: {error}")
        sys.exit(2)
