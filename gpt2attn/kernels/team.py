"""A team of threads that run one compiled function together, and the barrier they meet at.

Between torch's operations they are the threads of torch's own OpenMP pool, wherever it can be
called (`find_pool`). Two pools would be in each other's way: after each operation torch's threads
stay awake for some ten milliseconds, on cores that the other pool's then have to share. In one pool
the next call finds them awake, which takes 2 microseconds where waking a thread takes 50.

While decoding, where little of torch runs, they are Python threads, which sleep until they are
called: awake, they slow down what the caller does alone between two tokens, by more than waking
them takes. So they are where torch has another pool, and in a child after a fork. A compiled
function gives up the interpreter lock, so they run at the same time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiling import compiled
from .step import is_forked

# Places in the array that a call's threads share; a cache line each, so that they do not collide.
ARRIVED, ROUND, ABORTED, TAKEN, SHARED_SIZE = 0, 16, 32, 48, 64
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


@compiled()
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


@compiled(inner=True)
def take_one(shared):  # type: ignore[no-untyped-def]
    """0, 1, 2, ... in the order in which the threads of the call ask: who is free takes more."""
    return _add(shared, TAKEN, 1)


@intrinsic
def _call(typingctx, address, thread, n_threads, arguments):  # type: ignore[no-untyped-def]
    """Call the compiled function at an address: (thread, n_threads, *arguments)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address, thread, n_threads, packed = args
        _call_at(context, builder, address, arguments.types, thread, n_threads, packed)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, arguments), generate


@intrinsic
def _call_in_pool(typingctx, pool, n_threads, address, arguments):  # type: ignore[no-untyped-def]
    """Call the compiled function at an address in `n_threads` threads of a pool, or in fewer.

    It gets (thread, number of threads, *arguments). `pool` is what `find_pool` returns.
    """

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        start, which, how_many = cgutils.unpack_tuple(builder, args[0])
        number, byte = ir.IntType(64), ir.IntType(8).as_pointer()
        # What the threads need lies on the stack of this function, which waits for them.
        needed = (which, how_many, args[2], args[3])
        held = ir.LiteralStructType([value.type for value in needed])
        room = cgutils.alloca_once(builder, held)
        for place, value in enumerate(needed):
            builder.store(value, cgutils.gep_inbounds(builder, room, 0, place))

        work_type = ir.FunctionType(ir.VoidType(), [byte])
        work = ir.Function(builder.module, work_type, name=f"{builder.function.name}.work")
        work.linkage = "internal"
        inside = ir.IRBuilder(work.append_basic_block())
        taken = inside.bitcast(work.args[0], held.as_pointer())
        which, how_many, address, packed = (
            inside.load(cgutils.gep_inbounds(inside, taken, 0, place)) for place in range(4)
        )
        ask = ir.FunctionType(ir.IntType(32), []).as_pointer()
        thread, n_threads = (
            inside.sext(inside.call(inside.inttoptr(function, ask), []), number)
            for function in (which, how_many)
        )
        _call_at(context, inside, address, arguments.types, thread, n_threads, packed)
        inside.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [work.type, byte, ir.IntType(32), ir.IntType(32)])
        n, no_flags = builder.trunc(args[1], ir.IntType(32)), ir.Constant(ir.IntType(32), 0)
        begin = builder.inttoptr(start, kind.as_pointer())
        builder.call(begin, [work, builder.bitcast(room, byte), n, no_flags])
        return context.get_dummy_value()

    return types.void(pool, types.int64, types.int64, arguments), generate


def _call_at(context, builder, address, kinds, thread, n_threads, packed):  # type: ignore[no-untyped-def]
    kinds = (types.int64, types.int64, *kinds)
    kind = context.call_conv.get_function_type(types.none, kinds)
    function = builder.inttoptr(address, kind.as_pointer())
    values = [thread, n_threads, *cgutils.unpack_tuple(builder, packed)]
    status, _ = context.call_conv.call_function(builder, function, types.none, kinds, values)
    with builder.if_then(status.is_error, likely=False):  # there was no memory
        shared = context.make_array(kinds[2])(context, builder, values[2])
        place = builder.gep(shared.data, [ir.Constant(ir.IntType(64), ABORTED)])
        builder.store_atomic(ir.Constant(ir.IntType(64), 1), place, "release", 8)


