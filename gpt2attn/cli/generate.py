"""`gpt2attn generate`: continue a text."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .common import (
    AllowPickle,
    Debug,
    Device,
    DType,
    Json,
    Model,
    Revision,
    Special,
    Threads,
    load_language_model,
    note,
    print_json,
    read_text,
)
from .select import Heads, Layers, parse_numbers


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; `-` or nothing reads stdin.", show_default=False),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the text from a file, exactly as it stands.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=0)] = 60,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k likeliest tokens; 0 is off.")] = 50,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens of this mass; 1 is off.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text.", show_default="drawn")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    attention: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the attention maps of prompt and new text: "
            ".safetensors, .npz, .json or .csv.",
        ),
    ] = None,
    layers: Layers = None,
    heads: Heads = None,
    special: Special = False,
    model: Model = "gpt2",
    revision: Revision = None,
    device: Device = "auto",
    dtype: DType = "float32",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text, printing it as it is generated.

    Example:  gpt2attn generate "Apple raised its price target" --model pocket --seed 1
    """
    text = read_text(prompt, prompt_file, what="prompt")
    if attention is not None:
        from ..dump import check_suffix

        check_suffix(attention)
    lm = load_language_model(model, revision, device, dtype, threads, allow_pickle)
    stream = lm.stream(
        text,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        special=special,
        attention=attention is not None,
        layers=parse_numbers(layers, "--layers"),
        heads=parse_numbers(heads, "--heads"),
    )
    started = time.perf_counter()
    if not as_json:
        _write(text)
    for piece in stream:
        if not as_json:
            _write(piece)
    seconds = time.perf_counter() - started
    result = stream.generation
    if as_json:
        fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
        del fields["attention"]  # its place is the file that --attention names
        print_json({"model": model, "prompt": text, **fields})
    else:
        _write("\n")
    note(
        f"{len(result.prompt_ids)} + {len(result.ids)} tokens, "
        f"{len(result.ids) / seconds:.1f} tokens/s, seed {result.seed}, "
        f"ended by: {result.finish_reason}"
    )
    if attention is not None:
        if result.attention is None:
            raise ValueError("No token was fed, so there are no attention maps to write.")
        result.attention.save(attention)
        note(f"attention maps of {len(result.attention.ids[0])} tokens in {attention}")


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
