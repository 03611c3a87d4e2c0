"""Chunks of work done by several workers, their results in the order of the chunks.

A worker is made by calling `start` once, in its own process, for what it does with each chunk:
`work(chunk, progress)`, where `progress(n)` counts what it has done, in any unit. `start` and
chunks are pickled. A worker that is killed is replaced, and its chunk is done again: a chunk's
result may depend on the chunk alone.

`processes` has workers on this machine, `cluster` those of a Ray cluster.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

Progress = Callable[[int], object]
Work = Callable[[Any, Progress], Any]
Start = Callable[[], Work]

# Chunks on their way for each worker: the one it does, and results that wait for their turn.
CHUNKS_AHEAD = 4
# How often a chunk may end the worker that does it before it counts as the reason.
MAX_DEATHS = 3


class Pool(Protocol):
    """Workers, and a context in which they live."""

    n_workers: int

    def __enter__(self) -> Pool: ...
    def __exit__(self, *error: object) -> None: ...
    def has_room(self) -> bool:
        """Whether a worker is idle."""
        ...

    def send(self, number: int, chunk: Any) -> None:
        """Give a chunk to an idle worker."""
        ...

    def receive(self, progress: Progress) -> tuple[int, Answer]:
        """Wait for a chunk to be done."""
        ...


# "done" and the result, "refused" and a sentence, or "failed" and a traceback.
Answer = tuple[str, Any]


def run_here(start: Start, chunks: Iterable[Any], progress: Progress) -> Iterator[Any]:
    """The same without any worker: what `in_order` gives, computed in this process."""
    work = None
    for chunk in chunks:
        work = work or start()
        yield work(chunk, progress)


def in_order(pool: Pool, chunks: Iterable[Any], progress: Progress) -> Iterator[Any]:
    """The results of `chunks`, in order. `chunks` is read no further than the workers need.

    Raises ValueError for what a worker refused, ChildProcessError for a chunk that kills workers.
    """
    ahead = CHUNKS_AHEAD * pool.n_workers
    numbered = enumerate(chunks)
    early: dict[int, Any] = {}
    n_sent = n_given = 0
    exhausted = False
    with pool:
        while True:
            while not exhausted and pool.has_room() and n_sent - n_given < ahead:
                try:
                    pool.send(*next(numbered))
                    n_sent += 1
                except StopIteration:
                    exhausted = True
            if n_sent == n_given:
                return
            number, answer = pool.receive(progress)
            early[number] = _result(answer)
            while n_given in early:
                yield early.pop(n_given)
                n_given += 1


class Worker:
    """A worker's own side: it starts with its first chunk and never raises."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._work: Work | None = None

    def answer(self, chunk: Any, progress: Progress) -> Answer:
        # Exceptions travel as text: not every one survives pickling.
        try:
            if self._work is None:
                self._work = self._start()
            return "done", self._work(chunk, progress)
        except (ValueError, OSError) as error:
            return "refused", str(error)
        except Exception:
            return "failed", traceback.format_exc()


def too_many_deaths() -> ChildProcessError:
    return ChildProcessError(
        f"A worker was killed {MAX_DEATHS} times at the same records, perhaps for want of memory: "
        "use fewer workers, or fewer tokens at once."
    )


def _result(answer: Answer) -> Any:
    kind, value = answer
    if kind == "refused":
        raise ValueError(value)
    if kind == "failed":
        raise RuntimeError(f"a worker failed:\n{value}")
    return value
