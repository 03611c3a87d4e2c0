"""What the embedding table says of tokens, in float64: rows of `wte` (V, C), before any layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model import GPT2


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(...): a.b / (|a| |b|) of (..., C), in float64; exactly 1 if equal, 0 if one is zero."""
    a, b = a.double(), b.double()
    dot, aa, bb = (a * b).sum(-1), (a * a).sum(-1), (b * b).sum(-1)
    # One root of the product: sqrt(x * x) is x exactly, sqrt(x) * sqrt(x) is not.
    length = (aa * bb).sqrt()
    return (dot / length.where(length > 0, 1.0)).clamp(-1.0, 1.0)


@torch.no_grad()
def neighbours(table: Tensor, id: int, n: int = 10) -> list[tuple[int, float]]:
    """The `n` rows of `table` (V, C) nearest to row `id` by cosine, nearest first, as (id, cosine).

    Raises ValueError for an id outside the table or n below 1.
    """
    if not 0 <= id < len(table):
        raise ValueError(
            f"Token id {id} is outside the vocabulary: ids run from 0 to {len(table) - 1}."
        )
    if n < 1:
        raise ValueError(f"The number of neighbours must be at least 1, not {n}.")
    # In pieces: float64 copies of all of GPT-2's table would take 300 MB each.
    cosines = torch.cat([cosine(rows, table[id]) for rows in table.split(8192)])
    cosines[id] = -torch.inf
    found = cosines.topk(min(n, len(table) - 1))
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


@torch.no_grad()
def unembedding_bias(model: GPT2) -> Tensor:
    """(V): ln_f.bias W_U, less its mean: what the final LayerNorm's bias adds to all logits.

    W_U is `wte` transposed (or the untied lm_head). It favours frequent tokens. Source:
    TransformerLens, whose folding of LayerNorm turns it into the unembedding's bias.
    """
    logits = model.unembed(model.ln_f.bias)
    return logits - logits.mean()
