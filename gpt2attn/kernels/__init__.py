"""The layers of GPT-2 that hold its weights, and fast forms of what a run spends its time on.

`torch` is the reference: every operation is torch's, in transformers' order, bit for bit. `auto`
takes the fused GELU, and adds a compiled step: on the CPU with numba, for the few rows of a
decoding pass and for passes over many tokens, observed or not; on CUDA as a graph, for decoding.
Blocks that somebody edits or has put a hook into, gradients, and short prompts run on torch's
operations.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from .activations import activation
from .linear import Linear, Table
from .step import CompiledStep, unfit

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
    model.compiled, model.wanted_kernels, in_use = None, name, "torch"
    if name == "auto" and model.device.type == "cuda":
        from .cuda import GraphStep

        model.compiled, in_use = GraphStep(model), "CUDA graphs"
    elif name == "auto":
        reason = unfit(model) if find_spec("numba") else "numba is not installed"
        if reason:
            in_use = f"torch ({reason})"
        else:
            model.compiled = CompiledStep(model)
            n = model.compiled.n_threads
            in_use = f"numba, {n} thread{'s' if n > 1 else ''}"
    model.kernels = "torch" if model.compiled is None else name
    for block in model.h:
        block.mlp.activation = activation(model.config.activation_function, model.kernels)
    return in_use
