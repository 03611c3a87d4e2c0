"""Sections 10 and 12 to 17: all heads, the block, the logits, the cache, and what to try next."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..analysis import is_gpt2_small, measure_heads, rank_heads, sink_share
from ..attention import AttentionSteps
from ..cache import KVCache
from ..capture import attention_maps
from ..config import GPT2Config
from ..generation import generate
from ..trace import HeadTrace
from .base import (
    STANDING_SENTENCE,
    Section,
    Setting,
    Shape,
    pair_weights,
    relative_error,
    shapes,
)

# Of the last token of the standing sentence with its full stop, over all heads of GPT-2 small; by a
# published walk-through.
PUBLISHED_SINK = 0.61
MOST_MAPPED_TOKENS = 64  # all maps of 144 heads: 600,000 numbers
COST_LENGTHS = (8, 16, 32, 1024)
TOP = 10
TIMED_TOKENS = 8
LONG_PROMPT = 128
ANIMAL = "The animal was tired because it had been running"


@dataclass(frozen=True)
class RankedHead:
    layer: int
    head: int
    weight: float


@dataclass(frozen=True, eq=False)
class AllHeads(Section):
    """All heads on one text: who gives `key` the most at `query`, and the sink at the last token.

    `sink` (layer, head) is the share that the last token gives to the first. `maps` (layer, head,
    query, key) are None above 64 tokens. `published_sink` is somebody else's figure for this very
    text and model, None for any other.
    """

    number = 10
    title = "All heads of the model"
    text: str
    ids: list[int]
    labels: list[str]
    query: int
    key: int
    ranking: list[RankedHead]
    mean_weight: float
    uniform_weight: float
    sink: Tensor
    sink_by_layer: Tensor
    sink_mean: float
    uniform_sink: float
    published_sink: float | None
    maps: Tensor | None


def all_heads(setting: Setting) -> AllHeads:
    """The standing sentence is taken with its full stop here, any other text as it is."""
    text, model = setting.text, setting.model
    with_stop = f"{STANDING_SENTENCE}."
    if text == STANDING_SENTENCE and setting.example(with_stop) is not None:
        text = with_stop
    ids = setting.lm.encode(text)
    query, key = setting.pair(ids)
    weights = pair_weights(setting.lm, ids, query, key)
    sink = measure_heads(
        model, ids, lambda layer, steps: sink_share(steps.weights[0, :, -1].clone())
    ).cpu()
    maps = None
    if len(ids) <= MOST_MAPPED_TOKENS:
        maps = attention_maps(model, ids).weights[:, 0].cpu()
    n_layer, n_head = sink.shape
    known = text == with_stop and is_gpt2_small(model)
    return AllHeads(
        shapes={"all maps": (n_layer, n_head, len(ids), len(ids))},
        text=text,
        ids=ids,
        labels=setting.lm.tokenizer.labels(ids),
        query=query,
        key=key,
        ranking=[RankedHead(*entry) for entry in rank_heads(weights)],
        mean_weight=float(weights.double().mean()),
        uniform_weight=1 / (query + 1),
        sink=sink,
        sink_by_layer=sink.double().mean(1),
        sink_mean=float(sink.double().mean()),
        uniform_sink=1 / len(ids),
        published_sink=PUBLISHED_SINK if known else None,
        maps=maps,
    )


@dataclass(frozen=True)
class LengthCost:
    """What a text of `n_tokens` costs in scores, and in bytes if all were kept."""

    n_tokens: int
    scores: int  # of one head
    all_scores: int  # of all heads of all layers
    n_bytes: int
    fits: bool  # into the model's context


@dataclass(frozen=True, eq=False)
class Cost(Section):
    number = 12
    title = "Cost: the square of the length"
    n_layer: int
    n_head: int
    n_tokens: int  # of the given text
    lengths: list[LengthCost]
    doubled: float  # the cost of a text twice as long as the given one, over its own


def cost(setting: Setting) -> Cost:
    config, n_tokens = setting.model.config, len(setting.ids)
    n_maps, itemsize = config.n_layer * config.n_head, setting.model.dtype.itemsize

    def at(n: int) -> LengthCost:
        return LengthCost(n, n * n, n_maps * n * n, n_maps * n * n * itemsize, _fits(config, n))

    return Cost(
        shapes={"scores of one head": (n_tokens, n_tokens)},
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_tokens=n_tokens,
        lengths=[at(n) for n in sorted({n_tokens, *COST_LENGTHS})],
        doubled=at(2 * n_tokens).scores / at(n_tokens).scores,
    )


def _fits(config: GPT2Config, n_tokens: int) -> bool:
    return n_tokens <= config.n_positions


@dataclass(frozen=True)
class HeadsCost:
    """What attention of one layer takes with `n_head` heads of `head_dim`, for one text."""

    n_head: int
    head_dim: int
    parameters: int  # weights and biases, W_o included
    multiplications: int
    scores: int


@dataclass(frozen=True, eq=False)
class Heads(Section):
    """`part_norms` (H) are the lengths, at the query, of each head's output W_o; `error` is that of
    their sum plus the bias of c_proj against the attention output, over all tokens.
    """

    number = 13
    title = "Many heads for the price of one"
    layer: int
    many: HeadsCost
    one: HeadsCost
    part_norms: Tensor
    sum_norm: float
    error: float
    agrees: bool


def heads(setting: Setting) -> Heads:
    config, trace = setting.model.config, setting.trace
    T, C, H, D = len(setting.ids), config.n_embd, config.n_head, config.head_dim
    part_norms = measure_heads(
        setting.model, setting.ids, lambda layer, steps: _part_norms(setting, layer, steps)
    )[trace.layer].cpu()
    attn = setting.model.h[trace.layer].attn
    return Heads(
        shapes={
            "Q, K and V of all heads": (H, T, D),
            "weights": (H, T, T),
            "outputs": (H, T, D),
            "concatenated": (T, H * D),
            **shapes(W_o=attn.c_proj.matrix),
        },
        layer=trace.layer,
        many=_heads_cost(H, D, C, T),
        one=_heads_cost(1, C, C, T),
        part_norms=part_norms,
        sum_norm=float(trace.attention_output[trace.query].double().norm()),
        error=trace.heads_sum_error,
        agrees=trace.heads_sum_agrees,
    )


def _part_norms(setting: Setting, layer: int, steps: AttentionSteps) -> Tensor:
    w_o = setting.model.h[layer].attn.c_proj.matrix.unflatten(0, (steps.output.shape[1], -1))
    outputs = steps.output[0, :, setting.choice.query]  # (H, D)
    return (outputs.double()[:, None] @ w_o.double())[:, 0].norm(dim=1)


def _heads_cost(n_head: int, head_dim: int, n_embd: int, n_tokens: int) -> HeadsCost:
    matrix = n_embd * head_dim  # one of W_q, W_k, W_v, and W_o turned around
    square = n_tokens * n_tokens
    per_head = 3 * n_tokens * matrix + 2 * square * head_dim + n_tokens * matrix
    return HeadsCost(
        n_head,
        head_dim,
        # The bias of W_o is one for all heads.
        parameters=n_head * (4 * matrix + 3 * head_dim) + n_embd,
        multiplications=n_head * per_head,
        scores=n_head * square,
    )


@dataclass(frozen=True)
class BlockStage:
    """One step within a block: what comes out, and the length of the query's row of it."""

    name: str
    formula: str
    shape: Shape
    norm: float


