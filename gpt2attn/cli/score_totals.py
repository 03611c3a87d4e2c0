"""Sums over scored texts, and the words and cells that scores are printed in."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CSV_COLUMNS = ("text", "position", "id", "label", "logprob", "rank")


@dataclass
class Totals:
    """Sums over the rows of `corpus.score_row`."""

    n_texts: int = 0
    n_tokens: int = 0
    n_scored: int = 0
    logprob: float = 0.0
    n_bytes: int = 0
    n_perplexities: int = 0  # texts of which a token was scored
    perplexities: float = 0.0

    def add(self, row: dict[str, Any]) -> None:
        self.n_texts += 1
        self.n_tokens += row["tokens"]
        self.n_scored += row["scored"]
        self.logprob += _number(row["logprob"])
        self.n_bytes += row["bytes"]
        if row["scored"]:
            self.n_perplexities += 1
            self.perplexities += _number(row["perplexity"])

    def cells(self, n_words: int | None = None) -> dict[str, Any]:
        """As JSON has them; perplexity for each of `n_words`, too, if they were counted."""
        from ..corpus import finite
        from ..scoring import bits_per_byte, perplexity

        cells: dict[str, Any] = {
            "tokens": self.n_tokens,
            "scored": self.n_scored,
            "logprob": finite(self.logprob),
            "perplexity": finite(perplexity(self.logprob, self.n_scored)),
            "bytes": self.n_bytes,
            "bits_per_byte": finite(bits_per_byte(self.logprob, self.n_bytes)),
        }
        if n_words is not None:
            word_perplexity = finite(perplexity(self.logprob, n_words))
            cells |= {"words": n_words, "word_perplexity": word_perplexity}
        return cells

    def mean_perplexity(self) -> float | None:
        from ..corpus import finite

        return finite(self.perplexities / self.n_perplexities) if self.n_perplexities else None


def sentence(cells: dict[str, Any]) -> str:
    return (
        f"{cells['tokens']} tokens, {cells['scored']} scored: "
        f"log-probability {cell(cells['logprob'], '.4f')}, "
        f"perplexity {cell(cells['perplexity'], '.4f')}, "
        f"{cell(cells['bits_per_byte'], '.4f')} bits per byte"
    )


def how(row: dict[str, Any]) -> str:
    """The windows that a row was scored in."""
    before = "nothing" if row["prefix_id"] is None else "<|endoftext|>"
    return f"context {row['context']}, stride {row['stride']}, {before} in front"


def cell(value: float | None, spec: str) -> str:
    width = spec.partition(".")[0]
    return f"{'-':>{width or 1}}" if value is None else f"{value:{spec}}"


@contextlib.contextmanager
def csv_rows(
    path: Path | None, provenance: dict[str, Any]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes one row's tokens; the file is there when all have been written."""
    if path is None:
        yield lambda row: None
        return
    from ..files import replacing

    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")

        def write(row: dict[str, Any]) -> None:
            if not file.tell():
                windows = {key: row[key] for key in ("context", "stride", "prefix_id")}
                file.write("# " + json.dumps({**provenance, **windows}) + "\n")
                writer.writerow(CSV_COLUMNS)
            columns = (row[key] for key in ("ids", "labels", "logprobs", "ranks"))
            for position, (id, label, logprob, rank) in enumerate(zip(*columns, strict=True)):
                writer.writerow((row["name"], position, id, label, logprob, rank))

        yield write


def _number(value: float | None) -> float:
    return math.nan if value is None else value
