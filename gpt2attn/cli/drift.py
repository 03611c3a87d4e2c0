"""`gpt2attn drift`: one token in two texts, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
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
)
from .select import find_token, parse_numbers
from .tables import print_table

TOKEN, TEXTS = " bank", ("I deposited money in the bank.", "We sat on the bank of the river.")


def drift(
    token: Annotated[
        str | None,
        typer.Argument(help="Text of the token, its position, or #id.", show_default=repr(TOKEN)),
    ] = None,
    text1: Annotated[
        str | None, typer.Argument(help="A text with the token.", show_default=TEXTS[0])
    ] = None,
    text2: Annotated[
        str | None, typer.Argument(help="Another text with it.", show_default=TEXTS[1])
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="I,J", help="Its positions, where it occurs more than once."),
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
    """Follow one token through two texts: the cosine of its two vectors, from layer to layer.

    "others" is the average over pairs of different tokens of the two texts, without the first ones:
    the baseline that the token's own cosine stands against.

    Example:  gpt2attn drift " apple" "She ate an apple." "He bought an apple computer."
    """
    if token is None:
        token, text1, text2 = TOKEN, *TEXTS
    if text1 is None or text2 is None:
        raise ValueError("Give the token and two texts, or nothing for an example.")
    specs = [token, token]
    if at is not None:
        specs = [str(number) for number in parse_numbers(at, "--at") or ()]
        if len(specs) != 2:
            raise ValueError(f"--at takes a position in each text, such as 4,7, not {at!r}.")
    lm = load_language_model(
        model, revision, device, dtype, kernels, threads, allow_pickle, allow_nonfinite
    )
    texts = [text1, text2]
    ids = [lm.encode(text, special=special) for text in texts]
    if not all(ids):
        raise ValueError("A text is empty: both need the token.")
    positions = [
        find_token(spec, row, lm.tokenizer, f"The token in text {number}:")
        for number, (spec, row) in enumerate(zip(specs, ids, strict=True), start=1)
    ]
    from ..analysis import context_drift

    result = context_drift(lm.model, ids[0], positions[0], ids[1], positions[1])
    label = lm.tokenizer.label(ids[0][positions[0]])
    if as_json:
        print_json(
            {
                "model": model,
                "token": {"id": ids[0][positions[0]], "label": label},
                "texts": texts,
                "ids": ids,
                "positions": positions,
                "stages": result.stages,
                "cosines": result.cosines,
                "others": result.others,
            }
        )
        return
    others: Sequence[float | None] = result.others or [None] * len(result.stages)
    print_table(
        ["residual stream", f"cosine of {label}", "others"],
        [
            [stage, f"{cosine:.4f}", "" if other is None else f"{other:.4f}"]
            for stage, cosine, other in zip(result.stages, result.cosines, others, strict=True)
        ],
    )
