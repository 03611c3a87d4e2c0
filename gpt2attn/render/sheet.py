"""The sheet that pictures are drawn on, in inches from its top left corner, and what stands on it.

Drawn without pyplot and without a trace in matplotlib's settings.
"""

from __future__ import annotations

import io
import math
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import text_to_path
from torch import Tensor

from .look import BLUE, BROWN, WEIGHT_POWER, WEIGHT_TICKS, shortened, visible, wrapped

DPI = 150
FONT = "DejaVu Sans"  # comes with matplotlib
INK, GREY, RULE = "#1a1a1a", "#666666", "#b0b0b0"
MARGIN, GAP, LINE = 0.3, 0.06, 0.165  # inches
BEFORE_MAP = 0.95  # title, subtitle and the space below them
MIN_WIDTH = 6.2
MAX_LABEL = 22  # characters
RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+")  # Hebrew to Arabic
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)

_settings_lock = threading.RLock()


@contextmanager
def settings() -> Iterator[None]:
    """matplotlib's defaults, whatever the user has set; theirs are back afterwards."""
    defaults = {
        name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"
    }
    ours = {
        # Named as a kind, so that an SVG shown without the font falls back to another sans-serif.
        "font.family": ["sans-serif"],
        "font.sans-serif": [FONT],
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "gpt2attn",
        "image.composite_image": False,
    }
    with _settings_lock, matplotlib.rc_context({**defaults, **ours}):
        yield


