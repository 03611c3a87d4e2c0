"""Generation: one prefill over the prompt, then one token per step from the cache.

`decode` advances any number of rows at once; `generate` is its plainest use, an iterator of ids for
one row. A row is the state of one text: its prompt, what was chosen so far, and why it ended. Rows
of unequal length are padded on the left inside, which nobody outside can see.

What becomes of a text that needs more than the model's n_positions is `overflow`:

- "error": prompts that leave no room for max_new_tokens are refused before any compute.
- "stop": the text ends where prompt and new tokens fill the context, with the reason LENGTH_LIMIT.
- "slide": the model sees a window of the text. A new window begins when the old one is full: it
  holds the last half of the context (rounded up) and is computed afresh from position 0, as keys
  and values are made with positions, so that cached ones would be wrong after the shift. Of a
  prompt longer than the context the last n_positions tokens are the first window. The rules of
  `sampling` read the whole text all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cache import KVCache
from .lookup import Lookup
from .model import GPT2, Observer, as_ids
from .sampling import (
    Sampling,
    as_float64,
    choose,
    generator_for,
    largest,
    log_total,
    new_seed,
)

DEFAULT_MAX_NEW_TOKENS = 60

END_OF_TEXT = "end of text"
MAX_NEW_TOKENS = "max new tokens"
LENGTH_LIMIT = "length limit"
STOP_STRING = "stop string"

OVERFLOWS = ("error", "stop", "slide")


@dataclass(eq=False)
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
    n_top: int = 0  # how many of the likeliest tokens `top` keeps for each of `ids`
    # Their ids and log-probabilities, likeliest first; of equal ones the lower id.
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    start: int = 0  # of its window, counted in tokens of the text; above 0 only where it slides
    column: int = 0  # where its window begins in what observers are given, behind its padding

    def __post_init__(self) -> None:
        self.generator = generator_for(self.seed)

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def last_id(self) -> int:
        return self.ids[-1] if self.ids else self.prompt_ids[-1]

    @property
    def window(self) -> list[int]:
        """The tokens that decide on the next one."""
        return [*self.prompt_ids, *self.ids][self.start :]

    @property
    def fed_ids(self) -> list[int]:
        """The tokens of the window that the model has been given.

        The token chosen last is one of them only if the next choice was to end the text.
        """
        fed_all = not self.ids or self.finish_reason == END_OF_TEXT
        return self.window if fed_all else self.window[:-1]


def generate(
    model: GPT2,
    ids: Tensor | Sequence[int],
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    *,
    seed: int | None = None,
    stop_id: int | None = None,
    overflow: str = "stop",
    use_cache: bool = True,
    observe: Observer | None = None,
    lookup: bool = False,
    **sampling: Any,
) -> Iterator[int]:
    """Yield the ids that follow one row of `ids`, each as soon as it is known.

    Ends after `max_new_tokens`, at `stop_id` (not yielded), or when prompt and new tokens fill the
    model's n_positions, unless `overflow` says otherwise: see above. `sampling` are the arguments
    of `Sampling`: temperature (0.8; 0 is greedy), top_k (50), top_p, repetition_penalty and others;
    `seed` None draws one. `use_cache=False` recomputes the whole window for every token, to compare
    with; `lookup` is that of `decode`. Raises ValueError before any compute for an input that does
    not fit.
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
        overflow=overflow,
        use_cache=use_cache,
        observe=observe,
        lookup=lookup,
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
    overflow: str = "stop",
    use_cache: bool = True,
    cache: KVCache | None = None,
    observe: Observer | None = None,
    lookup: bool = False,
) -> Iterator[None]:
    """Advance all unfinished `rows` by one token per iteration, in place, until all have finished.

    `lookup`, for one row and the compiled step of kernels "auto", guesses tokens where the text
    repeats itself and checks several in one pass; the ids are those of plain decoding. `cache`,
    for one row, holds the first tokens of its window, all but one or more, and will hold
    what follows; without it a new one is made. Raises ValueError at once, before any compute, for
    an empty or too long prompt.
    """
    check_prompts(model, rows, max_new_tokens, overflow)
    if cache is not None and (len(rows) != 1 or cache.length >= len(rows[0].window)):
        raise ValueError(
            "A cache goes with one row, and holds less than its window: at least the last token is "
            "still to be fed."
        )
    for row in rows:
        _finish_if_full(model, row, max_new_tokens, overflow)
        if overflow == "slide" and len(row.window) > model.config.n_positions:
            row.start = row.length - model.config.n_positions
            if cache is not None:
                cache.truncate(0)
    columns = n_columns(model, rows, max_new_tokens, overflow, observed=observe is not None)
    kind = _Batch
    if lookup:
        _check_lookup(model, rows, overflow, plain=use_cache and observe is None)
        kind = _GuessedBatch
    batch = kind(model, rows, columns, cache, use_cache, observe)
    return _steps(batch, max_new_tokens, frozenset(stop_ids), overflow)


