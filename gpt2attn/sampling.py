"""From logits to the next token: pure functions over one row of logits, and one that draws.

Everything is computed in float64 on the CPU: for one row of 50,257 numbers that costs little, it
makes the same seed give the same text on every device, and no rounding moves a token over a cut.

Two kinds of rules, in the order and with the names of transformers' `generate`:

1. processors, which greedy and beam search obey too: logit_bias, repetition_penalty,
   no_repeat_ngram, ban_words and ban, min_new_tokens. They read `history`, the row's prompt and new
   ids so far.
2. filters, for draws only: temperature, top_k, top_p, min_p, typical_p.

A token at minus infinity is impossible and stays so under every rule; a row needs one that is
possible. Ties go to the lowest id: in a greedy choice and at the edge of top_k and top_p.
Temperature 0 is greedy.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor

DEFAULT_TEMPERATURE = 0.8
DEFAULT_TOP_K = 50

NO_TOKEN = (
    "The logits allow no token: they hold NaN or plus infinity, or nothing above minus infinity."
)
NO_TOKEN_LEFT = (
    "The rules leave no token to choose: ban less, or lower no_repeat_ngram_size or min_new_tokens."
)


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token; raises ValueError, naming the argument, outside its range."""

    temperature: float = DEFAULT_TEMPERATURE  # 0: greedy
    top_k: int | None = DEFAULT_TOP_K  # None or 0: off
    top_p: float | None = None  # None or 1: off
    _: KW_ONLY
    min_p: float | None = None  # None or 0: off
    typical_p: float | None = None  # None or 1: off
    repetition_penalty: float = 1.0  # 1: off
    no_repeat_ngram_size: int = 0  # 0: off
    min_new_tokens: int = 0
    banned_ids: Sequence[int] = ()
    banned_words: Sequence[Sequence[int]] = ()  # as token ids; a space before a word is another one
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # kept as pairs

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be a number from 0 up (0 is greedy), not {self.temperature!r}."
            )
        if self.top_k is not None and not _is_whole(self.top_k):
            raise ValueError(
                f"top_k must be a whole number from 0 up (0 is off), not {self.top_k!r}."
            )
        for name in ("top_p", "typical_p"):
            p = getattr(self, name)
            if p is not None and (not _is_number(p) or not 0 < p <= 1):
                raise ValueError(f"{name} must be above 0 and at most 1 (1 is off), not {p!r}.")
        if self.min_p is not None and (not _is_number(self.min_p) or not 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must be from 0 to 1 (0 is off), not {self.min_p!r}.")
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 0 < penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be a number above 0 (1 is off), not {penalty!r}."
            )
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            if not _is_whole(getattr(self, name)):
                raise ValueError(
                    f"{name} must be a whole number from 0 up (0 is off), "
                    f"not {getattr(self, name)!r}."
                )
        # Held as tuples, so that a later change to the caller's list changes nothing here.
        for name, as_tuple in (
            ("banned_ids", _ids),
            ("banned_words", _words),
            ("logit_bias", _biases),
        ):
            object.__setattr__(self, name, as_tuple(name, getattr(self, name)))

    @cached_property
    def has_processors(self) -> bool:
        """Whether any rule changes logits before the choice; if not, a greedy one is the argmax."""
        return bool(
            self.needs_history
            or self.min_new_tokens
            or self.banned_ids
            or self.banned_words
            or self.logit_bias
        )

    @cached_property
    def needs_history(self) -> bool:
        """Whether the choice depends on earlier tokens of the row."""
        return bool(
            self.repetition_penalty != 1
            or self.no_repeat_ngram_size
            or any(len(word) > 1 for word in self.banned_words)
        )

    @cached_property
    def _largest_id(self) -> int:
        biased = dict(self.logit_bias)
        return max((*self.banned_ids, *biased, *chain(*self.banned_words)), default=-1)

    def check(self, vocab_size: int, max_new_tokens: int) -> None:
        """Raise ValueError for an id outside the vocabulary or a minimum above the maximum."""
        if self._largest_id >= vocab_size:
            raise ValueError(
                f"Token id {self._largest_id} is banned or biased, but is outside the vocabulary: "
                f"ids run from 0 to {vocab_size - 1}."
            )
        if self.min_new_tokens > max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, "
                f"{max_new_tokens}; lower the one or raise the other."
            )


