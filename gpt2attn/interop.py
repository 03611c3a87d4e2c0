"""Attention maps in the shapes of other tools: BertViz, TransformerLens, pandas, xarray.

`AttentionMaps.to_bertviz` and its siblings call these. None of the tools is a dependency of this
package; pandas and xarray are imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .capture import AttentionMaps

if TYPE_CHECKING:
    import pandas
    import xarray

MOST_FRAME_ROWS = 20_000_000  # about 1.5 GB
# The stages that TransformerLens keeps, by its names. Its scores are scaled and masked.
HOOKS = {"masked": "hook_attn_scores", "weights": "hook_pattern"}


def to_bertviz(maps: AttentionMaps, text: int = 0) -> tuple[tuple[Tensor, ...], list[str]]:
    """For each layer the weights (1, head, query, key) of one text, and its labels.

    These are the arguments of `bertviz.head_view` and `bertviz.model_view`. Raises ValueError if
    layers or heads were left out, since BertViz counts them from 0.
    """
    _check_complete(maps.layers, "layers", "BertViz")
    _check_complete(maps.heads, "heads", "BertViz")
    one = maps[text]
    return tuple(one.weights.unbind(0)), one.labels[0]


def to_transformer_lens(maps: AttentionMaps) -> dict[str, Tensor]:
    """The captured maps by TransformerLens' names, (batch, head, query, key) each.

    "weights" is `blocks.L.attn.hook_pattern`, "masked" `blocks.L.attn.hook_attn_scores`; what else
    was captured it does not keep. Shorter texts stand at the right, as with its left padding.
    Raises ValueError if heads were left out, or if neither stage was captured.
    """
    _check_complete(maps.heads, "heads", "TransformerLens")
    named = {
        f"blocks.{layer}.attn.{hook}": maps.stages[stage][number]
        for stage, hook in HOOKS.items()
        if stage in maps.stages
        for number, layer in enumerate(maps.layers)
    }
    if not named:
        raise ValueError(
            f"TransformerLens keeps the stages weights and masked, not {', '.join(maps.stages)}."
        )
    return named


def to_frame(maps: AttentionMaps) -> pandas.DataFrame:
    """A long table, one row for each number of each text's own map, a column for each stage.

    The columns before those are text, layer, head, query, key, query_label, key_label, as in a
    .csv dump. Raises ValueError above 20 million rows.
    """
    import pandas

    n_rows = len(maps.layers) * len(maps.heads) * sum(len(ids) ** 2 for ids in maps.ids)
    if n_rows > MOST_FRAME_ROWS:
        raise ValueError(
            f"{n_rows:,} rows are too many for a table (at most {MOST_FRAME_ROWS:,}); capture "
            "fewer layers and heads, or use to_xarray."
        )
    parts = [_columns(maps, text) for text in range(len(maps))]
    return pandas.DataFrame(
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, copy=False
    )


def _columns(maps: AttentionMaps, text: int) -> dict[str, np.ndarray]:
    """The columns of one text's rows."""
    one = maps[text]
    n = len(one.ids[0])
    labels = np.array(one.labels[0], dtype=object)
    shape = (len(maps.layers), len(maps.heads), n, n)
    axes = (np.array(maps.layers), np.array(maps.heads), np.arange(n), np.arange(n))
    places = [grid.ravel() for grid in np.broadcast_arrays(*np.ix_(*axes))]
    return {
        "text": np.full(np.prod(shape), text),
        **dict(zip(("layer", "head", "query", "key"), places, strict=True)),
        "query_label": labels[places[2]],
        "key_label": labels[places[3]],
        **{name: _array(values[:, 0]).ravel() for name, values in one.stages.items()},
    }


def to_xarray(maps: AttentionMaps, text: int = 0) -> xarray.Dataset:
    """One text's maps with named axes, (layer, head, query, key), a variable for each stage.

    Layers and heads have the model's numbers as coordinates, tokens their positions and labels
    (`query_label`, `key_label`); `attrs` holds the metadata.
    """
    import xarray

    one = maps[text]
    axes = ("layer", "head", "query", "key")
    positions = range(len(one.ids[0]))
    return xarray.Dataset(
        {name: (axes, _array(values[:, 0])) for name, values in one.stages.items()},
        coords={
            "layer": one.layers,
            "head": one.heads,
            "query": positions,
            "key": positions,
            "query_label": ("query", one.labels[0]),
            "key_label": ("key", one.labels[0]),
        },
        attrs=dict(one.metadata),
    )


def _array(values: Tensor) -> np.ndarray:
    """As NumPy has it; bfloat16, which it lacks, as float32."""
    values = values.float() if values.dtype == torch.bfloat16 else values
    return values.cpu().numpy()


def _check_complete(numbers: list[int], kind: str, tool: str) -> None:
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"{tool} counts {kind} from 0, but only {', '.join(map(str, numbers))} were captured; "
            f"capture all {kind}."
        )