def check_prompts(
    model: GPT2, rows: Sequence[Row], max_new_tokens: int, overflow: str = "stop"
) -> None:
    """Raise ValueError for what cannot be continued, before any compute."""
    if (
        isinstance(max_new_tokens, bool)
        or not isinstance(max_new_tokens, int)
        or max_new_tokens < 0
    ):
        raise ValueError(
            f"max_new_tokens must be a whole number from 0 up, not {max_new_tokens!r}."
        )
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(OVERFLOWS)}, not {overflow!r}.")
    limit = model.config.n_positions
    for number, row in enumerate(rows):
        which = f"Prompt {number}" if len(rows) > 1 else "The prompt"
        if not row.prompt_ids:
            raise ValueError(f"{which} is empty: give at least one token to continue.")
        as_ids(row.prompt_ids, model.config.vocab_size)
        row.sampling.check(model.config.vocab_size, max_new_tokens)
        n_needed = len(row.prompt_ids) + (max_new_tokens if overflow == "error" else 0)
        if n_needed > limit and overflow != "slide":
            remedy = "shorten it or let it slide (overflow)"
            if len(row.prompt_ids) <= limit:
                remedy = f"ask for at most {limit - len(row.prompt_ids)}, or let it stop or slide"
            raise ValueError(
                f"{which} has {len(row.prompt_ids)} tokens (and {max_new_tokens} new ones are "
                f"asked for), but this model has {limit} positions; {remedy}."
            )


def _check_lookup(model: GPT2, rows: Sequence[Row], overflow: str, *, plain: bool) -> None:
    # Without the compiled step a token's logits change in the last bits with the number of tokens
    # fed at once, so that a near tie could be decided otherwise.
    if not getattr(model.compiled, "takes_guesses", False):
        raise ValueError(
            'Lookup needs the compiled step on the CPU: kernels="auto" (--kernels auto), with '
            "numba installed."
        )
    if len(rows) != 1 or overflow == "slide" or not plain:
        raise ValueError(
            "Lookup goes with one text at a time, from the cache, unobserved, and not sliding."
        )


def n_columns(
    model: GPT2, rows: Sequence[Row], max_new_tokens: int, overflow: str, *, observed: bool
) -> int:
    """The most columns, padding included, that the rows come to in a cache and for observers."""
    limit = model.config.n_positions
    width = max(min(len(row.window), limit) for row in rows)
    # The last token chosen is never fed, so it needs no room.
    if overflow != "slide":
        n_steps = max(min(max_new_tokens, limit - row.length) for row in rows)
        return max(width + n_steps - 1, 1)
    # Where windows slide one by one there are some more columns than a window has, so that those
    # before all windows need not be cleared at every step.
    most = limit if len(rows) == 1 else 2 * limit if observed else limit + limit // 4
    return max(min(width + max_new_tokens - 1, most), 1)


