"""Sections 4 to 9 and 11: attention in one head, one step after the other."""

from __future__ import annotations

import inspect
import math
import textwrap
from dataclasses import dataclass

import torch
from torch import Tensor

from ..analysis import entropy
from ..trace import softmax_jacobian_norm
from .base import Section, Setting, relative_error, shapes

SMALL_EXAMPLES = ((1.0, 2.0, 3.0), (10.0, 20.0, 30.0))


@dataclass(frozen=True, eq=False)
class Projection(Section):
    """X, this head's columns of c_attn, and what they make of it. `error`: of X W + b in float64,
    against the model's Q, K and V.
    """

    number = 4
    title = "Query, key, value"
    x: Tensor  # (T, C)
    w_q: Tensor  # (C, D)
    w_k: Tensor
    w_v: Tensor
    q: Tensor  # (T, D)
    k: Tensor
    v: Tensor
    columns: tuple[int, int]  # the first and the last, in each third of c_attn
    error: float


def projection(setting: Setting) -> Projection:
    trace = setting.trace
    head_dim = trace.q.shape[1]
    first = trace.head * head_dim
    x = trace.x.double()
    errors = [
        relative_error(x @ weight.double() + bias.double(), made)
        for weight, bias, made in (
            (trace.w_q, trace.b_q, trace.q),
            (trace.w_k, trace.b_k, trace.k),
            (trace.w_v, trace.b_v, trace.v),
        )
    ]
    tensors = {name: getattr(trace, name) for name in ("x", "w_q", "w_k", "w_v", "q", "k", "v")}
    names = ("X", "W_q", "W_k", "W_v", "Q", "K", "V")
    return Projection(
        shapes=shapes(**dict(zip(names, tensors.values(), strict=True))),
        **tensors,
        columns=(first, first + head_dim - 1),
        error=max(errors),
    )


@dataclass(frozen=True, eq=False)
class Scores(Section):
    """Q K^T before the mask; `there` is query on key, `back` is key on query."""

    number = 5
    title = "Scores: every token meets every token"
    scores: Tensor  # (T, T)
    there: float
    back: float
    products: Tensor  # (D) whose sum is `there`


def scores(setting: Setting) -> Scores:
    trace = setting.trace
    return Scores(
        shapes={**shapes(Q=trace.q), "K^T": tuple(trace.k.T.shape), **shapes(scores=trace.scores)},
        scores=trace.scores,
        there=float(trace.scores[trace.query, trace.key]),
        back=float(trace.scores[trace.key, trace.query]),
        products=trace.products,
    )


@dataclass(frozen=True)
class Spread:
    """A softmax: what went in, the shares, their entropy in nats, its Jacobian's norm."""

    inputs: tuple[float, ...]
    shares: list[float]
    entropy: float
    jacobian_norm: float


@dataclass(frozen=True, eq=False)
class Scaling(Section):
    """Softmax of raw and of scaled scores: the query's row, and three measures of every row."""

    number = 6
    title = "Scaling: divide before the softmax"
    examples: list[Spread]
    scale: float
    divisor: float | None  # sqrt(head_dim), if that is what the model divides by
    raw_row: Tensor  # (query + 1) shares; not what GPT-2 computes
    scaled_row: Tensor
    same_order: bool
    raw_largest: Tensor  # (T), and so on
    raw_entropy: Tensor
    raw_jacobian_norm: Tensor
    largest: Tensor
    entropy: Tensor
    jacobian_norm: Tensor


def scaling(setting: Setting) -> Scaling:
    trace = setting.trace
    seen, raw = trace.query + 1, trace.raw_weights
    root = math.sqrt(trace.q.shape[1])
    row = trace.scores[trace.query, :seen], trace.scaled[trace.query, :seen]
    before, after = (values.argsort(stable=True) for values in row)
    return Scaling(
        shapes=shapes(scores=trace.scores, scaled=trace.scaled),
        examples=[_spread(inputs) for inputs in SMALL_EXAMPLES],
        scale=trace.scale,
        divisor=root if math.isclose(trace.scale * root, 1.0) else None,
        raw_row=raw[trace.query, :seen],
        scaled_row=trace.weights[trace.query, :seen],
        same_order=torch.equal(before, after),
        raw_largest=raw.amax(1),
        raw_entropy=trace.raw_entropy,
        raw_jacobian_norm=trace.raw_jacobian_norm,
        largest=trace.weights.amax(1),
        entropy=trace.entropy,
        jacobian_norm=trace.jacobian_norm,
    )


def _spread(inputs: tuple[float, ...]) -> Spread:
    shares = torch.tensor(inputs, dtype=torch.float64).softmax(0)
    measures = float(entropy(shares)), float(softmax_jacobian_norm(shares))
    return Spread(inputs, shares.tolist(), *measures)


