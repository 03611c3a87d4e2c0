"""`gpt2attn trace`: the five steps of one head, with all their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    Special,
    Threads,
    load_language_model,
    print_json,
    read_text,
)
from .select import find_token

SENTENCE = "Apple raised its price target."


def trace(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to look at; `-` reads stdin.", show_default=SENTENCE),
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    *,
    layer: Annotated[int, typer.Option(help="Counted from 0; -1 is the last.")],
    head: Annotated[int, typer.Option(help="Counted from 0 in its layer; -1 is the last.")],
    query: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="The token whose row is taken apart.", show_default="the last"
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="The token whose score with it is taken apart.",
            show_default="the one it attends to most",
        ),
    ] = None,
    special: Special = False,
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
    """Show the five steps of one attention head: project, compare, scale, softmax, mix.

    TOKEN is the token's text (` its` or its), its position in the text, or #id. The screen fits 100
    columns and shows ten tokens of a longer text; --json gives every number.

    Example:  gpt2attn trace "Apple raised its price target" --layer 5 --head 1 --query its
    """
    if text is None and text_file is None:
        text = SENTENCE
    text = read_text(text, text_file, what="text")
    lm = load_language_model(
        model, revision, device, dtype, kernels, threads, allow_pickle, allow_nonfinite
    )
    ids = lm.encode(text, special=special)
    if not ids:
        raise ValueError("The text is empty: give at least one token.")

    def position(spec: str | None, option: str) -> int | None:
        return None if spec is None else find_token(spec, ids, lm.tokenizer, option)

    from ..render.trace_text import trace_text
    from ..trace import trace_head

    traced = trace_head(
        lm.model,
        ids,
        layer,
        head,
        position(query, "--query"),
        key=position(key, "--key"),
        labels=lm.tokenizer.labels(ids),
        metadata=lm.provenance,
    )
    if as_json:
        print_json({"text": text, **traced.to_dict()})
    else:
        print(trace_text(traced), end="")
