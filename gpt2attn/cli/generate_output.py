"""How `generate` shows texts: as they grow, or as JSON, one object a line."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from .common import print_json, write
from .tables import token_label

if TYPE_CHECKING:
    from ..language_model import LanguageModel
    from ..text_generation import Generation, Step, TextStream


class Output:
    """Where results go; stdout is flushed after each piece, so that a reader sees it at once."""

    def __init__(self, lm: LanguageModel, model: str, *, as_json: bool) -> None:
        self._lm, self._model, self._as_json = lm, model, as_json

    def stream(self, prompt: str, stream: TextStream, *, echo: bool = True) -> Generation:
        """Run a stream to its end, showing every step, `prompt` first if `echo`."""
        if echo:
            self._write(prompt)
        try:
            for step in stream.steps():
                if self._as_json:
                    self._print(self._step(step))
                else:
                    self._write(step.text)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"The seed was {stream.seed}.") from None
        self._write("\n")
        assert stream.generation is not None
        if self._as_json:
            self.whole(prompt, stream.generation)
        return stream.generation

    def whole(self, prompt: str, result: Generation, number: str = "") -> None:
        """A result in one piece, under the heading `number`."""
        if self._as_json:
            fields = result_fields(self._lm, result)
            self._print({"model": self._model, "prompt": prompt, **fields})
        else:
            self._write(f"--- {number}\n{prompt}{result.text}\n")

    def _step(self, step: Step) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": step.id,
            "label": None if step.id is None else self._lm.tokenizer.label(step.id),
            "text": step.text,
            "logprob": step.logprob,
        }
        if step.top_logprobs:
            fields["top_logprobs"] = _top(self._lm, step.top_logprobs)
        return fields

    def _write(self, piece: str) -> None:
        if not self._as_json:
            write(piece)

    def _print(self, value: Any) -> None:
        print_json(value)
        sys.stdout.flush()


def result_fields(lm: LanguageModel, result: Generation) -> dict[str, Any]:
    """A result as JSON holds it; the place of its attention is the file that --attention names."""
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    del fields["attention"]
    if result.top_logprobs is None:
        del fields["top_logprobs"]
    else:
        fields["top_logprobs"] = [_top(lm, top) for top in result.top_logprobs]
    return fields


def summary(result: Generation, seconds: float) -> str:
    """One line about a result for the person at the terminal."""
    origin = f"score {result.score:.4f}" if result.seed is None else f"seed {result.seed}"
    return (
        f"{len(result.prompt_ids)} + {len(result.ids)} tokens, "
        f"{len(result.ids) / seconds:.1f} tokens/s, {origin}, ended by: {result.finish_reason}"
    )


def _top(lm: LanguageModel, pairs: list[tuple[int, float]]) -> list[dict[str, Any]]:
    """The likeliest tokens of one step; an impossible one has no log-probability in JSON."""
    return [
        {
            "id": id,
            "label": token_label(lm.tokenizer, id),
            "logprob": logprob if logprob > float("-inf") else None,
        }
        for id, logprob in pairs
    ]
