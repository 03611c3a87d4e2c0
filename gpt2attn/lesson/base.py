"""What the sections of a lesson share: their form, the text, and the head that is followed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..analysis import ResidualStream, measure_heads, rank_heads, residual_stream
from ..capture import chosen
from ..dump import json_numbers
from ..model import as_ids
from ..trace import HeadTrace, trace_head

if TYPE_CHECKING:
    from ..language_model import LanguageModel

STANDING_SENTENCE = "Apple raised its price target"

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Section:
    """One item of the lesson: numbers, and the shapes of the tensors that they come from."""

    number: ClassVar[int]
    title: ClassVar[str]
    shapes: dict[str, Shape]

    def to_dict(self) -> dict[str, Any]:
        return {"number": self.number, "title": self.title, **plain(self)}


@dataclass(frozen=True)
class Choice:
    """The head that the detailed steps follow, and how it came to be this one.

    `weight` is what the head gives to the token `key` at the token `query`, and `rank` its place
    among all `n_heads` heads by that weight, from 1. `given` names what the caller fixed.
    """

    layer: int
    head: int
    query: int
    key: int
    weight: float
    rank: int
    n_heads: int
    given: tuple[str, ...]


class Setting:
    """The model, a text, and what more than one section needs of them, computed when first used."""

    def __init__(self, lm: LanguageModel, text: str, layer: int | None, head: int | None) -> None:
        self.lm, self.model, self.text = lm, lm.model, text
        self.ids = lm.encode(text)
        if not self.ids:
            raise ValueError("The text is empty: give at least one token.")
        self.labels = lm.tokenizer.labels(self.ids)
        self.choice = self._choose(layer, head)

    def _choose(self, layer: int | None, head: int | None) -> Choice:
        """The wanted head, or of those that fit what is wanted the one with the largest weight."""
        config = self.model.config
        layers = chosen(None if layer is None else [layer], config.n_layer, "layer")
        heads = chosen(None if head is None else [head], config.n_head, "head")
        query, key = self.pair(self.ids)
        ranking = rank_heads(pair_weights(self.lm, self.ids, query, key))
        rank, (at, number, weight) = next(
            (rank, entry)
            for rank, entry in enumerate(ranking, start=1)
            if entry[0] in layers and entry[1] in heads
        )
        given = tuple(
            name for name, value in (("layer", layer), ("head", head)) if value is not None
        )
        return Choice(at, number, query, key, weight, rank, len(ranking), given)

    def pair(self, ids: Sequence[int]) -> tuple[int, int]:
        """(query, key): `its` and an `Apple` before it, or the last token and the first."""
        words = [self.lm.tokenizer.decode([id]).removeprefix(" ") for id in ids]
        for query, word in enumerate(words):
            if word == "its" and "Apple" in words[:query]:
                return query, words.index("Apple")
        return len(ids) - 1, 0

    @cached_property
    def trace(self) -> HeadTrace:
        """The five steps of the chosen head."""
        choice = self.choice
        return trace_head(
            self.model,
            self.ids,
            choice.layer,
            choice.head,
            choice.query,
            key=choice.key,
            labels=self.labels,
        )

    @cached_property
    def stream(self) -> ResidualStream:
        return residual_stream(self.model, self.ids)

    def label(self, id: int) -> str:
        """A token's label; a padded vocabulary has rows that no token owns, which have a number."""
        try:
            return self.lm.tokenizer.label(id)
        except ValueError:
            return f"#{id}"

    def example(self, text: str) -> list[int] | None:
        """The ids of one of the lesson's own texts; None if the model has no room for them."""
        ids, config = self.lm.encode(text), self.model.config
        fits = len(ids) <= config.n_positions and max(ids) < config.vocab_size
        return ids if fits else None

    def word(self, text: str) -> int | None:
        """The id of a text that is one token of the model, else None."""
        id = self.lm.tokenizer.id_of(text)
        return id if id is not None and id < self.model.config.vocab_size else None


def pair_weights(lm: LanguageModel, ids: Sequence[int], query: int, key: int) -> Tensor:
    """(layer, head): what every head gives to position `key` at position `query`."""
    return measure_heads(
        lm.model, as_ids(ids, lm.model.config.vocab_size),
        lambda layer, steps: steps.weights[0, :, query, key].clone(),
    ).cpu()  # fmt: skip


def shapes(**tensors: Tensor) -> dict[str, Shape]:
    """The shape of each tensor by the name that the lesson gives it."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest number of `expected`, in float64."""
    found, expected = found.double(), expected.double()
    size = expected.abs().max()
    return float((found - expected).abs().max() / size.where(size > 0, 1.0))


def plain(value: Any) -> Any:
    """What JSON can hold: tensors as nested lists with all their digits, minus infinity as None."""
    if isinstance(value, Tensor):
        return json_numbers(value)
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
