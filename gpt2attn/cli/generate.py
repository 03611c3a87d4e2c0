"""`gpt2attn generate`: continue a text, or many, or in turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import generate_options as option
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
    check_output,
    load_language_model,
    note,
    read_text,
)
from .generate_output import Output, summary
from .maps import check_out, write_maps
from .select import Heads, Layers, parse_numbers

if TYPE_CHECKING:
    from ..language_model import LanguageModel
    from ..text_generation import Generation


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; `-` or nothing reads stdin.", show_default=False),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the text from a file, exactly as it stands.")
    ] = None,
    max_new_tokens: option.MaxNewTokens = 60,
    temperature: option.Temperature = 0.8,
    top_k: option.TopK = 50,
    top_p: option.TopP = 1.0,
    min_p: option.MinP = 0.0,
    typical_p: option.TypicalP = 1.0,
    repetition_penalty: option.RepetitionPenalty = 1.0,
    no_repeat_ngram_size: option.NoRepeatNgramSize = 0,
    min_new_tokens: option.MinNewTokens = 0,
    ban: option.Ban = None,
    ban_id: option.BanId = None,
    logit_bias: option.LogitBias = None,
    seed: option.Seed = None,
    stop: option.Stop = None,
    overflow: option.Overflow = "stop",
    lookup: option.Lookup = False,
    num_samples: option.NumSamples = 1,
    num_beams: option.NumBeams = 1,
    num_return_sequences: option.NumReturnSequences = 1,
    length_penalty: option.LengthPenalty = 1.0,
    early_stopping: option.EarlyStopping = "false",
    records: option.Input = None,
    out: option.Out = None,
    batch_size: option.BatchSize = 8,
    interactive: option.Interactive = False,
    top_logprobs: option.TopLogprobs = 0,
    attention: option.Attention = None,
    force: option.Force = False,
    layers: Layers = None,
    heads: Heads = None,
    special: Special = False,
    model: Model = "gpt2",
    revision: Revision = None,
    device: Device = "auto",
    dtype: DType = "float32",
    kernels: Kernels = "auto",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    allow_nonfinite: AllowNonfinite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text, printing it as it is generated.

    --json prints one object a line: one for each new token as soon as it is chosen, with its text,
    log-probability and, with --top-logprobs, the likeliest tokens, and at last one of the whole
    result with its finish_reason. Several samples or beams are one object each.

    Example:  gpt2attn generate "Apple raised its price target" --model pocket --seed 1

    Example:  gpt2attn generate --input prompts.txt --out texts.jsonl --model pocket
    """
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "min_new_tokens": min_new_tokens,
        "banned_words": ban or (),
        "banned_ids": ban_id or (),
        "logit_bias": option.parse_biases(logit_bias or ()),
        "seed": seed,
        "stop": stop or (),
        "special": special,
        "overflow": overflow,
        "lookup": lookup,
        "top_logprobs": top_logprobs,
    }
    beams: dict[str, Any] = {
        "num_beams": num_beams,
        "num_return": num_return_sequences,
        "length_penalty": length_penalty,
        "early_stopping": {"false": False, "true": True}.get(early_stopping, early_stopping),
    }
    captured = {
        "attention": attention is not None,
        "layers": parse_numbers(layers, "--layers"),
        "heads": parse_numbers(heads, "--heads"),
    }
    given = {
        "--interactive": interactive,
        "--input": records is not None,
        "--num-beams": num_beams > 1,
        "--num-samples": num_samples > 1,
        "--attention": attention is not None,
        "--stop": bool(stop),
        "--top-logprobs": top_logprobs > 0,
        "--lookup": lookup,
        "--length-penalty": length_penalty != 1,
        "--early-stopping": early_stopping != "false",
        "--layers": layers is not None,
        "--heads": heads is not None,
        "--prompt-file": prompt_file is not None,
        "a prompt": prompt is not None,
        "--json": as_json,
    }
    _check_together({name for name, value in given.items() if value})
    if num_return_sequences > num_beams:
        raise ValueError(
            f"--num-return-sequences is {num_return_sequences}, more than --num-beams, {num_beams}"
            + ("; without beams, --num-samples draws several." if num_beams == 1 else ".")
        )
    if num_beams > 1 and (idle := _idle_in_beams(options)):
        note(f"note: beam search draws nothing; without effect: {', '.join(idle)}.")
    if (records is None) != (out is None):
        raise ValueError("--input FILE and --out FILE.jsonl go together.")
    if attention is not None:
        check_out(attention, force=force, source=prompt_file)
    if out is not None:
        from ..jobs import check_result_path

        check_result_path(out, force=force)
        check_output(out, [records])
    text = ""
    if records is None and not (interactive and prompt is None and prompt_file is None):
        text = read_text(prompt, prompt_file, what="prompt")
    lm = load_language_model(
        model, revision, device, dtype, kernels, threads, allow_pickle, allow_nonfinite
    )
    _compile_first(lm)
    if records is not None and out is not None:
        from .generate_many import generate_many

        job = {"num_samples": num_samples, "dtype": dtype, "kernels": kernels, **options}
        generate_many(lm, records, out, max_new_tokens, batch_size, job, force=force)
        return
    output = Output(lm, model, as_json=as_json)
    if interactive:
        from .generate_session import converse

        converse(lm.session(**options), output, text, max_new_tokens)
        return
    started = time.perf_counter()
    results = _continue(lm, text, max_new_tokens, num_samples, beams, captured, options, output)
    seconds = time.perf_counter() - started
    for number, result in enumerate(results):
        if num_beams > 1 or num_samples > 1:
            output.whole(text, result, f"{number + 1} of {len(results)}")
        note(summary(result, seconds))
    if attention is not None:
        _save_attention(results[0], attention)


