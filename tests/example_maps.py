"""Made-up attention maps that look like a trained model's: a strong first token, and some noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpt2attn.capture import AttentionMaps


def example_maps(
    n_tokens: int, n_layer: int = 2, n_head: int = 3, *, labels: Sequence[str] | None = None
) -> AttentionMaps:
    """All four stages of one text; labels are "w0", "w1", ... unless given."""
    generator = torch.Generator().manual_seed(n_tokens)
    scores = 12 * torch.randn(n_layer, 1, n_head, n_tokens, n_tokens, generator=generator)
    scores[..., 0] += 20
    later = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
    scaled = scores / 8
    masked = scaled.masked_fill(later, -torch.inf)
    weights = masked.softmax(-1)
    return AttentionMaps(
        {"scores": scores, "scaled": scaled, "masked": masked, "weights": weights},
        list(range(n_layer)),
        list(range(n_head)),
        [list(range(n_tokens))],
        [list(labels or (f"w{at}" for at in range(n_tokens)))],
        [n_tokens],
        {"model": "a-model"},
    )
