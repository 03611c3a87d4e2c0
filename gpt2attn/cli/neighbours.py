"""`gpt2attn neighbours`: which tokens the embedding table puts close together."""

from __future__ import annotations

import re
from itertools import combinations
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
    Threads,
    load_language_model,
    note,
    print_json,
)
from .tables import print_table, token_label

if TYPE_CHECKING:
    from ..language_model import LanguageModel
    from ..tokenizer import Tokenizer


def neighbours(
    tokens: Annotated[
        list[str],
        typer.Argument(
            metavar="TOKEN...", help="A token's text (apple, ' apple') or #id; or several."
        ),
    ],
    count: Annotated[int, typer.Option("-n", min=1, help="How many neighbours to show.")] = 10,
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
    """Show the nearest rows of the embedding table to a token's, or the cosines among several.

    Example:  gpt2attn neighbours " apple"
    """
    lm = load_language_model(
        model, revision, device, dtype, kernels, threads, allow_pickle, allow_nonfinite
    )
    ids = [token_id(spec, lm.tokenizer) for spec in tokens]
    labels = [token_label(lm.tokenizer, id) for id in ids]
    if len(ids) == 1:
        found = _nearest(lm, ids[0], count)
        rows = [
            [str(rank), row["label"], str(row["id"]), f"{row['cosine']:.4f}"]
            for rank, row in enumerate(found, start=1)
        ]
        headers = ["rank", "token", "id", f"cosine to {labels[0]} (#{ids[0]})"]
        text_columns = [1]
    else:
        found = _pairs(lm, ids)
        rows = [[*row["labels"], f"{row['cosine']:.4f}"] for row in found]
        headers, text_columns = ["token", "token", "cosine"], [0, 1]
    if as_json:
        key = "neighbours" if len(ids) == 1 else "pairs"
        print_json({"model": model, "ids": ids, "labels": labels, key: found})
    else:
        print_table(headers, rows, text_columns=text_columns)


def token_id(spec: str, tokenizer: Tokenizer) -> int:
    """The id that `#id` or a token's text names: the text as it stands, or with a space before it.

    Raises ValueError, naming the pieces, for a text that is not one token.
    """
    if match := re.fullmatch(r"#(\d+)", spec):
        return int(match[1])
    if not spec:
        raise ValueError("A token's text cannot be empty.")
    exact, spaced = tokenizer.id_of(spec), tokenizer.id_of(f" {spec}")
    if exact is None and spaced is None:
        ids = tokenizer.encode(spec)
        pieces = ", ".join(f"{tokenizer.label(id)} (#{id})" for id in ids)
        raise ValueError(f"{spec!r} is not one token but {len(ids)}: {pieces}; give one of them.")
    if exact is not None and spaced is not None:
        labels = [tokenizer.label(id) for id in (exact, spaced)]
        note(f"note: {labels[0]} is #{exact}; {labels[1]} is another token, #{spaced}")
    id = spaced if exact is None else exact
    assert id is not None
    return id


def _nearest(lm: LanguageModel, id: int, count: int) -> list[dict[str, Any]]:
    from ..analysis import neighbours as nearest

    found = nearest(lm.model.wte.matrix, id, count)
    return [
        {"id": other, "label": token_label(lm.tokenizer, other), "cosine": cosine}
        for other, cosine in found
    ]


def _pairs(lm: LanguageModel, ids: list[int]) -> list[dict[str, Any]]:
    from ..analysis import cosine
    from ..model import as_ids

    as_ids(ids, lm.model.config.vocab_size)
    table = lm.model.wte.matrix
    return [
        {
            "ids": [a, b],
            "labels": [token_label(lm.tokenizer, a), token_label(lm.tokenizer, b)],
            "cosine": cosine(table[a], table[b]).item(),
        }
        for a, b in combinations(ids, 2)
    ]
