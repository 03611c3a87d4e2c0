"""The residual stream, layer by layer: what it would predict, and how context moves a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model import GPT2, as_ids, check_finite
from .embeddings import cosine


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """`values` (stage, B, T, C), and what each stage is: "wte + wpe", then "block 0" and so on.

    "block 3" is the stream that leaves block 3; "block 3 attention", where asked for, is between
    its attention and its MLP.
    """

    stages: list[str]
    values: Tensor


@torch.no_grad()
def residual_stream(model: GPT2, ids: Any, *, after_attention: bool = False) -> ResidualStream:
    """The residual stream of `ids` (B, T) at every stage of one forward pass, to the bit."""
    ids = as_ids(ids, model.config.vocab_size).to(model.device)
    kept: dict[tuple[int, str], Tensor] = {}

    def edit(layer: int, site: str, x: Tensor) -> Tensor:
        if site == "block" or after_attention:
            kept[layer, site] = x
        return x

    check_finite(model.hidden(ids, edit=edit))
    x = model.wte(ids) + model.wpe(torch.arange(ids.shape[1], device=model.device))
    stages, values = ["wte + wpe"], [x]
    for layer, block in enumerate(model.h):
        if after_attention:
            output = kept[layer, "heads"].transpose(1, 2).flatten(2)  # (B, T, C)
            stages.append(f"block {layer} attention")
            values.append(x + block.attn.c_proj(output))
        x = kept[layer, "block"]
        stages.append(f"block {layer}")
        values.append(x)
    return ResidualStream(stages, torch.stack(values))


@dataclass(frozen=True, eq=False)
class Lens:
    """`logits` (stage, B, P, V) that each stage of the residual stream gives at P positions."""

    stages: list[str]
    logits: Tensor


@torch.no_grad()
def logit_lens(
    model: GPT2,
    ids: Any,
    *,
    positions: Sequence[int] | None = (-1,),
    after_attention: bool = False,
) -> Lens:
    """unembed(ln_f(x)) for the residual stream x after every block, at `positions` (None: all).

    ln_f takes the mean and variance of each stage's own stream, so the last stage is the model's
    logits to the bit: `model(ids)` for all positions, `model.unembed(model.hidden(ids)[:,
    positions])` for some. nostalgebraist 2020, "interpreting GPT: the logit lens". Raises
    ValueError for a position outside the text.
    """
    stream = residual_stream(model, ids, after_attention=after_attention)
    n_tokens = stream.values.shape[2]
    if bad := [p for p in positions or () if not -n_tokens <= p < n_tokens]:
        raise ValueError(
            f"Position {bad[0]} is not there: the text has the positions 0 to {n_tokens - 1}."
        )
    where = slice(None) if positions is None else list(positions)
    # One by one, as the model does it: a product over all stages at once could round differently.
    logits = torch.stack([model.unembed(model.ln_f(x)[:, where]) for x in stream.values])
    check_finite(logits)
    return Lens(stream.stages, logits)


@dataclass(frozen=True)
class Drift:
    """For each stage, the cosine of one token in two texts, and that of `others` as a baseline.

    `others` is the mean cosine over all pairs of different tokens, one from each text, the first
    tokens left out; None if there are none. Streams of unrelated tokens grow alike with depth
    (Ethayarajh 2019, arXiv:1909.00512), so a high cosine means little where the baseline is high
    too.
    """

    stages: list[str]
    cosines: list[float]
    others: list[float] | None


@torch.no_grad()
def context_drift(
    model: GPT2, ids: Sequence[int], position: int, other_ids: Sequence[int], other_position: int
) -> Drift:
    """How one token in two texts moves apart: at "wte", at "wte + wpe" and after each block.

    At "wte" the two vectors are the same row of the table, and the cosine is exactly 1.
    Raises ValueError if the two places hold different tokens.
    """
    if ids[position] != other_ids[other_position]:
        raise ValueError(
            f"Position {position} holds token #{ids[position]}, position {other_position} of the "
            f"other text #{other_ids[other_position]}: drift compares a token with itself."
        )
    streams = [_with_wte(model, row) for row in (ids, other_ids)]
    a, b = (stream.values[:, 0] for stream in streams)  # (stage, T, C) each
    cosines = cosine(a[:, position], b[:, other_position])
    different = torch.tensor(ids[1:])[:, None] != torch.tensor(other_ids[1:])
    others = None
    if different.any():
        directions = [F.normalize(x[:, 1:].double(), dim=-1) for x in (a, b)]
        every_pair = directions[0] @ directions[1].transpose(1, 2)  # (stage, T - 1, T - 1)
        others = every_pair[:, different.to(model.device)].mean(-1).tolist()
    return Drift(streams[0].stages, cosines.tolist(), others)


def _with_wte(model: GPT2, ids: Sequence[int]) -> ResidualStream:
    """The stream of one text with the bare embedding put first."""
    stream = residual_stream(model, ids)
    wte = model.wte(torch.tensor(ids, device=model.device))
    return ResidualStream(["wte", *stream.stages], torch.cat([wte[None, None], stream.values]))


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """(...): KL(p || q) = sum p ln(p / q) in nats; p, q: softmax of `logits`, `other` (..., V)."""
    log_p, log_q = (x.double().log_softmax(-1) for x in (logits, other))
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)