def _steps(
    batch: _Batch, max_new_tokens: int, stop_ids: frozenset[int], overflow: str
) -> Iterator[None]:
    while any(row.finish_reason is None for row in batch.rows):
        logits = batch.next_logits()
        for row, scores in zip(batch.rows, logits, strict=True):
            if row.finish_reason is None:
                _advance(row, scores, stop_ids)
                _finish_if_full(batch.model, row, max_new_tokens, overflow)
        yield


class _Batch:
    """The rows as the model is given them: padded on the left, over one cache.

    A finished row goes on as padding until half of them have finished, or a window is computed
    afresh. An observer is given all rows all the time.
    """

    def __init__(
        self,
        model: GPT2,
        rows: Sequence[Row],
        columns: int,
        cache: KVCache | None,
        use_cache: bool,
        observe: Observer | None,
    ) -> None:
        self.model, self.rows = model, list(rows)
        self._columns, self._observe = columns, observe
        self._cache, self._use_cache = cache, use_cache
        self._mask: Tensor | None = None  # (B, columns fed): 1 for a token, 0 for padding

    def next_logits(self) -> Tensor:
        """(B, V) logits after the newest token of each of `rows`, on the CPU."""
        n_alive = sum(row.finish_reason is None for row in self.rows)
        if self._observe is None and 2 * n_alive <= len(self.rows):
            self._drop_finished()
        slid = [number for number, row in enumerate(self.rows) if self._slides(row)]
        all_afresh = len(slid) == n_alive or (slid and self._observe is not None)
        if self._mask is None or not self._use_cache or all_afresh:
            return self._feed_windows()
        if slid:
            self._renew(slid)
        assert self._cache is not None
        if self._cache.length == self._cache.max_len:
            self._close_up()
        goes_on = torch.tensor([[int(row.finish_reason is None)] for row in self.rows])
        self._mask = torch.cat([self._mask, goes_on], dim=1)
        return self._last_logits(torch.tensor([[row.last_id] for row in self.rows]))

    def _slides(self, row: Row) -> bool:
        """Whether the window of `row` was full, so that it begins later from now on."""
        limit = self.model.config.n_positions
        if row.finish_reason is not None or row.length - row.start <= limit:
            return False
        row.start = row.length - (limit + 1) // 2
        return True

    def _feed_windows(self) -> Tensor:
        """Logits after all of every window, computed from position 0 on."""
        if self._observe is None:
            self.rows = [row for row in self.rows if row.finish_reason is None]
        windows = [row.window if row.finish_reason is None else row.fed_ids for row in self.rows]
        n_held = self._set_up_cache()
        ids, self._mask = left_padded(windows)
        for row, window in zip(self.rows, windows, strict=True):
            row.column = ids.shape[1] - len(window)
        return self._last_logits(ids[:, n_held:])

    def _set_up_cache(self) -> int:
        """Make the cache ready for whole windows; how many of their tokens it holds already."""
        if not self._use_cache:
            return 0
        if self._mask is None and self._cache is not None:
            return self._cache.length  # the caller's
        if self._cache is not None and len(self.rows) == self._cache.batch_size == 1:
            self._cache.truncate(0)
        else:
            self._cache = KVCache.for_model(self.model, len(self.rows), self._columns)
        return 0

    def _drop_finished(self) -> None:
        alive = [n for n, row in enumerate(self.rows) if row.finish_reason is None]
        self.rows = [self.rows[number] for number in alive]
        if self._mask is not None:
            self._mask = self._mask[alive]
        if self._mask is not None and self._cache is not None:
            self._cache = self._cache.select(alive)

    @torch.no_grad()
    def _renew(self, numbers: list[int]) -> None:
        """Compute the windows of some rows afresh, all but the newest token, into the cache."""
        assert self._cache is not None
        assert self._mask is not None
        windows = torch.tensor([self.rows[number].window[:-1] for number in numbers])
        cache, n_new = self._cache, windows.shape[1]
        own = KVCache.for_model(self.model, len(numbers), max(n_new, 1))
        if n_new:
            self.model.hidden(windows, cache=own)
        columns = slice(cache.length - n_new, cache.length)
        cache.keys[:, numbers, :, columns] = own.keys[:, :, :, :n_new]
        cache.values[:, numbers, :, columns] = own.values[:, :, :, :n_new]
        self._mask[numbers] = 0
        self._mask[numbers, columns] = 1

    def _close_up(self) -> None:
        """Make room in the cache by dropping the columns before all windows.

        A key's position is that of its token in the window, so it may stand in any column.
        """
        assert self._cache is not None
        assert self._mask is not None
        cache = self._cache
        alive = torch.tensor([row.finish_reason is None for row in self.rows])
        width = int(self._mask[alive].sum(dim=1).max())
        for layer in [*cache.keys, *cache.values]:
            layer[:, :, :width] = layer[:, :, cache.length - width : cache.length].clone()
        cache.truncate(width)
        self._mask = self._mask[:, self._mask.shape[1] - width :]
        # Of a finished row nothing may be left, and a row of padding alone is refused.
        self._mask[~alive & ~self._mask.any(dim=1), -1] = 1

    @torch.no_grad()
    def _last_logits(self, ids: Tensor) -> Tensor:
        """(B, V) logits after the last of `ids`, on the CPU."""
        assert self._mask is not None
        needless = bool(self._mask.all()) and not (self._cache is not None and self._cache.padded)
        mask = None if needless else self._mask
        logits = self.model.last_logits(
            ids, cache=self._cache, attention_mask=mask, observe=self._observe
        )
        return logits.cpu()


