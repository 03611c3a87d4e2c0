"""Published logit differences, ablations, attributions, head scores and attention maps.

TransformerLens runs GPT-2 with LayerNorm's weights folded into the matrices after it, value biases
into the output's, and what writes to the residual stream centred. None of this changes a logit
difference, a probability or a map. But a head's output there lacks its constant part: c_attn's
value bias, and ln_1's bias through W_V (attention's weights sum to 1, so both pass through). What
TransformerLens sets to 0 is therefore set to that part here, and what it attributes to a head is
without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...analysis import head_scores as scores_of
from ...analysis import (
    measure_heads,
    over_queries,
    rank_heads,
    repeated_random_ids,
    residual_stream,
    sink_share,
)
from ...capture import attention_maps
from ...edits import set_heads
from ...model import GPT2, Edit
from .report import Figure, Row, head_place
from .subject import Subject


def constant_part(model: GPT2, layer: int) -> Tensor:
    """(H, D): what every head of a layer gives whatever it reads: its value of an input of 0."""
    config, block = model.config, model.h[layer]
    c_attn = block.attn.c_attn
    values = slice(2 * config.n_embd, None)
    constant = c_attn.bias[values] + block.ln_1.bias @ c_attn.weight[:, values]
    return constant.view(config.n_head, config.head_dim)


def without_head(model: GPT2, figure: Figure) -> Edit | None:
    """The edit that takes away the head a figure was made without, if it was."""
    if "without" not in figure.given:
        return None
    layer, head = figure.given["without"]
    positions = [figure.given["at"]] if "at" in figure.given else None
    value = constant_part(model, layer)[head]
    return set_heads(model, [(layer, head)], value, positions=positions)


def logit_differences(subject: Subject, figure: Figure) -> Iterator[Row]:
    """One token's logit less another's after each prompt, and the mean."""
    prompts, expected = figure.given["prompts"], figure.expected
    edit = without_head(subject.model, figure)
    got = []
    for prompt in prompts:
        logits = subject.last_logits(_with_prefix(subject, prompt), edit=edit)
        plus, minus = (subject.token_id(prompt[sign]) for sign in ("plus", "minus"))
        got.append(float(logits[plus] - logits[minus]))
    for prompt, wanted, found in zip(prompts, expected.get("each", ()), got, strict=False):
        front = "" if "prefix" in prompt else ", nothing in front"
        what = f"{prompt['plus']!r} less {prompt['minus']!r} after {prompt['text']!r}{front}"
        yield figure.close(what, wanted, found, figure.tolerance)
    if "mean" in expected:
        mean = sum(got) / len(got)
        what = f"mean of {len(got)} differences"
        yield figure.close(what, expected["mean"], mean, figure.tolerance)


def residual_attribution(subject: Subject, figure: Figure) -> Iterator[Row]:
    """What each stage of the residual stream adds up to, towards the logit difference."""

    def attributed(prompt: dict[str, Any]) -> Tensor:
        ids = _with_prefix(subject, prompt)
        stream = residual_stream(subject.model, [ids], after_attention=True)
        x = stream.values[:, 0, -1]  # (stage, C)
        return _towards(subject, prompt, x, x[-1])

    got = torch.stack([attributed(prompt) for prompt in figure.given["prompts"]]).mean(0)
    yield figure.close("stage of the residual stream", figure.expected, got, figure.tolerance)


def head_attribution(subject: Subject, figure: Figure) -> Iterator[Row]:
    """What each head's output at the last position adds to the logit difference."""
    model = subject.model
    config = model.config
    constants = torch.stack([constant_part(model, layer) for layer in range(config.n_layer)])
    w_o = torch.stack([block.attn.c_proj.weight for block in model.h])
    w_o = w_o.unflatten(1, (config.n_head, -1))  # (layer, H, D, C)

    def attributed(prompt: dict[str, Any]) -> Tensor:
        ids = _with_prefix(subject, prompt)
        outputs = measure_heads(model, [ids], lambda _, steps: steps.output[0, :, -1].clone())
        x = ((outputs - constants)[:, :, None] @ w_o)[:, :, 0]  # (layer, H, C)
        final = residual_stream(model, [ids]).values[-1, 0, -1]
        return _towards(subject, prompt, x, final)

    got = torch.stack([attributed(prompt) for prompt in figure.given["prompts"]]).mean(0)
    yield figure.close("head", figure.expected, got, figure.tolerance, place=head_place)


