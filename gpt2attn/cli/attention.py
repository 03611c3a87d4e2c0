"""`gpt2attn attention`: attention maps of a text, or of many, into files."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .common import (
    AllowNonfinite,
    AllowPickle,
    Debug,
    Device,
    Kernels,
    Model,
    Revision,
    Special,
    Threads,
    load_language_model,
    note,
    read_text,
)
from .maps import PAGE, SUFFIXES_HELP, check_out, print_maps, write_maps
from .progress import record_progress
from .select import Heads, Layers, parse_numbers
from .work import Engine, Workers, find_model

if TYPE_CHECKING:
    from ..corpus import Loader
    from ..language_model import LanguageModel

STANDING_SENTENCE = "Apple raised its price target"
Suffix = Literal["safetensors", "npz", "json", "csv"]


def attention(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to look at; `-` reads stdin.", show_default=STANDING_SENTENCE),
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    records: Annotated[
        Path | None,
        typer.Option("--input", help='Many texts, one a line: .txt, or .jsonl with a "text".'),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help=f"Write {SUFFIXES_HELP}; with --input, a folder of dumps."
        ),
    ] = None,
    suffix: Annotated[
        Suffix, typer.Option("--format", help="Of the files in the folder, with --input.")
    ] = "safetensors",
    layers: Layers = None,
    heads: Heads = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="weights|scores|scaled|masked",
            help="What to keep; may be given several times.",
            show_default="weights",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16"],
        typer.Option(help="Number format of the maps; they are computed in float32."),
    ] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    workers: Workers = 1,
    engine: Engine = "local",
    special: Special = False,
    model: Model = "gpt2",
    revision: Revision = None,
    device: Device = "auto",
    kernels: Kernels = "torch",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    allow_nonfinite: AllowNonfinite = False,
    debug: Debug = False,
) -> None:
    """Show the attention maps of a text, or write them to a file; with --input, those of many.

    One layer and one head (--layers 5 --heads 1) are shown large, else all in small. A page is made
    of all that was captured; give it every --stage to switch between them.

    Example:  gpt2attn attention "Apple raised its price target" --out maps.html
    """
    import torch

    options: dict[str, Any] = {
        "layers": parse_numbers(layers, "--layers"),
        "heads": parse_numbers(heads, "--heads"),
        "stages": stage or ["weights"],
        "dtype": getattr(torch, dtype),
    }
    if records is not None:
        if text is not None or text_file is not None or out is None:
            raise ValueError("--input goes with --out FOLDER, and not with another text.")
        how = (device, "float32", kernels, allow_pickle, allow_nonfinite)
        loader = find_model(model, revision, *how, engine=engine)
        run = {"n_workers": workers, "threads": threads, "engine": engine}
        _dump_many(loader, records, out, suffix, special, options, run)
        return
    if workers > 1 or engine != "local":
        raise ValueError("--workers and --engine go with --input.")
    if out is not None:
        check_out(out, force=force, source=text_file)
    if text is None and text_file is None:
        text = STANDING_SENTENCE
    text = read_text(text, text_file, what="text")
    lm = load_language_model(
        model, revision, device, "float32", kernels, threads, allow_pickle, allow_nonfinite
    )
    ids = lm.encode(text, special=special)
    if not ids:
        raise ValueError("The text is empty: attention needs at least one token.")
    if out is None:
        print_maps(lm.attention(ids, **options))
    else:
        _write(lm, ids, out, options)


def _write(lm: LanguageModel, ids: list[int], path: Path, options: dict[str, Any]) -> None:
    """Write one text's maps, saying first how large they are."""
    from ..capture import chosen
    from ..dump import dump_attention, dump_bytes

    config = lm.model.config
    layers = chosen(options["layers"], config.n_layer, "layer")
    heads = chosen(options["heads"], config.n_head, "head")
    n_bytes = dump_bytes(
        len(layers), len(heads), len(ids), len(options["stages"]), options["dtype"]
    )
    size = f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:,.1f} kB"
    counts = ((len(ids), "token"), (len(layers), "layer"), (len(heads), "head"))
    n_tokens, n_layers, n_heads = (f"{n:,} {what}{'s' * (n != 1)}" for n, what in counts)
    note(f"{n_tokens}, {n_layers} x {n_heads}: {size} of numbers to {path}")
    if path.suffix.lower() == ".safetensors":  # written as they are made, never all in memory
        labels = lm.tokenizer.labels(ids)
        dump_attention(lm.model, ids, path, labels=labels, metadata=lm.provenance, **options)
        return
    norms = None
    if path.suffix.lower() == PAGE:
        from ..analysis import measure_heads

        norms = measure_heads(lm.model, ids, lambda layer, steps: steps.v[0].norm(dim=-1))
        norms = norms[layers][:, heads].cpu()
    write_maps(lm.attention(ids, **options), path, value_norms=norms)


def _dump_many(
    loader: Loader,
    source: Path,
    folder: Path,
    suffix: str,
    special: bool,
    options: dict[str, Any],
    workers: dict[str, Any],
) -> None:
    """One file per record and an index; a run that was stopped goes on where it was."""
    from ..corpus import DumpMaps, run_job
    from ..files import replacing
    from ..jobs import job_record
    from ..records import read_records

    n_records = sum(1 for _ in read_records(source))
    job_options = {"format": suffix, "special": special, **options, "dtype": str(options["dtype"])}
    folder.mkdir(parents=True, exist_ok=True)
    model = {**loader.provenance, "kernels": loader.kernels}
    _claim(folder / "job.json", job_record("attention", [source], model, job_options))
    task = DumpMaps(loader, str(source), folder.absolute(), suffix, special, options)
    n_done = 0
    with (
        record_progress(n_records) as show,
        replacing(folder / "index.jsonl") as part,
        part.open("w", encoding="utf-8") as index,
        closing(run_job(task, read_records(source), lambda n: show(None, n), **workers)) as found,
    ):
        for rows in found:
            index.writelines(json.dumps(row) + "\n" for row in rows)
            n_done += len(rows)
            show(n_done, 0)
    note(f"{n_done} records in {folder}")


def _claim(path: Path, job: dict[str, Any]) -> None:
    """Mark a folder as this job's; raise ValueError if it holds another one's files."""
    from ..files import replacing
    from ..jobs import check_same_job

    if not path.exists():
        with replacing(path) as part:
            part.write_text(json.dumps(job, indent=2) + "\n", encoding="utf-8")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    check_same_job(found, job, path, "use another folder")
