"""Published figures of GPT-2 small, held against this package on somebody's weights.

Anyone with the real weights can check the program against numbers that others made: token ids,
texts, logits, losses, head scores, attention maps, each with its source, in `data/published.json`.
A figure's `kind` says how it is run: a function in `KINDS`, which gives a row for each comparison.
Where a source has a convention of its own, the figure names it and the function follows it. What
is never run (another model, a GPU's random draws, training) is listed with the reason.

Everything is computed in float32. Nothing here needs transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ...hub import Notify, resolve
from ...language_model import load
from . import data_sets, heads, numbers, text, weights
from .report import Figure, PublishedReport, Row, read_figures
from .subject import Subject

__all__ = ["FIGURES", "Figure", "PublishedReport", "Row", "read_figures", "verify_published"]

FIGURES = Path(__file__).parents[2] / "data" / "published.json"

Kind = Callable[[Subject, Figure], Iterator[Row]]


def listed(subject: Subject, figure: Figure) -> Iterator[Row]:
    """A figure that is never run, with the reason."""
    yield figure.not_run("listed only", figure.given["reason"], figure.expected)


KINDS: dict[str, Kind] = {
    "files": weights.files,
    "weight_entries": weights.weight_entries,
    "unembedding_bias": weights.unembedding_bias,
    "copying_scores": weights.copying_scores,
    "token_ids": text.token_ids,
    "prompt_ids": text.prompt_ids,
    "greedy": text.greedy,
    "beams": text.beams,
    "greedy_flags": text.greedy_flags,
    "all_logits": numbers.all_logits,
    "next_token": numbers.next_token,
    "hidden_state": numbers.hidden_state,
    "greedy_logprobs": numbers.greedy_logprobs,
    "continuations": numbers.continuations,
    "token_logprobs": numbers.token_logprobs,
    "loss": numbers.loss,
    "batch_loss": numbers.batch_loss,
    "perplexities": numbers.perplexities,
    "logit_differences": heads.logit_differences,
    "residual_attribution": heads.residual_attribution,
    "head_attribution": heads.head_attribution,
    "head_scores": heads.head_scores,
    "induction": heads.induction,
    "maps": heads.maps,
    "standing_sentence": heads.standing_sentence,
    "wikitext_lines": data_sets.wikitext_lines,
    "wikitext_whole": data_sets.wikitext_whole,
    "lambada_word": data_sets.lambada_word,
    "lambada_token": data_sets.lambada_token,
    "listed": listed,
}


def verify_published(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str = "cpu",
    kernels: str = "torch",
    allow_pickle: bool = False,
    wikitext2: str | os.PathLike[str] | None = None,
    lambada: str | os.PathLike[str] | None = None,
    figures: Sequence[Figure] | None = None,
    notify: Notify | None = None,
) -> PublishedReport:
    """Run the published figures of GPT-2 small on the model `name`, and compare.

    `wikitext2` (wiki.test.raw, or its rows as .jsonl) and `lambada` (its test passages, .jsonl or
    one a line) bring in the figures that need them. `figures` replaces the package's own. `notify`
    gets a line before a download and before each figure. A figure that cannot be computed on this
    model fails, and says why. Raises what `load` raises, and OSError or ValueError for a data set
    that cannot be read, before any compute.
    """
    figures = read_figures(FIGURES) if figures is None else figures
    lines = None if wikitext2 is None else data_sets.read_lines(Path(wikitext2))
    passages = None if lambada is None else data_sets.read_passages(Path(lambada))
    notify = notify or (lambda line: None)
    source = resolve(name, revision=revision, notify=notify)
    lm = load(source.folder, device=device, kernels=kernels, allow_pickle=allow_pickle)
    subject = Subject(lm, source, figures, lines, passages)
    rows: list[Row] = []
    for figure in figures:
        notify(figure.name)
        rows += figure_rows(subject, figure)
    stack: dict[str, str | int] = {
        "torch": torch.__version__,
        "device": str(lm.model.device),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "kernels": kernels,
    }
    return PublishedReport(os.fspath(name), source.folder, source.revision, stack, figures, rows)


@torch.no_grad()
def figure_rows(subject: Subject, figure: Figure) -> list[Row]:
    """The rows of one figure; what cannot be computed has failed."""
    rows: list[Row] = []
    reason = ""
    try:
        for row in KINDS[figure.kind](subject, figure):
            rows.append(row)
    except IndexError as error:
        reason = f"this model is smaller than the figure's: {error}"
    except ValueError as error:
        reason = f"not computed: {error}"
    if reason:
        rows.append(figure.failed("the rest" if rows else "all of it", reason))
    return rows