class Picture(Figure):
    """A matplotlib Figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        return figure_bytes(self, "png")


def figure_bytes(figure: Figure, format: Literal["png", "svg"] = "png") -> bytes:
    """A figure as the bytes of a PNG or SVG file, always the same; text in SVG stays text."""
    nothing = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    if format not in nothing:
        raise ValueError(f"A picture is a png or an svg file, not {format!r}.")
    buffer = io.BytesIO()
    with settings():
        figure.savefig(buffer, format=format, metadata=nothing[format])
    return buffer.getvalue()


class Scale:
    """How numbers become colours and text: a ramp, a norm, and the ticks of its bar."""

    def __init__(
        self,
        ramp: Colormap,
        norm: Normalize,
        ticks: Sequence[float],
        *,
        percent: bool = False,
        most_decimals: int = 2,
        is_weights: bool = False,
        sees_later: bool = False,
    ) -> None:
        self.ramp, self.norm, self.ticks = ramp, norm, ticks
        self._percent, self._most_decimals = percent, most_decimals
        self.is_weights, self.sees_later = is_weights, sees_later

    @classmethod
    def of(cls, stage: str, values: Tensor) -> Scale:
        if stage == "weights":
            return cls(
                _ramp("blue"), PowerNorm(WEIGHT_POWER, 0, 1), WEIGHT_TICKS,
                percent=True, most_decimals=1, is_weights=True,
            )  # fmt: skip
        finite = values[values.isfinite()].float()
        low, high = float(finite.min()), float(finite.max())
        norm = Normalize(low, max(high, low + 1e-6))
        return cls(_ramp("brown"), norm, (low, high), sees_later=stage != "masked")

    @classmethod
    def shares(cls, even: float) -> Scale:
        return cls(_ramp("blue"), Normalize(0, 1), (0, even, 1), percent=True, most_decimals=0)

    @classmethod
    def nats(cls, even: float) -> Scale:
        return cls(_ramp("brown"), Normalize(0, even), (0, even))

    def tick(self, value: float) -> str:
        return f"{100 * value:.0f}%" if self._percent else f"{value:z.3g}"

    def number(self, value: float, decimals: int) -> str:
        if math.isinf(value):
            return "-inf"
        return f"{100 * value if self._percent else value:z.{decimals}f}"

    def decimals(self, values: Tensor, cell: float) -> int | None:
        """The most decimals with which every number fits a cell of `cell` inches; None: none do."""
        finite = values[values.isfinite()]
        widest = [float(finite.min()), float(finite.max())]
        for decimals in range(self._most_decimals, -1, -1):
            texts = [self.number(value, decimals) for value in widest]
            if max(text_width(text, _number_size(cell)) for text in texts) <= 0.88 * cell:
                return decimals
        return None

    def ink(self, value: float) -> str:
        """Black or white, whichever can be read on the colour of `value`."""
        return "white" if self.norm(value) > 0.5 else INK


class TokenLabels:
    """The labels along a map of `side` inches, thinned until those that are left can be read."""

    def __init__(self, labels: Sequence[str], side: float) -> None:
        count = len(labels)
        self.cell = side / count
        pitch = 72 * self.cell
        self.step = next((step for step in STEPS if step * pitch >= 7.5), STEPS[-1])
        self.size = min(9.0, max(6.0, 0.75 * self.step * pitch))
        numbered = count > 12
        self.shown = [
            (at, f"{at} {label}" if numbered else label)
            for at, label in enumerate(shortened(plain(label), MAX_LABEL) for label in labels)
            if at % self.step == 0
        ]
        self.width = max(text_width(label, self.size) for _, label in self.shown)
        self.turned = self.step > 1 or self.width > 0.92 * self.cell
        self.height = GAP + (self.width if self.turned else self.size / 72)
        self.note = f"Labelled: every {_ordinal(self.step)} token." if self.step > 1 else ""

    def rows(self, sheet: Sheet, x: float, y: float) -> None:
        for at, label in self.shown:
            middle = y + (at + 0.5) * self.cell
            if self.step > 1:
                sheet.line([(x - 0.04, middle), (x, middle)])
            drop = 0.36 * self.size / 72
            sheet.text(x - GAP, middle + drop, label, self.size, align="right")

    def columns(self, sheet: Sheet, x: float, y: float) -> None:
        for at, label in self.shown:
            middle = x + (at + 0.5) * self.cell
            if self.step > 1:
                sheet.line([(middle, y), (middle, y + 0.04)])
            if self.turned:
                drop = 0.36 * self.size / 72
                sheet.text(middle + drop, y + GAP, label, self.size, align="right", turned=True)
            else:
                sheet.text(middle, y + GAP + self.size / 72, label, self.size, align="center")


class Sheet:
    """A figure on which everything has a place in inches from the top left corner.

    Title and subtitle stand at the top; below `height`, where the drawing ends, come the bars of
    the `scales`, each at its x, and the caption.
    """

    def __init__(
        self,
        width: float,
        height: float,
        title: str,
        subtitle: str,
        caption: Sequence[str],
        *,
        scales: Sequence[tuple[float, Scale]] = (),
        one_a_line: bool = False,
    ) -> None:
        width = max(width + MARGIN, MIN_WIDTH)
        room = width - 2 * MARGIN
        paragraphs = [part for part in caption if part]
        if not one_a_line:
            paragraphs = [" ".join(paragraphs)]
        lines = [
            line
            for part in paragraphs
            for line in wrapped(part, lambda line: text_width(line, 8) <= room)
        ]
        bars = height + 0.2
        below = bars + (0.5 if scales else 0.0)
        height = below + LINE * len(lines) + MARGIN
        self.figure = Picture((width, height), dpi=DPI, facecolor="white")
        self.axes = self.figure.add_axes(
            (0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), autoscale_on=False
        )
        self.axes.set_axis_off()
        self.text(MARGIN, 0.42, title, size=13, bold=True)
        self.text(MARGIN, 0.65, _fitting(subtitle, 9, room), size=9, color=GREY)
        for x, scale in scales:
            self._bar(x, bars, scale)
        for number, line in enumerate(lines):
            self.text(MARGIN, below + LINE * (number + 0.7), line, color="#404040")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 8,
        *,
        color: str = INK,
        align: str = "left",
        turned: bool = False,
        bold: bool = False,
    ) -> None:
        """`text` whose baseline starts, ends or has its middle at x, y; turned, it runs upwards."""
        self.axes.text(
            x, y, text, fontsize=size, color=color, ha=align, va="baseline",
            rotation=90 if turned else 0, rotation_mode="anchor",
            fontweight="bold" if bold else "normal",
        )  # fmt: skip

    def line(self, points: Sequence[tuple[float, float]], color: str = RULE) -> None:
        self.axes.add_collection(LineCollection([points], colors=color, linewidths=0.6))

    def map(
        self,
        values: Tensor,
        x: float,
        y: float,
        width: float,
        scale: Scale,
        *,
        name: str,
        height: float | None = None,
        causal: bool = True,
    ) -> None:
        """Cells coloured by `values`; what the mask hides is left white, behind a stepped edge."""
        height = width if height is None else height
        numbers = values.detach().float().cpu().numpy()
        n_rows, n_columns = numbers.shape
        causal = causal and not scale.sees_later
        hidden = ~np.tri(n_rows, n_columns, dtype=bool) if causal else False
        self.axes.imshow(
            np.ma.array(numbers, mask=hidden), cmap=scale.ramp, norm=scale.norm, aspect="auto",
            extent=(x, x + width, y + height, y), interpolation="none",
        ).set_label(name)  # fmt: skip
        columns = x + width * np.arange(n_columns + 1) / n_columns
        rows = y + height * np.arange(n_rows + 1) / n_rows
        if 72 * width / n_columns >= 9:
            grid = [[(a, y), (a, y + height)] for a in columns[1:-1]]
            grid += [[(x, b), (x + width, b)] for b in rows[1:-1]]
            self.axes.add_collection(LineCollection(grid, colors="white", linewidths=0.6))
        if causal:
            right, across = np.repeat(columns[1:], 2), np.repeat(rows, 2)[1:-1]
            edge = [(x, y), *zip(right, across, strict=True), (x, y + height), (x, y)]
        else:
            edge = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
        if width / n_columns >= 0.05:  # finer steps would be a row of dots
            self.line(edge)

    def numbers(self, values: Tensor, x: float, y: float, width: float, scale: Scale) -> None:
        """The number in each cell, if the cells have room for it."""
        n_columns = values.shape[1]
        cell = width / n_columns
        decimals, size = scale.decimals(values, cell), _number_size(cell)
        if decimals is None:
            return
        for row, numbers in enumerate(values.tolist()):
            for column, value in enumerate(numbers):
                if scale.is_weights and column > row:
                    continue
                place = x + (column + 0.5) * cell, y + (row + 0.5) * cell + 0.36 * size / 72
                ink = GREY if math.isinf(value) else scale.ink(value)
                self.text(*place, scale.number(value, decimals), size, color=ink, align="center")

    def axis_titles(self, x: float, y: float, side: float, tokens: TokenLabels) -> None:
        """What the rows and the columns are, along the left and the lower edge of a map."""
        middle: Any = {"color": GREY, "align": "center"}
        self.text(MARGIN + 0.12, y + side / 2, "query (reads)", turned=True, **middle)
        self.text(x + side / 2, y + side + tokens.height + 0.2, "key (is read)", **middle)

    def _bar(self, x: float, y: float, scale: Scale) -> None:
        width, height = 2.4, 0.09
        low, high = scale.ticks[0], scale.ticks[-1]
        shades = scale.norm.inverse(np.linspace(0, 1, 256))[None]
        self.axes.imshow(
            shades, cmap=scale.ramp, norm=scale.norm, extent=(x, x + width, y + height, y),
            aspect="auto", interpolation="none",
        ).set_label("bar")  # fmt: skip
        for value in scale.ticks if high > low else (low,):
            place = x + width * float(scale.norm(value))
            self.line([(place, y + height), (place, y + height + 0.04)])
            text = scale.tick(value)
            self.text(place, y + height + 0.15, text, 7, color=GREY, align="center")


def _number_size(cell: float) -> float:
    """Points of the numbers in cells of `cell` inches, never too small to read."""
    return min(9.0, max(6.5, 28 * cell))


@cache
def _ramp(name: Literal["blue", "brown"]) -> Colormap:
    colours = {"blue": BLUE, "brown": BROWN}[name]
    return LinearSegmentedColormap.from_list(f"gpt2attn {name}", colours).with_extremes(bad="white")


@cache
def _drawable() -> frozenset[int]:
    """The code points that the font has."""
    return frozenset(get_font(findfont(FontProperties(family=FONT))).get_charmap())


def plain(text: str) -> str:
    """`text` in characters that the font has, on one line.

    Right-to-left letters keep to themselves, so that a token's position and its neighbours stay
    where they are.
    """
    return RIGHT_TO_LEFT.sub("\u200e\\g<0>\u200e", visible(text, _drawable()))


def text_width(text: str, size: float) -> float:
    """Inches that a line of text takes."""
    font = FontProperties(family=FONT, size=size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def _fitting(text: str, size: float, room: float) -> str:
    """`text`, its middle cut out until it fits into `room` inches."""
    length = len(text)
    while length > 1 and text_width(shortened(text, length), size) > room:
        length -= max(1, length // 20)
    return shortened(text, length)


def _ordinal(number: int) -> str:
    return "2nd" if number == 2 else f"{number}th"