@dataclass(frozen=True, eq=False)
class Block(Section):
    """`error` is that of the stages, computed one by one, against the model's own block."""

    number = 14
    title = "The block, and the stack"
    layer: int
    n_layer: int
    stages: list[BlockStage]
    error: float
    stream: list[tuple[str, float]]  # what leaves each block, and its length at the query
    block_parameters: int
    model_parameters: int


def block(setting: Setting) -> Block:
    model, layer = setting.model, setting.choice.layer
    part, x = model.h[layer], setting.stream.values[layer]
    attention = part.attn(part.ln_1(x), None, None, None, None)
    middle = x + attention
    inner = part.mlp.activation(part.mlp.c_fc(part.ln_2(middle)))
    mlp = part.mlp.c_proj(inner)
    after = middle + mlp
    rows = (
        ("x", "the residual stream that enters", x),
        ("a", "ln_1(x)", part.ln_1(x)),
        ("b", "masked multi-head attention of a", attention),
        ("x'", "x + b", middle),
        ("c", "ln_2(x')", part.ln_2(middle)),
        ("d", f"{model.config.activation_function}(c_fc(c))", inner),
        ("e", "c_proj(d)", mlp),
        ("x''", "x' + e", after),
    )
    query = setting.choice.query
    lengths = setting.stream.values[:, 0, query].double().norm(dim=1).tolist()
    return Block(
        shapes={"enters": tuple(x.shape[1:]), "leaves": tuple(after.shape[1:])},
        layer=layer,
        n_layer=model.config.n_layer,
        stages=[
            BlockStage(name, formula, tuple(made.shape[1:]), float(made[0, query].double().norm()))
            for name, formula, made in rows
        ],
        error=relative_error(after, setting.stream.values[layer + 1]),
        stream=list(zip(setting.stream.stages, lengths, strict=True)),
        block_parameters=sum(p.numel() for p in part.parameters()),
        model_parameters=sum(p.numel() for p in model.parameters()),
    )


