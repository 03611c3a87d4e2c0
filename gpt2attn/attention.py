"""Attention in five steps, as pure functions of tensors.

    1. project   q, k, v = x W_q, x W_k, x W_v              (the layer's c_attn)
    2. compare   scores  = q k^T                            (B, H, T, S)
    3. scale     scaled  = scores * head_dim ** -0.5
    4. softmax   weights = softmax(scaled + mask)           each row is positive and sums to 1
    5. mix       output  = weights v                        (B, H, T, D)

Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1. With torch's kernels the model
runs these functions whenever somebody looks; the compiled pass over many tokens
(`kernels.prefill`) computes the same to rounding. `AttentionSteps` is what they see. Shapes:
B batch, H heads, T queries (new tokens), S keys (cached and new), D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def causal_mask(n_query: int, n_key: int, device: torch.device | str = "cpu") -> Tensor:
    """(T, S) booleans, True where a query may look.

    The queries are the last T of S tokens: row i stands at position S - T + i and sees keys up to
    there.
    """
    every = torch.ones(n_query, n_key, dtype=torch.bool, device=device)
    return every.tril(n_key - n_query)


def allowed_keys(
    n_query: int, n_key: int, mask: Tensor | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Where the last T of S tokens may look, broadcastable to (B, H, T, S), padding nowhere.

    `mask` (B, S) is True for a token, False for padding; None means that there is no padding.
    """
    causal = causal_mask(n_query, n_key, device)
    if mask is None:
        return causal
    return causal & mask[:, None, None, :] & mask[:, None, n_key - n_query :, None]


def attention_scores(q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
    """(B, H, T, S) dot products of every query with every key."""
    return torch.matmul(q, k.transpose(-1, -2), out=out)


def scale_scores(scores: Tensor, scale: float, *, in_place: bool = False) -> Tensor:
    """(B, H, T, S) scores times `scale`."""
    # A product, as transformers writes it: dividing by the root rounds differently.
    return scores.mul_(scale) if in_place else scores * scale


def mask_scores(scaled: Tensor, allowed: Tensor | None, *, in_place: bool = False) -> Tensor:
    """(B, H, T, S) scaled scores, minus infinity where `allowed` is False."""
    if allowed is None:
        return scaled
    if not in_place:
        return scaled.masked_fill(~allowed, -torch.inf)
    if allowed.dim() == 2:
        return _mask_in_strips(scaled, allowed)
    return scaled.masked_fill_(~allowed, -torch.inf)


def _mask_in_strips(scaled: Tensor, allowed: Tensor) -> Tensor:
    """`mask_scores` in place for an `allowed` (T, S), four times as fast where it is causal.

    Element by element it looks only at the columns that some rows of a strip see and others do not:
    to the left there is nothing to do, to the right everything is filled.
    """
    strip, n_key = 64, allowed.shape[1]
    columns = torch.arange(n_key, device=allowed.device)
    for low in range(0, len(allowed), strip):
        rows = allowed[low : low + strip]
        left = int(columns[~rows.all(0)].amin()) if not rows.all() else n_key
        right = int(columns[rows.any(0)].amax()) + 1 if rows.any() else 0
        part = scaled[..., low : low + strip, :]
        part[..., left:right].masked_fill_(~rows[:, left:right], -torch.inf)
        part[..., max(left, right) :] = -torch.inf
    return scaled


def attention_weights(masked: Tensor, allowed: Tensor | None, *, in_place: bool = False) -> Tensor:
    """(B, H, T, S) softmax over keys; zeros for a query that may look nowhere (padding)."""
    weights = torch.softmax(masked, dim=-1, out=masked if in_place else None)
    if allowed is None:
        return weights
    sees_nothing = ~allowed.any(dim=-1, keepdim=True)
    return weights.masked_fill_(sees_nothing, 0.0) if sees_nothing.any() else weights


@dataclass(frozen=True, eq=False)
class AttentionSteps:
    """What one attention layer computed, for all its heads.

    `q` (B, H, T, D); `k`, `v` (B, H, S, D), views of the cache where there is one, so copy what you
    keep; `weights` (B, H, T, S); `output` (B, H, T, D). `scores`, `scaled` and `masked` (B, H, T,
    S) are computed when asked for, with torch's kernels by the functions that gave `weights`: kept
    for all layers they would be 144 MB a layer at 1,000 tokens. `allowed` is the mask, True where a
    query may look, broadcastable to (B, H, T, S), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    allowed: Tensor | None
    upcast: bool
    weights: Tensor
    output: Tensor

    @property
    def scores(self) -> Tensor:
        return attention_scores(*_operands(self.q, self.k, self.upcast))

    @property
    def scaled(self) -> Tensor:
        return _scaled(self.q, self.k, self.scale, self.upcast)

    @property
    def masked(self) -> Tensor:
        return mask_scores(self.scaled, self.allowed)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    allowed: Tensor | None = None,
    upcast: bool = False,
    room: Tensor | None = None,
) -> AttentionSteps:
    """Steps 2 to 5, for `q` (B, H, T, D) and `k`, `v` (B, H, S, D).

    `upcast` is GPT-2's `reorder_and_upcast_attn`: weights in float32, the scale inside the product.
    `room` (B, H, T, S) is memory for the weights, used where they can be computed in it.
    """
    # Each step overwrites the one before, unless a gradient needs it: at 1,000 tokens a step has
    # 48 MB, and getting fresh memory for it takes longer than the arithmetic.
    in_place = not (torch.is_grad_enabled() and q.requires_grad)
    scaled = _scaled(q, k, scale, upcast, in_place=in_place, room=room if in_place else None)
    masked = mask_scores(scaled, allowed, in_place=in_place)
    weights = attention_weights(masked, allowed, in_place=in_place).to(v.dtype)
    return AttentionSteps(q, k, v, scale, allowed, upcast, weights, torch.matmul(weights, v))


def _operands(q: Tensor, k: Tensor, upcast: bool) -> tuple[Tensor, Tensor]:
    return (q.float(), k.float()) if upcast else (q, k)


def _scaled(
    q: Tensor,
    k: Tensor,
    scale: float,
    upcast: bool,
    *,
    in_place: bool = False,
    room: Tensor | None = None,
) -> Tensor:
    if not upcast:
        return scale_scores(attention_scores(q, k, out=room), scale, in_place=in_place)
    q, k = _operands(q, k, upcast)
    batch, heads, n_query, _ = q.shape
    keys = k.transpose(-1, -2).flatten(0, 1)
    # alpha inside the product, as transformers does it: scaling afterwards differs in the last bit.
    zero = q.new_empty(batch * heads, n_query, keys.shape[-1])
    product = torch.baddbmm(zero, q.flatten(0, 1), keys, beta=0, alpha=scale)
    return product.view(batch, heads, n_query, -1)
