"""From logits to the next token: pure functions that give probabilities, and one that draws from them.

Everything is computed in float64 on the CPU: for one row of 50,257 numbers that costs little, it makes the
same seed give the same text on every device, and no rounding moves a token over a cut.
Conventions: temperature 0 is greedy; ties go to the lowest id; top_k of at least the vocabulary keeps all;
top_p keeps the smallest set of most likely tokens whose mass reaches p, never less than one.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_TEMPERATURE = 0.8
DEFAULT_TOP_K = 50


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Raises ValueError, naming the argument, for a value out of range."""

    temperature: float = DEFAULT_TEMPERATURE  # 0: greedy
    top_k: int | None = DEFAULT_TOP_K  # None or 0: off
    top_p: float | None = None  # None or 1: off

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0 up (0 is greedy), not {self.temperature!r}.")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0
        ):
            raise ValueError(f"top_k must be a whole number from 0 up (0 is off), not {self.top_k!r}.")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1 (1 is off), not {self.top_p!r}.")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """(V,) float64 probabilities of the next token from (V,) logits.

    Order, as in transformers: temperature, top_k, top_p. Raises ValueError if no token is possible or a
    logit is NaN.
    """
    row = logits.detach().to("cpu", torch.float64)
    if row.dim() != 1:
        raise ValueError(f"Sampling takes one row of logits, not the shape {tuple(row.shape)}.")
    best = row.max()  # NaN if any logit is NaN
    if not best.isfinite():
        raise ValueError("The logits allow no token: they hold NaN, or nothing above minus infinity.")
    if sampling.temperature == 0:
        return torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0)
    # Shifting by the maximum first keeps a tiny temperature finite.
    scaled = (row - best) / sampling.temperature
    return top_p(top_k(scaled, sampling.top_k), sampling.top_p).softmax(0)


def top_k(logits: Tensor, k: int | None) -> Tensor:
    """Logits (V,) with all but the k largest at minus infinity; of equal ones the lowest ids stay."""
    if not k or k >= len(logits):
        return logits
    smallest = logits.topk(k).values[-1]  # topk breaks ties as it likes, so only its bound is used
    keep = logits > smallest
    ties = (logits == smallest).nonzero().squeeze(1)
    keep[ties[: k - int(keep.sum())]] = True
    return logits.masked_fill(~keep, -torch.inf)


def top_p(logits: Tensor, p: float | None) -> Tensor:
    """Logits (V,) with all but the smallest most likely set of mass p at minus infinity."""
    if p is None or p >= 1:
        return logits
    possible = (logits > -torch.inf).nonzero().squeeze(1)  # a top_k before leaves little to sort
    order = possible[logits[possible].argsort(descending=True, stable=True)]
    mass_before = logits[order].softmax(0).cumsum(0).roll(1)
    mass_before[0] = 0.0  # the most likely token always stays
    return logits.index_fill(0, order[mass_before >= p], -torch.inf)


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """A token id from (V,) probabilities: one uniform number, and the inverse of the cumulative sum.

    One number per token, whatever the distribution, so two ways of computing the same probabilities stay in
    step. An id of probability 0 is never returned.
    """
    cumulative = probabilities.cumsum(0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, point, right=True))
    # Rounding can put the point on the total itself, one past the last possible token.
    return min(index, int(probabilities.nonzero()[-1]))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token id from (V,) logits; greedy choices use up no random number."""
    chances = probabilities(logits, sampling)
    return int(chances.argmax()) if sampling.temperature == 0 else draw(chances, generator)


def new_seed() -> int:
    """A fresh seed that does not touch any global random generator."""
    return secrets.randbits(32)


def generator_for(seed: int) -> torch.Generator:
    """A random generator of its own for one row; raises ValueError for a seed that is not a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, not {seed!r}.")
    return torch.Generator().manual_seed(seed % 2**64)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