class _GuessedBatch(_Batch):
    """One row, of which guessed tokens are fed with the newest one.

    The logits after a guess count if the row chooses that very token.
    """

    _logits: Tensor | None = None  # (1 + guessed, V), after the newest token and each guessed one
    _guess: Sequence[int] = ()
    _n_right = 0

    def next_logits(self) -> Tensor:
        (row,) = self.rows
        if self._logits is None:
            self._lookup = Lookup(row.window)
            self._logits = super().next_logits()
            return self._logits
        self._lookup.append(row.last_id)
        if self._n_right < len(self._guess) and row.last_id == self._guess[self._n_right]:
            self._n_right += 1
        else:
            self._feed(row)
        return self._logits[self._n_right : self._n_right + 1]

    @torch.no_grad()
    def _feed(self, row: Row) -> None:
        assert self._cache is not None
        self._lookup.learn(len(self._guess), self._n_right)
        self._cache.truncate(row.length - row.start - 1)
        room = self._cache.max_len - self._cache.length - 1
        self._guess, self._n_right = self._lookup.guess(room), 0
        x = self.model.hidden([[row.last_id, *self._guess]], cache=self._cache)
        self._logits = self.model.unembed(x[0], decoding=True)


def _advance(row: Row, logits: Tensor, stop_ids: frozenset[int]) -> None:
    logits = as_float64(logits)  # once for all that passes over them
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
    total = log_total(logits)
    row.ids.append(id)
    row.logprobs.append(float(logits[id]) - total)
    if row.n_top:
        likeliest = largest(logits, row.n_top)
        logprobs = (logits[likeliest] - total).tolist()
        row.top.append(list(zip(likeliest.tolist(), logprobs, strict=True)))


def _finish_if_full(model: GPT2, row: Row, max_new_tokens: int, overflow: str) -> None:
    if len(row.ids) >= max_new_tokens:
        row.finish_reason = MAX_NEW_TOKENS
    elif overflow != "slide" and row.length >= model.config.n_positions:
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

    def __init__(self, stops: str | Sequence[str] | None = ()) -> None:
        stops = (stops,) if isinstance(stops, str) else stops or ()
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
