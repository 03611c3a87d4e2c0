"""Generation: one prefill over the prompt, then one token per step from the cache.

`decode` advances any number of rows at once; `generate` is its plainest use, an iterator of ids for
one row. A row is the state of one text: its prompt, what was chosen so far, and why it ended. Rows
of unequal length are padded on the left inside, which nobody outside can see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cache import KVCache
from .model import GPT2, Observer, as_ids
from .sampling import Sampling, choose, generator_for, new_seed

DEFAULT_MAX_NEW_TOKENS = 60

END_OF_TEXT = "end of text"
MAX_NEW_TOKENS = "max new tokens"
LENGTH_LIMIT = "length limit"
STOP_STRING = "stop string"


@dataclass
class Row:
    """One text while it is generated. Setting `finish_reason` ends it."""

    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    ids: list[int] = field(
        default_factory=list
    )  # new tokens only, an end-of-text token not among them
    logprobs: list[float] = field(default_factory=list)  # of `ids`, by the unfiltered softmax
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.generator = generator_for(self.seed)


def generate(
    model: GPT2,
    ids: Tensor | Sequence[int],
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    *,
    seed: int | None = None,
    stop_id: int | None = None,
    use_cache: bool = True,
    observe: Observer | None = None,
    **sampling: Any,
) -> Iterator[int]:
    """Yield the ids that follow one row of `ids`, each as soon as it is known.

    Ends after `max_new_tokens`, at `stop_id` (not yielded), or when prompt and new tokens fill the
    model's n_positions. `sampling` are the arguments of `Sampling`: temperature (0.8; 0 is greedy),
    top_k (50), top_p, repetition_penalty and others; `seed` None draws one. `use_cache=False`
    recomputes the whole text for every token, to compare with. Raises ValueError before any compute
    for an input that does not fit.
    """
    prompts = as_ids(ids, model.config.vocab_size).tolist()
    if len(prompts) != 1:
        raise ValueError(
            f"generate continues one row of ids, not {len(prompts)}; decode takes several."
        )
    row = Row(prompts[0], Sampling(**sampling), new_seed() if seed is None else seed)
    steps = decode(
        model,
        [row],
        max_new_tokens,
        stop_ids=() if stop_id is None else (stop_id,),
        use_cache=use_cache,
        observe=observe,
    )

    def new_ids() -> Iterator[int]:
        for _ in steps:
            if row.ids and row.finish_reason != END_OF_TEXT:
                yield row.ids[-1]

    return new_ids()


def decode(
    model: GPT2,
    rows: Sequence[Row],
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    *,
    stop_ids: Sequence[int] = (),
    use_cache: bool = True,
    observe: Observer | None = None,
) -> Iterator[None]:
    """Advance all unfinished `rows` by one token per iteration, in place, until all have finished.

    Raises ValueError at once, before any compute, for an empty or too long prompt.
    """
    check_prompts(model, rows, max_new_tokens)
    return _steps(model, rows, max_new_tokens, frozenset(stop_ids), use_cache, observe)


def check_prompts(model: GPT2, rows: Sequence[Row], max_new_tokens: int) -> None:
    """Raise ValueError for what cannot be continued, before any compute."""
    if (
        isinstance(max_new_tokens, bool)
        or not isinstance(max_new_tokens, int)
        or max_new_tokens < 0
    ):
        raise ValueError(
            f"max_new_tokens must be a whole number from 0 up, not {max_new_tokens!r}."
        )
    limit = model.config.n_positions
    for number, row in enumerate(rows):
        which = f"Prompt {number}" if len(rows) > 1 else "The prompt"
        if not row.prompt_ids:
            raise ValueError(f"{which} is empty: give at least one token to continue.")
        as_ids(row.prompt_ids, model.config.vocab_size)
        row.sampling.check(model.config.vocab_size, max_new_tokens)
        if len(row.prompt_ids) > limit:
            raise ValueError(
                f"{which} has {len(row.prompt_ids)} tokens (and {max_new_tokens} new ones are "
                f"asked for), but this model has {limit} positions; shorten it."
            )


def _steps(
    model: GPT2,
    rows: Sequence[Row],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    use_cache: bool,
    observe: Observer | None,
) -> Iterator[None]:
    for row in rows:
        _finish_if_full(model, row, max_new_tokens)
    width = max(len(row.prompt_ids) for row in rows)
    n_steps = max(
        min(max_new_tokens, model.config.n_positions - len(row.prompt_ids)) for row in rows
    )
    ids, mask = left_padded([row.prompt_ids for row in rows])
    cache = None
    if use_cache and n_steps:
        # The last token chosen is never fed, so it needs no room.
        cache = KVCache.for_model(model, len(rows), width + n_steps - 1)
    fed = 0
    while any(row.finish_reason is None for row in rows):
        logits = _last_logits(model, ids if cache is None else ids[:, fed:], cache, mask, observe)
        fed = ids.shape[1]
        alive = [row.finish_reason is None for row in rows]
        for row, scores in zip(rows, logits, strict=True):
            if row.finish_reason is None:
                _advance(model, row, scores, max_new_tokens, stop_ids)
        # A finished row goes on as padding until all have finished.
        ids = torch.cat(
            [ids, torch.tensor([[row.ids[-1] if row.ids else 0] for row in rows])], dim=1
        )
        mask = torch.cat([mask, torch.tensor([[int(is_alive)] for is_alive in alive])], dim=1)
        yield


@torch.no_grad()
def _last_logits(
    model: GPT2, ids: Tensor, cache: KVCache | None, mask: Tensor, observe: Observer | None
) -> Tensor:
    """(B, V) logits after the last of `ids`, on the CPU; only that position is unembedded."""
    padding = None if bool(mask.all()) else mask
    x = model.hidden(ids, cache=cache, attention_mask=padding, observe=observe)
    # (B, C), not (B, 1, C): a strided batch of matrices is another product, slower and rounded
    # differently.
    return model.unembed(x[:, -1]).cpu()


def _advance(
    model: GPT2, row: Row, logits: Tensor, max_new_tokens: int, stop_ids: frozenset[int]
) -> None:
    id = choose(
        logits,
        row.sampling,
        row.generator,
        history=[*row.prompt_ids, *row.ids] if row.sampling.needs_history else (),
        n_new=len(row.ids),
        end_ids=stop_ids,
    )
    if id in stop_ids:
        row.finish_reason = END_OF_TEXT
        return
    row.ids.append(id)
    row.logprobs.append(float(logits[id].double() - logits.double().logsumexp(0)))
    _finish_if_full(model, row, max_new_tokens)


def _finish_if_full(model: GPT2, row: Row, max_new_tokens: int) -> None:
    if len(row.ids) >= max_new_tokens:
        row.finish_reason = MAX_NEW_TOKENS
    elif len(row.prompt_ids) + len(row.ids) >= model.config.n_positions:
        row.finish_reason = LENGTH_LIMIT


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids (B, T) with zeros before the shorter rows, and the mask (B, T) that is 0 there."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


class StopStrings:
    """Cuts generated text before the first stop string, never letting a part of one out.

    `push` takes text as it comes and returns what is certain; once a stop string is complete,
    `found` is that string and all later text is dropped. Only generated text is looked at, not the
    prompt.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str):
            stops = (stops,)
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise ValueError("A stop string must be text of at least one character.")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if self.found is not None:
            return ""
        self._held += text
        matches = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if matches:
            cut, self.found = min(matches, key=lambda match: match[0])
        else:
            cut = self._first_possible_start()
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain

    def finish(self) -> str:
        """The text that was held back, now that no more comes."""
        return "" if self.found is not None else self._held

    def _first_possible_start(self) -> int:
        """Where a stop string may have begun without being complete; the end, if nowhere."""
        text = self._held
        longest = max(map(len, self._stops), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
