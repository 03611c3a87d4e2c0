"""A lesson in words: what its numbers are put into, chapter by chapter.

What a trained model tends to do is said as what this model did; only what holds by arithmetic is
said as a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..lesson import Lesson, Section, one_head, tokens, whole_model
from .image import drift_figure, head_figure, overview_figure, stages_figure
from .lesson_blocks import Beside, Block, Chapter, Document, Listing, Picture, Prose, Table, code

MAX_TOKENS = 10  # rows and columns of a printed map
FIRST_NUMBERS = 4
NOT_GPT2 = "NOT what GPT-2 computes"


def document(lesson: Lesson) -> Document:
    """The lesson as blocks."""
    return Document(
        f"Attention, step by step, in {lesson.model}",
        list(_about(lesson)),
        [
            Chapter(
                section.number,
                section.title,
                [f"{name} {_shape(shape)}" for name, shape in section.shapes.items()],
                list(_WRITERS[type(section)](section, lesson)),
            )
            for section in lesson.sections
        ],
    )


def _about(lesson: Lesson) -> Iterator[Block]:
    config, choice = lesson.config, lesson.choice
    yield Prose(
        f"Model {code(lesson.model)}: {config['n_layer']} layers of {config['n_head']} heads of "
        f"{config['head_dim']} numbers, {config['n_embd']} in all; {config['vocab_size']:,} "
        f"tokens; a context of {config['n_positions']:,}. Text: {code(lesson.text)}, "
        f"{_count(len(lesson.ids), 'token')}. Every number here was computed from this model, "
        f"in {code(lesson.metadata['dtype'])}; layers, heads and positions count from 0."
    )
    weight = (
        f"it gives {_percent(choice.weight)} at {_token(lesson, choice.query)} to "
        f"{_token(lesson, choice.key)}"
    )
    if not choice.given:
        why = f"Of all {choice.n_heads} heads {weight}, the most."
    else:
        why = (
            f"You chose its {' and '.join(choice.given)}; {weight}, place {choice.rank} of "
            f"{choice.n_heads}."
        )
    yield Prose(f"The steps in one head follow layer {choice.layer}, head {choice.head}. {why}")
    if len(lesson.ids) > MAX_TOKENS:
        yield Prose(
            f"Maps show {MAX_TOKENS} of the {len(lesson.ids)} tokens: the first, the query, its "
            "key and the query's neighbours; their rows need not add up to 100%."
        )


def _static_row(section: tokens.StaticRow, lesson: Lesson) -> Iterator[Block]:
    rows, width = section.shapes["wte"]
    yield Prose(
        "The text becomes token ids, and each id selects one row of the embedding table `wte`: "
        f"{rows:,} rows of {width} numbers. Nothing is multiplied. What the model starts from "
        f"{'is' if section.is_lookup else 'is NOT'} these rows, to the last bit."
    )
    shown = section.tokens[:MAX_TOKENS]
    if section.example is not None:
        shown = [*shown, section.example]
    yield Table(
        ["token", "id", "length", *_first_numbers(width)],
        [[t.label, str(t.id), *_vector(t.row)] for t in shown],
        title="Rows of wte, their length and first numbers"
        + (f"; the first {MAX_TOKENS} tokens" if len(section.tokens) > MAX_TOKENS else ""),
    )
    if section.example is not None:
        example = section.example
        yield Prose(f"Id {example.id} is row {example.id}, the token {code(example.label)}.")
    if (shared := section.shared) is not None:
        same = "the same" if shared.same_row else "NOT the same"
        yield Prose(
            f"The token {code(shared.label)} has one id, {shared.id}. In {code(shared.texts[0])} "
            f"(the fruit) and in {code(shared.texts[1])} (a company) it starts as {same} {width} "
            f"numbers. Then its position's row of `wpe` is added, {shared.positions[0]} in one and "
            f"{shared.positions[1]} in the other: the cosine of the two sums is "
            f"{shared.cosine_with_position:.4f}."
        )


def _neighbours(section: tokens.Neighbours, lesson: Lesson) -> Iterator[Block]:
    yield Prose(
        "Training can move the rows of tokens that are used alike towards each other. Whether it "
        "did so in this table, the cosine tells: 1 is the same direction. Two different rows have "
        f"{section.average:z.3f} on average, over all pairs: read the others against that."
    )
    yield Table(
        ["", *section.labels],
        [
            [label, *(f"{value:z.3f}" for value in row)]
            for label, row in zip(section.labels, section.cosines.tolist(), strict=True)
        ],
        title="Cosine of each pair",
    )
    most = max(len(nearest.neighbours) for nearest in section.nearest)
    yield Table(
        ["token", *(f"nearest {rank}" for rank in range(1, most + 1))],
        [
            [near.label, *(f"{other.label} {other.cosine:.3f}" for other in near.neighbours)]
            for near in section.nearest
        ],
        text_columns=tuple(range(most + 1)),
        title="The nearest rows of the whole table",
    )
    yield Prose("For any token: `gpt2attn neighbours TOKEN`; for pairs, give several.")


def _context(section: tokens.Context, lesson: Lesson) -> Iterator[Block]:
    if not section.examples:
        yield Prose("This model's vocabulary or context has no room for the example texts.")
        return
    examples = section.examples
    for example in examples:
        yield Prose(
            f"{code(example.label)} in {code(example.texts[0])} and in {code(example.texts[1])}: "
            f"cosine {example.drift.cosines[0]:.4f} in the table, "
            f"{example.drift.cosines[-1]:.4f} after the last block."
        )
    columns = [values for e in examples for values in (e.drift.cosines, e.drift.others)]
    yield Table(
        ["residual stream", *(head for e in examples for head in (e.label, "others"))],
        [
            [stage, *("" if column is None else f"{column[at]:z.4f}" for column in columns)]
            for at, stage in enumerate(examples[0].drift.stages)
        ],
        title="Cosine of the token's two vectors, layer by layer",
    )
    yield Prose(
        '"others" is the mean over pairs of different tokens, one from each text, without the '
        "first ones. Vectors of unrelated tokens can grow alike with depth too, so read a column "
        "against its others. Any token in any two texts: `gpt2attn drift`."
    )
    for example in examples:
        yield Picture(
            partial(drift_figure, example.drift, example.label, example.texts, source=lesson.model),
            f"Curves: the cosine of {example.label} in two texts after each layer, and of others",
        )


def _projection(section: one_head.Projection, lesson: Lesson) -> Iterator[Block]:
    n_tokens, n_embd = section.x.shape
    head_dim, query = section.q.shape[1], lesson.choice.query
    first, last = section.columns
    yield Prose(
        f"X is the residual stream that enters layer {lesson.choice.layer}, after its LayerNorm "
        f"`ln_1`: {_count(n_tokens, 'token')} of {n_embd} numbers. Times W_q it is what each token "
        "asks for (query), times W_k what it can be found by (key), times W_v what it passes on "
        f"(value): {n_embd} numbers become {head_dim}, three times."
    )
    vectors = ("x", "q", "k", "v")
    headers = ["", "shape", "length", *_first_numbers(n_embd)]
    rows = [
        [name.upper(), _shape(matrix.shape), *_vector(matrix[query])]
        for name in vectors
        for matrix in [getattr(section, name)]
    ]
    yield Table(
        headers,
        [_filled(row, len(headers)) for row in rows],
        text_columns=(0, 1),
        title=f"The row of {_plain_token(lesson, query)}: its length and first numbers",
    )
    yield Prose(
        "The three matrices are the same for every token and every position. This head's are the "
        f"columns {first} to {last} of the three thirds of `c_attn`, a bias b beside each: "
        f"Q = X W_q + b_q. Computed again from X in float64, Q, K and V and the model's "
        f"{_agree(section.error)}."
    )


def _scores(section: one_head.Scores, lesson: Lesson) -> Iterator[Block]:
    choice, n_tokens = lesson.choice, len(lesson.ids)
    products = section.products.tolist()
    yield Prose(
        f"Q K^T is one matrix product, and it holds all {n_tokens} x {n_tokens} = "
        f"{n_tokens * n_tokens:,} dot products: each row a token that asks (query), each column "
        "one that is asked (key). No mask hides any of them yet."
    )
    yield _map(section.scores, lesson, "Scores")
    if choice.query != choice.key:
        query, key = _token(lesson, choice.query), _token(lesson, choice.key)
        yield Prose(
            f"Asking is not symmetric: {query} scores {section.there:z.3f} on {key}, and {key} "
            f"scores {section.back:z.3f} on {query}. They are two numbers, and the second exists "
            "only before the mask: the earlier token may not look ahead."
        )
    yield Prose(
        f"The score {section.there:z.3f} is one query times one key, number by number: the sum of "
        f"these {len(products)} products is {sum(products):z.3f}."
    )
    cells = _numbers(products, 9)
    across = min(8, len(cells))
    yield Table(
        ["q_i k_i", *(f"+{i}" for i in range(across))],
        [
            [str(start), *_filled(cells[start : start + across], across)]
            for start in range(0, len(cells), across)
        ],
        title="One score, followed down to its products",
    )
    yield Picture(
        lambda: head_figure(
            section.scores, lesson.labels, stage="scores",
            layer=choice.layer, head=choice.head, source=lesson.model,
        ),
        f"The scores of layer {choice.layer}, head {choice.head} as a map",
    )  # fmt: skip


def _scaling(section: one_head.Scaling, lesson: Lesson) -> Iterator[Block]:
    choice, head_dim = lesson.choice, lesson.config["head_dim"]
    yield Prose(
        "Softmax turns scores into shares by their differences. Ten times the numbers is ten times "
        "the differences, and one token takes nearly all:"
    )
    yield Table(
        ["softmax of", "shares", "entropy", "|J|"],
        [
            [
                ", ".join(f"{value:g}" for value in spread.inputs),
                "   ".join(_percent(share, 4) for share in spread.shares),
                f"{spread.entropy:.4f}",
                _small(spread.jacobian_norm),
            ]
            for spread in section.examples
        ],
        text_columns=(0, 1),
    )
    by = (
        f"divides its scores by sqrt({head_dim}) = {section.divisor:.6g}"
        if section.divisor is not None
        else f"multiplies its scores by {section.scale:.6g}"
    )
    order = "the same" if section.same_order else "NOT the same"
    yield Prose(
        f"A score is a sum of {head_dim} products, and sums of more products tend to be larger. So "
        f"this head {by} before the softmax. The ranking of the tokens stays {order}; the shares "
        f"at {_token(lesson, choice.query)} are:"
    )
    shown = [at for at in _shown(lesson) if at <= choice.query]
    rows = (("raw", section.raw_row), ("scaled", section.scaled_row))
    yield Table(
        ["", *(lesson.labels[at] for at in shown)],
        [[name, *(_percent(float(row[at])) for at in shown)] for name, row in rows],
        title=f"raw: the softmax of the scores as they are, {NOT_GPT2}",
        shares=[[float(row[at]) for at in shown] for _, row in rows],
    )
    shown = _shown(lesson)
    yield Table(
        [
            "row of", "raw: largest", "entropy", "|J|",
            "scaled: largest", "entropy", "|J|",
        ],
        [
            [
                lesson.labels[at],
                *_measures(section.raw_largest, section.raw_entropy, section.raw_jacobian_norm, at),
                *_measures(section.largest, section.entropy, section.jacobian_norm, at),
            ]
            for at in shown
        ],
        title="Each row's largest share, its entropy in nats, and the norm of its Jacobian J",
        marked=_place(shown, choice.query),
    )  # fmt: skip
    yield Prose(
        "J = diag(p) - p p^T is the derivative of a softmax by its scores, and what training "
        "changes passes through it. As one share nears 100%, J nears 0, and the row can hardly "
        "learn. A row that sees one token only has J = 0 either way."
    )


def _rows(section: one_head.Rows, lesson: Lesson) -> Iterator[Block]:
    choice = lesson.choice
    row = section.weights[choice.query].tolist()
    order = sorted(range(choice.query + 1), key=lambda at: -row[at])[:3]
    said = ", ".join(f"{_percent(row[at])} to {_token(lesson, at)}" for at in order)
    sums = section.row_sums
    smallest = (
        f"the smallest is {_small(section.smallest)}"
        if section.smallest > 0
        else f"the smallest so near 0 that {lesson.metadata['dtype']} holds it as 0"
    )
    yield Prose(
        "The softmax is taken along each row, so a row is one token that asks, and its numbers say "
        "how it divides its attention. Each share that the mask leaves is positive "
        f"({smallest}), and each row adds up to 1 (here: from {float(sums.min()):.7f} to "
        f"{float(sums.max()):.7f})."
    )
    yield _share_map(section.weights, lesson, "Weights")
    yield Prose(f"{_token(lesson, choice.query)} gives {said}.")
    yield Picture(
        lambda: head_figure(
            section.weights, lesson.labels,
            layer=choice.layer, head=choice.head, source=lesson.model,
        ),
        f"The weights of layer {choice.layer}, head {choice.head} as a map",
    )  # fmt: skip


def _values(section: one_head.Values, lesson: Lesson) -> Iterator[Block]:
    choice, shown = lesson.choice, [at for at in _shown(lesson) if at <= lesson.choice.query]
    n_tokens, head_dim = section.output.shape
    lengths = [_numbers(x, 9) for x in (section.value_norms, section.contribution_norms)]
    added = _numbers([*section.added_norms.tolist(), section.added_norm], 9)
    yield Prose(
        "The weights say how much of each token's value vector is taken. The output of "
        f"{_token(lesson, choice.query)} is the sum over tokens of share x value vector:"
    )
    rows = [
        [
            lesson.labels[at],
            _percent(float(section.shares[at])),
            lengths[0][at],
            lengths[1][at],
            added[at],
        ]
        for at in shown
    ]
    total = ["sum", _percent(float(section.shares.double().sum())), ""]
    yield Table(
        ["token", "share", "|v|", "|share v|", "|share v W_o|"],
        [*rows, [*total, *_numbers([section.output_norm], 9), added[-1]]],
        title="Lengths: of the value, of the share of it, and of that as it enters the stream",
    )
    yield Prose(
        "The last line is the length of the sum, which is not the sum of the lengths. A large "
        "share of a short vector moves little. For all tokens at once it is one product, A V: "
        f"{_shape((n_tokens, head_dim))}, the shape of Q, K and V. The contributions' sum and the "
        f"model's output {_agree(section.error)}."
    )


def _five_steps(section: one_head.FiveSteps, lesson: Lesson) -> Iterator[Block]:
    choice = lesson.choice
    yield Prose("Sections 4 to 8 are one function:")
    yield Listing(section.source)
    yield Prose(
        f"It was run, in float64, on this head's X and matrices; its output and the model's "
        f"{_agree(section.error)}. One pair, {_token(lesson, choice.query)} on "
        f"{_token(lesson, choice.key)}, on its way through:"
    )
    shape = section.shapes
    yield Table(
        ["step", "what", "shape", "number"],
        [
            ["1 project", "Q, K, V = X W + b", f"{_shape(shape['Q'])} each", ""],
            ["2 compare", "scores = Q K^T", _shape(shape["scores"]), f"{section.score:z.4f}"],
            ["3 scale", "scores x scale", _shape(shape["scores"]), f"{section.scaled:z.4f}"],
            ["4 softmax", "of each masked row", _shape(shape["weights"]), _percent(section.weight)],
            [
                "5 mix", "weights V", _shape(shape["output"]),
                f"length {section.output_norm:.4f}",
            ],
        ],
        text_columns=(0, 1, 2),
    )  # fmt: skip
    yield Prose(
        "All numbers of any head on one screen: `gpt2attn trace TEXT --layer "
        f"{choice.layer} --head {choice.head}`."
    )
    yield Picture(
        lambda: stages_figure(
            section.stages, lesson.labels,
            layer=choice.layer, head=choice.head, source=lesson.model,
        ),
        "Four maps side by side: scores, scaled scores, masked scores, weights",
    )  # fmt: skip


def _all_heads(section: whole_model.AllHeads, lesson: Lesson) -> Iterator[Block]:
    n_layer, n_head = section.sink.shape
    n_tokens, labels = len(section.ids), section.labels
    query, key = code(labels[section.query]), code(labels[section.key])
    yield Prose(
        f"All {n_layer} x {n_head} = {n_layer * n_head} heads on {code(section.text)}, "
        f"{_count(n_tokens, 'token')}. What do they give to {key} at {query}? On average "
        f"{_percent(section.mean_weight)}; attention spread evenly would give "
        f"{_percent(section.uniform_weight)}."
    )
    yield Table(
        ["rank", "layer", "head", f"{labels[section.query]} to {labels[section.key]}"],
        [
            [str(rank), str(head.layer), str(head.head), _percent(head.weight)]
            for rank, head in enumerate(section.ranking[: whole_model.TOP], start=1)
        ],
        text_columns=(),
        title=f"The {min(whole_model.TOP, len(section.ranking))} heads that give it the most",
    )
    yield Prose(
        f"And where does the last token, {code(labels[-1])}, look? Trained models can park much of "
        "their attention on the first token, the attention sink. Here the first token, "
        f"{code(labels[0])}, gets {_percent(section.sink_mean)} of it, averaged over heads and "
        f"layers; an even share would be {_percent(section.uniform_sink)}."
    )
    if section.published_sink is not None:
        yield Prose(
            f"A published walk-through claims {section.published_sink:.0%} for GPT-2 small on this "
            f"text; these weights gave {_percent(section.sink_mean)} just now."
        )
    yield from _sink_tables(section)
    yield Prose(
        "Attention is not an explanation of the output. A weight says where a head looked; what it "
        "did with what it found, and whether that mattered for the next token, are other questions."
    )
    if (maps := section.maps) is not None:
        yield Picture(
            lambda: overview_figure(maps, labels, source=lesson.model),
            f"Small maps of all {n_layer * n_head} heads, a row for each layer",
        )
    else:
        yield Prose(
            f"Above {whole_model.MOST_MAPPED_TOKENS} tokens the lesson leaves out the maps of all "
            "heads; `gpt2attn attention` writes them."
        )


def _sink_tables(section: whole_model.AllHeads) -> Iterator[Table]:
    """Twelve heads side by side fit a screen; more go below."""
    n_head = section.sink.shape[1]
    for start in range(0, n_head, 12):
        part = section.sink[:, start : start + 12].tolist()
        means = section.sink_by_layer.tolist() if start == 0 else [None] * len(part)
        yield Table(
            ["layer", "mean", *(f"h {head}" for head in range(start, min(start + 12, n_head)))],
            [
                [str(layer), "" if mean is None else f"{100 * mean:.1f}", *(_whole(x) for x in row)]
                for layer, (row, mean) in enumerate(zip(part, means, strict=True))
            ],
            text_columns=(),
            title="Percent of the last token's attention on the first, per layer and head",
            shares=part,
        )


def _mask(section: one_head.Mask, lesson: Lesson) -> Iterator[Block]:
    n_tokens = len(lesson.ids)
    yield Prose(
        "GPT-2 predicts the next token, so no token may see a later one. Above the diagonal minus "
        "infinity is added to the scaled scores, before the softmax:"
    )
    yield _map(section.masked, lesson, "Masked scores")
    yield Prose(
        "The share of minus infinity is exactly 0. The second map has the same scores without the "
        "mask, and GPT-2 never makes it."
    )
    yield Beside(
        _share_map(section.weights, lesson, "Masked: what GPT-2 computes"),
        _share_map(section.unmasked, lesson, f"Without the mask: {NOT_GPT2}", causal=False),
    )
    yield Prose(
        f"The first row sees {_count(section.seen[0], 'token')}, itself, and the last row all "
        f"{section.seen[-1]}."
    )
    if n_tokens > 1:
        yield Prose(
            "Setting the hidden scores to 0 would not hide them, for a score of 0 still gets a "
            f"share: {_token(lesson, 0)} would give {_percent(section.leaked)} of its attention to "
            f"later tokens ({NOT_GPT2}). Setting shares to 0 after the softmax would leave rows "
            "that no longer add up to 1."
        )


def _cost(section: whole_model.Cost, lesson: Lesson) -> Iterator[Block]:
    n_maps, n = section.n_layer * section.n_head, section.n_tokens
    yield Prose(
        "Every token meets every token: n x n scores, in each head of each layer, here "
        f"{section.n_layer} x {section.n_head} = {n_maps} times. For this text that is {n} x {n} = "
        f"{n * n:,} scores a head. Twice the length is {section.doubled:g} times the cost."
    )
    yield Table(
        ["tokens", "scores of a head", f"of all {n_maps}", "if kept"],
        [
            [
                f"{cost.n_tokens:,}{'' if cost.fits else ' *'}",
                f"{cost.scores:,}",
                f"{cost.all_scores:,}",
                _bytes(cost.n_bytes),
            ]
            for cost in section.lengths
        ],
        text_columns=(),
        marked=[cost.n_tokens for cost in section.lengths].index(n),
    )
    if not all(cost.fits for cost in section.lengths):
        yield Prose(f"* more than this model's context of {lesson.config['n_positions']:,} tokens.")


def _heads(section: whole_model.Heads, lesson: Lesson) -> Iterator[Block]:
    many, one, width = section.many, section.one, lesson.config["n_embd"]
    yield Prose(
        f"A layer has {many.n_head} heads of {many.head_dim} numbers, which make "
        f"{many.n_head} x {many.head_dim} = {width}. Each runs the whole operation with its own "
        f"matrices. One head of {width} would cost as much; it would make one map in place of "
        f"{many.n_head}."
    )
    kinds = ("parameters", "multiplications", "scores")
    yield Table(
        [
            f"attention of a layer, {_count(len(lesson.ids), 'token')}",
            f"{many.n_head} x {many.head_dim}",
            f"{one.n_head} x {one.head_dim}",
        ],
        [[kind, f"{getattr(many, kind):,}", f"{getattr(one, kind):,}"] for kind in kinds],
    )
    verdict = "is" if section.agrees else "is NOT"
    yield Prose(
        f"The outputs are put side by side, {many.n_head} x {many.head_dim} numbers for each "
        "token, and multiplied by W_o (`c_proj`). That is the same as giving each head its own "
        f"rows of W_o and adding: the sum over heads of output_h W_o,h, plus the bias, {verdict} "
        f"the attention output of layer {section.layer}; they {_agree(section.error)}. "
        f"What each head adds at {_token(lesson, lesson.choice.query)}:"
    )
    norms = _numbers([*section.part_norms.tolist(), section.sum_norm], 7)
    n_head = len(section.part_norms)
    for start in range(0, n_head, 8):
        end = min(start + 8, n_head)
        last = end == n_head
        yield Table(
            ["", *(f"head {head}" for head in range(start, end)), *(["all + bias"] * last)],
            [["length", *norms[start:end], *([norms[-1]] * last)]],
        )


def _block(section: whole_model.Block, lesson: Lesson) -> Iterator[Block]:
    yield Prose(
        f"Block {section.layer}, step by step; lengths are of the row of "
        f"{_token(lesson, lesson.choice.query)}. x is the residual stream: attention and the MLP "
        "read it through a LayerNorm and add to it."
    )
    yield Table(
        ["", "what it is", "shape", "length"],
        [[s.name, s.formula, _shape(s.shape), f"{s.norm:.3f}"] for s in section.stages],
        text_columns=(0, 1, 2),
    )
    enters, leaves = section.shapes["enters"], section.shapes["leaves"]
    yield Prose(
        f"{_shape(enters)} enters and {_shape(leaves)} leaves, so blocks stack: this model has "
        f"{section.n_layer}, of {section.block_parameters:,} parameters each, "
        f"{section.model_parameters:,} in all with the embeddings. Done one by one, these steps "
        f"and the model's own block {_agree(section.error)}. GPT-2 is a decoder only: there is no "
        "encoder, and no cross-attention to one."
    )
    yield Table(
        ["residual stream", "length"],
        [[stage, f"{length:.3f}"] for stage, length in section.stream],
        title="The same row through the whole stack",
    )


def _logits(section: whole_model.Logits, lesson: Lesson) -> Iterator[Block]:
    rows, width = section.shapes["table"]
    matrix = (
        "with the same matrix that the tokens were looked up in, `wte`"
        if section.tied
        else "with a matrix of its own, `lm_head` (in GPT-2 it is the embedding table itself)"
    )
    best = section.top[0]
    yield Prose(
        f"After the last block comes a final LayerNorm, then a product {matrix}: each of its "
        f"{rows:,} rows of {width} numbers gives one token's logit. The logit of "
        f"{code(best.label)} is {best.logit:.4f}; the dot product with its row, "
        f"computed apart in float64, is {section.dot:.4f}. Softmax makes the "
        "logits the probabilities of the next token:"
    )
    yield Table(
        ["rank", "token", "id", "logit", "probability"],
        [
            [
                str(rank), token.label, str(token.id), f"{token.logit:z.3f}",
                _percent(token.probability, 2),
            ]
            for rank, token in enumerate(section.top, start=1)
        ],
        text_columns=(1,),
        title=f"After the text; together these {len(section.top)} have "
        f"{_percent(section.top_sum, 2)}",
    )  # fmt: skip


def _cache(section: whole_model.Cache, lesson: Lesson) -> Iterator[Block]:
    n = len(lesson.ids)
    (q, k) = section.shapes.values()
    yield Prose(
        "Keys and values of earlier tokens do not change when a token is added: the mask keeps the "
        "future out of them. So they are computed once, kept, and reused. Only the new token needs "
        f"a fresh query: for the last of {_count(n, 'token')} a layer uses q {_shape(q)} and k "
        f"{_shape(k)} (heads, tokens, numbers)."
    )
    if section.error is not None:
        yield Prose(
            "The last token's output from the cache and from a pass over the whole text "
            f"{_agree(section.error)}."
        )
    yield Prose(
        f"For {section.n_new} new tokens after this text, each layer computes the keys and values "
        f"of {section.computed} positions with a cache and of {section.recomputed} without one. "
        "Measured on this machine just now:"
    )
    if section.timings:
        yield Table(
            ["prompt tokens", "ms a token, cache", "ms a token, no cache", "times"],
            [
                [
                    f"{timing.n_prompt:,}", f"{1000 * timing.cached:.2f}",
                    f"{1000 * timing.uncached:.2f}", f"{timing.uncached / timing.cached:.1f}",
                ]
                for timing in section.timings
            ],
            text_columns=(),
            title=f"Medians of {section.timings[0].n_timed} tokens each; the first is left out, "
            "for it reads the prompt",
        )  # fmt: skip
    else:
        yield Prose("(This model's context has no room for new tokens.)")
    yield Prose(
        f"The price is memory: 2 (a key and a value) x {section.n_layer} layers x {section.n_embd} "
        f"numbers x {section.itemsize} bytes = {section.bytes_per_token:,} bytes for each token, "
        "in proportion to the text:"
    )
    yield Table(
        ["tokens", "bytes", ""],
        [[f"{length:,}", f"{size:,}", _bytes(size)] for length, size in section.growth],
        text_columns=(),
    )


def _try_it(section: whole_model.TryIt, lesson: Lesson) -> Iterator[Block]:
    yield Prose(
        "An independent check: this head's formulas, written in NumPy in float64 over the same X "
        f"and matrices. Its weights and the model's {_agree(section.weights_error)}; the outputs "
        f"{_agree(section.output_error)}."
    )
    if (animal := section.animal) is None:
        yield Prose("The sentence about the animal does not fit this model.")
        return
    it, seen = code(animal.labels[animal.query]), animal.labels[: animal.query + 1]
    best = animal.best
    yield Prose(
        f"What does {it} look at in {code(animal.text)}? Below, its row: the mean over all heads, "
        f"and head {best.layer}.{best.head}, which gives "
        f"{code(animal.labels[animal.key])} the most, {_percent(best.weight)}."
    )
    rows = (("mean of all", animal.mean), (f"head {best.layer}.{best.head}", animal.best_row))
    yield Table(
        ["", *seen],
        [[name, *(_percent(share) for share in row.tolist())] for name, row in rows],
        shares=[row.tolist() for _, row in rows],
    )
    yield Prose(
        "Then try your own: `gpt2attn explain TEXT`, `gpt2attn heads TEXT --from TOKEN --to "
        "TOKEN`, `gpt2attn trace TEXT --layer L --head H`."
    )


_WRITERS: dict[type[Section], Callable[[Any, Lesson], Iterator[Block]]] = {
    tokens.StaticRow: _static_row,
    tokens.Neighbours: _neighbours,
    tokens.Context: _context,
    one_head.Projection: _projection,
    one_head.Scores: _scores,
    one_head.Scaling: _scaling,
    one_head.Rows: _rows,
    one_head.Values: _values,
    one_head.FiveSteps: _five_steps,
    whole_model.AllHeads: _all_heads,
    one_head.Mask: _mask,
    whole_model.Cost: _cost,
    whole_model.Heads: _heads,
    whole_model.Block: _block,
    whole_model.Logits: _logits,
    whole_model.Cache: _cache,
    whole_model.TryIt: _try_it,
}


def _shown(lesson: Lesson) -> list[int]:
    """The positions that printed maps have, in order: all, or the first, query, key and others.

    The others are the query's neighbours, those before it first.
    """
    n_tokens, query = len(lesson.ids), lesson.choice.query
    order = (0, query, lesson.choice.key, *range(query - 1, 0, -1), *range(query + 1, n_tokens))
    return sorted(list(dict.fromkeys(order))[:MAX_TOKENS])


def _place(shown: Sequence[int], position: int) -> int:
    return list(shown).index(position)


def _map(values: Tensor, lesson: Lesson, title: str) -> Table:
    """A (T, T) map of numbers."""
    shown = _shown(lesson)
    part = values[shown][:, shown].tolist()
    cells = _numbers([value for row in part for value in row], 7)
    width = len(shown)
    return Table(
        ["query \\ key", *(lesson.labels[at] for at in shown)],
        [
            [lesson.labels[at], *cells[width * row : width * (row + 1)]]
            for row, at in enumerate(shown)
        ],
        title=title,
        marked=_place(shown, lesson.choice.query),
    )


def _share_map(values: Tensor, lesson: Lesson, title: str, *, causal: bool = True) -> Table:
    """A (T, T) map of shares; a masked one is a plain 0."""
    shown = _shown(lesson)
    part = values[shown][:, shown].tolist()
    return Table(
        ["query \\ key", *(lesson.labels[at] for at in shown)],
        [
            [
                lesson.labels[at],
                *(
                    "0" if causal and key > at else _percent(share)
                    for key, share in zip(shown, row, strict=True)
                ),
            ]
            for at, row in zip(shown, part, strict=True)
        ],
        title=title,
        shares=part,
        marked=_place(shown, lesson.choice.query),
    )


def _token(lesson: Lesson, position: int) -> str:
    return code(lesson.labels[position])


def _plain_token(lesson: Lesson, position: int) -> str:
    return f"{lesson.labels[position]} (position {position})"


def _measures(largest: Tensor, entropy: Tensor, jacobian_norm: Tensor, at: int) -> list[str]:
    return [_percent(float(largest[at])), f"{entropy[at]:z.3f}", _small(float(jacobian_norm[at]))]


def _vector(row: Tensor) -> list[str]:
    """A vector's length and first numbers."""
    return _numbers([float(row.double().norm()), *row[:FIRST_NUMBERS].tolist()], 9)


