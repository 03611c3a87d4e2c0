"""The linear layer of GPT-2, and compiled forms of what decoding spends its time on.

`torch` is the reference: every product is torch's, bit for bit as in transformers. `auto` adds,
where numba is there and the model is a float32 one on the CPU, a compiled step for the few rows of
a decoding pass; prompts, and every layer that somebody observes or edits, still run on torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .linear import Linear, Table

if TYPE_CHECKING:
    from ..model import GPT2

__all__ = ["KERNELS", "Linear", "Table", "use_kernels"]

KERNELS = ("auto", "torch")


def use_kernels(model: GPT2, name: str) -> str:
    """Fix the kernels of `model`; returns what is in use, and why where that is not the fast one.

    Raises ValueError for a name other than "auto" and "torch".
    """
    if name not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, not {name!r}.")
    model.compiled = None
    if name == "torch":
        return "torch"
    if model.device.type == "cuda":
        from .cuda import GraphStep

        model.compiled = GraphStep(model)
        return "CUDA graphs"
    try:
        from .decode import CompiledStep, unfit
    except ImportError:
        return "torch (numba is not installed)"
    if reason := unfit(model):
        return f"torch ({reason})"
    model.compiled = CompiledStep(model)
    return f"numba, {model.compiled.n_threads} threads"
