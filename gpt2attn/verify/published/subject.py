"""What the published figures are held against: a model, and the texts of data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ...hub import Source
from ...language_model import LanguageModel
from ...model import GPT2, Edit
from ...scoring import LastWords, score_last_words
from ...tokenizer import Tokenizer
from .report import Figure


@dataclass
class Subject:
    """The model under test, and the texts of data sets where the user gave them."""

    lm: LanguageModel
    source: Source
    figures: Sequence[Figure]
    wikitext2: list[str] | None = None  # lines of the raw test file
    lambada: list[str] | None = None  # passages

    @property
    def model(self) -> GPT2:
        return self.lm.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.lm.tokenizer

    def ids(self, prompt: Mapping[str, Any], prefix: int | None = None) -> list[int]:
        """A prompt's published ids, else those of its text, after `prefix`, if there is one."""
        ids = prompt["ids"] if "ids" in prompt else self.tokenizer.encode(prompt["text"])
        return [*([] if prefix is None else [prefix]), *ids]

    def only(self, figure: Figure) -> list[int]:
        """The ids of a figure's one prompt, with the figure's prefix."""
        (prompt,) = figure.given["prompts"]
        return self.ids(prompt, figure.given.get("prefix"))

    def logits(self, ids: Sequence[int], *, edit: Edit | None = None) -> Tensor:
        """(T, V) logits of one row of ids, on the CPU."""
        return self.model([ids], edit=edit)[0].float().cpu()

    def last_logits(self, ids: Sequence[int], *, edit: Edit | None = None) -> Tensor:
        """(V) logits after the last of `ids`, on the CPU."""
        return self.model.unembed(self.model.hidden([ids], edit=edit)[0, -1]).float().cpu()

    def token_id(self, token: str) -> int:
        """The id of a token; ValueError if the vocabulary does not have it as one."""
        id = self.tokenizer.id_of(token)
        if id is None:
            raise ValueError(f"the vocabulary has no token {token!r}")
        return id

    @cached_property
    def last_words(self) -> LastWords:
        """LAMBADA's scores, computed once for all figures."""
        assert self.lambada is not None
        return score_last_words(self.model, self.tokenizer, self.lambada)
