"""The MLP's non-linearity, in every form that GPT-2 checkpoints ask for.

GPT-2's own is the tanh form of the GELU (Hendrycks & Gimpel 2016), which configs spell in three
ways; they are one function that transformers rounds in three.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]

SLOPE = math.sqrt(2.0 / math.pi)
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def gelu_new(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), in transformers' steps and their order.

    F.gelu(approximate="tanh") rounds differently, by 3e-5 in the logits.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return 0.5 * x * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0))))
    # The same steps in the memory of the first: at 1,000 tokens each has 12 MB, and fresh memory
    # takes longer than the arithmetic.
    inner = torch.pow(x, 3.0).mul_(0.044715).add_(x).mul_(SLOPE)
    return inner.tanh_().add_(1.0).mul_(0.5 * x)


def gelu_fast(x: Tensor) -> Tensor:
    """GPT-2's GELU in transformers' other spelling."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def gelu_pytorch_tanh(x: Tensor) -> Tensor:
    """GPT-2's GELU in one pass over memory."""
    return F.gelu(x, approximate="tanh")


ACTIVATION_FUNCTIONS: dict[str, Activation] = {
    "gelu_new": gelu_new,
    "gelu": F.gelu,
    "gelu_fast": gelu_fast,
    "gelu_pytorch_tanh": gelu_pytorch_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str, kernels: str) -> Activation:
    """The function that a config names, in transformers' steps ("torch") or in one ("auto")."""
    in_one = kernels == "auto" and name in TANH_GELUS
    return gelu_pytorch_tanh if in_one else ACTIVATION_FUNCTIONS[name]
