"""`gpt2attn generate --input`: continue many texts, in batches, into a file that can be resumed."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import note
from .generate_output import result_fields
from .progress import record_progress

if TYPE_CHECKING:
    from ..language_model import LanguageModel
    from ..records import Record


def generate_many(
    lm: LanguageModel,
    source: Path,
    out: Path,
    max_new_tokens: int,
    batch_size: int,
    options: dict[str, Any],
    *,
    force: bool,
) -> None:
    """Write one row for each text of `source` and each of its samples; row i uses seed + i.

    Batches are the same rows whether or not a run was stopped between, so a resumed run computes,
    to the last bit, what an uninterrupted one does.
    """
    from ..jobs import ResultFile, job_record
    from ..records import read_records

    records = list(read_records(source))
    if not records:
        raise ValueError(f"{source} has no texts to continue.")
    how = {name: value for name, value in options.items() if name not in _OF_THE_JOB}
    prompts = _encode(lm, source, records, max_new_tokens, how)
    if options["seed"] is None:
        how["seed"] = options["seed"] = _seed_begun_with(out)
    job_options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, **options}
    job_options["device"] = lm.model.device.type
    job = job_record("generate", [source], lm.provenance, job_options)
    n_samples = options["num_samples"]
    n_rows = len(records) * n_samples
    started = time.perf_counter()
    n_tokens = 0
    with ResultFile(out, job, force=force) as results, record_progress(n_rows, what="rows") as show:
        if results.n_done:
            note(f"{results.n_done} of {n_rows} rows were there; going on after them")
        for first in range(results.n_done // batch_size * batch_size, n_rows, batch_size):
            numbers = range(first, min(first + batch_size, n_rows))
            show(first, 0)
            which = [records[number // n_samples] for number in numbers]
            try:
                found = lm.generate(
                    [prompts[number // n_samples] for number in numbers],
                    max_new_tokens,
                    progress=lambda n_new: show(None, n_new),
                    **{**how, "seed": how["seed"] + first},
                )
            except ValueError as error:
                lines = f"lines {which[0].line} to {which[-1].line}"
                raise ValueError(f"{source}, {lines}: {error}") from None
            rows = [
                {"line": record.line, "prompt": record.text, **result_fields(lm, result)}
                for record, result in zip(which, found, strict=True)
            ]
            results.append(*rows[max(results.n_done - first, 0) :])
            n_tokens += sum(len(result.ids) for result in found)
    seconds = time.perf_counter() - started
    note(f"{n_rows} rows in {out}, seed {how['seed']} and up, {n_tokens / seconds:,.1f} tokens/s")


# Options that the rows depend on, but that `LanguageModel.generate` does not take.
_OF_THE_JOB = ("num_samples", "dtype", "kernels")


def _encode(
    lm: LanguageModel,
    source: Path,
    records: list[Record],
    max_new_tokens: int,
    options: dict[str, Any],
) -> list[list[int]]:
    """The ids of all texts; raises ValueError, naming the line, for one that cannot be continued.

    So nothing is computed for a file that would fail in the end.
    """
    from ..generation import check_prompts
    from ..text_generation import start

    prompts = []
    row = None
    for record in records:
        try:
            prompts.append(lm.encode(record.text, special=options["special"]))
            if row is None:  # checks the options as well
                row = start(lm, prompts[:1], max_new_tokens, **options).rows[0].row
            row.prompt_ids = prompts[-1]
            check_prompts(lm.model, [row], max_new_tokens, options["overflow"])
        except ValueError as error:
            raise ValueError(f"{source}, line {record.line}: {error}") from None
    return prompts


def _seed_begun_with(out: Path) -> int:
    """The seed that an unfinished run drew, or a new one: without --seed, too, it can go on."""
    from ..sampling import new_seed

    part = out.with_name(f"{out.name}.part")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), part.open("rb") as file:
        return int(json.loads(file.readline())["job"]["seed"])
    return new_seed()
