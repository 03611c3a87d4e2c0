"""Published figures that need a data set, which the user gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...records import read_records
from ...scoring import score, wikitext_text
from .numbers import perplexity_rows
from .report import PASSED, Figure, Row
from .subject import Subject

NO_WIKITEXT = "needs WikiText-2's raw test file: --wikitext2 FILE"
NO_LAMBADA = "needs LAMBADA's test passages: --lambada FILE"


def read_lines(path: Path) -> list[str]:
    """The lines of WikiText-2's raw file, with their newlines, or the texts of a .jsonl's rows."""
    if path.suffix.lower() == ".jsonl":
        return [record.text for record in read_records(path)]
    with path.open(encoding="utf-8", newline="\n") as file:
        return list(file)


def read_passages(path: Path) -> list[str]:
    """LAMBADA's passages, from .jsonl or one a line."""
    return [record.text for record in read_records(path)]


def wikitext_lines(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Mean perplexity of the first lines; the source names two numbers of lines, and one fits."""
    if subject.wikitext2 is None:
        yield figure.not_run("perplexities", NO_WIKITEXT, figure.expected["mean"])
        return
    found: list[list[Row]] = []
    for n_lines in figure.given["lines"]:
        texts = [line for line in subject.wikitext2[:n_lines] if line.strip()]
        rows = [subject.tokenizer.encode(text) for text in texts]
        found.append(list(perplexity_rows(subject, figure, rows, f"of the first {n_lines} lines")))
    yield found[0][0]
    means = [rows[1] for rows in found]
    yield min(means, key=lambda row: (row.verdict != PASSED, row.difference or 0.0))


def wikitext_whole(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Perplexity of the whole test file, beside what was published under other rules."""
    if subject.wikitext2 is None:
        yield figure.not_run("perplexity", NO_WIKITEXT, figure.expected["paper"])
        return
    ids = subject.tokenizer.encode(wikitext_text(subject.wikitext2))
    got = score(subject.model, ids, **figure.given).perplexity
    for where, claim in figure.expected.items():
        yield figure.measured(f"perplexity of {len(ids):,} tokens; {where}", claim, got)


def lambada_word(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Accuracy and perplexity of the last word."""
    if subject.lambada is None:
        yield figure.not_run("last word", NO_LAMBADA, figure.expected["accuracy"])
        return
    found, expected, tolerance = subject.last_words, figure.expected, figure.tolerance
    what = f"accuracy over {found.n_passages:,} passages"
    yield figure.close(what, expected["accuracy"], found.word_accuracy, tolerance["accuracy"])
    got = found.word_perplexity
    yield figure.close("perplexity", expected["perplexity"], got, tolerance["perplexity"])


def lambada_token(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Accuracy and perplexity of the last token, beside the paper's."""
    if subject.lambada is None:
        yield figure.not_run("last token", NO_LAMBADA, figure.expected["accuracy"])
        return
    found, expected = subject.last_words, figure.expected
    reason = "the paper does not say how passages are prepared and stop words left out"
    yield figure.measured("accuracy", expected["accuracy"], found.token_accuracy, reason)
    yield figure.measured("perplexity", expected["perplexity"], found.token_perplexity, reason)
