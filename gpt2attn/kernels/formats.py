"""How the weights of the big matrices are stored: float32, bfloat16, float16 or int8.

Decoding reads every weight for every token, so fewer bits are more tokens a second. Only the
matrices change: biases, LayerNorms and positions are a thousandth of the bytes and stay float32, as
do the activations and all arithmetic. int8 keeps one float32 scale for each output channel and each
64 inputs: a weight is its integer times the scale, which is the largest magnitude of the 64 over
127, so that the largest one is met exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..model import GPT2
    from .linear import Linear, Table

AT_ONCE = 1024  # rows of a table
GROUP = 64  # inputs that share a scale: finer costs bandwidth, coarser costs accuracy
STORED = (torch.bfloat16, torch.float16, torch.int8)


def group_size(n_in: int) -> int:
    """How many inputs share a scale: 64, or all of them where 64 does not divide them."""
    return GROUP if n_in % GROUP == 0 else n_in


def quantize(weight: Tensor, input_dim: int) -> tuple[Tensor, Tensor]:
    """`weight` as int8 and its scales, grouped along `input_dim` (0 or 1).

    Scales have the weight's shape with inputs / `group_size` entries along `input_dim`.
    """
    size = group_size(weight.shape[input_dim])
    stored = torch.empty_like(weight, dtype=torch.int8)
    shape = list(weight.shape)
    shape[input_dim] //= size
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    # In pieces, whose memory is used again: fresh memory for all takes longer than the arithmetic.
    rows, scale_rows = (AT_ONCE, AT_ONCE) if input_dim == 1 else (size, 1)
    pieces = zip(weight.split(rows), stored.split(rows), scales.split(scale_rows), strict=True)
    for piece, place, scale in pieces:
        groups = piece.float().unflatten(input_dim, (-1, size))
        torch.div(groups.abs().amax(input_dim + 1), 127, out=scale)
        safe = torch.where(scale == 0, 1, scale).unsqueeze(input_dim + 1)  # a group of zeros
        place.copy_((groups / safe).round_().flatten(input_dim, input_dim + 1))
    return stored, scales


def widen(
    weight: Tensor, scale: Tensor | None, input_dim: int, out: Tensor | None = None
) -> Tensor:
    """The float32 weights that stored ones stand for; `out` is memory for them."""
    wide = weight.float() if out is None else out.copy_(weight)
    if scale is not None:
        groups = wide.unflatten(input_dim, (scale.shape[input_dim], -1))
        groups *= scale.unsqueeze(input_dim + 1)
    return wide


def store_weights(model: GPT2, dtype: torch.dtype) -> None:
    """Keep the big matrices of a float32 `model` in `dtype` from now on, one after the other."""
    for block in model.h:
        for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            _store(layer, dtype, input_dim=0)
    _store(model.table, dtype, input_dim=1)
    if model.table is not model.wte:
        _store(model.wte, dtype, input_dim=1)


def _store(layer: Linear | Table, dtype: torch.dtype, input_dim: int) -> None:
    weight = layer.weight.detach()
    if dtype == torch.int8:
        weight, layer.scale = quantize(weight, input_dim)
    else:
        weight = weight.to(dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.is_stored = True
