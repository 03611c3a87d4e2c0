"""`gpt2attn lens`: what the model would say if it stopped after each block."""

from __future__ import annotations

from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

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
from .tables import percent, print_table, token_label

if TYPE_CHECKING:
    from ..language_model import LanguageModel

SENTENCE = "Apple raised its price target"


def lens(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to continue; `-` reads stdin.", show_default=SENTENCE),
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="The token to look at: its text, position or #id.",
            show_default="the last one",
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="How many tokens to show.")] = 3,
    after_attention: Annotated[
        bool,
        typer.Option("--after-attention", help="Also between each block's attention and its MLP."),
    ] = False,
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
    """Logit lens: the final LayerNorm and the unembedding on the residual stream after every block.

    The last row is the model's own prediction. "rank" is that of the token it puts first.

    Example:  gpt2attn lens "Apple raised its price target" --model pocket
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
    position = len(ids) - 1 if at is None else find_token(at, ids, lm.tokenizer, "--at")
    stages = _stages(lm, ids, position, count, after_attention)
    labels = lm.tokenizer.labels(ids)
    if as_json:
        print_json(
            {
                "model": model,
                "text": text,
                "ids": ids,
                "labels": labels,
                "position": position,
                "stages": stages,
            }
        )
        return
    _print(stages)
    final = stages[-1]["top"][0]["label"]
    print(
        f"\nWhat follows {labels[position]} (position {position}).\n"
        f"rank: that of the model's own first choice, {final}."
    )


def _print(stages: list[dict[str, Any]]) -> None:
    headers = ["residual stream", "rank", "likeliest next tokens"]
    # What the other two columns and the gaps between them leave of the line.
    stage_width = max(len(name) for name in (headers[0], *(stage["stage"] for stage in stages)))
    width = get_terminal_size().columns - stage_width - 12
    rows = []
    for stage in stages:
        items = [f"{top['label']} {percent(top['probability'])}" for top in stage["top"]]
        # A line breaks between two tokens, never between a token and its share.
        unbroken = "  ".join(item.replace(" ", "\0") for item in items)
        lines = wrap(unbroken, max(width, 20), break_long_words=False, break_on_hyphens=False)
        tokens = "\n".join(lines).replace("\0", " ")
        rows.append([stage["stage"], str(stage["rank_of_final"]), tokens])
    print_table(headers, rows, text_columns=(0, 2))


def _stages(
    lm: LanguageModel, ids: list[int], position: int, count: int, after_attention: bool
) -> list[dict[str, Any]]:
    from ..analysis import logit_lens

    result = logit_lens(lm.model, ids, positions=[position], after_attention=after_attention)
    logits = result.logits[:, 0, 0].double()  # (stage, V)
    final = logits[-1].argmax()
    found = []
    for stage, row in zip(result.stages, logits, strict=True):
        top = row.softmax(-1).topk(min(count, len(row)))
        found.append(
            {
                "stage": stage,
                "rank_of_final": int((row > row[final]).sum()) + 1,
                "top": [
                    {"id": id, "label": token_label(lm.tokenizer, id), "probability": p}
                    for id, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ],
            }
        )
    return found
