"""The layers that hold GPT-2's big matrices.

OpenAI's code ran the linear layers as one-wide convolutions, so a checkpoint holds W as (in, out),
where torch.nn.Linear would hold (out, in). Keeping it that way needs no copy at load, and
`F.linear` on the transposed *view* runs the same matrix product as transformers: equal to the last
bit from 1 to 1,000 rows. A contiguous (out, in) copy runs another one and differs by up to 2e-5.

A matrix may be stored with fewer bits than the activations have (`formats`); it is then widened for
the product. `matrix` is what it stands for, however it is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .formats import widen


class Linear(nn.Module):
    """x (..., in) -> (..., out); `weight` (in, out), `bias` (out)."""

    is_stored = False  # in another format than the activations have, see `formats`
    scale: Tensor | None  # of int8 weights

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.register_buffer("scale", None)
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    @property
    def matrix(self) -> Tensor:
        """The weights (in, out), however they are stored."""
        if not self.is_stored:
            return self.weight
        return widen(self.weight, self.scale, input_dim=0).to(self.bias.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix.t(), self.bias)


class Table(nn.Embedding):
    """A row for each token: ids (...) -> (..., width); `weight` (tokens, width)."""

    is_stored = False
    scale: Tensor | None

    def __init__(self, n_tokens: int, width: int) -> None:
        # Given its weight, nn.Embedding draws no random one: on the meta device, where a
        # checkpoint's model is built, that imports 800 modules of torch and takes a second.
        super().__init__(n_tokens, width, _weight=torch.empty(n_tokens, width))
        self.register_buffer("scale", None)

    @property
    def matrix(self) -> Tensor:
        """All rows, however they are stored."""
        return widen(self.weight, self.scale, input_dim=1) if self.is_stored else self.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        if not self.is_stored:
            return rows
        return widen(rows, None if self.scale is None else self.scale[ids], input_dim=ids.dim())

    def scores(self, x: Tensor) -> Tensor:
        """The product of `x` (..., width) with each row: (..., tokens)."""
        return F.linear(x, self.matrix.to(x.dtype))
