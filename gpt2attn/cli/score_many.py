"""`gpt2attn score` of many texts: a row for each, printed or in a file that can be resumed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import note, print_json, read_text
from .progress import record_progress
from .score_totals import Totals, cell, csv_rows, how, sentence

if TYPE_CHECKING:
    from ..corpus import Loader, NamedText


def score_many(
    loader: Loader,
    records: Sequence[Path],
    text_files: Sequence[Path],
    options: dict[str, Any],
    workers: dict[str, Any],
    *,
    as_json: bool,
    csv_file: Path | None,
    out: Path | None,
    force: bool,
) -> None:
    """Print or write a row for each text as soon as it is known, then print the totals.

    `options` are those of `scoring.score_texts`, `workers` those of `corpus.run_job`.
    """
    from ..corpus import ScoreTexts, run_job
    from ..jobs import ResultFile, job_record

    n_texts = _count(records, text_files)
    if not n_texts:
        raise ValueError("The input has no texts to score.")
    with contextlib.ExitStack() as stack:
        results, n_done, totals = None, 0, Totals()
        if out is not None:
            job = job_record("score", [*records, *text_files], loader.job, options)
            results = stack.enter_context(ResultFile(out, job, force=force))
            n_done = results.n_done
            for row in results.rows():
                totals.add(row)
            if n_done:
                note(f"{n_done} of {n_texts} records were there; going on after them")
        elif not as_json:
            print(
                f"{'scored':>9} {'log-probability':>16} {'perplexity':>12} {'bits/byte':>10}  text"
            )
        # On a terminal the lines show the progress, and a bar would be written over them.
        show = stack.enter_context(
            record_progress(n_texts, silent=out is None and sys.stdout.isatty())
        )
        show(n_done, 0)
        write_csv = stack.enter_context(csv_rows(csv_file, loader.provenance))
        started, n_before = time.perf_counter(), totals.n_scored
        found = run_job(
            ScoreTexts(loader, options),
            _texts(records, text_files),
            lambda n: show(None, n),
            n_done=n_done,
            **workers,
        )
        for rows in stack.enter_context(contextlib.closing(found)):
            if results is not None:
                results.append(*rows)
            for row in rows:
                totals.add(row)
                write_csv(row)
                if out is None:
                    _print_row(row, as_json)
            show(totals.n_texts, 0)
        rate = (totals.n_scored - n_before) / (time.perf_counter() - started)
    _print_totals(totals, as_json)
    note(f"{how(row)}; {rate:,.1f} tokens/s")
    for path in filter(None, (out, csv_file)):
        note(f"{totals.n_texts} texts, {totals.n_tokens} tokens in {path}")


def _count(records: Sequence[Path], text_files: Sequence[Path]) -> int:
    """How many texts there are; a line or a file that holds none is refused here, before the work.

    A pipe among the files can be read only once, and is not read here.
    """
    from ..records import read_records

    for path in text_files:
        if not path.exists() or path.is_file():
            read_text(None, path, what="text")
    return len(text_files) + sum(1 for path in records for _ in read_records(path))


def _texts(records: Sequence[Path], text_files: Sequence[Path]) -> Iterator[NamedText]:
    from ..corpus import NamedText
    from ..records import read_records

    for path in records:
        for record in read_records(path):
            yield NamedText(f"{path}:{record.line}", record.text)
    for path in text_files:
        yield NamedText(str(path), read_text(None, path, what="text"))


def _print_row(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(row)
        return
    print(
        f"{row['scored']:>9} {cell(row['logprob'], '16.4f')} "
        f"{cell(row['perplexity'], '12.4f')} {cell(row['bits_per_byte'], '10.4f')}  {row['name']}"
    )


def _print_totals(totals: Totals, as_json: bool) -> None:
    cells = totals.cells()
    mean = totals.mean_perplexity()
    if as_json:
        print_json({"total": {"texts": totals.n_texts, **cells, "mean_perplexity": mean}})
        return
    print(f"{totals.n_texts} texts, {sentence(cells)}")
    print(f"mean of the texts' perplexities {cell(mean, '.4f')}")
