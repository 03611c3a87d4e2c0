"""`gpt2attn explain`: the whole lesson on attention, computed on the loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    AllowNonfinite,
    AllowPickle,
    Debug,
    Device,
    DType,
    Json,
    Kernels,
    Model,
    Revision,
    Threads,
    check_output,
    load_language_model,
    note,
    print_json,
    read_text,
)
from .select import parse_numbers

if TYPE_CHECKING:
    from ..lesson import Lesson

SENTENCE = "Apple raised its price target"
SUFFIXES = (".html", ".md")


def explain(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to look at; `-` reads stdin.", show_default=SENTENCE),
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    section: Annotated[
        str | None,
        typer.Option(
            "--section",
            "-s",
            metavar="LIST",
            help="Sections, such as 6 or 4-9.",
            show_default="all",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Of the head that the steps follow.", show_default="where `its` sees Apple most"
        ),
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="The head, counted from 0.", show_default="the same")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="An .html or .md file, with pictures.", show_default="the screen"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    model: Model = "gpt2",
    revision: Revision = None,
    device: Device = "auto",
    dtype: DType = "float32",
    kernels: Kernels = "torch",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    allow_nonfinite: AllowNonfinite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain attention on a text, from embedding to KV cache, with the model's own numbers.

    Sections: 1 token rows, 2 neighbours, 3 context, 4 query, key and value, 5 scores, 6 scaling,
    7 rows, 8 values, 9 the five steps, 10 all heads, 11 mask, 12 cost, 13 heads, 14 block, 15
    logits, 16 KV cache, 17 to try. In a text without `its` and an earlier Apple, the steps follow
    the head where the last token sees the first one most.

    Example:  gpt2attn explain --model pocket --out lesson.html
    """
    if out is not None:
        _check_out(out, force, as_json, text_file)
    sections = parse_numbers(section, "--section")
    if text is None and text_file is None:
        text = SENTENCE
    text = read_text(text, text_file, what="text")
    lm = load_language_model(
        model, revision, device, dtype, kernels, threads, allow_pickle, allow_nonfinite
    )
    from rich.console import Console

    from ..lesson import explain as compute

    with Console(stderr=True).status("") as status:
        lesson = compute(lm, text, sections=sections, layer=layer, head=head, notify=status.update)
    if as_json:
        print_json(lesson.to_dict())
    elif out is None:
        from ..render.lesson_text import lesson_text

        print(lesson_text(lesson), end="")
    else:
        _write(lesson, out)


def _check_out(out: Path, force: bool, as_json: bool, source: Path | None) -> None:
    """Refuse before any work what cannot be written after it."""
    if as_json:
        raise ValueError("Give --out or --json, not both.")
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{out} must end in .html or .md.")
    if out.exists() and not force:
        raise ValueError(f"{out} is already there; --force replaces it.")
    check_output(out, [source])


def _write(lesson: Lesson, out: Path) -> None:
    from ..files import replacing

    if out.suffix.lower() == ".html":
        from ..render.lesson_html import lesson_html as written
    else:
        from ..render.lesson_markdown import lesson_markdown as written
    document = written(lesson)
    with replacing(out) as part:
        part.write_text(document, encoding="utf-8", newline="\n")
    note(f"{len(lesson.sections)} sections, {len(document.encode()) / 1e6:,.1f} MB, in {out}")
