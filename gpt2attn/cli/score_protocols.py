"""Scoring as published figures were made: WikiText-2 and LAMBADA, from the user's own file."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .common import note, print_json, read_text
from .progress import token_progress

if TYPE_CHECKING:
    from ..language_model import LanguageModel


def protocol_file(
    protocol: str,
    text: str | None,
    text_files: Sequence[Path] | None,
    records: Sequence[Path] | None,
) -> Path:
    """The one file that a protocol scores; ValueError if there is another text, or several."""
    if text is not None or text_files or not records or len(records) != 1:
        raise ValueError(f"--protocol {protocol} scores one file, which --input names.")
    return records[0]


def wikitext(path: Path) -> tuple[str, int]:
    """The text of WikiText's raw file, or of its rows in a .jsonl, and the number of its words."""
    from ..scoring import wikitext_text, wikitext_words

    lines = list(_lines(path))
    return wikitext_text(lines), wikitext_words(lines)


def _lines(path: Path) -> Iterable[str]:
    """The lines of a raw file, with their newlines, or the texts of a .jsonl's rows."""
    if path.suffix.lower() == ".jsonl":
        from ..records import read_records

        return (record.text for record in read_records(path))
    # Windows line ends, of which the published file has none, would be tokens.
    text = read_text(None, path, what="text").replace("\r\n", "\n")
    return io.StringIO(text, newline="\n")


def lambada(lm: LanguageModel, path: Path, batch_tokens: int, model: str, as_json: bool) -> None:
    """Print how well the last word and the last token of the file's passages are predicted."""
    from ..corpus import finite
    from ..records import read_records
    from ..scoring import score_last_words

    passages = (record.text for record in read_records(path))
    started = time.perf_counter()
    with token_progress() as progress:
        found = score_last_words(
            lm.model, lm.tokenizer, passages, batch_tokens=batch_tokens, progress=progress
        )
    seconds = time.perf_counter() - started
    fields = {name: finite(value) for name, value in dataclasses.asdict(found).items()}
    if as_json:
        print_json({"model": model, "name": str(path), **fields})
    else:
        print(f"{found.n_passages} passages")
        for what in ("word", "token"):
            accuracy = 100 * getattr(found, f"{what}_accuracy")
            perplexity = fields[f"{what}_perplexity"]
            print(
                f"last {what:<5}  accuracy {accuracy:.2f} %, "
                f"perplexity {'-' if perplexity is None else f'{perplexity:.4f}'}"
            )
    note(f"nothing in front; {found.n_passages / seconds:,.1f} passages/s")
