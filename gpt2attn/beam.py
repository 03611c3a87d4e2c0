"""Beam search: the likeliest continuations of one prompt, followed several at a time.

Ids and scores are those of transformers' `generate(num_beams=n)`. A beam's score is the sum of the
log-probabilities of its tokens, an end-of-text token's among them, divided by their number to the
power `length_penalty`: a higher one favours longer texts, and at 0 the plain sum decides. The
processors of `sampling` change log-probabilities here, not logits, as in transformers. Computed in
float64; of equal scores those of the better beam come first, then the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import KVCache
from .generation import (
    DEFAULT_MAX_NEW_TOKENS,
    END_OF_TEXT,
    LENGTH_LIMIT,
    MAX_NEW_TOKENS,
    Row,
    check_prompts,
)
from .model import GPT2, as_ids
from .sampling import NO_TOKEN, NO_TOKEN_LEFT, Sampling, largest, process

GREEDY = Sampling(temperature=0)
# Far more than anybody wants, and n ** 10 is a finite float for every length n.
MAX_LENGTH_PENALTY = 10


@dataclass(frozen=True)
class Beam:
    """One continuation that beam search found; `ids` are the new tokens only."""

    ids: list[int]  # without the end-of-text token that ended it
    score: float
    logprobs: list[float]  # of `ids`, by the softmax that no processor has changed
    finish_reason: str


@dataclass(frozen=True)
class _Path:
    """A continuation under way: its ids, their log-probabilities, and their sum as processed."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    row: int = 0  # where its last id was chosen


def beam_search(
    model: GPT2,
    ids: Tensor | Sequence[int],
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    *,
    n_beams: int,
    n_best: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    end_ids: Sequence[int] = (),
    overflow: str = "stop",
    sampling: Sampling = GREEDY,
) -> list[Beam]:
    """The `n_best` best continuations of one row of `ids`, best first.

    A continuation ends at one of `end_ids`, after `max_new_tokens`, or where the context is full;
    with `overflow` "error" a prompt that leaves too little room is refused.
    `early_stopping` says when the search ends, once `n_beams` have ended: True, at once; False, if
    the best open one, ended where it is, would not beat the worst of them; "never", if it would not
    at any length. `sampling` gives the processors, and must be greedy. Fewer than `n_best` come
    back where the processors allow no more.

    Raises ValueError before any compute for arguments that do not fit, and during the search if the
    logits hold NaN or the processors leave no token.
    """
    _check_options(n_beams, n_best, length_penalty, early_stopping, sampling)
    prompts = as_ids(ids, model.config.vocab_size).tolist()
    if len(prompts) != 1:
        raise ValueError(f"beam_search continues one row of ids, not {len(prompts)}.")
    (prompt,) = prompts
    if overflow == "slide":
        raise ValueError("Beam search keeps to one window: overflow must be stop or error.")
    check_prompts(model, [Row(prompt, sampling, seed=0)], max_new_tokens, overflow)
    sampling.check(model.config.vocab_size, max_new_tokens)
    n_steps = min(max_new_tokens, model.config.n_positions - len(prompt))
    reason = MAX_NEW_TOKENS if n_steps == max_new_tokens else LENGTH_LIMIT
    if n_steps == 0:
        return [Beam([], 0.0, [], reason)]
    end = frozenset(end_ids)
    ended: list[Beam] = []
    for n_new, candidates in enumerate(_steps(model, prompt, n_beams, n_steps, end, sampling), 1):
        ended += [
            _ended(path, path.total / n_new**length_penalty, end, reason)
            for path in candidates[:n_beams]
            if n_new == n_steps or path.ids[-1] in end
        ]
        ended = sorted(ended, key=lambda beam: -beam.score)[:n_beams]
        if len(ended) == n_beams:
            open_totals = [path.total for path in candidates if path.ids[-1] not in end]
            length = n_steps if early_stopping == "never" and length_penalty > 0 else n_new
            reachable = max(open_totals, default=-math.inf) / length**length_penalty
            if early_stopping is True or reachable <= ended[-1].score:
                break
    if not ended:
        raise ValueError(NO_TOKEN_LEFT)
    return ended[:n_best]


