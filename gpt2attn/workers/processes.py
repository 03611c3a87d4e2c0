"""Worker processes on this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias, cast

from . import MAX_DEATHS, Answer, Progress, Start, Worker, too_many_deaths

Pipe: TypeAlias = "Connection[Any, Any]"


class Processes:
    """A pool of `n_workers` spawned processes.

    Each has a pipe of its own, so that one that is killed, whatever it was doing, disturbs no
    other. Forking is no choice: the threads of this process, OpenMP's among them, would be missing.
    """

    def __init__(self, start: Start, n_workers: int) -> None:
        self.n_workers = n_workers
        self._start = start
        self._members: list[_Member] = []

    def __enter__(self) -> Processes:
        self._members = [_Member(*_spawn(self._start)) for _ in range(self.n_workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for member in self._members:
            member.end()

    def has_room(self) -> bool:
        return any(member.chunk is None for member in self._members)

    def send(self, number: int, chunk: Any) -> None:
        member = next(member for member in self._members if member.chunk is None)
        member.number, member.chunk, member.n_deaths = number, chunk, 0
        self._hand_over(member)

    def receive(self, progress: Progress) -> tuple[int, Answer]:
        while True:
            busy = {member.pipe: member for member in self._members if member.chunk is not None}
            for pipe in cast("list[Pipe]", wait(busy)):
                member = busy[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    progress(-member.n_counted)
                    self._replace(member)
                    continue
                if isinstance(message, int):
                    member.n_counted += message
                    progress(message)
                    continue
                member.chunk = None
                return member.number, message

    def _hand_over(self, member: _Member) -> None:
        member.n_counted = 0
        try:
            member.pipe.send(member.chunk)
        except OSError:  # it was killed while it was idle
            self._replace(member)

    def _replace(self, member: _Member) -> None:
        member.end()
        member.n_deaths += 1
        if member.n_deaths == MAX_DEATHS:
            raise too_many_deaths()
        member.process, member.pipe = _spawn(self._start)
        self._hand_over(member)


@dataclass(eq=False)
class _Member:
    process: SpawnProcess
    pipe: Pipe
    number: int = 0
    chunk: Any = None  # what it does now; None where it is idle
    n_deaths: int = 0  # of those that tried this chunk
    n_counted: int = 0  # progress with this chunk

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _spawn(start: Start) -> tuple[SpawnProcess, Pipe]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(start, theirs), daemon=True)
    with _without_interrupts():
        process.start()
    theirs.close()  # so that the pipe ends when the process does
    return process, ours


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all processes at once; those started here leave it to their parent."""
    # Starting it unblocks the signal; the first process would start it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(start: Start, pipe: Connection) -> None:
    """What a worker process runs, until its parent closes the pipe or is gone."""
    worker = Worker(start)
    try:
        while True:
            pipe.send(worker.answer(pipe.recv(), pipe.send))
    except (EOFError, OSError):
        return
