"""`gpt2attn attention`: attention maps of a text, or of many, into files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .common import (
    AllowPickle,
    Debug,
    Device,
    Model,
    Revision,
    Special,
    Threads,
    load_language_model,
    note,
    read_text,
)
from .maps import PAGE, SUFFIXES_HELP, check_out, print_maps, write_maps
from .select import Heads, Layers, parse_numbers

if TYPE_CHECKING:
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
    special: Special = False,
    model: Model = "gpt2",
    revision: Revision = None,
    device: Device = "auto",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
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
        lm = load_language_model(model, revision, device, "float32", threads, allow_pickle)
        _dump_many(lm, records, out, suffix, special, options)
        return
    if out is not None:
        check_out(out, force=force)
    if text is None and text_file is None:
        text = STANDING_SENTENCE
    text = read_text(text, text_file, what="text")
    lm = load_language_model(model, revision, device, "float32", threads, allow_pickle)
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
    note(
        f"{len(ids)} tokens, {len(layers)} layers x {len(heads)} heads: "
        f"{n_bytes / 1e6:,.1f} MB of numbers to {path}"
    )
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
    lm: LanguageModel,
    source: Path,
    folder: Path,
    suffix: str,
    special: bool,
    options: dict[str, Any],
) -> None:
    """One file per record and an index; a run that was stopped goes on where it was."""
    from rich.console import Console
    from rich.progress import Progress

    from ..dump import dump_attention
    from ..files import replacing, sha256
    from ..records import read_records

    job = {
        "input_sha256": sha256(source),
        "format": suffix,
        "special": special,
        **lm.provenance,
        **{key: str(value) for key, value in options.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder / "job.json", job)
    records = list(read_records(source))
    index = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for record in progress.track(records, description="records"):
            ids = lm.encode(record.text, special=special)
            path = folder / f"{record.line:08d}.{suffix}"
            index.append({"line": record.line, "file": path.name, "tokens": len(ids)})
            if path.exists():
                continue
            try:
                if suffix == "safetensors":
                    labels = lm.tokenizer.labels(ids)
                    dump_attention(
                        lm.model, ids, path, labels=labels, metadata=lm.provenance, **options
                    )
                else:
                    lm.attention(ids, **options).save(path)
            except ValueError as error:
                raise ValueError(f"{source}, line {record.line}: {error}") from None
    with replacing(folder / "index.jsonl") as part:
        part.write_text("".join(json.dumps(entry) + "\n" for entry in index), encoding="utf-8")
    note(f"{len(index)} records in {folder}")


def _claim(path: Path, job: dict[str, Any]) -> None:
    """Mark a folder as this job's; raise ValueError if it holds another one's files."""
    from ..files import replacing

    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != job:
            raise ValueError(
                f"{path.parent} holds the maps of another job (its job.json differs); "
                "use another folder."
            )
        return
    with replacing(path) as part:
        part.write_text(json.dumps(job, indent=2) + "\n", encoding="utf-8")