@dataclass(frozen=True)
class NextToken:
    id: int
    label: str
    logit: float
    probability: float


@dataclass(frozen=True, eq=False)
class Logits(Section):
    """The next token after the text. `dot` is the product, in float64, of the last row of the final
    LayerNorm with the best token's row of the table: its logit once more.
    """

    number = 15
    title = "Logits: back to the vocabulary"
    tied: bool  # the embedding table is the matrix of the projection too
    top: list[NextToken]
    top_sum: float
    dot: float


def logits(setting: Setting) -> Logits:
    model = setting.model
    hidden = model.hidden([setting.ids])[0]
    all_logits = model.unembed(hidden[-1])
    tied = model.config.tie_word_embeddings
    table = model.table.matrix
    probabilities = all_logits.double().softmax(0)
    best = probabilities.topk(min(TOP, len(probabilities)))
    return Logits(
        shapes={
            **shapes(hidden=hidden, table=table),
            "logits": (len(hidden), len(all_logits)),
        },
        tied=tied,
        top=[
            NextToken(id, setting.label(id), float(all_logits[id]), probability)
            for id, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        top_sum=float(best.values.sum()),
        dot=float(hidden[-1].double() @ table[best.indices[0]].double()),
    )


@dataclass(frozen=True)
class Timing:
    """Median seconds per new token after a prompt, from the cache and without one."""

    n_prompt: int
    n_timed: int
    cached: float
    uncached: float


@dataclass(frozen=True, eq=False)
class Cache(Section):
    """`growth` are (tokens, bytes of keys and values). `recomputed` counts the positions whose keys
    and values every layer computes for `TIMED_TOKENS` new tokens without a cache, `computed` with
    one. `error` is that of the last token's output from the cache against a pass over all.
    """

    number = 16
    title = "The KV cache"
    n_layer: int
    n_embd: int
    itemsize: int
    bytes_per_token: int
    growth: list[tuple[int, int]]
    n_new: int
    computed: int
    recomputed: int
    error: float | None  # None for a text of one token
    timings: list[Timing]


def kv_cache(setting: Setting) -> Cache:
    model, ids = setting.model, setting.ids
    config, n = model.config, len(ids)
    per_token = KVCache.for_model(model, max_len=1).nbytes
    q, k, error = _last_from_cache(setting)
    growth = {1, n, *(config.n_positions // part for part in (8, 4, 2, 1))} - {0}
    n_new = TIMED_TOKENS
    return Cache(
        shapes=shapes(**{"q of one new token": q, "k of the whole text": k}),
        n_layer=config.n_layer,
        n_embd=config.n_embd,
        itemsize=model.dtype.itemsize,
        bytes_per_token=per_token,
        growth=[(length, length * per_token) for length in sorted(growth)],
        n_new=n_new,
        # The token chosen last is not fed.
        computed=n + n_new - 1,
        recomputed=sum(n + done for done in range(n_new)),
        error=error,
        timings=_timings(setting),
    )


def _last_from_cache(setting: Setting) -> tuple[Tensor, Tensor, float | None]:
    """(H, 1, D) queries and (H, T, D) keys of the last token, from a cache of the others."""
    model, ids = setting.model, setting.ids
    seen: list[AttentionSteps] = []
    cache = KVCache.for_model(model, max_len=len(ids))
    if len(ids) > 1:
        model.hidden([ids[:-1]], cache=cache)
    output = model.hidden([ids[-1:]], cache=cache, observe=lambda _, steps: seen.append(steps))[
        0, -1
    ]
    error = relative_error(output, model.hidden([ids])[0, -1]) if len(ids) > 1 else None
    return seen[0].q[0], seen[0].k[0], error


def _timings(setting: Setting) -> list[Timing]:
    """After the text, and after a longer prompt that repeats it, where the context has room."""
    room = setting.model.config.n_positions - TIMED_TOKENS
    wanted = (len(setting.ids), max(len(setting.ids), min(LONG_PROMPT, room)))
    lengths = sorted({min(length, room) for length in wanted if min(length, room) > 0})
    repeats = -(-max(lengths, default=0) // len(setting.ids))
    ids = setting.ids * repeats
    timings = []
    for length in lengths:
        cached, uncached = (_seconds(setting, ids[:length], cached) for cached in (True, False))
        timings.append(Timing(length, len(cached), *map(statistics.median, (cached, uncached))))
    return timings


def _seconds(setting: Setting, ids: Sequence[int], use_cache: bool) -> list[float]:
    """Seconds for each new token but the first, which has to read the prompt either way."""
    # One token more than is timed for the first, greedy, so that both ways take the same steps.
    steps = generate(setting.model, ids, TIMED_TOKENS, temperature=0, use_cache=use_cache)
    next(steps)
    seconds = []
    start = time.perf_counter()
    for _ in steps:
        end = time.perf_counter()
        seconds.append(end - start)
        start = end
    return seconds


@dataclass(frozen=True, eq=False)
class Animal:
    """What ` it` looks at: the mean over all heads, and the head that looks at ` animal` most."""

    text: str
    labels: list[str]
    query: int
    key: int
    mean: Tensor  # (query + 1)
    best: RankedHead
    best_row: Tensor  # (query + 1)


@dataclass(frozen=True, eq=False)
class TryIt(Section):
    """`weights_error` and `output_error` are those of the chosen head's formulas in NumPy and
    float64, from the model's X and matrices, against the model.
    """

    number = 17
    title = "Also to try"
    animal: Animal | None  # None if the model has no room for the sentence
    weights_error: float
    output_error: float


def try_it(setting: Setting) -> TryIt:
    weights, output = _in_numpy(setting.trace)
    return TryIt(
        shapes=shapes(weights=setting.trace.weights, output=setting.trace.output),
        animal=_animal(setting),
        weights_error=relative_error(torch.from_numpy(weights), setting.trace.weights),
        output_error=relative_error(torch.from_numpy(output), setting.trace.output),
    )


def _animal(setting: Setting) -> Animal | None:
    ids = setting.example(ANIMAL)
    it, animal = setting.word(" it"), setting.word(" animal")
    if ids is None or it not in ids or animal not in ids:
        return None
    query, key = ids.index(it), ids.index(animal)
    rows = measure_heads(
        setting.model, ids, lambda _, steps: steps.weights[0, :, query, : query + 1].clone()
    ).cpu()  # (layer, head, query + 1)
    best = RankedHead(*rank_heads(rows[..., key])[0])
    return Animal(
        ANIMAL,
        setting.lm.tokenizer.labels(ids),
        query,
        key,
        rows.double().mean((0, 1)),
        best,
        rows[best.layer, best.head],
    )


def _in_numpy(trace: HeadTrace) -> tuple[np.ndarray, np.ndarray]:
    """The weights (T, T) and the output (T, D) of a head."""
    names = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
    x, w_q, w_k, w_v, b_q, b_k, b_v = (getattr(trace, name).double().numpy() for name in names)
    scaled = (x @ w_q + b_q) @ (x @ w_k + b_k).T * trace.scale
    masked = np.where(np.tri(len(x), dtype=bool), scaled, -np.inf)
    powers = np.exp(masked - masked.max(axis=1, keepdims=True))
    weights = powers / powers.sum(axis=1, keepdims=True)
    return weights, weights @ (x @ w_v + b_v)
