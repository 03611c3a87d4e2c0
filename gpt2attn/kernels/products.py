"""Products of many rows with a float32 matrix, by the one of torch's two libraries that fits.

torch gives its products to MKL, which on other processors than Intel's keeps to half the width of
AVX-512; oneDNN, which torch carries too, does not. The two round differently, and results must not
change from run to run, so what decides is the processor and not a timing.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PAGE = 4096  # bytes


def product(x: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """x (rows, in) times matrix (in, out), with whatever strides; in `out` where that can be."""
    if not by_onednn():
        return torch.mm(x, matrix, out=out)
    if matrix.stride(1) == 1 and matrix.stride(0) * matrix.itemsize % PAGE == 0:
        # Rows a whole number of pages apart compete for the same cache lines.
        matrix = matrix.t().contiguous().t()
    return torch.ops.mkldnn._linear_pointwise(x, matrix.t(), None, "none", [], "")


@cache
def by_onednn() -> bool:
    """Whether oneDNN is the faster one here."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return wide and there and not _is_intel()


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "Intel" in platform.processor()
