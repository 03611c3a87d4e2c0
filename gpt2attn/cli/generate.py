"""`gpt2attn generate`: continue a text."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .common import (
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
    note,
    print_json,
    read_text,
)
from .maps import SUFFIXES_HELP, check_out, write_maps
from .select import Heads, Layers, parse_numbers

if TYPE_CHECKING:
    from ..language_model import Generation, TextStream


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
    min_p: Annotated[
        float, typer.Option(help="Keep tokens at least this likely beside the best; 0 is off.")
    ] = 0.0,
    typical_p: Annotated[
        float, typer.Option(help="Keep the most typical tokens of this mass; 1 is off.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, make tokens of the text so far less likely.")
    ] = 1.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(min=0, help="Let no run of this many tokens appear twice; 0 is off.")
    ] = 0,
    min_new_tokens: Annotated[
        int, typer.Option(min=0, help="No end of text before this many new tokens.")
    ] = 0,
    ban: Annotated[
        list[str] | None, typer.Option(help="Text that may not appear; may be given several times.")
    ] = None,
    ban_id: Annotated[
        list[int] | None, typer.Option(help="A token id that may not appear.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Added to a token's logit, such as 464=-2.5."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text.", show_default="drawn")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    num_samples: Annotated[
        int, typer.Option(min=1, help="Continue this often, with seeds in a row.")
    ] = 1,
    num_beams: Annotated[
        int, typer.Option(min=1, help="Beam search with this many beams; 1 is off.")
    ] = 1,
    num_return_sequences: Annotated[
        int, typer.Option(min=1, help="How many of the best beams to print.")
    ] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="Of beam search: above 0 favours long continuations.")
    ] = 1.0,
    early_stopping: Annotated[
        Literal["false", "true", "never"], typer.Option(help="Of beam search, as in transformers.")
    ] = "false",
    attention: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Also write the attention maps of prompt and new text: {SUFFIXES_HELP}.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file of attention maps.")
    ] = False,
    layers: Layers = None,
    heads: Heads = None,
    special: Special = False,
    model: Model = "gpt2",
    revision: Revision = None,
    device: Device = "auto",
    dtype: DType = "float32",
    kernels: Kernels = "torch",
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
        check_out(attention, force=force)
    rules: dict[str, Any] = {
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "min_new_tokens": min_new_tokens,
        "banned_words": ban or (),
        "banned_ids": ban_id or (),
        "logit_bias": _parse_biases(logit_bias or ()),
        "special": special,
    }
    draws: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "seed": seed,
        "stop": stop or (),
        "attention": attention is not None,
        "layers": parse_numbers(layers, "--layers"),
        "heads": parse_numbers(heads, "--heads"),
    }
    if num_beams > 1 and (num_samples > 1 or stop or attention is not None):
        raise ValueError("--num-beams goes with neither --num-samples, --stop nor --attention.")
    if num_samples > 1 and attention is not None:
        raise ValueError("--attention goes with one continuation, not with --num-samples.")
    lm = load_language_model(model, revision, device, dtype, threads, allow_pickle, kernels)
    started = time.perf_counter()
    if num_beams > 1:
        results = lm.beam_search(
            text,
            max_new_tokens,
            num_beams=num_beams,
            num_return=num_return_sequences,
            length_penalty=length_penalty,
            early_stopping={"false": False, "true": True}.get(early_stopping, early_stopping),
            **rules,
        )
    elif num_samples > 1:
        results = lm.generate(text, max_new_tokens, num_samples=num_samples, **draws, **rules)
    else:
        stream = lm.stream(text, max_new_tokens, **draws, **rules)
        results = [_stream(stream, text, show=not as_json)]
    seconds = time.perf_counter() - started
    for number, result in enumerate(results):
        if as_json:
            print_json({"model": model, "prompt": text, **_fields(result)})
        elif len(results) > 1 or num_beams > 1:
            _write(f"--- {number + 1} of {len(results)}\n{text}{result.text}\n")
        note(_summary(result, seconds))
    if attention is not None:
        _save_attention(results[0], attention)


def _stream(stream: TextStream, prompt: str, *, show: bool) -> Generation:
    """Run a stream to its end, showing the prompt and each piece as it comes."""
    if show:
        _write(prompt)
    for piece in stream:
        if show:
            _write(piece)
    if show:
        _write("\n")
    assert stream.generation is not None
    return stream.generation


def _fields(result: Generation) -> dict[str, Any]:
    """A result as JSON holds it; the place of its attention is the file that --attention names."""
    names = [field.name for field in dataclasses.fields(result) if field.name != "attention"]
    return {name: getattr(result, name) for name in names}


def _summary(result: Generation, seconds: float) -> str:
    origin = f"score {result.score:.4f}" if result.seed is None else f"seed {result.seed}"
    return (
        f"{len(result.prompt_ids)} + {len(result.ids)} tokens, "
        f"{len(result.ids) / seconds:.1f} tokens/s, {origin}, ended by: {result.finish_reason}"
    )


def _save_attention(result: Generation, path: Path) -> None:
    if result.attention is None:
        raise ValueError("No token was fed, so there are no attention maps to write.")
    write_maps(result.attention, path)
    note(f"attention maps of {len(result.attention.ids[0])} tokens in {path}")


def _parse_biases(pairs: list[str] | tuple[()]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        id, _, bias = pair.partition("=")
        try:
            biases[int(id)] = float(bias)
        except ValueError:
            raise ValueError(
                f"--logit-bias takes ID=BIAS, such as 464=-2.5, not {pair!r}."
            ) from None
    return biases


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
