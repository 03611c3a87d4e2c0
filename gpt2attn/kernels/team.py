"""A team of threads that run one compiled function together, and the barrier they meet at.

Python threads do for this what a thread library would: a compiled function gives up the interpreter
lock, so they run at the same time, and nothing has to share a pool with torch's. Within one call
they meet at a spin barrier, which costs a microsecond where waking a thread costs fifty.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Places in the array that a call's threads share; a cache line each, so that they do not collide.
ARRIVED, ROUND, ABORTED, SHARED_SIZE = 0, 16, 32, 48
SPINS_BEFORE_YIELD = 2000  # about 20 microseconds: longer, and a thread that has no core gets one

WAIT = 1.0  # seconds; a thread that was told to go home does so in a hundredth of that

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _add(typingctx, array, index, value):  # type: ignore[no-untyped-def]
    """Atomic array[index] += value; returns the value before."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(array, index, types.int64), generate


@intrinsic
def _load(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Atomic read of array[index]; what the writer wrote before is seen after."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = _element(context, builder, signature, args)
        return builder.load_atomic(pointer, "acquire", 8, typ=ir.IntType(64))

    return types.int64(array, index), generate


def _element(context, builder, signature, args):  # type: ignore[no-untyped-def]
    kind = signature.args[0]
    array = context.make_array(kind)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, kind, array, [args[1]])


@njit(nogil=True, cache=True)
def barrier(shared, n_threads):  # type: ignore[no-untyped-def]
    """Wait until all threads of the call are here; False if the call was given up."""
    if n_threads == 1:
        return True
    before = _load(shared, ROUND)
    if _add(shared, ARRIVED, 1) == n_threads - 1:
        _add(shared, ARRIVED, -n_threads)
        _add(shared, ROUND, 1)
        return True
    spins = 0
    while _load(shared, ROUND) == before:
        if _load(shared, ABORTED) != 0:
            return False
        spins += 1
        if spins >= SPINS_BEFORE_YIELD:
            _sched_yield()
    return True


class Team:
    """`n_threads` threads, the caller's among them; the others start with the first call."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._lock = threading.Lock()
        self._pid = 0
        self._workers: list[_Worker] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call function(thread, n_threads, shared, *arguments) in every thread; returns when all
        have met.

        The function must end at a barrier. Calls from several Python threads take turns.
        """
        with self._lock:
            if (
                self._pid != os.getpid()
            ):  # the first call, or the first after a fork, which keeps no threads
                self._workers = [_Worker(number) for number in range(1, self.n_threads)]
                self._pid = os.getpid()
            shared = np.zeros(SHARED_SIZE, np.int64)
            try:
                for worker in self._workers:
                    worker.start_job(function, (self.n_threads, shared, *arguments))
                function(0, self.n_threads, shared, *arguments)
            except BaseException:
                # An interrupt, at any moment: let the others go home, wait for those that have
                # begun, since they work on memory that the caller may free, and make new ones next
                # time: one may have been taken and not been started.
                shared[ABORTED] = 1
                for worker in self._workers:
                    worker.wait(WAIT)
                self._pid = 0
                raise


class _Worker:
    """A thread that sleeps until it is given a job."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._job: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        # Plain locks, which one thread takes and another gives back: a Semaphore is Python code
        # over several of them, and these are passed twice for every token.
        self._wanted, self._free = threading.Lock(), threading.Lock()
        self._wanted.acquire()
        threading.Thread(target=self._serve, name=f"gpt2attn-{number}", daemon=True).start()

    def start_job(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._free.acquire()
        self._job = (function, arguments)
        self._wanted.release()

    def wait(self, seconds: float) -> None:
        """Return once the last job is done, or after `seconds`."""
        self._free.acquire(timeout=seconds)

    def _serve(self) -> None:
        while True:
            self._wanted.acquire()
            assert self._job is not None
            function, arguments = self._job
            self._job = None  # keeps no array alive while it sleeps
            function(self._number, *arguments)
            del function, arguments
            self._free.release()
