"""y = x W + b, with W as GPT-2 checkpoints store it.

OpenAI's code ran these layers as one-wide convolutions, so a checkpoint holds W as (in, out), where
torch.nn.Linear would hold (out, in). Keeping it that way needs no copy at load, and `F.linear` on
the transposed *view* runs the same matrix product as transformers: equal to the last bit from 1 to
1,000 rows. A contiguous (out, in) copy runs another one and differs by up to 2e-5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """x (..., in) -> (..., out); `weight` (in, out), `bias` (out)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)
