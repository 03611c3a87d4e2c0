"""The lesson: attention from a row of the embedding table to the KV cache, on a loaded model.

`explain` computes; `render.lesson_text`, `lesson_markdown` and `lesson_html` put its numbers into
words. Every number comes from the model that was loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..capture import provenance
from . import one_head, tokens, whole_model
from .base import STANDING_SENTENCE, Choice, Section, Setting, plain

if TYPE_CHECKING:
    from ..language_model import LanguageModel

__all__ = ["SECTIONS", "STANDING_SENTENCE", "Choice", "Lesson", "Section", "explain"]

FORMAT = "gpt2attn lesson 1"
# What computes each section, by number.
SECTIONS: dict[int, Callable[[Setting], Section]] = {
    1: tokens.static_row,
    2: tokens.find_neighbours,
    3: tokens.context,
    4: one_head.projection,
    5: one_head.scores,
    6: one_head.scaling,
    7: one_head.rows,
    8: one_head.values,
    9: one_head.five_steps,
    10: whole_model.all_heads,
    11: one_head.mask,
    12: whole_model.cost,
    13: whole_model.heads,
    14: whole_model.block,
    15: whole_model.logits,
    16: whole_model.kv_cache,
    17: whole_model.try_it,
}

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, eq=False)
class Lesson:
    """The sections that were asked for, in order, and what they were computed from."""

    model: str
    config: dict[str, int]
    text: str
    ids: list[int]
    labels: list[str]
    choice: Choice
    sections: list[Section]
    metadata: dict[str, Any]

    def section(self, kind: type[AnySection]) -> AnySection:
        """The section of a class; raises ValueError if it was not asked for."""
        for section in self.sections:
            if isinstance(section, kind):
                return section
        raise ValueError(f"Section {kind.number}, {kind.title}, is not part of this lesson.")

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it: full numbers in nested lists, minus infinity as None."""
        return {
            "format": FORMAT,
            "model": self.model,
            "config": self.config,
            "text": self.text,
            "ids": self.ids,
            "labels": self.labels,
            "choice": plain(asdict(self.choice)),
            "sections": [section.to_dict() for section in self.sections],
            "metadata": self.metadata,
        }


@torch.no_grad()
def explain(
    lm: LanguageModel,
    text: str = STANDING_SENTENCE,
    *,
    sections: Sequence[int] | None = None,
    layer: int | None = None,
    head: int | None = None,
    notify: Callable[[str], None] | None = None,
) -> Lesson:
    """The whole lesson, or some `sections` of it, on one text; computed, not yet worded.

    The detailed steps follow the head `layer`.`head`; left open, the one that gives the most weight
    to `Apple` at `its` (in a text without this pair: to the first token at the last). Section 16
    times some passes. `notify` is given a line before each section. Raises ValueError for a
    section, layer or head that is not there, and for a text that is empty or longer than the
    context.
    """
    wanted = _wanted(sections)
    setting = Setting(lm, text, layer, head)
    made = []
    for place, number in enumerate(wanted, start=1):
        if notify is not None:
            notify(f"section {number} ({place} of {len(wanted)})")
        made.append(SECTIONS[number](setting))
    config = lm.model.config
    sizes = ("n_layer", "n_head", "n_embd", "head_dim", "n_positions", "vocab_size")
    return Lesson(
        model=str(lm.provenance["model"]),
        config={name: getattr(config, name) for name in sizes},
        text=text,
        ids=setting.ids,
        labels=setting.labels,
        choice=setting.choice,
        sections=made,
        metadata={**provenance(lm.model), **lm.provenance},
    )


def _wanted(sections: Sequence[int] | None) -> list[int]:
    """Section numbers in the lesson's order; ValueError for one that is not there."""
    if sections is None:
        return list(SECTIONS)
    bad = [number for number in sections if number not in SECTIONS]
    if bad or not len(sections):
        raise ValueError(
            f"Section {bad[0] if bad else 'list'} is not there: the lesson has the sections "
            f"1 to {max(SECTIONS)}."
        )
    return sorted(set(sections))
