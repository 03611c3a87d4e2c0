"""How this package's decoding depends on the text: on its length, and with lookup on what it says.

Only the process that measures imports this.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..cache import KVCache
from ..generation import Row, decode
from ..model import GPT2
from ..sampling import Sampling

Ids = list[int]


def growth(
    model: GPT2, ids: Ids, positions: list[int], turns: int
) -> tuple[int, list[list[float]]]:
    """The cache's bytes of one position, and for each of `positions` the seconds of its token.

    `ids`, as many as the last of `positions`, fill the cache once; the positions take turns over
    it, so that all of them meet the same machine. A model of n_positions has `positions` from 1 to
    n_positions - 2.
    """
    cache = KVCache.for_model(model, 1, max(positions) + 1)
    model.hidden([ids], cache=cache)
    seconds: list[list[float]] = [[] for _ in positions]
    for _ in range(turns):
        for position, times in zip(positions, seconds, strict=True):
            cache.length = position - 1  # the tokens after it stay where they are
            row = Row(ids[:position], Sampling(temperature=0), seed=0)
            steps = decode(model, [row], 2, cache=cache)
            next(steps)  # sets up the text; the token after it is one in the midst of a text
            started = time.perf_counter()
            next(steps)
            times.append(time.perf_counter() - started)
    return cache.nbytes // cache.max_len, seconds


class CountingCache(KVCache):
    """A cache that counts the passes of the model over it."""

    n_passes = 0

    def advance(self, n_new: int) -> None:
        super().advance(n_new)
        self.n_passes += 1


@dataclass(frozen=True)
class LookupAnswer:
    """The same continuation plain and with lookup."""

    plain_s: float
    lookup_s: float
    n_passes: int  # with lookup, the prompt's among them
    n_same: int  # ids, before the first that differs


def compare_lookup(
    model: GPT2, ids: Ids, n_new: int, sampling: dict[str, Any], seed: int, *, plain_first: bool
) -> LookupAnswer:
    """Continue `ids` by `n_new` tokens without lookup and with it, in either order."""
    rows, seconds, passes = {}, {}, {}
    for lookup in (False, True) if plain_first else (True, False):
        row = Row(ids, Sampling(**sampling), seed)
        cache = CountingCache(model.config, 1, len(ids) + n_new - 1, dtype=model.dtype)
        started = time.perf_counter()
        for _ in decode(model, [row], n_new, cache=cache, lookup=lookup):
            pass
        seconds[lookup] = time.perf_counter() - started
        rows[lookup], passes[lookup] = row.ids, cache.n_passes
    pairs = enumerate(zip(rows[False], rows[True], strict=True))
    n_same = next((n for n, (a, b) in pairs if a != b), n_new)
    return LookupAnswer(seconds[False], seconds[True], passes[True], n_same)