@torch.no_grad()
def _steps(
    model: GPT2,
    prompt: list[int],
    n_beams: int,
    n_steps: int,
    end: frozenset[int],
    sampling: Sampling,
) -> Iterator[list[_Path]]:
    """The best continuations by each number of new tokens, best first.

    They are enough for `n_beams` to be open even if as many as possible end, unless the processors
    leave fewer.
    """
    cache = KVCache.for_model(model, 1, len(prompt) + n_steps - 1)
    logits = model.last_logits([prompt], cache=cache).cpu()
    open_paths = [_Path()]
    for n_new in range(1, n_steps + 1):
        candidates = _continuations(
            logits, open_paths, (1 + len(end)) * n_beams, prompt, end, sampling
        )
        yield candidates
        parents = open_paths
        open_paths = [path for path in candidates if path.ids[-1] not in end][:n_beams]
        if n_new == n_steps or not open_paths:
            return
        cache = _follow(cache, len(prompt), parents, open_paths)
        logits = model.last_logits([path.ids[-1:] for path in open_paths], cache=cache).cpu()


def _continuations(
    logits: Tensor,
    paths: list[_Path],
    width: int,
    prompt: list[int],
    end: frozenset[int],
    sampling: Sampling,
) -> list[_Path]:
    """The `width` best paths that are one token longer, best first; impossible ones left out."""
    logprobs = logits.double().log_softmax(1)  # (B, V)
    processed = logprobs
    if sampling.has_processors:
        rows = [
            process(row, sampling, history=[*prompt, *path.ids], n_new=len(path.ids), end_ids=end)
            for row, path in zip(logprobs, paths, strict=True)
        ]
        processed = torch.stack(rows)
    totals = processed + torch.tensor([[path.total] for path in paths], dtype=torch.float64)
    totals, logprobs = totals.flatten(), logprobs.flatten()
    if totals.max().isnan():
        raise ValueError(NO_TOKEN)
    best = largest(totals, width)
    best = best[totals[best] > -torch.inf]
    continuations = []
    for place, total, logprob in zip(
        best.tolist(), totals[best].tolist(), logprobs[best].tolist(), strict=True
    ):
        row, id = divmod(place, logits.shape[1])
        path = paths[row]
        continuations.append(_Path((*path.ids, id), (*path.logprobs, logprob), total, row))
    return continuations


def _follow(
    cache: KVCache, prompt_length: int, parents: list[_Path], paths: list[_Path]
) -> KVCache:
    """The cache with a row for each of `paths`, all but the last id of which its parent was fed."""
    rows = [path.row for path in paths]
    if len(rows) != cache.batch_size:
        return cache.select(rows)
    shared = [_n_shared(parents[i].ids, parents[row].ids) for i, row in enumerate(rows) if row != i]
    if shared:
        # Beams have most of their text in common: only what follows it is copied.
        cache.reorder(rows, start=prompt_length + min(shared))
    return cache


def _n_shared(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=True))
    return next((i for i, (id, other) in pairs if id != other), len(ids))


def _ended(path: _Path, score: float, end: frozenset[int], reason: str) -> Beam:
    n_kept = len(path.ids)
    if path.ids[-1] in end:
        n_kept, reason = n_kept - 1, END_OF_TEXT
    return Beam(list(path.ids[:n_kept]), score, list(path.logprobs[:n_kept]), reason)


def _check_options(
    n_beams: int,
    n_best: int,
    length_penalty: float,
    early_stopping: bool | str,
    sampling: Sampling,
) -> None:
    for name, value, least in (("n_beams", n_beams, 2), ("n_best", n_best, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            hint = " (one beam is greedy search)" if name == "n_beams" else ""
            raise ValueError(f"{name} must be a whole number from {least} up{hint}, not {value!r}.")
    if n_best > n_beams:
        raise ValueError(
            f"n_best is {n_best}, more than n_beams, {n_beams}; lower the one or raise the other."
        )
    if (
        isinstance(length_penalty, bool)
        or not isinstance(length_penalty, int | float)
        or not abs(length_penalty) <= MAX_LENGTH_PENALTY
    ):
        raise ValueError(
            f"length_penalty must be a number from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY} "
            f"(0 is off), not {length_penalty!r}."
        )
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f'early_stopping must be True, False or "never", not {early_stopping!r}.')
    if sampling.temperature != 0:
        raise ValueError(
            f"Beam search draws nothing: temperature must be 0, not {sampling.temperature!r}."
        )