def probabilities(
    logits: Tensor,
    sampling: Sampling,
    *,
    history: Sequence[int] = (),
    n_new: int = 0,
    end_ids: Iterable[int] = (),
) -> Tensor:
    """(V,) float64 probabilities of the next token from (V,) logits; greedy gives one 1.

    `history` holds the ids of the row so far, prompt and new ones, of which `n_new` are new;
    `end_ids` are those that min_new_tokens holds back. Raises ValueError if no token is possible,
    a logit is NaN or plus infinity, or a rule names an id that the row does not have.
    """
    row = _scores(logits, sampling, history, n_new, end_ids)
    if sampling.temperature == 0:
        return torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0)
    ids, chances = _candidates(row, sampling)
    return chances if ids is None else torch.zeros_like(row).index_copy_(0, ids, chances)


def _candidates(row: Tensor, sampling: Sampling) -> tuple[Tensor | None, Tensor]:
    """The ids that top_k leaves, in their order (None: all), and their probabilities."""
    ids = None
    if sampling.top_k and sampling.top_k < len(row):
        ids = largest(row, sampling.top_k)  # the rules below see these alone: 50, not 50,257
    few = row if ids is None else row[ids]
    # Shifting by the maximum first keeps a tiny temperature finite.
    few = (few - few.max()) / sampling.temperature
    few = typical_p(min_p(top_p(few, sampling.top_p), sampling.min_p), sampling.typical_p)
    chances = few.softmax(0)
    if ids is None:
        return None, chances
    ids, order = ids.sort()
    return ids, chances[order]


def process(
    logits: Tensor,
    sampling: Sampling,
    *,
    history: Sequence[int] = (),
    n_new: int = 0,
    end_ids: Iterable[int] = (),
) -> Tensor:
    """Logits (V,) after the processors of `sampling`; arguments as in `probabilities`."""
    sampling.check(len(logits), max_new_tokens=max(sampling.min_new_tokens, n_new))
    logits = logit_bias(logits, cast("tuple[tuple[int, float], ...]", sampling.logit_bias))
    logits = repetition_penalty(logits, history, sampling.repetition_penalty)
    logits = no_repeat_ngram(logits, history, sampling.no_repeat_ngram_size)
    logits = ban(ban_words(logits, history, sampling.banned_words), sampling.banned_ids)
    return min_new_tokens(logits, n_new, sampling.min_new_tokens, end_ids)


def logit_bias(logits: Tensor, biases: Sequence[tuple[int, float]]) -> Tensor:
    """Logits (V,) with each bias added to its id's; a bias of minus infinity bans."""
    if not biases:
        return logits
    ids, amounts = zip(*biases, strict=True)
    return logits.index_add(0, torch.tensor(ids), torch.tensor(amounts, dtype=logits.dtype))


def repetition_penalty(logits: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    """Logits (V,) with those of ids in `history` made smaller: positive ones divided by `penalty`,
    negative ones multiplied (Keskar et al. 2019, "CTRL").

    Each id counts once, however often it came; below 1 the penalty favours repetition.
    """
    if penalty == 1 or not len(history):
        return logits
    seen = torch.tensor(sorted(set(history)))
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values < 0, values * penalty, values / penalty))


def no_repeat_ngram(logits: Tensor, history: Sequence[int], size: int) -> Tensor:
    """Logits (V,) without the ids that would repeat `size` ids of `history` in a row; 0 is off."""
    if not size:
        return logits
    history = list(history)
    prefix = history[len(history) + 1 - size :]
    windows = range(len(history) + 1 - size)  # none while there are fewer than `size` ids
    return ban(
        logits,
        [
            history[start + size - 1]
            for start in windows
            if history[start : start + size - 1] == prefix
        ],
    )


def ban_words(logits: Tensor, history: Sequence[int], words: Iterable[Sequence[int]]) -> Tensor:
    """Logits (V,) without the ids that would complete a word, a row of ids, begun in `history`.

    Unlike transformers, which drops such a ban, end-of-text can be a banned word of one id.
    """
    last_ids = []
    for *first, last in words:
        start = len(history) - len(first)
        if start >= 0 and list(history[start:]) == first:
            last_ids.append(last)
    return ban(logits, last_ids)


