"""What the figures depend on: the processor, how fast it reads memory, versions, peak memory."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

BLOCK_FLOATS = 128 * 2**20  # 512 MB: far more than any cache holds
PASSES = 5
PACKAGES = (
    "gpt2attn", "torch", "numpy", "numba", "transformers", "ctranslate2", "llama-cpp-python",
)  # fmt: skip


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """The processor, the system, and the versions of everything that is measured."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def peak_bytes() -> int:
    """The most memory this process has held so far, file pages it mapped included."""
    status = Path("/proc/self/status")
    if status.exists():
        most = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert most is not None
        return int(most[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MemoryReader:
    """Reads 512 MB with `threads` threads, each its own part: numba's loop, else torch's sum.

    Every call of `gigabytes_per_second` is the best of several passes.
    """

    def __init__(self, threads: int) -> None:
        try:
            self._read = _numba_reader(threads)
            self.method = f"a compiled sum over 512 MB, a part in each thread, the best of {PASSES}"
        except ImportError:
            self._read = _torch_reader(threads)
            self.method = f"torch's sum over 512 MB, the best of {PASSES}"
        self._read()

    def gigabytes_per_second(self) -> float:
        best = min(_seconds(self._read) for _ in range(PASSES))
        return 4 * BLOCK_FLOATS / best / 1e9


def _numba_reader(threads: int) -> Callable[[], object]:
    import numba
    import numpy as np
    import torch

    from ..kernels.simd import FORMATS, add, load, splat, total

    floats, zero = FORMATS[torch.float32], np.float32(0)

    # In whole vectors, four sums at a time: what numba makes of a plain loop reads at 80 % of this.
    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def read(part: Any) -> Any:
        a, b, c, d = splat(zero), splat(zero), splat(zero), splat(zero)
        at = part.ctypes.data
        for p in range(at, at + part.size // 64 * 256, 256):
            a, b = add(a, load(p, floats)), add(b, load(p + 64, floats))
            c, d = add(c, load(p + 128, floats)), add(d, load(p + 192, floats))
        return total(add(add(a, b), add(c, d)))

    parts = np.array_split(np.ones(BLOCK_FLOATS, np.float32), threads)
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(read, parts))


def _torch_reader(threads: int) -> Callable[[], object]:
    import torch

    torch.set_num_threads(threads)
    return torch.ones(BLOCK_FLOATS).sum


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.M) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
