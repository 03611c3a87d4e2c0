"""Progress on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def record_progress(
    n_records: int, *, what: str = "records", silent: bool = False
) -> Iterator[Callable[[int | None, int], None]]:
    """A bar: records, tokens/s and the time left.

    The function takes the number of records done, or None for as many as before, and how many more
    tokens were.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(what + ", {task.fields[rate]:,.1f} tokens/s,"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with _tokens(columns, n_records, silent) as show:
        yield show


@contextlib.contextmanager
def token_progress(*, silent: bool = False) -> Iterator[Callable[[int], None]]:
    """A count of tokens, for work whose end is not known; the function takes how many more."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
    )
    with _tokens(columns, None, silent) as show:
        yield lambda n: show(None, n)


@contextlib.contextmanager
def _tokens(
    columns: tuple[Any, ...], total: int | None, silent: bool
) -> Iterator[Callable[[int | None, int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    started = time.perf_counter()
    n_tokens = 0
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=silent or not sys.stderr.isatty(),
        redirect_stdout=False,  # what is printed meanwhile must not go to stderr with the bar
    ) as bar:
        task = bar.add_task("", total=total, tokens=0, rate=0.0)

        def show(n_done: int | None, n_new: int) -> None:
            nonlocal n_tokens
            n_tokens += n_new
            rate = n_tokens / (time.perf_counter() - started)
            bar.update(task, completed=n_done, tokens=n_tokens, rate=rate)

        yield show
