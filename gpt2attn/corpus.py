"""Many texts: in chunks, on any number of workers, with results that do not depend on how.

A chunk is cut from the input by the length of its texts alone and is computed by itself. So a text
has the same numbers in one process, on many workers, and in a run that goes on where another was
stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from .dump import dump_attention
from .hub import resolve
from .language_model import LanguageModel, chosen_device, load, source_provenance
from .records import Record, in_lists
from .scoring import BATCH_TOKENS, Score, bits_per_byte, score_texts
from .workers import Pool, Progress, Work, in_order, run_here
from .workers.cluster import Cluster
from .workers.processes import Processes

Engine = Literal["local", "ray"]
# Sorting texts by length spares padding where a chunk has several batches of them.
BATCHES_IN_CHUNK = 4
CHARACTERS_IN_TOKEN = 4  # of English text, about
# Maps are made one text at a time, since a batch rounds otherwise than its texts alone; a chunk has
# only to be worth its way to a worker.
CHARACTERS_OF_MAPS = 2048


class NamedText(NamedTuple):
    name: str
    text: str


Item = TypeVar("Item", NamedText, Record)


@dataclass(frozen=True)
class Loader:
    """Loads one model in any process; `locate` makes it."""

    name: str
    place: str  # the name, or the whole path of a folder: a worker may stand in another one
    revision: str | None
    device: str
    dtype: str
    kernels: str
    options: dict[str, Any]  # others of `load`
    provenance: dict[str, Any]
    threads: int | None = None
    elsewhere: bool = False  # on another machine, where a folder of that name may hold other files

    @property
    def job(self) -> dict[str, Any]:
        """What the numbers depend on."""
        how = {"device": self.device, "dtype": self.dtype, "kernels": self.kernels}
        return {**self.provenance, **how, **self.options}

    def __call__(self) -> LanguageModel:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        lm = load(
            self.place,
            revision=self.revision,
            device=self.device,
            dtype=getattr(torch, self.dtype),
            kernels=self.kernels,
            **self.options,
        )
        assert lm.source is not None
        lm.source = dataclasses.replace(lm.source, name=self.name)
        if self.elsewhere and lm.provenance != self.provenance:
            raise ValueError(f"{self.name} has other files on a worker's machine than here.")
        return lm


def locate(
    name: str,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    kernels: str = "auto",
    notify: Callable[[str], None] | None = None,
    **options: Any,
) -> Loader:
    """Find a model, downloading it if need be, without loading it; arguments are those of `load`.

    `dtype` is a name, such as "float32". Workers load the very commit that is found here.
    """
    source = resolve(name, revision=revision, notify=notify)
    return Loader(
        name,
        os.path.abspath(name) if os.path.exists(name) else name,
        source.revision,
        chosen_device(device),
        dtype,
        kernels,
        options,
        source_provenance(source),
    )


@dataclass(frozen=True)
class ScoreTexts:
    """What a worker does to score chunks of NamedText; rows are those of `score_row`."""

    loader: Loader
    options: dict[str, Any]  # of `scoring.score_texts`

    @property
    def chunk_characters(self) -> int:
        batch_tokens = self.options.get("batch_tokens", BATCH_TOKENS)
        return BATCHES_IN_CHUNK * CHARACTERS_IN_TOKEN * batch_tokens

    def __call__(self) -> Work:
        lm = self.loader()

        def work(chunk: Sequence[NamedText], progress: Progress) -> list[dict[str, Any]]:
            texts = [item.text for item in chunk]
            scores = score_texts(lm.model, lm.tokenizer, texts, progress=progress, **self.options)
            return [
                score_row(lm, item.name, result) for item, result in zip(chunk, scores, strict=True)
            ]

        return work


@dataclass(frozen=True)
class DumpMaps:
    """What a worker does to write the maps of chunks of records into `folder`, a file for each.

    A file that is there already is left as it is. Rows are those of an index.
    """

    loader: Loader
    source: str  # for messages
    folder: Path
    suffix: str  # "safetensors", "npz", "json" or "csv"
    special: bool
    options: dict[str, Any]  # of `LanguageModel.attention`

    @property
    def chunk_characters(self) -> int:
        return CHARACTERS_OF_MAPS

    def __call__(self) -> Work:
        lm = self.loader()

        def work(chunk: Sequence[Record], progress: Progress) -> list[dict[str, Any]]:
            return [self._dump(lm, record, progress) for record in chunk]

        return work

    def _dump(self, lm: LanguageModel, record: Record, progress: Progress) -> dict[str, Any]:
        ids = lm.encode(record.text, special=self.special)
        path = self.folder / f"{record.line:08d}.{self.suffix}"
        if not path.exists():
            try:
                self._write(lm, ids, path)
            except ValueError as error:
                raise ValueError(f"{self.source}, line {record.line}: {error}") from None
            progress(len(ids))
        return {"line": record.line, "file": path.name, "tokens": len(ids)}

    def _write(self, lm: LanguageModel, ids: list[int], path: Path) -> None:
        if self.suffix != "safetensors":
            lm.attention(ids, **self.options).save(path)
            return
        labels = lm.tokenizer.labels(ids)
        dump_attention(lm.model, ids, path, labels=labels, metadata=lm.provenance, **self.options)


def run_job(
    task: ScoreTexts | DumpMaps,
    items: Iterable[Item],
    progress: Progress,
    *,
    n_done: int = 0,
    n_workers: int = 1,
    threads: int | None = None,
    engine: Engine = "local",
) -> Generator[list[dict[str, Any]], None, None]:
    """A row for each item but the first `n_done`, in order, in lists as they are known.

    `threads` (default: as many as torch would use) are divided among the workers. With `engine`
    "ray" the workers are a cluster's, and `threads` defaults to its cores. `progress(n)` hears of n
    more tokens. Only a few chunks of `items` are held.
    """
    n_skipped, todo = _unfinished(chunks(items, task.chunk_characters), n_done)
    for rows in _run(task, todo, progress, n_workers, threads, engine):
        yield rows[n_skipped:]
        n_skipped = 0


def chunks(items: Iterable[Item], n_characters: int) -> Iterator[list[Item]]:
    """`items` in order, in lists of at least `n_characters` of text, but for the last."""
    return in_lists(items, lambda item: len(item.text), n_characters)


def score_row(lm: LanguageModel, name: str, result: Score) -> dict[str, Any]:
    """A score as JSON holds it, None for what is not a number or was not scored."""
    return {
        "model": lm.provenance["model"],
        "name": name,
        "tokens": len(result.ids),
        "scored": result.n_scored,
        "logprob": finite(result.total),
        "perplexity": finite(result.perplexity),
        "bytes": result.n_bytes,
        "bits_per_byte": finite(bits_per_byte(result.total, result.n_bytes or 0)),
        "context": result.context,
        "stride": result.stride,
        "prefix_id": result.prefix_id,
        "ids": result.ids,
        "labels": lm.tokenizer.labels(result.ids),
        "logprobs": [finite(value) for value in result.logprobs.tolist()],
        "ranks": [rank or None for rank in result.ranks.tolist()],
    }


def finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _unfinished(todo: Iterator[list[Item]], n_done: int) -> tuple[int, Iterable[list[Item]]]:
    """The chunks that hold more than the first `n_done` items, and how many of those they hold.

    A chunk that is done in part is computed whole: its numbers come from the whole of it.
    """
    for chunk in todo:
        if n_done < len(chunk):
            return n_done, itertools.chain([chunk], todo)
        n_done -= len(chunk)
    return 0, ()


def _run(
    task: ScoreTexts | DumpMaps,
    todo: Iterable[list[Item]],
    progress: Progress,
    n_workers: int,
    threads: int | None,
    engine: Engine,
) -> Iterator[list[dict[str, Any]]]:
    pool: Pool
    if engine == "ray":
        n_cpus = None if threads is None else max(1, threads // n_workers)
        n_gpus = int(task.loader.device == "cuda")
        pool = Cluster(_with(task, n_cpus, True), n_workers, n_cpus=n_cpus, n_gpus=n_gpus)
    elif n_workers > 1:
        threads = threads or torch.get_num_threads()
        pool = Processes(_with(task, max(1, threads // n_workers)), n_workers)
    else:
        return run_here(_with(task, threads), todo, progress)
    return in_order(pool, todo, progress)


def _with(
    task: ScoreTexts | DumpMaps, threads: int | None, elsewhere: bool = False
) -> ScoreTexts | DumpMaps:
    loader = dataclasses.replace(task.loader, threads=threads, elsewhere=elsewhere)
    return dataclasses.replace(task, loader=loader)