@dataclass(frozen=True, eq=False)
class Rows(Section):
    """The weights, and the sum of each row in float64."""

    number = 7
    title = "A row is one token asking"
    weights: Tensor  # (T, T)
    row_sums: Tensor  # (T)
    smallest: float  # of the weights that the mask leaves


def rows(setting: Setting) -> Rows:
    weights = setting.trace.weights
    seen = torch.ones_like(weights).tril().bool()
    return Rows(
        shapes=shapes(weights=weights),
        weights=weights,
        row_sums=weights.double().sum(1),
        smallest=float(weights[seen].min()),
    )


@dataclass(frozen=True, eq=False)
class Values(Section):
    """What each token gives to the query's output; `error` is that of their sum against it."""

    number = 8
    title = "Values: what is passed on"
    shares: Tensor  # (T)
    value_norms: Tensor  # (T)
    contributions: Tensor  # (T, D)
    contribution_norms: Tensor  # (T)
    added_norms: Tensor  # (T) after W_o
    output: Tensor  # (T, D)
    output_norm: float  # of the query's row
    added_norm: float
    error: float


def values(setting: Setting) -> Values:
    trace = setting.trace
    output = trace.output[trace.query]
    return Values(
        shapes=shapes(weights=trace.weights, V=trace.v, output=trace.output),
        shares=trace.weights[trace.query],
        value_norms=trace.value_norms,
        contributions=trace.contributions,
        contribution_norms=trace.contributions.norm(dim=1),
        added_norms=trace.contribution_norms,
        output=trace.output,
        output_norm=float(output.double().norm()),
        added_norm=float(trace.head_part[trace.query].norm()),
        error=relative_error(trace.contributions.sum(0), output),
    )


def one_head(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor,
    b_q: Tensor, b_k: Tensor, b_v: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """(T, D): the output of one head for X (T, C)."""
    q, k, v = x @ w_q + b_q, x @ w_k + b_k, x @ w_v + b_v  # 1  project
    scores = q @ k.T  # 2  compare
    scaled = scores * scale  # 3  scale
    later = torch.ones_like(scaled).triu(1).bool()
    weights = scaled.masked_fill(later, -torch.inf).softmax(-1)  # 4  mask, softmax
    return weights @ v  # 5  mix


@dataclass(frozen=True, eq=False)
class FiveSteps(Section):
    """`source` is the function that was run, in float64, on the model's X and matrices; `error` is
    that of its output against the model's. The numbers follow one query and key through it.
    """

    number = 9
    title = "Five steps, one function"
    source: str
    error: float
    score: float
    scaled: float
    weight: float
    output_norm: float
    stages: dict[str, Tensor]  # (T, T) each: scores, scaled, masked, weights


def five_steps(setting: Setting) -> FiveSteps:
    trace = setting.trace
    names = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
    inputs = {name: getattr(trace, name).double() for name in names}
    output = one_head(**inputs, scale=trace.scale)
    at = trace.query, trace.key
    stages = {name: getattr(trace, name) for name in ("scores", "scaled", "masked", "weights")}
    return FiveSteps(
        shapes=shapes(
            X=trace.x, Q=trace.q, scores=trace.scores, weights=trace.weights, output=trace.output
        ),
        source=textwrap.dedent(inspect.getsource(one_head)).replace("  # fmt: skip", "").rstrip(),
        error=relative_error(output, trace.output),
        score=float(trace.scores[at]),
        scaled=float(trace.scaled[at]),
        weight=float(trace.weights[at]),
        output_norm=float(trace.output[trace.query].double().norm()),
        stages=stages,
    )


@dataclass(frozen=True, eq=False)
class Mask(Section):
    """The weights as they are, and two maps that GPT-2 does not compute: without the mask, and
    with the hidden scores set to 0 in place of minus infinity.
    """

    number = 11
    title = "The mask: no token sees a later one"
    masked: Tensor  # (T, T)
    weights: Tensor
    unmasked: Tensor
    zeroed: Tensor
    seen: list[int]  # how many tokens each row sees
    leaked: float  # what later tokens would get of the first row, if hidden scores were 0


def mask(setting: Setting) -> Mask:
    trace = setting.trace
    zeroed = trace.scaled.double().tril().softmax(-1)
    return Mask(
        shapes=shapes(masked=trace.masked, weights=trace.weights),
        masked=trace.masked,
        weights=trace.weights,
        unmasked=trace.unmasked_weights,
        zeroed=zeroed,
        seen=trace.masked.isfinite().sum(1).tolist(),
        leaked=float(zeroed[0, 1:].sum()),
    )