def _compile_first(lm: LanguageModel) -> None:
    """What must be compiled is so before the text begins, which would stop after its first word."""
    from ..generation import generate as generate_ids

    if getattr(lm.model.compiled, "compiles_first", False):
        note("Compiling the fast kernels for this machine, once: some seconds ...")
        list(generate_ids(lm.model, [0], 2, temperature=0))


def _continue(
    lm: LanguageModel,
    text: str,
    max_new_tokens: int,
    num_samples: int,
    beams: dict[str, Any],
    captured: dict[str, Any],
    options: dict[str, Any],
    output: Output,
) -> list[Generation]:
    """The beams, the samples, or the one continuation of `text`, which is shown as it grows."""
    if beams["num_beams"] > 1:
        rules = {name: value for name, value in options.items() if name not in _OF_DRAWS}
        return lm.beam_search(text, max_new_tokens, **beams, **rules)
    if num_samples > 1:
        return lm.generate([text], max_new_tokens, num_samples=num_samples, **options)
    return [output.stream(text, lm.stream(text, max_new_tokens, **captured, **options))]


# What beam search, which draws nothing, does not take.
_OF_DRAWS = {"temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "top_logprobs",
             "lookup"}  # fmt: skip
# Options that exclude others: these, in the order in which they are asked about.
_EXCLUDES = {
    "--input": (
        "--interactive", "--num-beams", "--attention", "--prompt-file", "a prompt", "--json",
        "--lookup",
    ),
    "--interactive": ("--num-beams", "--num-samples", "--attention"),
    "--num-beams": ("--num-samples", "--stop", "--attention", "--top-logprobs", "--lookup"),
    "--num-samples": ("--attention", "--lookup"),
    "--attention": ("--lookup",),
}  # fmt: skip
_NEEDS = {
    "--length-penalty": "--num-beams",
    "--early-stopping": "--num-beams",
    "--layers": "--attention",
    "--heads": "--attention",
}


def _check_together(given: set[str]) -> None:
    """Raise ValueError for options that do not go with each other."""
    for name, others in _EXCLUDES.items():
        if name in given and given.intersection(others):
            *most, last = others
            listed = f"neither {', '.join(most)} nor {last}" if most else f"no {last}"
            raise ValueError(f"{name} goes with {listed}.")
    for name, other in _NEEDS.items():
        if name in given and other not in given:
            raise ValueError(f"{name} goes with {other}, and has no effect without.")
    if "--top-logprobs" in given and not given & {"--json", "--input"}:
        raise ValueError("--top-logprobs goes with --json or --input: text has no place for them.")


def _idle_in_beams(options: dict[str, Any]) -> list[str]:
    """The options that were given and that beam search has no use for; greedy ones are its own."""
    from ..sampling import DEFAULT_TEMPERATURE, DEFAULT_TOP_K

    idle = {
        "--temperature": options["temperature"] not in (0, DEFAULT_TEMPERATURE),
        "--top-k": options["top_k"] not in (0, 1, DEFAULT_TOP_K),
        "--top-p": options["top_p"] != 1,
        "--min-p": options["min_p"] != 0,
        "--typical-p": options["typical_p"] != 1,
    }
    return [name for name, given in idle.items() if given]


def _save_attention(result: Generation, path: Path) -> None:
    if result.attention is None:
        raise ValueError("No token was fed, so there are no attention maps to write.")
    write_maps(result.attention, path)
    window = result.attention.metadata.get("window_start")
    note(
        f"attention maps of {len(result.attention.ids[0])} tokens in {path}"
        + (f", the last window: it begins after {window} tokens" if window else "")
    )
