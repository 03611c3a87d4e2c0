"""Measures of attention maps, on weights alone.

`weights` are softmax weights (..., query, key), such as `AttentionMaps.weights` (layer, batch,
head, query, key), without padding: take `maps[i]`. a[q, k] is the weight of query q on key k. Where
a map has more keys S than queries T, as with a cache, row i stands at position S - T + i.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sink_share(weights: Tensor) -> Tensor:
    """(..., query): the share of each query that lands on the first token, a[q, 0].

    Trained models park attention there: Xiao et al. 2023, "Efficient Streaming Language Models with
    Attention Sinks", arXiv:2309.17453. Compare with a uniform map (`uniform_weights`): 1 / 6 at the
    last of six tokens.
    """
    return weights[..., 0]


def entropy(weights: Tensor) -> Tensor:
    """(..., query): -sum_k a[q, k] ln a[q, k] in nats, with 0 ln 0 = 0; at most ln(q + 1)."""
    return -torch.xlogy(weights, weights).sum(-1)


def attention_distance(weights: Tensor) -> Tensor:
    """(..., query): sum_k a[q, k] (q - k), how many tokens back a query looks on average.

    Vig and Belinkov 2019, "Analyzing the Structure of Attention in a Transformer Language Model",
    arXiv:1906.04284.
    """
    T, S = weights.shape[-2:]
    keys = torch.arange(S, device=weights.device)
    queries = keys[S - T :, None]
    return (weights * (queries - keys)).sum(-1)


def over_queries(values: Tensor) -> Tensor:
    """(...): the mean of (..., query) over all queries but the first, which sees only itself.

    Raises ValueError for a single query.
    """
    if values.shape[-1] < 2:
        raise ValueError("One token can only look at itself: give a text of two tokens or more.")
    return values[..., 1:].mean(-1)


def diagonal_score(weights: Tensor, offset: int) -> Tensor:
    """(...): the mean of a[q, q - offset] over every query that has a key `offset` tokens back.

    Offset 1 scores previous-token heads. On n tokens that are repeated once, offset n scores
    duplicate-token heads and offset n - 1 induction heads, which look at what followed last time:
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022,
    arXiv:2209.11895. Raises ValueError if no query reaches that far back.
    """
    T, S = weights.shape[-2:]
    if not 0 <= offset < S:
        raise ValueError(f"No query looks {offset} tokens back: the map has {S} keys.")
    return weights.diagonal(S - T - offset, -2, -1).mean(-1)


def uniform_weights(n_tokens: int) -> Tensor:
    """(query, key): 1 / (q + 1) up to the diagonal: all visible tokens alike, as a baseline."""
    return torch.ones(n_tokens, n_tokens).tril() / torch.arange(1, n_tokens + 1)[:, None]


def rollout(weights: Tensor) -> Tensor:
    """(layer, ..., query, key): rollout after each layer, of (layer, ..., head, query, key).

    R_l = A_l R_(l-1), where A_l is (mean over heads + identity) / 2 with its rows normalised: the
    identity stands for the residual stream. R_l[q, k] is how much of token k's embedding reaches
    position q. Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers",
    arXiv:2005.00928.

    In a decoder rollout leans to the first tokens whatever the model does: rows mix earlier tokens
    only, and each product moves weight further back. Read it against `rollout` of
    `uniform_weights`.
    """
    mixed = (weights.mean(-3) + torch.eye(weights.shape[-1], device=weights.device)) / 2
    mixed = mixed / mixed.sum(-1, keepdim=True)
    rolled = [mixed[0]]
    for layer in mixed[1:]:
        rolled.append(layer @ rolled[-1])
    return torch.stack(rolled)


def value_weighted(weights: Tensor, v: Tensor, w_o: Tensor | None = None) -> Tensor:
    """(..., query, key): a[q, k] ||v_k||, or, with `w_o`, a[q, k] ||v_k W_o||.

    `v` (..., key, D) are value vectors and `w_o` (..., D, C) the head's rows of c_proj: with them,
    the norm of what key k adds to the residual stream at q. A large weight on a short vector moves
    little, as on the first token. Kobayashi et al. 2020, "Attention is Not Only a Weight",
    arXiv:2004.10102.
    """
    if w_o is not None:
        v = v @ w_o
    return weights * v.norm(dim=-1)[..., None, :]
