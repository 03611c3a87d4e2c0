"""Edits: changing activations in the middle of a forward pass, to see what they were for.

An edit is an argument of one call, never a state of the model: `model(ids, edit=set_heads(model,
[(9, 6)]))` runs with head 6 of layer 9 silenced, and the next call runs as ever. An edit is any
function `edit(layer, site, x) -> x`; the ones here write a value at chosen places of a copy.
Positions count from the first token of the pass, negative ones from its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .capture import chosen
from .model import GPT2, Edit


def set_heads(
    model: GPT2,
    heads: Sequence[tuple[int, int]],
    value: float | Tensor = 0.0,
    *,
    positions: Sequence[int] | None = None,
) -> Edit:
    """Replace (layer, head) outputs, before c_proj, by `value` at `positions` (None: all).

    0 is zero ablation. A tensor is put in each head's place, (B, T', D) or what broadcasts to it,
    T' being the chosen positions: a head's mean (`mean_head_output`), or its output in another run
    (`head_outputs`). Raises ValueError for a layer or head that the model does not have.
    """
    by_layer: dict[int, list[int]] = {}
    for pair in heads:
        layer, head = _existing(model, *pair)
        by_layer.setdefault(layer, []).append(head)

    def edit(layer: int, site: str, x: Tensor) -> Tensor:
        if site != "heads" or layer not in by_layer:
            return x
        x = x.clone()
        for head in by_layer[layer]:
            x[:, head, _where(positions)] = _like(value, x)
        return x

    return edit


def set_block(
    model: GPT2,
    layer: int,
    value: float | Tensor = 0.0,
    *,
    positions: Sequence[int] | None = None,
) -> Edit:
    """Replace what leaves block `layer` by `value` (B, T', C) at `positions` (None: all)."""
    wanted, _ = _existing(model, layer, 0)

    def edit(layer: int, site: str, x: Tensor) -> Tensor:
        if site != "block" or layer != wanted:
            return x
        x = x.clone()
        x[:, _where(positions)] = _like(value, x)
        return x

    return edit


def chain(*edits: Edit) -> Edit:
    """All `edits`, one after the other."""

    def edit(layer: int, site: str, x: Tensor) -> Tensor:
        for one in edits:
            x = one(layer, site, x)
        return x

    return edit


def head_outputs(model: GPT2, ids: Any, layer: int, head: int, **arguments: Any) -> Tensor:
    """(B, T, D): what one head gives, before c_proj, for `ids`; to patch into another run."""
    layer, head = _existing(model, layer, head)
    return _read(model, ids, layer, "heads", **arguments)[:, head]


def mean_head_output(model: GPT2, ids: Any, layer: int, head: int, **arguments: Any) -> Tensor:
    """(D): one head's output averaged over all tokens of `ids`, for mean ablation."""
    return head_outputs(model, ids, layer, head, **arguments).flatten(0, 1).mean(0)


def block_output(model: GPT2, ids: Any, layer: int, **arguments: Any) -> Tensor:
    """(B, T, C): the residual stream that leaves block `layer`, for `ids`."""
    layer, _ = _existing(model, layer, 0)
    return _read(model, ids, layer, "block", **arguments)


@torch.no_grad()
def _read(model: GPT2, ids: Any, layer: int, site: str, **arguments: Any) -> Tensor:
    found: list[Tensor] = []

    def edit(at: int, place: str, x: Tensor) -> Tensor:
        if (at, place) == (layer, site):
            found.append(x.clone())
        return x

    model.hidden(ids, edit=edit, **arguments)
    return found[0]


def _existing(model: GPT2, layer: int, head: int) -> tuple[int, int]:
    """The pair, negative numbers counted from the end; ValueError if it does not exist."""
    (layer,) = chosen([layer], model.config.n_layer, "layer")
    (head,) = chosen([head], model.config.n_head, "head")
    return layer, head


def _where(positions: Sequence[int] | None) -> Any:
    return slice(None) if positions is None else list(positions)


def _like(value: float | Tensor, x: Tensor) -> float | Tensor:
    return value.to(x.device, x.dtype) if isinstance(value, Tensor) else value