def _towards(subject: Subject, prompt: dict[str, Any], x: Tensor, final: Tensor) -> Tensor:
    """(...): what x (..., C) adds to a difference of logits, scaled as ln_f scales `final`."""
    model = subject.model
    plus, minus = (subject.token_id(prompt[sign]) for sign in ("plus", "minus"))
    direction = (model.wte.weight[plus] - model.wte.weight[minus]).double()
    x, final, weight = x.double(), final.double(), model.ln_f.weight.double()
    deviation = (final.var(correction=0) + model.config.layer_norm_epsilon).sqrt()
    return ((x - x.mean(-1, keepdim=True)) / deviation * weight) @ direction


def _with_prefix(subject: Subject, prompt: dict[str, Any]) -> list[int]:
    return subject.ids(prompt, prompt.get("prefix"))


def head_scores(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Previous-token, duplicate-token and induction scores of all heads."""
    scores = scores_of(subject.model, **figure.given)
    for name, wanted in figure.expected.items():
        got, what = getattr(scores, name), f"{name.replace('_', '-')} score"
        yield figure.close(what, wanted, got, figure.tolerance, place=head_place)


def induction(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Induction scores of some heads on random tokens, and the loss on their repetition."""
    model, expected, tolerance = subject.model, figure.expected, figure.tolerance
    names = list(expected["heads"])
    pairs = [tuple(map(int, name.split("."))) for name in names]
    scores = scores_of(model, **figure.given).induction
    got = torch.stack([scores[pair] for pair in pairs])
    wanted = list(expected["heads"].values())
    yield figure.close(
        "induction score", wanted, got, tolerance["heads"], place=lambda index: names[index[0]]
    )
    ids = repeated_random_ids(model.config.vocab_size, **figure.given)
    start = figure.given["n_tokens"]  # the first repeated token cannot be foreseen
    losses = [
        F.cross_entropy(subject.logits(row.tolist())[start:-1], row[start + 1 :]) for row in ids
    ]
    loss = float(torch.stack(losses).mean())
    what = "mean loss on the repetition"
    yield figure.close(what, expected["loss_repeated"], loss, tolerance["loss_repeated"])


def maps(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The last row of some heads' maps of one text, and the share of the first token."""
    heads, tolerance = figure.expected, figure.tolerance
    weights = attention_maps(subject.model, subject.only(figure)).weights[:, 0].cpu()
    chosen = torch.stack([weights[head["layer"], head["head"]] for head in heads])

    def place(index: tuple[int, ...]) -> str:
        head, *key = index
        name = f"{heads[head]['layer']}.{heads[head]['head']}"
        return f"{name} at token {key[0]}" if key else name

    rows = [head["last_row"] for head in heads]
    got = chosen[:, -1, : len(rows[0])]
    yield figure.close("last row of a map", rows, got, tolerance["last_row"], place=place)
    sinks, got = [head["sink"] for head in heads], over_queries(sink_share(chosen))
    yield figure.close("sink share of a head", sinks, got, tolerance["sink"], place=place)


def standing_sentence(subject: Subject, figure: Figure) -> Iterator[Row]:
    """A walk-through's claim on one sentence, beside each value that it could mean."""
    (prompt,), claim = figure.given["prompts"], figure.expected["sink"]
    ids = subject.ids(prompt)
    query, key = (subject.tokenizer.id_of(figure.given[name]) for name in ("query", "key"))
    if query not in ids or key not in ids:
        yield figure.not_run("all of it", "this vocabulary cuts the sentence otherwise")
        return
    weights = attention_maps(subject.model, ids).weights[:, 0].double().cpu()  # (layer, H, T, T)
    sink = sink_share(weights)[..., -1]
    what = "share that the last token gives to the first"
    uniform = f"spread evenly it would be {1 / len(ids):.4f}"
    n_layer, n_head = sink.shape
    yield figure.measured(
        f"{what}, mean of all {n_layer * n_head} heads", claim, float(sink.mean()), uniform
    )
    layer, share = _nearest(sink.mean(1).tolist(), claim)
    spread = f"layers go from {sink.mean(1).min():.4f} to {sink.mean(1).max():.4f}"
    yield figure.measured(
        f"{what}, mean of a layer's heads, nearest in layer {layer}", claim, share, spread
    )
    place, share = _nearest(sink.flatten().tolist(), claim)
    name = f"{place // n_head}.{place % n_head}"
    spread = f"heads go from {sink.min():.4f} to {sink.max():.4f}"
    yield figure.measured(f"{what}, one head, nearest in {name}", claim, share, spread)
    pair = weights[:, :, ids.index(query), ids.index(key)]
    layer, head, share = rank_heads(pair)[0]
    what = f"head with the most weight from {figure.given['query']!r} to {figure.given['key']!r}"
    yield figure.measured(
        f"{what}: {layer}.{head}", None, share, f"mean of all heads {float(pair.mean()):.4f}"
    )


def _nearest(values: Sequence[float], wanted: float) -> tuple[int, float]:
    return min(enumerate(values), key=lambda item: abs(item[1] - wanted))
