"""Pictures of attention as matplotlib figures: one head, a layer, all heads, stages, measures.

Rows are queries (the tokens that read), columns are keys (the tokens they read from). The figures
touch neither pyplot nor matplotlib's settings; `figure_bytes` makes PNG or SVG of them, the same
bytes every time.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from ..analysis import entropy, over_queries, sink_share, uniform_weights
from .look import BLUE, BROWN, block_note, first_token_note, pooled, select, shortened, source_of
from .sheet import (
    BEFORE_MAP,
    DPI,
    GAP,
    GREY,
    LINE,
    MARGIN,
    MAX_LABEL,
    Scale,
    Sheet,
    TokenLabels,
    figure_bytes,
    plain,
    settings,
    text_width,
)

if TYPE_CHECKING:
    from ..analysis import Drift
    from ..capture import AttentionMaps

__all__ = [
    "drift_figure",
    "figure_bytes",
    "head_figure",
    "layer_figure",
    "maps_figure",
    "maps_html",
    "measures_figure",
    "overview_figure",
    "stages_figure",
]

PERCENT = "Numbers are percent; a row adds up to 100%."
READING = "Row: the token that reads (query). Column: the token it reads from (key)."
MASKED = "White: masked, a token cannot see later ones; the palest blue is a weight of 0."
UNDRAWN = "More tokens than dots: some rows and columns are left out."
STAGES = {
    "scores": ("Raw scores", "query · key"),
    "scaled": ("Scaled scores", "scores x scale"),
    "masked": ("Masked scores", "-inf above the diagonal"),
    "weights": ("Attention", "softmax of each row"),
}


def maps_figure(
    maps: AttentionMaps,
    layer: int | None = None,
    head: int | None = None,
    *,
    text: int = 0,
    show: str = "weights",
) -> Figure:
    """A picture of one text's maps: all heads, the heads of `layer`, or one head with its numbers.

    `show` is "weights" or, for one head, another captured stage; "stages" puts the four stages of
    one head side by side; "measures" maps sink share and entropy over all layers and heads. Raises
    ValueError for what was not captured.
    """
    maps, layer, head = select(maps, layer, head, text)
    (labels,), source = maps.labels, source_of(maps)
    if layer is not None and head is not None and show != "measures":
        place: Any = {"layer": layer, "head": head, "source": source}
        if show == "stages":
            stages = {name: maps.head(layer, head, stage=name) for name in STAGES}
            return stages_figure(stages, labels, **place)
        return head_figure(maps.head(layer, head, stage=show), labels, stage=show, **place)
    if show not in ("weights", "measures"):
        raise ValueError(f"{show!r} is a picture of one head: give layer and head.")
    axes: Any = {"layers": maps.layers, "heads": maps.heads, "source": source}
    if show == "measures":
        weights = maps.weights[:, 0].float()
        return measures_figure(
            over_queries(sink_share(weights)),
            over_queries(entropy(weights)),
            n_tokens=len(labels),
            **axes,
        )
    if layer is not None:
        weights = maps.weights[maps.layers.index(layer), 0]
        return layer_figure(weights, labels, layer=layer, heads=maps.heads, source=source)
    return overview_figure(maps.weights[:, 0], labels, **axes)


def maps_html(maps: AttentionMaps) -> str | None:
    """An img element that holds `maps_figure` of the first text; None if there are no weights."""
    if "weights" not in maps.stages or not len(maps):
        return None
    figure = maps_figure(maps)
    data = base64.b64encode(figure_bytes(figure, "png")).decode()
    width = round(96 * figure.get_figwidth())
    note = ""
    if len(maps) > 1:
        note = f"<p>Text 0 of {len(maps)}; <code>.figure(text=1)</code> shows the next.</p>"
    return (
        f'<img alt="Attention maps" style="width:{width}px;max-width:100%" '
        f'src="data:image/png;base64,{data}">{note}'
    )


def head_figure(
    values: Tensor,
    labels: Sequence[str],
    *,
    layer: int,
    head: int,
    stage: str = "weights",
    source: str = "",
) -> Figure:
    """One map (query, key) with labels, and its numbers where they fit.

    `source`, here and below, is what the subtitle says of where the numbers come from.
    """
    n_tokens = len(labels)
    side = _side(n_tokens)
    with settings():
        tokens = TokenLabels(labels, side)
        scale = Scale.of(stage, values)
        shown, block = pooled(values, int(side * DPI) // 2) if scale.is_weights else (values, 1)
        caption = [READING]
        if scale.is_weights:
            if scale.decimals(values, tokens.cell) is not None:
                caption.append(PERCENT)
            caption += [MASKED, first_token_note(values)]
        elif stage == "masked":
            caption.append("White: minus infinity, which becomes a weight of 0.")
        caption += [tokens.note, block_note(block) if block > 1 else ""]
        left = MARGIN + 0.25 + tokens.width + GAP
        sheet = Sheet(
            left + side,
            BEFORE_MAP + side + tokens.height + 0.3,
            f"{STAGES[stage][0]} of layer {layer}, head {head}",
            _subtitle(source, labels),
            caption,
            scales=[(left, scale)],
        )
        sheet.map(shown, left, BEFORE_MAP, side, scale, name=f"{layer}.{head}")
        sheet.numbers(shown, left, BEFORE_MAP, side, scale)
        tokens.rows(sheet, left, BEFORE_MAP)
        tokens.columns(sheet, left, BEFORE_MAP + side)
        sheet.axis_titles(left, BEFORE_MAP, side, tokens)
        return sheet.figure


def layer_figure(
    weights: Tensor,
    labels: Sequence[str],
    *,
    layer: int,
    heads: Sequence[int] | None = None,
    source: str = "",
) -> Figure:
    """The maps (head, query, key) of a layer's heads in a grid, the token labels at its edge."""
    heads = list(range(len(weights))) if heads is None else heads
    n_columns = _grid(len(heads))
    n_rows = math.ceil(len(heads) / n_columns)
    side, gap_x, gap_y = 2.3, 0.22, 0.36
    with settings():
        tokens, scale = TokenLabels(labels, side), Scale.of("weights", weights)
        shown, block = pooled(weights, int(side * DPI) // 2)
        left, top = MARGIN + 0.25 + tokens.width + GAP, BEFORE_MAP + 0.22
        sheet = Sheet(
            left + n_columns * (side + gap_x) - gap_x,
            top + n_rows * (side + gap_y) - gap_y + tokens.height + 0.3,
            f"Attention of the heads of layer {layer}",
            _subtitle(source, labels),
            [
                READING,
                "The share above a map is what its first column gets on average.",
                PERCENT if scale.decimals(weights, tokens.cell) is not None else "",
                MASKED,
                first_token_note(weights),
                tokens.note,
                block_note(block) if block > 1 else "",
            ],
            scales=[(left, scale)],
        )
        for place, head in enumerate(heads):
            row, column = divmod(place, n_columns)
            x, y = left + column * (side + gap_x), top + row * (side + gap_y)
            sheet.text(x, y - 0.07, f"head {head}", size=9)
            if len(labels) > 1:
                share = over_queries(sink_share(weights[place]).float())
                sheet.text(x + side, y - 0.07, f"{share:.0%}", color=GREY, align="right")
            sheet.map(shown[place], x, y, side, scale, name=f"{layer}.{head}")
            sheet.numbers(shown[place], x, y, side, scale)
            if column == 0:
                tokens.rows(sheet, x, y)
            if place + n_columns >= len(heads):
                tokens.columns(sheet, x, y + side)
        sheet.axis_titles(left, top + (n_rows - 1) * (side + gap_y), side, tokens)
        return sheet.figure


def overview_figure(
    weights: Tensor,
    labels: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    source: str = "",
) -> Figure:
    """All maps (layer, head, query, key) as small multiples: a row a layer, a column a head."""
    layers, heads = _axes_of(weights, layers, heads)
    gap = 0.1
    side = min(1.2, max(0.34, 8.6 / len(heads) - gap))
    with settings():
        scale = Scale.of("weights", weights)
        shown = [pooled(layer, int(side * DPI)) for layer in weights]  # one layer's copy at a time
        block = shown[0][1]
        left, top = MARGIN + 0.55, BEFORE_MAP + 0.25
        right = left + len(heads) * (side + gap) - gap
        sheet = Sheet(
            right,
            top + len(layers) * (side + gap),
            f"Attention of all {len(layers) * len(heads)} heads",
            _subtitle(source, labels),
            [
                "In each small map a row is a token that reads (query), from the first at the top; "
                "a column is a token it reads from (key), from the first at the left. A dark left "
                "edge is attention to the first token, a dark diagonal to the token itself or just "
                "before it.",
                MASKED,
                first_token_note(weights),
                block_note(block) if block > 1 else "",
            ],
            scales=[(left, scale)],
        )
        sheet.text((left + right) / 2, top - 0.3, "head", color=GREY, align="center")
        middle = top + len(layers) * (side + gap) / 2
        sheet.text(MARGIN + 0.12, middle, "layer", color=GREY, align="center", turned=True)
        for column, head in enumerate(heads):
            sheet.text(
                left + column * (side + gap) + side / 2, top - 0.09, str(head), align="center"
            )
        for row, layer in enumerate(layers):
            y = top + row * (side + gap)
            sheet.text(left - 0.12, y + side / 2 + 0.04, str(layer), align="right")
            for column, head in enumerate(heads):
                x = left + column * (side + gap)
                sheet.map(shown[row][0][column], x, y, side, scale, name=f"{layer}.{head}")
        return sheet.figure


def stages_figure(
    stages: Mapping[str, Tensor],
    labels: Sequence[str],
    *,
    layer: int,
    head: int,
    source: str = "",
) -> Figure:
    """One head's raw, scaled and masked scores and its weights (query, key), side by side."""
    side, gap = 2.6, 0.3
    with settings():
        tokens = TokenLabels(labels, side)
        left, top = MARGIN + 0.25 + tokens.width + GAP, BEFORE_MAP + 0.22
        lefts = [left + place * (side + gap) for place in range(len(STAGES))]
        # Masking changes no score that it leaves: the same colours before and after.
        ranges = {**stages, "masked": stages["scaled"]}
        scales = [Scale.of(name, ranges[name]) for name in STAGES]
        sheet = Sheet(
            lefts[-1] + side,
            top + side + tokens.height + 0.3,
            f"Layer {layer}, head {head}: from scores to weights",
            _subtitle(source, labels),
            [
                READING,
                "Brown: scores, the darker the higher. Blue: weights in percent; a row adds up to "
                "100%.",
                "White: masked; a score of minus infinity becomes a weight of exactly 0.",
                tokens.note,
                UNDRAWN if len(labels) > side * DPI else "",
            ],
            scales=list(zip(lefts, scales, strict=True)),
        )
        for x, scale, (name, (title, formula)) in zip(lefts, scales, STAGES.items(), strict=True):
            sheet.text(x, top - 0.08, f"{title}: {formula}", size=9)
            sheet.map(stages[name], x, top, side, scale, name=name)
            sheet.numbers(stages[name], x, top, side, scale)
            tokens.columns(sheet, x, top + side)
        tokens.rows(sheet, left, top)
        sheet.axis_titles(left, top, side, tokens)
        return sheet.figure


def measures_figure(
    sink: Tensor,
    entropies: Tensor,
    *,
    n_tokens: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    source: str = "",
) -> Figure:
    """Sink share and entropy in nats (layer, head), averages over queries, side by side."""
    layers, heads = _axes_of(sink, layers, heads)
    cell = min(0.4, max(0.2, 5.0 / len(heads)))
    width, height = len(heads) * cell, len(layers) * cell
    even = uniform_weights(n_tokens)
    even_sink, even_entropy = (float(over_queries(f(even))) for f in (sink_share, entropy))
    with settings():
        left, top = MARGIN + 0.5, BEFORE_MAP + 0.45
        second = left + max(width, 2.6) + 0.8
        panels = (
            (left, "share on the first token", sink, Scale.shares(even_sink), "sink share"),
            (second, "entropy in nats", entropies, Scale.nats(even_entropy), "entropy"),
        )
        sheet = Sheet(
            second + max(width, 2.6),
            top + height,
            "Where the heads look, in two numbers",
            " · ".join(filter(None, [plain(source), f"{n_tokens} tokens"])),
            [
                "Averages over the rows of each head's map but the first, which sees only itself.",
                f"Left, in percent: attention spread evenly would give the first token "
                f"{even_sink:.0%}; trained heads rest there when they find nothing to read "
                "(attention sinks), which is no fault.",
                f"Right: 0 is a head that reads one token, {even_entropy:.2f} one that reads all "
                "alike.",
            ],
            scales=[(x, scale) for x, _, _, scale, _ in panels],
        )
        for x, title, values, scale, name in panels:
            sheet.text(x, top - 0.42, title, size=9)
            sheet.text(x + width / 2, top - 0.23, "head", color=GREY, align="center")
            sheet.text(x - 0.35, top + height / 2, "layer", color=GREY, align="center", turned=True)
            sheet.map(values, x, top, width, scale, name=name, height=height, causal=False)
            sheet.numbers(values, x, top, width, scale)
            for column, head in enumerate(heads):
                sheet.text(x + (column + 0.5) * cell, top - 0.06, str(head), size=7, align="center")
            for row, layer in enumerate(layers):
                sheet.text(x - 0.08, top + (row + 0.5) * cell + 0.035, str(layer), 7, align="right")
        return sheet.figure


def drift_figure(
    drift: Drift, label: str, texts: Sequence[str] = (), *, source: str = ""
) -> Figure:
    """The cosine of one token in two texts after each layer, and that of other tokens."""
    left, top, width, height = MARGIN + 0.55, BEFORE_MAP, 6.0, 3.2
    label = shortened(plain(label), MAX_LABEL)
    curves = [(label, drift.cosines, BLUE[5])]
    if drift.others is not None:
        curves.append(("other pairs of tokens", drift.others, BROWN[3]))
    lowest = min(0.0, *(min(cosines) for _, cosines, _ in curves))
    with settings():
        sheet = Sheet(
            left + width + 0.12 + max(text_width(name, 8) for name, _, _ in curves),
            top + height + 0.95,
            f"{label} in two texts, layer by layer",
            plain(source),
            [
                *(f"{i}: {shortened(plain(text), 90)}" for i, text in enumerate(texts, start=1)),
                "Cosine of the token's two vectors in the residual stream: 1 is the same "
                "direction. Streams of unrelated tokens grow alike with depth too, so read one "
                "curve against the other.",
            ],
            one_a_line=True,
        )
        for tick in np.arange(math.ceil(lowest * 5), 6) / 5:
            y = top + height * (1 - tick) / (1 - lowest)
            sheet.line([(left, y), (left + width, y)], color="#e4e4e4")
            sheet.text(left - 0.08, y + 0.04, f"{tick:z.1f}", color=GREY, align="right")
        middle: Any = {"color": GREY, "align": "center"}
        sheet.text(MARGIN + 0.12, top + height / 2, "cosine", turned=True, **middle)
        sheet.text(left + width / 2, top + height + 0.9, "stage of the residual stream", **middle)
        at = np.linspace(left, left + width, len(drift.stages))
        for x, stage in zip(at, drift.stages, strict=True):
            sheet.text(x + 0.04, top + height + 0.1, stage, color=GREY, align="right", turned=True)
        above = None
        for name, cosines, ink in sorted(curves, key=lambda curve: -curve[1][-1]):
            ys = top + height * (1 - np.array(cosines)) / (1 - lowest)
            sheet.axes.plot(at, ys, color=ink, lw=1.6, marker="o", markersize=3.5, label=name)
            # Names at the right end, apart even where the curves meet.
            above = ys[-1] + 0.04 if above is None else max(ys[-1] + 0.04, above + LINE)
            sheet.text(at[-1] + 0.12, above, name, color=ink)
        return sheet.figure


def _subtitle(source: str, labels: Sequence[str]) -> str:
    count = f"{len(labels)} token{'' if len(labels) == 1 else 's'}"
    # More than 400 labels never fit a line; measuring them would take longer than drawing.
    text = plain("".join(labels[:400]))
    return " · ".join(filter(None, [shortened(plain(source), 60), count, text]))


def _side(n_tokens: int) -> float:
    """Inches of a head's map: room for a number in each cell up to 30 tokens, then no larger."""
    return n_tokens * max(0.28, min(0.72, 5.6 / n_tokens)) if n_tokens <= 30 else 8.4


def _grid(n_heads: int) -> int:
    """Columns of a grid that is a little wider than high: 4 for 12 heads, 5 for 25."""
    wide = math.ceil(math.sqrt(n_heads))
    return next((n for n in (wide, wide + 1) if n_heads % n == 0), wide)


def _axes_of(
    values: Tensor, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]]:
    n_layer, n_head = values.shape[:2]
    return layers or range(n_layer), heads or range(n_head)
