"""Trace: the five steps of one head for one text, every number of them.

`trace_head` runs the model once and keeps what it computed. Two things the model does not hand out
are made again by its own modules from its own tensors, and come out equal to the last bit: X, the
ln_1 of the residual stream, and the attention output, the c_proj of all heads' outputs. No module
hook is used: a hook is state on a model that other threads may be running.

Shapes: T tokens, C n_embd, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .analysis.maps import entropy
from .attention import AttentionSteps, attention_weights, causal_mask, mask_scores
from .capture import chosen, provenance, whole_number
from .dump import json_numbers
from .model import GPT2, as_ids, check_finite

FORMAT = "gpt2attn head trace 1"
# What a trace holds, in the order of the five steps.
STEPS = (
    "x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "q", "k", "v",
    "scores", "scaled", "masked", "weights", "output", "w_o", "attention_output", "heads_sum",
)  # fmt: skip
DERIVED = (
    "entropy", "jacobian_norm", "products", "contributions", "value_norms", "contribution_norms",
    "head_part",
)  # fmt: skip
COMPARISONS = ("raw_weights", "raw_entropy", "raw_jacobian_norm", "unmasked_weights")


@dataclass(frozen=True, eq=False)
class HeadTrace:
    """The five steps of one head, on the CPU, in the model's dtype; row t of a tensor is token t.

    `x` is the residual stream after ln_1, what attention is given. `w_q`, `b_q` and so on are this
    head's columns of c_attn: q = x w_q + b_q. `w_o` are its rows of c_proj. `query` is the position
    taken apart, `key` the one whose score is; `dataclasses.replace(trace, query=2)` takes another
    one apart. The properties are computed from these tensors in float64; `heads_sum` is too, from
    all heads.
    """

    layer: int
    head: int
    query: int
    key: int
    ids: list[int]
    labels: list[str]
    scale: float  # scaled = scores x scale
    x: Tensor  # (T, C)
    w_q: Tensor  # (C, D)
    w_k: Tensor  # (C, D)
    w_v: Tensor  # (C, D)
    b_q: Tensor  # (D)
    b_k: Tensor  # (D)
    b_v: Tensor  # (D)
    q: Tensor  # (T, D)
    k: Tensor  # (T, D)
    v: Tensor  # (T, D)
    scores: Tensor  # (T, T) q k^T
    scaled: Tensor  # (T, T)
    masked: Tensor  # (T, T) minus infinity above the diagonal
    weights: Tensor  # (T, T) softmax of each row
    output: Tensor  # (T, D) weights v
    w_o: Tensor  # (D, C)
    attention_output: Tensor  # (T, C) what the layer's attention adds to the residual stream
    heads_sum: Tensor  # (T, C) the sum over heads of output w_o, plus the bias of c_proj
    metadata: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """What it is of; the numbers of 18 tensors would fill many screens."""
        query, key = (f"{at} {self.labels[at]}" for at in (self.query, self.key))
        return (
            f"<HeadTrace of layer {self.layer}, head {self.head}: {len(self.ids)} tokens, "
            f"query {query}, key {key}>"
        )

    @property
    def n_head(self) -> int:
        return self.x.shape[1] // self.q.shape[1]

    @property
    def entropy(self) -> Tensor:
        """(T): of each row of `weights`, in nats; ln n if n tokens share it evenly, 0 for one."""
        return entropy(self.weights.double())

    @property
    def jacobian_norm(self) -> Tensor:
        """(T): `softmax_jacobian_norm` of each row of `weights`."""
        return softmax_jacobian_norm(self.weights)

    @property
    def raw_weights(self) -> Tensor:
        """(T, T): softmax of the masked scores without the scale; not what GPT-2 computes."""
        allowed = causal_mask(*self.scores.shape)
        return attention_weights(mask_scores(self.scores.double(), allowed), None)

    @property
    def raw_entropy(self) -> Tensor:
        """(T): of each row of `raw_weights`, in nats."""
        return entropy(self.raw_weights)

    @property
    def raw_jacobian_norm(self) -> Tensor:
        """(T): `softmax_jacobian_norm` of each row of `raw_weights`."""
        return softmax_jacobian_norm(self.raw_weights)

    @property
    def unmasked_weights(self) -> Tensor:
        """(T, T): softmax of the scaled scores without the mask; not what GPT-2 computes."""
        return attention_weights(self.scaled.double(), None)

    @property
    def products(self) -> Tensor:
        """(D): q_i k_i of the query and the key; their sum is the score."""
        return self.q[self.query].double() * self.k[self.key].double()

    @property
    def contributions(self) -> Tensor:
        """(T, D): share x value vector of each token; their sum is the query's output."""
        return self.weights[self.query].double()[:, None] * self.v.double()

    @property
    def value_norms(self) -> Tensor:
        """(T): the length of each token's value vector."""
        return self.v.double().norm(dim=1)

    @property
    def contribution_norms(self) -> Tensor:
        """(T): the length of each contribution after w_o, as it enters the residual stream."""
        return (self.contributions @ self.w_o.double()).norm(dim=1)

    @property
    def head_part(self) -> Tensor:
        """(T, C): output w_o, this head's part of the attention output."""
        return self.output.double() @ self.w_o.double()

    @property
    def heads_sum_error(self) -> float:
        """The largest difference of `heads_sum` and `attention_output`, over its largest number."""
        expected = self.attention_output.double()
        size = expected.abs().max()
        # All zero, as in a model whose c_proj starts at zero, leaves nothing to divide by.
        return float((self.heads_sum - expected).abs().max() / size.where(size > 0, 1.0))

    @property
    def heads_sum_agrees(self) -> bool:
        """Whether they agree to 1e-5, or to the rounding of the dtype where that is coarser."""
        return self.heads_sum_error < max(1e-5, 2 * torch.finfo(self.x.dtype).eps)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it: full numbers in nested lists, minus infinity as None."""
        return {
            "format": FORMAT,
            **{
                name: getattr(self, name)
                for name in ("layer", "head", "query", "key", "ids", "labels")
            },
            "scale": self.scale,
            **{name: json_numbers(getattr(self, name)) for name in (*STEPS, *DERIVED)},
            "heads_sum_error": self.heads_sum_error,
            "heads_sum_agrees": self.heads_sum_agrees,
            "not_what_gpt2_computes": {
                name: json_numbers(getattr(self, name)) for name in COMPARISONS
            },
            "metadata": self.metadata,
        }


@torch.no_grad()
def trace_head(
    model: GPT2,
    ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    layer: int,
    head: int,
    query: int | None = None,
    *,
    key: int | None = None,
    labels: Sequence[str] | None = None,
    metadata: dict[str, Any] | None = None,
) -> HeadTrace:
    """The five steps of one head for one row of `ids`, as the model computes them.

    `query` is the position to take apart (None: the last), `key` the one whose score with it is
    (None: the one it attends to most). All layers are observed, so every number equals that of a
    whole dump to the bit. Negative numbers count from the end. `labels` are the tokens' names.
    Raises ValueError for what does not exist, and for a batch.
    """
    (layer,) = chosen([layer], model.config.n_layer, "layer")
    (head,) = chosen([head], model.config.n_head, "head")
    ids = as_ids(ids, model.config.vocab_size).to(model.device)
    n_rows, n_tokens = ids.shape
    if n_rows != 1:
        raise ValueError(
            f"A trace takes one text, not a batch of {n_rows}: give one row of token ids."
        )
    query = n_tokens - 1 if query is None else _position(query, n_tokens, "query")
    key = None if key is None else _position(key, n_tokens, "key")
    stream, steps = _run(model, ids, layer)
    kept = _kept(model, layer, head, stream, steps)
    row = ids[0].tolist()
    return HeadTrace(
        layer=layer,
        head=head,
        query=query,
        key=int(kept["weights"][query].argmax()) if key is None else key,
        ids=row,
        labels=list(labels) if labels else [f"#{id}" for id in row],
        scale=steps.scale,
        **{name: kept[name].cpu() for name in STEPS},
        metadata={**provenance(model), **(metadata or {})},
    )


def softmax_jacobian_norm(weights: Tensor) -> Tensor:
    """(...): the Frobenius norm of J = diag(p) - p p^T for each row p of `weights` (..., T).

    J is the derivative of a softmax by its inputs. It vanishes as one weight nears 1, and with it
    what a training step can change: what dividing the scores by sqrt(head_dim) is for. In float64.
    """
    p = weights.double()
    squares = p.square()
    diagonal = (p * (1 - p)).square().sum(-1)
    # Each pair i < j, twice. (sum of squares)^2 - (sum of fourth powers) is the same, but loses a
    # saturated row to cancellation.
    earlier = F.pad(squares.cumsum(-1)[..., :-1], (1, 0))
    return (diagonal + 2 * (squares * earlier).sum(-1)).sqrt()


def _run(model: GPT2, ids: Tensor, layer: int) -> tuple[Tensor, AttentionSteps]:
    """The residual stream (1, T, C) that enters a layer, and what its attention computed."""
    found: dict[str, Any] = {}

    def observe(at: int, steps: AttentionSteps) -> None:
        if at == layer:
            found["steps"] = steps

    def edit(at: int, site: str, x: Tensor) -> Tensor:
        if (at, site) == (layer - 1, "block"):
            found["stream"] = x
        return x

    check_finite(model.hidden(ids, observe=observe, edit=edit))
    if layer == 0:  # after the pass, which refuses a text that is too long
        positions = torch.arange(ids.shape[1], device=ids.device)
        found["stream"] = model.wte(ids) + model.wpe(positions)
    return found["stream"], found["steps"]


def _kept(
    model: GPT2, layer: int, head: int, stream: Tensor, steps: AttentionSteps
) -> dict[str, Tensor]:
    """The tensors of a HeadTrace by name, copied, so that none is a view of the model's weights."""
    block, n_head, head_dim = model.h[layer], model.config.n_head, model.config.head_dim
    w = block.attn.c_attn.matrix.unflatten(1, (3, n_head, head_dim))  # (C, 3, H, D)
    b = block.attn.c_attn.bias.unflatten(0, (3, n_head, head_dim))  # (3, H, D)
    w_o = block.attn.c_proj.matrix.unflatten(0, (n_head, head_dim))  # (H, D, C)
    outputs = steps.output[0].double()  # (H, T, D)
    parts = (output @ w_o[number].double() for number, output in enumerate(outputs))
    kept = {
        "x": block.ln_1(stream)[0],
        **dict(zip(("w_q", "w_k", "w_v"), w[:, :, head].unbind(1), strict=True)),
        **dict(zip(("b_q", "b_k", "b_v"), b[:, head], strict=True)),
        **{
            name: getattr(steps, name)[0, head]
            for name in ("q", "k", "v", "scores", "scaled", "masked", "weights", "output")
        },
        "w_o": w_o[head],
        "attention_output": block.attn.c_proj(steps.output.transpose(1, 2).flatten(2))[0],
        "heads_sum": sum(parts, block.attn.c_proj.bias.double()),
    }
    return {name: values.detach().clone() for name, values in kept.items()}


def _position(number: int, n_tokens: int, kind: str) -> int:
    position = whole_number(number)
    if position is None or not -n_tokens <= position < n_tokens:
        raise ValueError(
            f"{kind} {number} is not there: the text has the positions 0 to {n_tokens - 1}."
        )
    return position % n_tokens
