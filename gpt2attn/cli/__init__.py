"""The command line: parse, call, print, write. One file per command; nothing imports it.

Results go to stdout, notes and progress to stderr. Exit status: 0 done, 1 the check or the work
failed (a full disk), 2 wrong usage or bad input, 130, 143 and 129 ended by SIGINT, SIGTERM and
SIGHUP, 141 the reader of the output went away. A user's mistake is one sentence; `--debug` shows
the traceback.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import Any, NoReturn, cast

import typer

from ..files import remove_unfinished
from ..untrusted import one_line
from . import (
    attention,
    bench,
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

# Windows has no EDQUOT.
_FAILED_WRITES = [
    getattr(errno, name, errno.ENOSPC) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO")
]

app = typer.Typer(
    name="gpt2attn",
    help=(
        "GPT-2, exact and fast, with every attention head in view.\n\n"
        "Start without a download:  gpt2attn generate 'Once upon a time' --model pocket"
    ),
    no_args_is_help=True,
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
    bench.bench,
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


def run_script(function: Callable[..., None]) -> None:
    """Run a script of one function, its parameters the options, as `main` runs the program."""
    script = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    script.command()(function)
    main(script)


def main(program: Callable[[], object] = app) -> None:
    """Run the program; never shows a traceback for what a user can cause."""
    _open_streams()
    warnings.showwarning = lambda message, *_: note(f"note: {one_line(str(message))}")
    status = 0
    try:
        with _ended_by_signals() as received:
            status = _run(program, received)
    except KeyboardInterrupt:  # in the instant after the work
        status = 130
    sys.exit(status)


def _run(program: Callable[[], object], received: list[int]) -> int:
    """Run the command that the arguments name; its exit status. `received` are signals."""
    try:
        try:
            program()
            status = 0
        except SystemExit as stop:
            # Versions of typer end on these themselves, each in its way.
            for error in _causes(stop):
                if isinstance(error, KeyboardInterrupt | BrokenPipeError):
                    raise error from None
                # Not by class: some versions of typer bring their own.
                unknown = getattr(error, "option_name", None)
                if type(error).__name__ == "NoSuchOption" and unknown and _is_of_text(unknown):
                    note(
                        "error: a text that begins with a dash goes last, after --, as in: "
                        "-- '-5 degrees'"
                    )
            status = int(stop.code or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader went away (`| head`). Nothing may be flushed into the pipe at exit.
        for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + 13  # SIGPIPE's, which ends other programs then
    except KeyboardInterrupt as stop:
        note(f"\ninterrupted. {stop}".rstrip())
        return 130
    except Exception as error:
        if received:  # a library has made another error of the signal's
            return 128 + received[0]
        sentence = _sentence(error)
        if sentence is None or debug_wanted():
            raise
        note(f"error: {sentence}")
        work_failed = isinstance(error, MemoryError | RuntimeError)
        return 1 if work_failed or getattr(error, "errno", None) in _FAILED_WRITES else 2


def _is_of_text(option: str) -> bool:
    """Whether what was taken for an option begins a text, such as `-5` or `- a list`."""
    texts = (one for one in sys.argv[1:] if re.match(r"-(\d|-*\s|[^=]*\s)", one))
    return any(text.startswith(option) for text in texts)


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Let signals end the program by an exception, so that it removes what is half written.

    Yields the list of those that came.
    """
    before: dict[int, Any] = {}
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> NoReturn:
        if _is_importing(frame):  # a library that is being loaded may swallow an exception
            remove_unfinished()
            os._exit(128 + number)
        received.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)  # a second one ends it at once
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    try:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    before[number] = signal.signal(number, end)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _open_streams() -> None:
    # A closed stream (`>&-`) becomes the null device: the next file that is opened would take its
    # number, and be written to.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the program
    for stream in (sys.stdout, sys.stderr):
        # Files and pipes are always UTF-8; a terminal keeps its encoding and shows what it cannot
        # write as "?".
        encoding = None if stream.isatty() else "utf-8"
        cast(TextIOWrapper, stream).reconfigure(encoding=encoding, errors="replace")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What `error` was raised while handling, from the last to the first."""
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause


def _sentence(error: Exception) -> str | None:
    """What to tell the user of an error; None for one that is our own fault."""
    if isinstance(error, OSError) and error.strerror:
        where = "the output" if error.filename is None else os.fsdecode(error.filename)
        return one_line(f"{where}: {error.strerror}.")
    if isinstance(error, ValueError | OSError):
        return one_line(str(error))
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("can't allocate memory", "out of memory"))
    ):
        return "there is not enough memory for this; ask for less at once."
    return None
