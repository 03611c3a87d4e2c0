"""Capture: attention maps kept while the model's own forward pass makes them.

A `Recorder` is an observer: the model calls it with the very tensors it uses, and it copies the
layers, heads and stages that were asked for. `attention_maps` runs it over a prompt; generation
runs it over every step. What comes out is an `AttentionMaps`: tensors, token ids, labels, and where
they came from.
"""

from __future__ import annotations

import math
import mmap
import operator
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import __version__
from .attention import AttentionSteps
from .model import GPT2, as_ids, check_finite

if TYPE_CHECKING:
    import pandas
    import xarray
    from matplotlib.figure import Figure

STAGES = ("scores", "scaled", "masked", "weights")
KEPT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MASK_RULE = "minus infinity is added to scaled scores above the diagonal and at padding"


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention of a batch of texts: `stages[name]` is (layer, batch, head, query, key).

    Row r of a map says how token r spreads its attention over the tokens up to itself: with the
    stage "weights" it is positive and sums to 1. Shorter texts stand at the right, and their
    padding is 0; `maps[i]` is text i alone, without padding. `layers` and `heads` say which ones
    the axes hold. `labels[b]` and `ids[b]` are the real tokens of text b, the first
    `prompt_lengths[b]` of them given, the others generated.
    """

    stages: dict[str, Tensor]
    layers: list[int]
    heads: list[int]
    ids: list[list[int]]
    labels: list[list[str]]
    prompt_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> Tensor:
        """The softmax weights (layer, batch, head, query, key); ValueError if not captured."""
        return self.stage("weights")

    def stage(self, name: str) -> Tensor:
        """One captured stage; raises ValueError naming those that there are."""
        if name not in self.stages:
            raise ValueError(f"The stage {name!r} was not captured, only {', '.join(self.stages)}.")
        return self.stages[name]

    def head(self, layer: int, head: int, *, text: int = 0, stage: str = "weights") -> Tensor:
        """The (query, key) map of one head of one text, unpadded; numbers as in the model."""
        for kind, number, kept in (("layer", layer, self.layers), ("head", head, self.heads)):
            if number not in kept:
                raise ValueError(f"{kind} {number} was not captured, only {_ranges(kept)}.")
        text = self._place(text)
        n = len(self.ids[text])
        map = self.stage(stage)[self.layers.index(layer), text, self.heads.index(head)]
        return map[map.shape[0] - n :, map.shape[1] - n :]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> AttentionMaps:
        """Text `index` alone: square maps without padding, with a batch axis of 1."""
        index = self._place(index)
        n = len(self.ids[index])
        stages = {
            name: values[:, index : index + 1, :, values.shape[3] - n :, values.shape[4] - n :]
            for name, values in self.stages.items()
        }
        return replace(
            self,
            stages=stages,
            ids=[self.ids[index]],
            labels=[self.labels[index]],
            prompt_lengths=[self.prompt_lengths[index]],
        )

    def _place(self, text: int) -> int:
        """The place of a text, counted from 0; TypeError for what is no whole number."""
        number = whole_number(text)
        if number is None:
            raise TypeError(
                f"maps[i] is text i, a whole number, not {text!r}; a stage is maps.stage(name)."
            )
        if not -len(self) <= number < len(self):
            raise IndexError(
                f"There is no text {number}: the maps hold {len(self)}, counted from 0."
            )
        return number % len(self)

    def __repr__(self) -> str:
        """What is in it; the numbers of all heads would fill many screens."""
        stages = ", ".join(
            f"{name} {tuple(values.shape)} {str(values.dtype).removeprefix('torch.')}"
            for name, values in self.stages.items()
        )
        texts = f"{len(self)} text{'' if len(self) == 1 else 's'}"
        layers, heads = _ranges(self.layers), _ranges(self.heads)
        return f"<AttentionMaps of {texts}: {stages}; layers {layers}; heads {heads}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionMaps):
            return NotImplemented
        return (
            self._header() == other._header()
            and self.stages.keys() == other.stages.keys()
            and all(
                mine.dtype == other.stages[name].dtype and torch.equal(mine, other.stages[name])
                for name, mine in self.stages.items()
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def _header(self) -> tuple[Any, ...]:
        return (
            self.layers, self.heads, self.ids, self.labels, self.prompt_lengths, self.metadata,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write .safetensors, .npz, .json or .csv, by the path's suffix; see `dump`."""
        from .dump import save_maps

        save_maps(self, Path(path))

    def to_bertviz(self, text: int = 0) -> tuple[tuple[Tensor, ...], list[str]]:
        """What `bertviz.head_view` and `model_view` take for one text; see `interop`."""
        from .interop import to_bertviz

        return to_bertviz(self, text)

    def to_transformer_lens(self) -> dict[str, Tensor]:
        """The maps as TransformerLens names them, `blocks.L.attn.hook_pattern`; see `interop`."""
        from .interop import to_transformer_lens

        return to_transformer_lens(self)

    def to_frame(self) -> pandas.DataFrame:
        """A long pandas table, one row for each number, without padding; see `interop`."""
        from .interop import to_frame

        return to_frame(self)

    def to_xarray(self, text: int = 0) -> xarray.Dataset:
        """One text's maps with named axes (layer, head, query, key); see `interop`."""
        from .interop import to_xarray

        return to_xarray(self, text)

    def figure(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        text: int = 0,
        show: str = "weights",
    ) -> Figure:
        """A matplotlib Figure of all heads, of one layer's, or of one; see `render.image`."""
        from .render.image import maps_figure

        return maps_figure(self, layer, head, text=text, show=show)

    def html(self, *, title: str | None = None) -> str:
        """One self-contained page to explore the maps in a browser; see `render.html`."""
        from .render.html import render_page

        return render_page(self, title=title)

    def _repr_html_(self) -> str | None:
        """A static picture, for notebooks."""
        from .render.image import maps_html

        return maps_html(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionMaps:
        """The object that `save` wrote; raises ValueError if the file is something else."""
        from .dump import load_maps

        return load_maps(Path(path))


class Recorder:
    """An observer that keeps chosen stages of chosen heads, over one pass or many with a cache.

    Room for `n_tokens` of `batch_size` rows is set aside at once, but takes memory only as it is
    written. `done` is the number of tokens seen so far.
    """

    def __init__(
        self,
        model: GPT2,
        batch_size: int,
        n_tokens: int,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        stages: Iterable[str] = ("weights",),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.layers = chosen(layers, model.config.n_layer, "layer")
        self.heads = chosen(heads, model.config.n_head, "head")
        shape = (len(self.layers), batch_size, len(self.heads), n_tokens, n_tokens)
        self.stages = {
            name: _untouched_zeros(shape, kept_dtype(dtype, model)) for name in known_stages(stages)
        }
        self.done = 0
        self._dtype, self._device = model.dtype, model.device.type
        self._all_heads = self.heads == list(range(model.config.n_head))

    def room(self, layer: int, shape: tuple[int, ...]) -> Tensor | None:
        """Where the weights (B, H, T, S) of a layer are kept, if all of them are, as computed.

        The layer may compute them there: no copy, and half the fresh memory, which at 1,000 tokens
        takes longer than the arithmetic.
        """
        buffer = self.stages.get("weights")
        if buffer is None or self._device != "cpu":
            return None
        whole = buffer.shape[1:] == shape and buffer.dtype == self._dtype
        return buffer[self.layers.index(layer)] if whole else None

    def __call__(self, layer: int, steps: AttentionSteps) -> None:
        n_query, n_key = steps.weights.shape[-2:]
        self.done = n_key
        for name, buffer in self.stages.items():
            values = kept(steps, name, None if self._all_heads else self.heads)
            place = buffer[self.layers.index(layer), :, :, n_key - n_query : n_key, :n_key]
            if values.data_ptr() != place.data_ptr():
                place.copy_(values)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written.

    torch.zeros writes them all at once, and NumPy's ask for huge pages, which the system can take a
    second to find for the maps of 1,000 tokens. Pages that no other process may share come faster.
    """
    private = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def kept(steps: AttentionSteps, stage: str, heads: list[int] | None) -> Tensor:
    """One stage (B, H, T, S) of what a layer computed, for some heads (None: all), padding at 0."""
    if stage == "weights":
        return steps.weights if heads is None else steps.weights[:, heads]
    if heads is not None:
        steps = replace(steps, q=steps.q[:, heads], k=steps.k[:, heads])
    values = getattr(steps, stage)
    if steps.allowed is None or steps.allowed.dim() == 2:
        return values
    # Scores of padding are numbers without meaning. A column nobody may look at, and a row that may
    # look nowhere, are padding; the causal mask alone never makes either.
    real = steps.allowed.any(-1, keepdim=True) & steps.allowed.any(-2, keepdim=True)
    return values.masked_fill(~real, 0.0)


@torch.no_grad()
def attention_maps(
    model: GPT2,
    ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    *,
    stages: Iterable[str] = ("weights",),
    dtype: torch.dtype | None = None,
    labels: Sequence[Sequence[str]] | None = None,
    metadata: dict[str, Any] | None = None,
) -> AttentionMaps:
    """The attention maps of a batch of `ids` (B, T), for some `layers` and `heads` (None: all).

    Selection comes before keeping: one layer costs one layer's memory, and the others stay on the
    fused kernel (whose rounding, some 1e-6, reaches the layers after them); no logits are made.
    `attention_mask` (B, T) marks padding, on the left, with 0. `stages` are of "scores", "scaled",
    "masked", "weights"; `dtype` is that of the kept numbers (None: the model's). Negative layers
    and heads count from the end. Raises ValueError for what does not exist.
    """
    ids = as_ids(ids, model.config.vocab_size)
    rows = ids.tolist()
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask)
        if mask.dim() == 2 and (mask.int().diff(dim=1) < 0).any():
            raise ValueError("attention_mask must have its padding (0) on the left of each row.")
        rows = [row[len(row) - int(n) :] for row, n in zip(rows, mask.sum(1), strict=True)]
    recorder = Recorder(model, *ids.shape, layers=layers, heads=heads, stages=stages, dtype=dtype)
    check_finite(model.hidden(ids, attention_mask=attention_mask, observe=recorder))
    return AttentionMaps(
        recorder.stages,
        recorder.layers,
        recorder.heads,
        rows,
        [list(row) for row in labels] if labels else [[f"#{id}" for id in row] for row in rows],
        [len(row) for row in rows],
        {**provenance(model), **(metadata or {})},
    )


def provenance(model: GPT2) -> dict[str, Any]:
    """What a dump says of how its numbers were made."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_dtype": str(model.table.weight.dtype).removeprefix("torch."),
        "kernels": model.kernels,
        "device": model.device.type,
        "torch": torch.__version__,
        "gpt2attn": __version__,
        "python": platform.python_version(),
        "mask": MASK_RULE,
    }


def chosen(numbers: Sequence[int] | None, count: int, kind: str) -> list[int]:
    """The layers or heads that `numbers` name: None is all, negative ones count from the end.

    Raises ValueError, with the legal range, for one that does not exist.
    """
    if numbers is None:
        return list(range(count))
    try:
        given = list(numbers)
    except TypeError:
        raise ValueError(f"{kind}s are given as a list, such as [0], not {numbers!r}.") from None
    found = [whole_number(n) for n in given]
    bad = [
        n
        for n, number in zip(given, found, strict=True)
        if number is None or not -count <= number < count
    ]
    if bad or not given:
        raise ValueError(
            f"{kind} {bad[0] if bad else 'list'} is not there: "
            f"this model has the {kind}s 0 to {count - 1}."
        )
    return list(dict.fromkeys(n % count for n in found if n is not None))


def whole_number(value: Any) -> int | None:
    """An int, one of NumPy's or torch's too, as a plain int; None for a bool and all else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def kept_dtype(dtype: torch.dtype | None, model: GPT2) -> torch.dtype:
    """The number format of kept maps, None being the model's; ValueError for one without shares."""
    if dtype is None:
        return model.dtype
    if dtype not in KEPT:
        raise ValueError(
            f"Maps are kept in float64, float32, float16 or bfloat16, not in {dtype!r}."
        )
    return dtype


def known_stages(stages: Iterable[str]) -> list[str]:
    """Stage names as a list; raises ValueError naming one that does not exist."""
    names = [stages] if isinstance(stages, str) else list(stages)
    bad = [name for name in names if name not in STAGES]
    if bad or not names:
        raise ValueError(
            f"The stage {bad[0] if bad else ''!r} does not exist; there are {', '.join(STAGES)}."
        )
    return names


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as a person writes them: 0-3, 7."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)
