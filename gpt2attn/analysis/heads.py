"""What each head of a model does: by its attention, by its weights, and by taking it away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionSteps
from ..edits import chain, mean_head_output, set_heads
from ..model import GPT2, check_finite
from .maps import diagonal_score, value_weighted
from .stream import kl_divergence

# (layer, head) in GPT-2 small, by their part in indirect object identification: Wang et al. 2022,
# "Interpretability in the Wild", arXiv:2211.00593; the lists are those of their published code.
IOI_HEADS: dict[str, list[tuple[int, int]]] = {
    "previous token": [(2, 2), (4, 11)],
    "duplicate token": [(0, 1), (0, 10), (3, 0)],
    "induction": [(5, 5), (5, 8), (5, 9), (6, 9)],
    "S-inhibition": [(7, 3), (7, 9), (8, 6), (8, 10)],
    "name mover": [(9, 9), (10, 0), (9, 6)],
    "backup name mover": [
        (10, 10), (10, 6), (10, 2), (10, 1), (11, 2), (9, 7), (9, 0), (11, 9),
    ],
    "negative name mover": [(10, 7), (11, 10)],
}  # fmt: skip

_GPT2_SMALL_WPE = (-0.0188, -0.1974, 0.0040, 0.0113, 0.0638, -0.1050, 0.0369, -0.1680)


def is_gpt2_small(model: GPT2) -> bool:
    """Whether these are OpenAI's weights of GPT-2 small, so that lists of its heads apply.

    Known by the sizes and the first entries of `wpe`, to what float16 and bfloat16 keep of them.
    """
    config = model.config
    if (config.n_layer, config.n_head, config.n_embd) != (12, 12, 768):
        return False
    start = model.wpe.weight[0, : len(_GPT2_SMALL_WPE)].float().cpu()
    return torch.allclose(start, start.new_tensor(_GPT2_SMALL_WPE), rtol=0, atol=1e-3)


@torch.no_grad()
def measure_heads(
    model: GPT2, ids: Any, measure: Callable[[int, AttentionSteps], Tensor]
) -> Tensor:
    """(layer, ...): `measure(layer, steps)` of every layer in one pass; no maps are kept.

    `steps.weights` are (B, H, T, T); `measure` must not return a view of them.
    """
    measured: list[Tensor] = []
    check_finite(
        model.hidden(ids, observe=lambda layer, steps: measured.append(measure(layer, steps)))
    )
    return torch.stack(measured)


def rank_heads(scores: Tensor) -> list[tuple[int, int, float]]:
    """(layer, head, score), highest score first, of `scores` (layer, head); ties in their order.

    For attention to a named pair, `scores` is a[q, k] of that pair: `maps.weights[:, 0, :, q, k]`.
    """
    order = scores.flatten().sort(descending=True, stable=True)
    n_head = scores.shape[1]
    return [
        (place // n_head, place % n_head, score)
        for place, score in zip(order.indices.tolist(), order.values.tolist(), strict=True)
    ]


def value_weighted_maps(model: GPT2, ids: Any, *, transformed: bool = True) -> Tensor:
    """(layer, batch, head, query, key): `maps.value_weighted` of every head for `ids` (B, T).

    `transformed` takes the norm after the head's part of c_proj, otherwise that of the value vector
    itself.
    """

    def measure(layer: int, steps: AttentionSteps) -> Tensor:
        w_o = model.h[layer].attn.c_proj.matrix.unflatten(0, (model.config.n_head, -1))  # (H, D, C)
        return value_weighted(steps.weights, steps.v, w_o if transformed else None)

    return measure_heads(model, ids, measure)


def repeated_random_ids(
    vocab_size: int,
    *,
    n_tokens: int = 100,
    batch_size: int = 2,
    low: int = 100,
    high: int = 20_000,
    seed: int = 0,
) -> Tensor:
    """(batch_size, 2 n_tokens): random ids, and then the same again.

    Ids are drawn from `low` up to but not including `high`; a vocabulary smaller than `high` is
    used whole. The defaults give the very ids of TransformerLens' published scores.
    """
    if high > vocab_size:
        low, high = 0, vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, high, (batch_size, n_tokens), generator=generator)
    return ids.repeat(1, 2)


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores (layer, head), from 0 to 1, on `n_tokens` random tokens that are repeated once."""

    previous_token: Tensor
    duplicate_token: Tensor
    induction: Tensor
    n_tokens: int