def _first_numbers(width: int) -> list[str]:
    return [f"[{i}]" for i in range(min(FIRST_NUMBERS, width))]


def _numbers(values: Sequence[float] | Tensor, width: int) -> list[str]:
    """Numbers with as many decimals for each, at most 4 and as many as `width` has room for."""
    values = [float(value) for value in values]
    finite = [value for value in values if abs(value) != float("inf")]
    for decimals in (4, 3, 2, 1, 0):
        if all(len(f"{value:z.{decimals}f}") <= width for value in finite):
            return [_number(value, f"z.{decimals}f") for value in values]
    return [_number(value, ".0e") for value in values]


def _number(value: float, form: str) -> str:
    return f"{value:.0f}" if abs(value) == float("inf") else format(value, form)


def _filled(cells: list[str], width: int) -> list[str]:
    return cells + [""] * (width - len(cells)) if len(cells) < width else cells


def _percent(share: float, decimals: int = 1) -> str:
    return f"{100 * share:z.{decimals}f}%"


def _whole(share: float) -> str:
    return f"{100 * share:z.0f}"


def _small(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def _agree(error: float) -> str:
    """How well two tensors agree, as a verb."""
    return f"agree within {error:.1e} of the largest number" if error else "agree to the last bit"


def _shape(shape: Sequence[int]) -> str:
    return f"({' x '.join(map(str, shape))})"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number} B"