def min_new_tokens(logits: Tensor, n_new: int, minimum: int, end_ids: Iterable[int]) -> Tensor:
    """Logits (V,) without end-of-text while fewer than `minimum` tokens are new."""
    if n_new >= minimum:
        return logits
    return ban(logits, [id for id in end_ids if 0 <= id < len(logits)])


def ban(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Logits (V,) with those of `ids` at minus infinity."""
    return logits.index_fill(0, torch.tensor(ids), -torch.inf) if len(ids) else logits


def top_k(logits: Tensor, k: int | None) -> Tensor:
    """Logits (V,) with all but the k largest at minus infinity; of ties the lowest ids stay.

    None, 0 and k of at least the vocabulary keep all.
    """
    return logits if not k or k >= len(logits) else _only(logits, largest(logits, k))


def top_p(logits: Tensor, p: float | None) -> Tensor:
    """Logits (V,) with all but the smallest most likely set that reaches mass p at minus infinity.

    The most likely token always stays; of ties the lowest ids. None and 1 keep all.
    """
    if p is None or p >= 1:
        return logits
    mass = logits.softmax(0)
    # All tokens below (1 - p) / V hold less than 1 - p together, so the set never needs them, and
    # the rest is quickly sorted. Half of it, as rounding may put all of them below the whole.
    likely = (mass >= 0.5 * (1 - p) / len(mass)).nonzero().squeeze(1)
    order = likely[logits[likely].argsort(descending=True, stable=True)]
    mass_before = mass[order].cumsum(0).roll(1)
    mass_before[0] = 0.0
    return _only(logits, order[mass_before < p])


def min_p(logits: Tensor, p: float | None) -> Tensor:
    """Logits (V,) with those less likely than p times the most likely at minus infinity.

    Equally likely tokens share their fate. None and 0 keep all, 1 the most likely and its ties.
    """
    return logits if not p else logits.masked_fill((logits - logits.max()).exp() < p, -torch.inf)


def typical_p(logits: Tensor, p: float | None) -> Tensor:
    """Logits (V,) with all but the most typical set that reaches mass p at minus infinity: those
    whose surprise is nearest to its mean, the entropy (Meister et al. 2022).

    As in transformers, tokens as typical as the last one needed all stay. None and 1 keep all.
    """
    if p is None or p >= 1:
        return logits
    logprobs = logits.log_softmax(0)
    mass = logprobs.exp()
    entropy = -(mass * logprobs).nansum()  # an impossible token's 0 * -inf is NaN
    distance = (entropy + logprobs).abs()
    # Sorting a whole vocabulary takes longer than all the rest. Those that top_p could need reach p
    # too, so the distance at which they do bounds the one looked for, and few are within it.
    bound = _distance_of_mass(distance, mass, mass >= 0.5 * (1 - p) / len(mass), p)
    return logits.masked_fill(
        distance > _distance_of_mass(distance, mass, distance <= bound, p), -torch.inf
    )


def _distance_of_mass(distance: Tensor, mass: Tensor, among: Tensor, p: float) -> Tensor:
    """The distance within which the tokens of `among`, (V,) bool, have mass p."""
    among = among.nonzero().squeeze(1)
    nearest, order = distance[among].sort()
    n_before = int((mass[among][order].cumsum(0) < p).sum())
    return nearest[min(n_before, len(among) - 1)]


def largest(values: Tensor, k: int) -> Tensor:
    """The places of the k largest of (N,) values, largest first; of ties the lowest places.

    k is at least 1, and no value a NaN.
    """
    row = as_float64(values).numpy()
    k = min(k, len(row))
    # The k-th largest of the maxima of parts bounds what is looked for: k values are at least that,
    # and so few more that sorting them costs nothing. torch's topk takes five times as long.
    width = max(len(row) // (4 * k), 1)
    maxima = row[: len(row) // width * width].reshape(-1, width).max(axis=1)
    places = np.flatnonzero(row >= np.partition(maxima, -k)[-k])
    places = places[np.argsort(-row[places], kind="stable")[:k]]
    return torch.from_numpy(places).to(values.device)


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """A token id drawn from (V,) probabilities.

    One uniform number and the inverse of the cumulative sum: one number per token, whatever the
    distribution, so two ways of computing the same probabilities stay in step. An id of probability
    0 is never returned.
    """
    cumulative = probabilities.cumsum(0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, point, right=True))
    # Rounding can put the point on the total itself, one past the last possible token.
    return index if index < len(cumulative) else int(probabilities.nonzero()[-1])


def choose(
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
    *,
    history: Sequence[int] = (),
    n_new: int = 0,
    end_ids: Iterable[int] = (),
) -> int:
    """The next token id from (V,) logits; arguments as in `probabilities`.

    Greedy choices use up no random number.
    """
    row = _scores(logits, sampling, history, n_new, end_ids)
    if sampling.temperature == 0:
        return int(row.numpy().argmax())
    ids, chances = _candidates(row, sampling)
    place = draw(chances, generator)
    return place if ids is None else int(ids[place])


def log_total(logits: Tensor) -> float:
    """log(sum(exp(logits))) in float64: a logit less this is a log-probability."""
    row = as_float64(logits).numpy()
    largest_logit = row.max()
    return float(largest_logit + np.log(np.exp(row - largest_logit).sum()))


def as_float64(logits: Tensor) -> Tensor:
    """(V,) numbers as float64 on the CPU, themselves if they are.

    By NumPy, not torch, here and where else a whole row is passed over for each token: torch
    shares 50,257 numbers among its threads, which then spin for some milliseconds in wait of more,
    on the core that the next decode step needs.
    """
    row = logits.detach().cpu()
    row = row.float() if row.dtype in (torch.bfloat16, torch.float16) else row
    return torch.from_numpy(row.numpy().astype(np.float64, copy=False))


def new_seed() -> int:
    """A fresh seed that does not touch any global random generator."""
    return secrets.randbits(32)


def generator_for(seed: int) -> torch.Generator:
    """One row's own random generator; raises ValueError for a seed that is no whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, not {seed!r}.")
    return torch.Generator().manual_seed(seed % 2**64)


def _scores(
    logits: Tensor,
    sampling: Sampling,
    history: Sequence[int],
    n_new: int,
    end_ids: Iterable[int],
) -> Tensor:
    """(V,) float64 logits after the processors; raises ValueError if they allow no token."""
    if logits.dim() != 1 or not len(logits):
        raise ValueError(f"Sampling takes one row of logits, not the shape {tuple(logits.shape)}.")
    row = as_float64(logits)
    if not np.isfinite(row.numpy().max()):  # the maximum is NaN if any logit is
        raise ValueError(NO_TOKEN)
    if not sampling.has_processors:
        return row
    row = process(row, sampling, history=history, n_new=n_new, end_ids=end_ids)
    if not row.max().isfinite():
        raise ValueError(NO_TOKEN_LEFT)
    return row


def _only(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf).index_copy_(0, ids, logits[ids])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ValueError(f"{name} must be token ids, not {ids!r}.")
    ids = tuple(ids)
    for id in ids:
        if not _is_whole(id):
            raise ValueError(f"{name} must be token ids, whole numbers from 0 up, not {id!r}.")
    return ids


def _words(name: str, words: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    if isinstance(words, str) or not isinstance(words, Iterable):
        raise ValueError(f"{name} must be rows of token ids, not {words!r}.")
    rows = tuple(_ids(name, word) for word in words)
    if () in rows:
        raise ValueError(f"{name} must be rows of at least one token id, not an empty one.")
    return rows


def _biases(
    name: str, biases: Mapping[int, float] | Sequence[tuple[int, float]]
) -> tuple[tuple[int, float], ...]:
    try:
        pairs = tuple(dict(biases).items())
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a bias for each token id, not {biases!r}.") from None
    for id, bias in pairs:
        if not _is_whole(id) or not _is_number(bias) or not bias < math.inf:
            raise ValueError(
                f"{name} must give token ids, whole numbers from 0 up, numbers below infinity, "
                f"not {id!r}: {bias!r}."
            )
    return pairs
