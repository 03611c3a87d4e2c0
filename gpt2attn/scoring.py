"""Scoring: the log-probability and the rank of every token of a text, and what follows from them.

A text longer than the context is scored in overlapping windows. A window is `context` tokens; each
next one starts `stride` tokens later and scores only what no earlier window has, so every token is
scored exactly once, with at least `context - stride` tokens before it. context 8, stride 3:

    token         0 1 2 3 4 5 6 7 8 9 . . . .
    window 0      - s s s s s s s                s: scored here, knowing all before it in its window
    window 1            . . . . . s s s          .: read as context only
    window 2                  . . . . . s s s    -: nothing before it, so it has no log-probability

These are the windows of the stride loop in Hugging Face's guide to perplexity. They follow too that
the last window is short, unless `full_last` moves it back to `context` tokens, and that with
`stride == context` the first token of each window has nothing before it and is left out, as is the
first token of the text. The last token of a window is predicted but need not be read, so `context`
may be one more than the model's positions. lm-eval's rolling windows (max_length L, one token of
context) are `context=L + 1, stride=L, full_last=True` with a prefix.

Nothing is put in front of a text unless `prefix_id` asks for it. It stands once, before the first
token, which then has a log-probability too; later windows do not repeat it. It counts as a token of
the first window, and is not itself scored.

Log-probabilities are natural logarithms, log-softmax in the logits' dtype but at least float32,
returned and summed as float64. Rank 1 is the model's first choice; equal logits share the better
rank. Texts and windows are computed in batches of like length, padded on the right, where causal
attention cannot see it. Logits are made for a bounded number of positions at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .model import GPT2, as_ids, check_finite
from .records import in_lists
from .tokenizer import Tokenizer

BATCH_TOKENS = 4096  # read in one forward pass
LOGITS_AT_ONCE = 2**24  # 64 MiB in float32: 333 positions of GPT-2's vocabulary
_LOGITS_IN_CACHE = 2**19  # 2 MiB, which a core's cache holds while they are read several times
# Texts whose windows are sorted by length together; more would only delay the first results.
_BATCHES_IN_POOL = 8

Ids = Tensor | Sequence[int]
# progress(n) hears of n more tokens that have been scored.
Progress = Callable[[int], object]


@dataclass(frozen=True, eq=False)
class Score:
    """What the model makes of each token of one text.

    `logprobs` (T,) is float64, NaN for a token that had nothing before it; `ranks` (T,) is int64
    from 1, and 0 for such a token. `n_bytes` counts the bytes of the scored tokens, where the
    vocabulary is known.
    """

    ids: list[int]  # without the prefix
    logprobs: Tensor
    ranks: Tensor
    context: int
    stride: int
    prefix_id: int | None = None
    n_bytes: int | None = None

    @property
    def n_scored(self) -> int:
        return int((self.ranks > 0).sum())

    @property
    def total(self) -> float:
        """The log-probability of all scored tokens together."""
        return float(self.logprobs[self.ranks > 0].sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of the scored tokens; NaN if there are none."""
        return perplexity(self.total, self.n_scored)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of the scored tokens; None where their bytes are not known."""
        return None if self.n_bytes is None else bits_per_byte(self.total, self.n_bytes)


class Continuation(NamedTuple):
    """How likely a continuation is after its context."""

    total: float  # log-probability of the whole continuation
    is_greedy: bool  # every token of it is the model's first choice
    logprobs: Tensor  # (T,) float64, of each of its tokens
    ranks: Tensor  # (T,) int64, from 1
    n_dropped: int  # tokens at the start of the context for which there was no room


@dataclass(frozen=True)
class LastWords:
    """LAMBADA: how well the last word, and the last token, of passages are predicted."""

    n_passages: int
    word_accuracy: float
    word_perplexity: float
    token_accuracy: float
    token_perplexity: float


class Window(NamedTuple):
    """Tokens [start, end - 1) are read, tokens [first, end) are scored."""

    start: int
    first: int
    end: int


class _Job(NamedTuple):
    ids: Tensor  # (T,)
    windows: list[Window]


def perplexity(total: float, n_tokens: int) -> float:
    """exp(-total / n_tokens): NaN for no tokens, infinity where a float cannot hold it."""
    if not n_tokens:
        return math.nan
    mean = -total / n_tokens
    return math.inf if mean > 709 else math.exp(mean)


def bits_per_byte(total: float, n_bytes: int) -> float:
    """The bits that `total` is worth for each byte; NaN for no bytes."""
    return -total / math.log(2) / n_bytes if n_bytes else math.nan


def score(
    model: GPT2,
    ids: Ids,
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix_id: int | None = None,
    full_last: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Score:
    """Score one text of any length; the module's docstring draws the windows.

    `context` defaults to the model's n_positions, `stride` to half of it. Memory is bounded by
    `batch_tokens`, the tokens read at once (one window at least), and by LOGITS_AT_ONCE. Raises
    ValueError before any compute for an id, a context or a stride that does not fit.
    """
    (result,) = score_many(
        model,
        [ids],
        context=context,
        stride=stride,
        prefix_id=prefix_id,
        full_last=full_last,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    return result


def score_many(
    model: GPT2,
    rows: Iterable[Ids],
    *,
    context: int | None = None,
    stride: int | None = None,
    prefix_id: int | None = None,
    full_last: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Iterator[Score]:
    """Score each text on its own, in order, computing those of like length together.

    `rows` may be endless: only a few batches of it are held. Options as in `score`.
    """
    config = model.config
    context, stride = _checked_windows(config.n_positions, context, stride)
    _check_batch_tokens(batch_tokens)
    prefix = torch.empty(0, dtype=torch.long)
    if prefix_id is not None:
        prefix = as_ids([prefix_id], config.vocab_size)[0]

    def jobs() -> Iterator[_Job]:
        for row in rows:
            ids = torch.cat([prefix, _row(row, config.vocab_size)])
            yield _Job(ids, list(windows(len(ids), context, stride, full_last=full_last)))

    def scores() -> Iterator[Score]:
        for job, logprobs, ranks in _run(model, jobs(), batch_tokens, progress):
            ids, logprobs, ranks = (x[len(prefix) :] for x in (job.ids, logprobs, ranks))
            yield Score(ids.tolist(), logprobs, ranks, context, stride, prefix_id)

    return scores()


def score_texts(
    model: GPT2,
    tokenizer: Tokenizer,
    texts: Iterable[str | Ids],
    *,
    bos: bool = False,
    special: bool = False,
    **options: Any,
) -> Iterator[Score]:
    """`score_many` of texts, or of ids already, with the bytes of their scored tokens.

    `bos` puts the vocabulary's end-of-text token in front of each text, which GPT-2 was trained to
    see there; `special` reads `<|endoftext|>` in a text as that token. Raises ValueError if the
    vocabulary has no such token.
    """
    rows = (
        tokenizer.encode(text, special=special) if isinstance(text, str) else text for text in texts
    )
    prefix_id = _end_of_text(tokenizer) if bos else None
    return (
        dataclasses.replace(
            result,
            n_bytes=sum(
                len(tokenizer.token_bytes(id))
                for id, rank in zip(result.ids, result.ranks.tolist(), strict=True)
                if rank
            ),
        )
        for result in score_many(model, rows, prefix_id=prefix_id, **options)
    )


def windows(
    n_tokens: int, context: int, stride: int, *, full_last: bool = False
) -> Iterator[Window]:
    """The windows of a text of `n_tokens`, a prefix among them; see the module's docstring."""
    start = end = 0
    while end < n_tokens:
        done, end = end, min(start + context, n_tokens)
        begin = max(0, end - context) if full_last else start
        first = max(done, begin + 1)
        if first < end:
            yield Window(begin, first, end)
        start += stride


