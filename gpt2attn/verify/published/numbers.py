"""Published logits, probabilities, log-likelihoods and losses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ...scoring import continuation_logprobs, score
from .heads import without_head
from .report import Figure, Row
from .subject import Subject


def all_logits(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Every position of a prompt, by argmax, maximum, a few logits and the loss."""
    ids, expected, tolerance = subject.only(figure), figure.expected, figure.tolerance
    logits = subject.logits(ids)
    yield figure.exact("first choice at every position", expected["argmax"], _ids(logits.argmax(1)))
    yield figure.close("maximum at every position", expected["max"], logits.amax(1), tolerance)
    last, top = logits[-1], expected["last_top_ids"]
    yield figure.exact("best ids at the last position", top, _ids(last.topk(len(top)).indices))
    yield figure.close("their logits", expected["last_top_logits"], last[top], tolerance)
    first = expected["last_first_logits"]
    yield figure.close("logits of the first ids", first, last[: len(first)], tolerance)
    loss = float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:])))
    yield figure.close("mean loss of the next token", expected["loss"], loss, tolerance)


def next_token(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The distribution after a prompt: best tokens, logits, centred logits, probabilities in %."""
    expected, tolerance = figure.expected, figure.tolerance
    logits = subject.last_logits(subject.only(figure)).double()
    percent = 100 * logits.softmax(0)
    if not isinstance(tolerance, dict):
        tolerance = {"logits": tolerance}
    top = list(expected.get("top_ids", ()))
    if "top_tokens" in expected:
        top = [subject.token_id(token) for token in expected["top_tokens"]]
    if top:
        best = _ids(logits.topk(len(top)).indices)
        decode = subject.tokenizer.decode
        yield figure.exact(
            "best tokens", [decode([id]) for id in top], [decode([id]) for id in best]
        )
    if "top_logits" in expected:
        yield figure.close("their logits", expected["top_logits"], logits[top], tolerance["logits"])
    if "top_centred_logits" in expected:
        centred = (logits - logits.mean())[top]
        wanted = expected["top_centred_logits"]
        yield figure.close("their centred logits", wanted, centred, tolerance["logits"])
    if "top_percent" in expected:
        wanted = expected["top_percent"]
        yield figure.close("their probabilities in %", wanted, percent[top], tolerance["percent"])
    for token, share in expected.get("percent", {}).items():
        got = float(percent[subject.token_id(token)])
        yield figure.close(f"probability of {token!r} in %", share, got, tolerance["percent"])


def hidden_state(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The first numbers of the final LayerNorm's output at the first position."""
    x = subject.model.hidden([subject.only(figure)])[0, 0]
    got = x[: len(figure.expected)]
    yield figure.close("numbers after ln_f", figure.expected, got, figure.tolerance)


def greedy_logprobs(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The ids that greedy decoding chooses, and their log-probabilities."""
    expected, tolerance = figure.expected, figure.tolerance
    n_new = len(expected["ids"])
    result = subject.lm.generate(subject.only(figure), n_new, temperature=0, seed=0)
    yield figure.exact("ids chosen", expected["ids"], result.ids)
    got = torch.tensor(result.logprobs, dtype=torch.float64)
    wanted = expected["logprobs"]
    yield figure.close("their log-probabilities", wanted, got, tolerance["logprobs"])
    if "percent" in expected:
        percent = 100 * got.exp()
        wanted = expected["percent"]
        yield figure.close("their probabilities in %", wanted, percent, tolerance["percent"])


def continuations(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The log-likelihood of each continuation after its context."""
    pairs = figure.given["pairs"]
    ids = [(pair["context_ids"], pair["continuation_ids"]) for pair in pairs]
    results = continuation_logprobs(subject.model, ids)
    for pair, wanted, result in zip(pairs, figure.expected, results, strict=True):
        what = f"log-likelihood of {_start(pair['continuation'])} after {_start(pair['context'])}"
        allowed = abs(wanted) * figure.tolerance["relative"]
        yield figure.close(what, wanted, result.total, allowed)


def token_logprobs(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The log-probability of every token of a text, and their sum."""
    (prompt,) = figure.given["prompts"]
    given = {
        key: figure.given[key] for key in ("context", "stride", "full_last") if key in figure.given
    }
    result = score(subject.model, subject.ids(prompt), prefix_id=figure.given["prefix"], **given)
    wanted, tolerance = figure.expected, figure.tolerance
    logprobs = result.logprobs
    yield figure.close("log-probability", wanted["logprobs"], logprobs, tolerance["logprobs"])
    allowed = abs(wanted["sum"]) * tolerance["relative_sum"]
    yield figure.close("sum of the log-probabilities", wanted["sum"], result.total, allowed)


def loss(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The mean next-token loss of a text, with or without a head."""
    ids = subject.only(figure)
    edit = without_head(subject.model, figure)
    logits = subject.logits(ids, edit=edit)
    got = float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:])))
    yield figure.close("mean loss of the next token", figure.expected, got, figure.tolerance)


def batch_loss(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The mean loss of batches cut from one row of ids, each target the id that follows."""
    given = figure.given
    shape = (-1, given["rows"], given["columns"])
    ids = torch.tensor(given["ids"])
    inputs, targets = ids[:-1].view(shape), ids[1:].view(shape)
    losses = [
        F.cross_entropy(subject.model(rows).float().flatten(0, 1).cpu(), wanted.flatten())
        for rows, wanted in zip(inputs, targets, strict=True)
    ]
    got = float(torch.stack(losses).mean())
    what = f"mean loss of {len(losses)} x {given['rows']} x {given['columns']} tokens"
    yield figure.close(what, figure.expected, got, figure.tolerance)


def perplexities(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The perplexity of the first text, and the mean of all."""
    rows = [subject.ids(prompt) for prompt in figure.given["prompts"]]
    yield from perplexity_rows(subject, figure, rows)


def perplexity_rows(
    subject: Subject, figure: Figure, rows: list[list[int]], of: str = "texts"
) -> Iterator[Row]:
    """The perplexity of the first of `rows`, and the mean of all."""
    prefix = figure.given.get("prefix")
    got = [score(subject.model, ids, prefix_id=prefix).perplexity for ids in rows]
    wanted, tolerance = figure.expected, figure.tolerance
    yield figure.close("perplexity of the first text", wanted["first"], got[0], tolerance["first"])
    what = f"mean perplexity of {len(rows)} {of}"
    yield figure.close(what, wanted["mean"], sum(got) / len(got), tolerance["mean"])


def _ids(tensor: Tensor) -> list[int]:
    ids: list[int] = tensor.tolist()
    return ids


def _start(text: str) -> str:
    return repr(text if len(text) <= 24 else text[:21] + "...")