@compiled()
def _run_in_pool(pool, n_threads, address, *arguments):  # type: ignore[no-untyped-def]
    _call_in_pool(pool, n_threads, address, arguments)


@compiled()
def _run_alone(address, thread, n_threads, *arguments):  # type: ignore[no-untyped-def]
    _call(address, thread, n_threads, arguments)


class Kernel:
    """A compiled function (thread, n_threads, shared, *arguments) for a team, ending at a barrier.

    Its arguments are of the same types at every call, and its arrays contiguous. It is called by
    its address: a caller that had it compiled in would be compiled as long as itself.
    """

    def __init__(self, function: Any) -> None:
        self._function, self._address = function, 0

    def address(self, shared: np.ndarray, arguments: tuple[Any, ...]) -> int:
        """Where the code for such arguments is; compiles it at the first call."""
        if not self._address:
            kinds = (types.int64, types.int64, *(typeof(one) for one in (shared, *arguments)))
            self._function.compile(kinds)
            made = self._function.overloads[kinds]
            self._address = made.library.get_pointer_to_function(made.fndesc.mangled_name)
        return self._address


@cache
def find_pool() -> tuple[int, int, int] | None:
    """The addresses of three functions of the OpenMP library that torch computes with.

    They start a function in its threads, and tell a thread its number and how many there are. None
    where torch is built on another library than GNU's or one that has its entry points.
    """
    for file in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            library = ctypes.CDLL(str(file))  # looks into the libraries that this one needs, too
            names = (library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads)
        except (OSError, AttributeError):
            continue
        start, which, how_many = (ctypes.cast(name, ctypes.c_void_p).value for name in names)
        if start and which and how_many:
            return start, which, how_many
    return None


class Team:
    """Up to `n_threads` threads, the caller's among them: torch's (`in_pool`) or its own."""

    def __init__(self, n_threads: int, *, in_pool: bool) -> None:
        self.n_threads = n_threads
        self._pool = find_pool() if in_pool and not is_forked() else None
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._pid = os.getpid()

    def run(self, kernel: Kernel, *arguments: Any) -> None:
        """Call the kernel in every thread; returns when all are done.

        Calls from several Python threads take turns.
        """
        if self._pid != os.getpid():  # a fork took neither torch's threads along nor ours
            self._pool = None
            self._begin()
        assert all(one.flags.c_contiguous for one in arguments if isinstance(one, np.ndarray))
        with self._lock:
            shared = np.zeros(SHARED_SIZE, np.int64)
            address = kernel.address(shared, arguments)
            if self._pool is not None:
                _run_in_pool(self._pool, self.n_threads, address, shared, *arguments)
            else:
                self._run_in_own(partial(_run_alone, address), shared, arguments)
        if shared[ABORTED]:
            raise MemoryError("There was not enough memory for compiled code to work in.")

    def _run_in_own(
        self, function: Callable[..., Any], shared: np.ndarray, arguments: tuple[Any, ...]
    ) -> None:
        if not self._workers:
            self._workers = [_Worker(number) for number in range(1, self.n_threads)]
        try:
            for worker in self._workers:
                worker.start_job(function, (self.n_threads, shared, *arguments))
            function(0, self.n_threads, shared, *arguments)
        except BaseException:
            # An interrupt, at any moment: let the others go home, wait for those that have begun,
            # since they work on memory that the caller may free, and make new ones next time: one
            # may have been taken and not been started.
            shared[ABORTED] = 1
            for worker in self._workers:
                worker.wait(WAIT)
            self._workers = []
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
            try:
                function(self._number, *arguments)
            finally:
                del function, arguments
                self._free.release()