def continuation_logprob(model: GPT2, context_ids: Ids, continuation_ids: Ids) -> Continuation:
    """How likely `continuation_ids` are after `context_ids`: sum, is it greedy, and each token.

    A context that does not fit loses tokens at its start, as in evaluation harnesses; `n_dropped`
    says how many. Raises ValueError if either is empty or the continuation alone does not fit.
    """
    (result,) = continuation_logprobs(model, [(context_ids, continuation_ids)])
    return result


def continuation_logprobs(
    model: GPT2,
    pairs: Iterable[tuple[Ids, Ids]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Iterator[Continuation]:
    """`continuation_logprob` of each pair, in order, computing those of like length together."""
    _check_batch_tokens(batch_tokens)

    def results() -> Iterator[Continuation]:
        jobs = (_continuation_job(model, *pair) for pair in pairs)
        for job, logprobs, ranks in _run(model, jobs, batch_tokens, progress):
            (window,) = job.windows
            logprobs, ranks = logprobs[window.first :], ranks[window.first :]
            is_greedy = bool((ranks == 1).all())
            yield Continuation(float(logprobs.sum()), is_greedy, logprobs, ranks, window.start)

    return results()


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Ids of a context and its continuation, split where lm-eval splits them.

    Blanks at the end of the context go to the continuation, both are encoded as one text, and the
    continuation is what comes after as many tokens as the context alone has. An empty context is
    the end-of-text token.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        return [_end_of_text(tokenizer)], tokenizer.encode(continuation)
    context_ids = tokenizer.encode(kept)
    return context_ids, tokenizer.encode(kept + continuation)[len(context_ids) :]


def wikitext_text(lines: Iterable[str]) -> str:
    r"""WikiText as Hugging Face's guide to perplexity joins it, from the lines of the raw file.

    Lines keep their newline, blank ones become empty, and "\n\n" goes between them. The 4,358 lines
    of WikiText-2's test file give 287,644 tokens.
    """
    return "\n\n".join(line if line.strip() else "" for line in lines)


def wikitext_words(lines: Iterable[str]) -> int:
    """Words as word-level models count WikiText: between blanks, and one for each line's end.

    WikiText-2's test file has 245,569.
    """
    return sum(len(line.split()) + 1 for line in lines)


def score_last_words(
    model: GPT2,
    tokenizer: Tokenizer,
    passages: Iterable[str],
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> LastWords:
    """LAMBADA over whole passages: the last word (lm-eval) and the last token (the GPT-2 paper).

    The last word is what follows the last space, predicted with that space; it counts as right if
    every token of it is the first choice. Perplexity is exp of the mean negative log-probability
    for each word, or for each last token. Raises ValueError for a passage of one word, or for none.
    """
    pairs = (encode_pair(tokenizer, *_last_word(passage)) for passage in passages)
    n_passages = n_words = n_tokens = 0
    words = tokens = 0.0
    for result in continuation_logprobs(model, pairs, batch_tokens=batch_tokens, progress=progress):
        n_passages += 1
        n_words += result.is_greedy
        n_tokens += int(result.ranks[-1]) == 1
        words += result.total
        tokens += float(result.logprobs[-1])
    if not n_passages:
        raise ValueError("There are no passages to score.")
    return LastWords(
        n_passages,
        n_words / n_passages,
        perplexity(words, n_passages),
        n_tokens / n_passages,
        perplexity(tokens, n_passages),
    )


def _last_word(passage: str) -> tuple[str, str]:
    before, space, word = passage.rstrip().rpartition(" ")
    if not before.strip():
        raise ValueError(
            f"A passage needs two words or more, the last to be predicted: {passage!r}."
        )
    return before, space + word


def _checked_windows(n_positions: int, context: int | None, stride: int | None) -> tuple[int, int]:
    context = n_positions if context is None else context
    if not _is_whole(context) or not 2 <= context <= n_positions + 1:
        raise ValueError(
            f"context must be a whole number of tokens from 2 to {n_positions + 1} (this model's "
            f"positions and the token that follows), not {context!r}."
        )
    stride = context // 2 if stride is None else stride
    if not _is_whole(stride) or not 1 <= stride <= context:
        raise ValueError(
            f"stride must be a whole number of tokens from 1 to the context, {context}, not "
            f"{stride!r}."
        )
    return context, stride


def _check_batch_tokens(batch_tokens: int) -> None:
    if not _is_whole(batch_tokens) or batch_tokens < 1:
        raise ValueError(f"batch_tokens must be a whole number from 1 up, not {batch_tokens!r}.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _end_of_text(tokenizer: Tokenizer) -> int:
    if tokenizer.end_of_text_id is None:
        raise ValueError(
            "This vocabulary has no <|endoftext|> to put in front of a text; give a prefix_id."
        )
    return tokenizer.end_of_text_id


def _row(ids: Ids, vocab_size: int) -> Tensor:
    """One text's ids (T,), checked; it may have none."""
    if len(ids) == 0:
        return torch.empty(0, dtype=torch.long)
    rows = as_ids(ids, vocab_size).cpu()
    if len(rows) != 1:
        raise ValueError(f"A text is one row of ids, not {len(rows)}; score_many takes several.")
    return rows[0]


def _continuation_job(model: GPT2, context_ids: Ids, continuation_ids: Ids) -> _Job:
    config = model.config
    context, continuation = (
        _row(ids, config.vocab_size) for ids in (context_ids, continuation_ids)
    )
    if not len(context) or not len(continuation):
        empty = "continuation" if len(context) else "context"
        raise ValueError(
            f"The {empty} is empty: give at least one token, such as the end-of-text token before "
            "a text that starts."
        )
    if len(continuation) > config.n_positions:
        raise ValueError(
            f"The continuation has {len(continuation)} tokens, but this model has "
            f"{config.n_positions} positions; score it as a text of its own."
        )
    ids = torch.cat([context, continuation])
    start = max(0, len(ids) - (config.n_positions + 1))
    return _Job(ids, [Window(start, len(context), len(ids))])


def _run(
    model: GPT2, jobs: Iterable[_Job], batch_tokens: int, progress: Progress | None
) -> Iterator[tuple[_Job, Tensor, Tensor]]:
    """Each job with the log-probabilities and ranks of its ids, in order."""
    for pool in in_lists(jobs, lambda job: len(job.ids), _BATCHES_IN_POOL * batch_tokens):
        logprobs = [torch.full((len(job.ids),), math.nan, dtype=torch.float64) for job in pool]
        ranks = [torch.zeros(len(job.ids), dtype=torch.long) for job in pool]
        for batch in _batches(pool, batch_tokens):
            lengths = [window.end - window.first for _, window in batch]
            found = _logprobs_and_ranks(model, *_last_states(model, pool, batch))
            parts = zip(*(values.split(lengths) for values in found), strict=True)
            for (number, window), (some_logprobs, some_ranks) in zip(batch, parts, strict=True):
                logprobs[number][window.first : window.end] = some_logprobs
                ranks[number][window.first : window.end] = some_ranks
            if progress is not None:
                progress(sum(lengths))
        yield from zip(pool, logprobs, ranks, strict=True)


def _batches(pool: Sequence[_Job], batch_tokens: int) -> Iterator[list[tuple[int, Window]]]:
    """The windows of all jobs, with the number of their job, the longest first."""
    todo = [(number, window) for number, job in enumerate(pool) for window in job.windows]
    todo.sort(key=lambda item: item[1].start - item[1].end)
    start = 0
    while start < len(todo):
        longest = todo[start][1]
        n_rows = max(1, batch_tokens // (longest.end - 1 - longest.start))
        yield todo[start : start + n_rows]
        start += n_rows


@torch.no_grad()
def _last_states(
    model: GPT2, pool: Sequence[_Job], batch: Sequence[tuple[int, Window]]
) -> tuple[Tensor, Tensor]:
    """The residual stream (N, C) before each token that the batch scores, and their ids (N,)."""
    width = max(window.end - 1 - window.start for _, window in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    rows, columns, targets = [], [], []
    for row, (number, window) in enumerate(batch):
        start, first, end = window
        ids[row, : end - 1 - start] = pool[number].ids[start : end - 1]
        rows.append(torch.full((end - first,), row))
        columns.append(torch.arange(first - 1 - start, end - 1 - start))
        targets.append(pool[number].ids[first:end])
    states = model.hidden(ids)[torch.cat(rows), torch.cat(columns)]
    return check_finite(states), torch.cat(targets)


@torch.no_grad()
def _logprobs_and_ranks(model: GPT2, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of `targets` (N,) after the states `x` (N, C): (N,) float64 and (N,) int64, on the CPU."""
    V = model.config.vocab_size
    logprobs, ranks = [], []
    targets = targets.to(x.device)[:, None]
    slices = (part.split(max(1, LOGITS_AT_ONCE // V)) for part in (x, targets))
    for states, slice_ids in zip(*slices, strict=True):
        all_logits = model.unembed(states)
        parts = (part.split(max(1, _LOGITS_IN_CACHE // V)) for part in (all_logits, slice_ids))
        for logits, ids in zip(*parts, strict=True):
            if logits.dtype in (torch.float16, torch.bfloat16):
                logits = logits.float()
            # On a CPU, counting in int32 takes half the time of the default, int64.
            ranks.append((logits > logits.gather(1, ids)).sum(1, dtype=torch.int32) + 1)
            logprobs.append(logits.log_softmax(1).gather(1, ids)[:, 0])
    return check_finite(torch.cat(logprobs)).double().cpu(), torch.cat(ranks).long().cpu()