def head_scores(
    model: GPT2,
    *,
    n_tokens: int | None = None,
    batch_size: int = 2,
    low: int = 100,
    high: int = 20_000,
    seed: int = 0,
) -> HeadScores:
    """Previous-token, duplicate-token and induction scores of every head.

    Each is `maps.diagonal_score`, averaged over the batch, on `repeated_random_ids` of n =
    `n_tokens` (None: 100, or half the context if that is less): at offset 1, n and n - 1. The
    tokens mean nothing, so only a head that goes by position or by repetition scores. Nothing is
    prepended. Protocol: TransformerLens, Exploratory_Analysis_Demo; head 5.1 of GPT-2 small scores
    0.931 for induction there, 4.11 0.992 for the previous token. Raises ValueError if n tokens
    twice do not fit the context, or for n below 2.
    """
    most = model.config.n_positions // 2
    n = min(100, most) if n_tokens is None else n_tokens
    if not 2 <= n <= most:
        raise ValueError(
            f"n_tokens must be from 2 to {most}, half of this model's context, not {n}."
        )
    ids = repeated_random_ids(
        model.config.vocab_size, n_tokens=n, batch_size=batch_size, low=low, high=high, seed=seed
    )

    def measure(layer: int, steps: AttentionSteps) -> Tensor:
        return torch.stack(
            [diagonal_score(steps.weights.float(), offset).mean(0) for offset in (1, n, n - 1)]
        )

    previous_token, duplicate_token, induction = measure_heads(model, ids, measure).unbind(1)
    return HeadScores(previous_token, duplicate_token, induction, n_tokens=n)


@torch.no_grad()
def ov_eigenvalues(model: GPT2, layer: int) -> Tensor:
    """(head, D) complex: the eigenvalues of each head's W_V W_O, in float64; weights only.

    W_V (C, D) has ln_1's weight folded in and each column centred over the inputs; W_O (D, C) has
    each row centred over the outputs: neither changes what reaches a LayerNorm. The D x D product
    W_O W_V has the eigenvalues of the C x C one that are not zero. Protocol: TransformerLens,
    Main_Demo.
    """
    config, block = model.config, model.h[layer]
    w_v = block.attn.c_attn.matrix.double()[:, 2 * config.n_embd :]
    w_v = (block.ln_1.weight.double()[:, None] * w_v).unflatten(1, (config.n_head, -1))  # (C, H, D)
    w_v = (w_v - w_v.mean(0)).transpose(0, 1)
    w_o = block.attn.c_proj.matrix.double().unflatten(0, (config.n_head, -1))  # (H, D, C)
    w_o = w_o - w_o.mean(-1, keepdim=True)
    return torch.linalg.eigvals(w_o @ w_v)


def copying_score(eigenvalues: Tensor) -> Tensor:
    """(...): sum of eigenvalues / sum of their absolute values, for (..., D); 0 where all are 0.

    Near 1 a head passes on what it reads (it copies), near -1 it writes the opposite: Elhage et al.
    2021, "A Mathematical Framework for Transformer Circuits", on detecting copying behaviour.
    """
    total = eigenvalues.abs().sum(-1)
    return eigenvalues.sum(-1).real / total.where(total > 0, 1.0)


def ov_copying_scores(model: GPT2) -> Tensor:
    """(layer, head): `copying_score` of `ov_eigenvalues`, from -1 to 1.

    In GPT-2 small, as published: head 11.3 0.999, head 5.11 -0.997.
    """
    return torch.stack(
        [copying_score(ov_eigenvalues(model, layer)) for layer in range(model.config.n_layer)]
    )


@dataclass(frozen=True, eq=False)
class Ablation:
    """Next-token logits (V) with and without some heads, and KL(before || after) in nats."""

    before: Tensor
    after: Tensor
    kl: float


@torch.no_grad()
def ablate_heads(
    model: GPT2, ids: Sequence[int], heads: Sequence[tuple[int, int]], *, mean: bool = False
) -> Ablation:
    """How the next-token distribution after `ids` changes without some heads, all together.

    `heads` are (layer, head) pairs. A head's output before c_proj becomes 0, or with `mean` its
    average over the tokens of `ids`. Raises ValueError for a layer or head that is not there.
    """
    if mean:
        edit = chain(
            *(set_heads(model, [pair], mean_head_output(model, ids, *pair)) for pair in heads)
        )
    else:
        edit = set_heads(model, heads)
    rows = [list(ids)]
    before = check_finite(model.unembed(model.hidden(rows)[0, -1]))
    after = check_finite(model.unembed(model.hidden(rows, edit=edit)[0, -1]))
    return Ablation(before, after, kl_divergence(before, after).item())
