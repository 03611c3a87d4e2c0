"""`gpt2attn heads`: what every head of the model looks at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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

SENTENCE = "Apple raised its price target."
Row = dict[str, Any]
# A column of a table of heads: its name in JSON, its header, its number format.
Column = tuple[str, str, str]
OVERVIEW: tuple[Column, ...] = (
    ("sink_share_last", "sink, last token", "share"),
    ("sink_share", "sink", "share"),
    ("entropy", "entropy (nats)", ".3f"),
    ("mean_distance", "distance", ".2f"),
    ("previous_token", "previous token", "share"),
)
SCORES: tuple[Column, ...] = (
    ("previous_token", "previous token", ".3f"),
    ("duplicate_token", "duplicate token", ".3f"),
    ("induction", "induction", ".3f"),
    ("ov_copying", "OV copying", ".3f"),
)


def heads(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to look at; `-` reads stdin.", show_default=SENTENCE),
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    from_token: Annotated[
        str | None,
        typer.Option("--from", metavar="TOKEN", help="The token that looks, with --to."),
    ] = None,
    to_token: Annotated[
        str | None,
        typer.Option("--to", metavar="TOKEN", help="The earlier token that is looked at."),
    ] = None,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Score all heads on repeated random tokens, without a text."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random tokens of --scores.")] = 0,
    ablate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER.HEAD",
            help="Silence this head and report the next token; may be given several times.",
        ),
    ] = None,
    mean: Annotated[
        bool,
        typer.Option("--mean", help="With --ablate: put the head's mean over the text, not 0."),
    ] = False,
    sort: Annotated[
        Literal[
            "layer", "sink", "entropy", "distance", "previous", "duplicate", "induction", "copying"
        ],
        typer.Option(help="Show the heads with the highest value first."),
    ] = "layer",
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            min=1,
            help="How many heads or tokens to show.",
            show_default="all heads, 10 tokens",
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
    """Compare all heads: where they look, and what the model is without them.

    TOKEN is the token's text (` its` or its), its position in the text, or #id. Without --from,
    --scores or --ablate: for every head the share of attention on the first token (at the last
    token, and on average), the entropy of its rows, how many tokens back it looks, and the share on
    the previous token. Averages leave out the first token, which can only look at itself.

    Example:  gpt2attn heads "Apple raised its price target." --from its --to Apple -n 10
    """
    pair = from_token is not None or to_token is not None
    if pair + scores + bool(ablate) > 1:
        raise ValueError("Give one of --from with --to, --scores, or --ablate.")
    if pair and (from_token is None or to_token is None):
        raise ValueError("--from and --to go together: give both tokens.")
    if mean and not ablate:
        raise ValueError("--mean says what --ablate puts in a head's place: give --ablate too.")
    if scores and (text is not None or text_file is not None):
        raise ValueError("--scores uses random tokens: leave the text out.")
    silenced = [_parse_head(spec) for spec in ablate or ()]
    key = _sort_key(sort, () if pair or ablate else SCORES if scores else OVERVIEW)
    if text is None and text_file is None:
        text = SENTENCE
    text = read_text(text, text_file, what="text")
    lm = load_language_model(
        model, revision, device, dtype, kernels, threads, allow_pickle, allow_nonfinite
    )
    if scores:
        found, show = _scores(lm, seed), _print_scores
    else:
        ids = lm.encode(text, special=special)
        if not ids:
            raise ValueError("The text is empty: give at least one token.")
        if from_token is not None and to_token is not None:
            found, show = _pair(lm, ids, from_token, to_token), _print_pair
        elif ablate:
            found, show = _ablation(lm, ids, silenced, mean, count or 10), _print_ablation
        else:
            found, show = _overview(lm, ids), _print_overview
        found = {"text": text, "ids": ids, "labels": lm.tokenizer.labels(ids), **found}
    if "heads" in found:
        if key is not None:
            found["heads"].sort(key=lambda row: row[key], reverse=True)
        found["heads"] = found["heads"][:count]
    if as_json:
        print_json({"model": model, **found})
    else:
        show(found)


def _sort_key(sort: str, columns: tuple[Column, ...]) -> str | None:
    """The name of the column that `--sort` names; None for the order of layers."""
    if sort == "layer":
        return None
    # "sink" is the average; its column at the last token comes first in the table.
    fits = [name for name, *_ in columns if sort in name and not name.endswith("_last")]
    if not fits:
        raise ValueError(f"--sort {sort}: this table has no such column.")
    return fits[0]


def _parse_head(spec: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", spec)
    if match is None:
        raise ValueError(f"--ablate takes LAYER.HEAD such as 9.6, not {spec!r}.")
    return int(match[1]), int(match[2])


def _as_rows(values: dict[str, Any]) -> list[Row]:
    """One dict a head from tensors (layer, head)."""
    n_layer, n_head = next(iter(values.values())).shape
    return [
        {
            "layer": layer,
            "head": head,
            **{name: tensor[layer, head].item() for name, tensor in values.items()},
        }
        for layer in range(n_layer)
        for head in range(n_head)
    ]


def _overview(lm: LanguageModel, ids: list[int]) -> Row:
    import torch

    from ..analysis import (
        attention_distance,
        diagonal_score,
        entropy,
        measure_heads,
        over_queries,
        sink_share,
        uniform_weights,
    )

    def measure(weights: torch.Tensor) -> torch.Tensor:
        """(5, ..., head) in the order of OVERVIEW."""
        weights = weights.float()
        sinks = sink_share(weights)
        return torch.stack(
            [
                sinks[..., -1],
                over_queries(sinks),
                over_queries(entropy(weights)),
                over_queries(attention_distance(weights)),
                diagonal_score(weights, 1),
            ]
        )

    measured = measure_heads(lm.model, ids, lambda layer, steps: measure(steps.weights[0]))
    names = [name for name, *_ in OVERVIEW]
    uniform = measure(uniform_weights(len(ids)))
    return {
        "heads": _as_rows(dict(zip(names, measured.unbind(1), strict=True))),
        "mean": dict(zip(names, measured.mean((0, 2)).tolist(), strict=True)),
        "uniform": dict(zip(names, uniform.tolist(), strict=True)),
    }


def _scores(lm: LanguageModel, seed: int) -> Row:
    from ..analysis import IOI_HEADS, head_scores, is_gpt2_small, ov_copying_scores

    scores = head_scores(lm.model, seed=seed)
    rows = _as_rows(
        {
            "previous_token": scores.previous_token,
            "duplicate_token": scores.duplicate_token,
            "induction": scores.induction,
            "ov_copying": ov_copying_scores(lm.model),
        }
    )
    if is_gpt2_small(lm.model):
        roles = {pair: role for role, pairs in IOI_HEADS.items() for pair in pairs}
        for row in rows:
            row["published"] = roles.get((row["layer"], row["head"]))
    return {"seed": seed, "n_tokens": scores.n_tokens, "heads": rows}


def _pair(lm: LanguageModel, ids: list[int], from_token: str, to_token: str) -> Row:
    from ..analysis import measure_heads, rank_heads

    query = find_token(from_token, ids, lm.tokenizer, "--from")
    key = find_token(to_token, ids, lm.tokenizer, "--to")
    if key > query:
        raise ValueError(
            f"--to (position {key}) comes after --from (position {query}): a token sees only "
            "itself and earlier ones; swap them."
        )
    weights = measure_heads(
        lm.model, ids, lambda layer, steps: steps.weights[0, :, query, key].clone()
    )
    return {
        "from": query,
        "to": key,
        "mean": weights.mean().item(),
        "uniform": 1 / (query + 1),
        "heads": [
            {"rank": rank, "layer": layer, "head": head, "weight": weight}
            for rank, (layer, head, weight) in enumerate(rank_heads(weights), start=1)
        ],
    }


def _ablation(
    lm: LanguageModel, ids: list[int], heads: list[tuple[int, int]], mean: bool, count: int
) -> Row:
    from ..analysis import ablate_heads

    result = ablate_heads(lm.model, ids, heads, mean=mean)
    before, after = (logits.double().softmax(-1) for logits in (result.before, result.after))
    top = {id: None for p in (before, after) for id in p.topk(min(count, len(p))).indices.tolist()}
    return {
        "ablated": [list(pair) for pair in heads],
        "value": "mean" if mean else "zero",
        "kl_nats": result.kl,
        "tokens": [
            {
                "id": id,
                "label": token_label(lm.tokenizer, id),
                "before": before[id].item(),
                "after": after[id].item(),
                "rank_before": int((before > before[id]).sum()) + 1,
                "rank_after": int((after > after[id]).sum()) + 1,
            }
            for id in top
        ],
    }


def _print_overview(found: Row) -> None:
    summary = [("all", found["mean"]), ("uniform", found["uniform"])]
    print_table(
        ["head", *(header for _, header, _ in OVERVIEW)],
        [_cells(name, row, OVERVIEW) for name, row in _named(found["heads"]) + summary],
    )
    share, uniform = (percent(found[row]["sink_share_last"]) for row in ("mean", "uniform"))
    print(
        f"\nThe last of {len(found['ids'])} tokens gives the first {share} of its attention,\n"
        f"averaged over all heads and layers; a uniform share is {uniform}."
    )


def _print_scores(found: Row) -> None:
    headers = ["head", *(header for _, header, _ in SCORES)]
    rows = [_cells(name, row, SCORES) for name, row in _named(found["heads"])]
    if "published" in found["heads"][0]:
        headers.append("published")
        for cells, row in zip(rows, found["heads"], strict=True):
            cells.append(row["published"] or "")
    print_table(headers, rows, text_columns=(0, len(SCORES) + 1))
    print(
        f"\n2 x {found['n_tokens']} random tokens, repeated once, seed {found['seed']}.\n"
        "OV copying comes from the weights alone."
    )


def _named(rows: list[Row]) -> list[tuple[str, Row]]:
    return [(f"{row['layer']}.{row['head']}", row) for row in rows]


def _cells(name: str, row: Row, columns: tuple[Column, ...]) -> list[str]:
    numbers = [
        percent(row[key]) if spec == "share" else format(row[key], spec) for key, _, spec in columns
    ]
    return [name, *numbers]


def _print_pair(found: Row) -> None:
    labels = found["labels"]
    query, key = (f"{labels[found[end]]} ({found[end]})" for end in ("from", "to"))
    print_table(
        ["rank", "head", f"{query} to {key}"],
        [[str(row["rank"]), name, percent(row["weight"])] for name, row in _named(found["heads"])],
        text_columns=(1,),
    )
    mean, uniform = percent(found["mean"]), percent(found["uniform"])
    print(
        f"\nAll heads on average {mean}, a uniform share {uniform}.\n"
        "A weight says where a head looks, not why the model answers as it does."
    )


def _print_ablation(found: Row) -> None:
    print_table(
        ["next token", "before", "rank", "after", "rank "],
        [
            [
                row["label"],
                percent(row["before"]),
                str(row["rank_before"]),
                percent(row["after"]),
                str(row["rank_after"]),
            ]
            for row in found["tokens"]
        ],
    )
    heads = ", ".join(f"{layer}.{head}" for layer, head in found["ablated"])
    what = "their mean over the text" if found["value"] == "mean" else "0"
    print(
        f"\nWithout {heads} (output set to {what}):\n"
        f"KL(before || after) = {found['kl_nats']:.4g} nats."
    )
