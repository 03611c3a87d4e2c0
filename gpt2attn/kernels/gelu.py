"""GPT-2's GELU (Hendrycks & Gimpel 2016), in the tanh form.

The steps and their order are transformers': F.gelu(approximate="tanh") rounds differently, by 3e-5
in the logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLOPE = math.sqrt(2.0 / math.pi)


def gelu_new(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    if torch.is_grad_enabled() and x.requires_grad:
        return 0.5 * x * (1.0 + torch.tanh(SLOPE * (x + 0.044715 * torch.pow(x, 3.0))))
    # The same steps in the memory of the first: at 1,000 tokens each has 12 MB, and fresh memory
    # takes longer than the arithmetic.
    inner = torch.pow(x, 3.0).mul_(0.044715).add_(x).mul_(SLOPE)
    return inner.tanh_().add_(1.0).mul_(0.5 * x)
