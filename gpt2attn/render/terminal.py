"""Attention maps in a terminal: one head as a shaded table, a layer or all heads as small maps.

What a terminal can show is a `Screen`: its width, colours, UTF-8. Shades follow the square root of
a weight, as in the pictures, but colours run from blue to yellow, which stand out from a black and
from a white terminal: where the mask hides a cell, nothing is drawn. Without colours, characters do
the shading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text
from torch import Tensor

from ..analysis import over_queries, sink_share
from .look import (
    WEIGHT_POWER,
    block_note,
    first_token_note,
    pooled,
    select,
    source_of,
    visible,
    wrapped,
)
from .trace_text import fit

if TYPE_CHECKING:
    from rich.console import Console

    from ..capture import AttentionMaps

# From matplotlib's cividis, made for all kinds of colour vision; even steps of lightness.
RAMP = ("#083370", "#434e6c", "#666970", "#888578", "#aea371", "#d6c35d", "#fee838")
MIN_WIDTH = 40
MAX_LABEL = 14
# A weight's shade is four times its square root, rounded: the steps are at 2%, 14%, 39% and 77%.
SHADES, ASCII_SHADES = "·░▒▓█", ".:+*#"
SHADE_STEPS = "2%", "14%", "39%", "77%"
ASCII = str.maketrans({"␣": "_", "⏎": "\\n", "⇥": "\\t", "·": ",", "…": "~"})


@dataclass(frozen=True)
class Screen:
    """What a terminal can show; `color` means 256 colours or more."""

    width: int = 80
    color: bool = False
    utf8: bool = True

    @classmethod
    def of(cls, console: Console) -> Screen:
        """The screen that a rich console writes to; a file or a pipe has no colours."""
        color = console.color_system in ("256", "truecolor") and not console.no_color
        return cls(console.width, color, console.encoding.lower().startswith("utf"))

    @property
    def columns(self) -> int:
        return max(self.width, MIN_WIDTH)

    @property
    def shades(self) -> str:
        return SHADES if self.utf8 else ASCII_SHADES

    def plain(self, text: str) -> str:
        """`text` in characters that this screen has, on one line."""
        text = visible(text)
        return text if self.utf8 else visible(text.translate(ASCII), frozenset(range(128)))

    def fit(self, text: str, width: int, *, right: bool = False) -> str:
        """`text` in exactly `width` columns."""
        fitting = fit(self.plain(text), width, right=right)
        return fitting if self.utf8 else fitting.replace("…", "~")


def maps_text(
    maps: AttentionMaps,
    layer: int | None = None,
    head: int | None = None,
    *,
    text: int = 0,
    screen: Screen,
) -> Text:
    """One text's maps: all captured heads, the heads of `layer`, or one head with percentages.

    Raises ValueError for what was not captured, and for a head without its layer.
    """
    maps, layer, head = select(maps, layer, head, text)
    (labels,), source = maps.labels, source_of(maps)
    if layer is not None and head is not None:
        weights = maps.head(layer, head)
        return head_text(weights, labels, layer=layer, head=head, source=source, screen=screen)
    weights = maps.weights[:, 0]
    if layer is not None:
        weights = weights[maps.layers.index(layer)]
        heads = maps.heads
        return layer_text(weights, labels, layer=layer, heads=heads, source=source, screen=screen)
    axes = {"layers": maps.layers, "heads": maps.heads}
    return overview_text(weights, labels, source=source, screen=screen, **axes)


def head_text(
    weights: Tensor,
    labels: Sequence[str],
    *,
    layer: int,
    head: int,
    source: str = "",
    screen: Screen,
) -> Text:
    """One map (query, key) as a shaded table of percentages.

    Where the columns do not fit, the first token and the last ones are shown, with the sum over
    those between in a column of its own, so that rows still add up to 100%.
    """
    table = _Table(labels, screen)
    page = _Page(f"Attention of layer {layer}, head {head}", source, labels, screen)
    page.add(table.heading())
    for query in table.queries:
        page.add(table.row(query, weights[query].tolist()))
    page.add(Text())
    page.say(
        "Row: the token that reads (query). Column: the token it reads from (key). Percent; a row "
        "adds up to 100."
    )
    if table.n_between:
        page.say(
            f"Too wide to show whole: of {len(labels)} tokens, the first and the last "
            f"{len(table.queries)} are here; {table.between} is the sum over the "
            f"{table.n_between} between them."
        )
    page.legend()
    page.say(first_token_note(weights))
    return page.text


def layer_text(
    weights: Tensor,
    labels: Sequence[str],
    *,
    layer: int,
    heads: Sequence[int] | None = None,
    source: str = "",
    screen: Screen,
) -> Text:
    """The maps (head, query, key) of a layer's heads, each with its share on the first token."""
    heads = range(len(weights)) if heads is None else heads
    page = _Page(f"Attention of the heads of layer {layer}", source, labels, screen)
    across = min(len(heads), screen.columns // 20)
    pitch = screen.columns // across
    small, block = pooled(weights, min(pitch - 2, 40))
    pitch = max(small.shape[-1], 12) + 2
    for first in range(0, len(heads), across):
        places = range(first, min(first + across, len(heads)))
        names = [f"head {heads[place]}".ljust(pitch - 6) for place in places]
        if len(labels) > 1:
            shares = over_queries(sink_share(weights[list(places)]).float()).tolist()
            names = [f"{name}{x:>4.0%}  " for name, x in zip(names, shares, strict=True)]
        page.add(Text("".join(name.ljust(pitch) for name in names)))
        for line in _band([small[place] for place in places], pitch, screen):
            page.add(line)
        page.add(Text())
    if len(labels) > 1:
        page.say("The percentage above a map is what the first token gets on average.")
    page.explain(weights, block)
    return page.text


def overview_text(
    weights: Tensor,
    labels: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    source: str = "",
    screen: Screen,
) -> Text:
    """All maps (layer, head, query, key) as small multiples: a row a layer, a column a head."""
    n_layer, n_head = weights.shape[:2]
    layers, heads = layers or range(n_layer), heads or range(n_head)
    page = _Page(f"Attention of all {n_layer * n_head} heads", source, labels, screen)
    margin = max(len("layer"), len(str(max(layers)))) + 1
    # At least four cells a map; heads that then do not fit stand in further bands.
    across = min(n_head, (screen.columns - margin) // 5)
    pitch = (screen.columns - margin) // across
    maps = [pooled(layer, min(pitch - 1, 16)) for layer in weights]  # one layer's copy at a time
    block = maps[0][1]
    pitch = min(pitch, max(maps[0][0].shape[-1], 4) + 2)
    for first in range(0, n_head, across):
        places = range(first, min(first + across, n_head))
        page.add(Text(" " * margin + "head"))
        names = "".join(str(heads[place]).ljust(pitch) for place in places)
        page.add(Text("layer".ljust(margin) + names))
        for row, layer in enumerate(layers):
            lines = _band([maps[row][0][place] for place in places], pitch, screen)
            for number, line in enumerate(lines):
                page.add(Text(("" if number else str(layer)).ljust(margin)) + line)
            page.add(Text())
    page.explain(weights, block)
    return page.text


class _Table:
    """The columns and rows of one head's table, as many as the screen holds."""

    def __init__(self, labels: Sequence[str], screen: Screen) -> None:
        self._screen, count = screen, len(labels)
        digits = len(str(count - 1))
        plain = [screen.plain(label) for label in labels]
        longest = min(MAX_LABEL, max(cell_len(label) for label in plain))
        self._heads = [
            f"{at:>{digits}} {screen.fit(label, longest)} " for at, label in enumerate(plain)
        ]
        room = screen.columns - digits - longest - 2
        shade = 0 if screen.color else 1
        self._cell, self._decimals = 8, 1
        self.n_between, self.between = 0, ""
        shown = list(range(count))
        if 8 * count > room:
            self._cell, self._decimals = max(4 + shade, digits + 1), 0
            fitting = room // self._cell
            if count > fitting:
                self.between = "…" if screen.utf8 else "..."
                self.n_between = count - (fitting - 1)
                shown = [0, *range(count - (fitting - 2), count)]
        self._keys, self.queries = shown, shown[1:] if self.n_between else shown
        self._titles = [
            screen.fit(labels[key], 7, right=True) if self._decimals else str(key) for key in shown
        ]

    def heading(self) -> Text:
        cells = self._titles[:1] + [self.between] * bool(self.n_between) + self._titles[1:]
        line = "".join(" " * (self._cell - cell_len(cell)) + cell for cell in cells)
        return Text(
            " " * cell_len(self._heads[0]) + line, style="dim" if self._screen.color else ""
        )

    def row(self, query: int, weights: Sequence[float]) -> Text:
        line = Text(self._heads[query])
        shares = [weights[key] for key in self._keys if key <= query]
        if self.n_between:
            shares.insert(1, sum(weights[1 : self.n_between + 1]))
        for share in shares:
            number = f"{100 * share:.{self._decimals}f}"
            if self._screen.color:
                line.append(number.rjust(self._cell), _style(share))
            else:
                # The number stands close to its shade, apart from the next one's.
                shade = _shade(share, self._screen)
                line.append(number.rjust(self._cell - 1) + shade)
        return line


class _Page:
    """Lines that fit the screen, beginning with a title."""

    def __init__(self, title: str, source: str, labels: Sequence[str], screen: Screen) -> None:
        self._screen = screen
        self.text = Text(no_wrap=True, overflow="ignore")
        self.text.append(f"{title}\n", "bold" if screen.color else "")
        count = f"{len(labels)} token{'' if len(labels) == 1 else 's'}"
        # 400 labels fill any line.
        facts = [source, count, "".join(labels[:400])]
        line = " · ".join(fact for fact in facts if fact)
        self.add(Text(screen.fit(line, screen.columns).rstrip()))
        self.add(Text())

    def add(self, line: Text) -> None:
        line.rstrip()
        self.text.append_text(line).append("\n")

    def say(self, prose: str) -> None:
        for line in wrapped(prose, lambda line: cell_len(line) <= self._screen.columns):
            self.add(Text(line))

    def explain(self, weights: Tensor, block: int) -> None:
        """What stands below small maps."""
        self.say(
            "Row: a token that reads (query), downwards. Column: a token it reads from (key), to "
            "the right. A strong left edge is attention to the first token, a strong diagonal to "
            "the token itself or the one before."
        )
        if not (self._screen.color and self._screen.utf8):
            self.say("A character stands for two rows, averaged.")
        if block > 1:
            self.say(block_note(block))
        self.legend()
        self.say(first_token_note(weights))

    def legend(self) -> None:
        """Which shade is which weight."""
        if self._screen.color:
            line = Text("0% ")
            for step in range(1, 16):
                middle = step == 8
                share = (step / 16) ** (1 / WEIGHT_POWER)
                line.append(f" {share:.0%} " if middle else " ", "" if middle else _style(share))
            self.add(line.append(" 100%; nothing where the mask hides a later token."))
        else:
            shades = self._screen.shades
            steps = ", ".join(
                f"{shade} from {step}" for shade, step in zip(shades[1:], SHADE_STEPS, strict=True)
            )
            self.say(f"{shades[0]} from 0%, {steps}; nothing where the mask hides a later token.")


def _band(maps: Sequence[Tensor], pitch: int, screen: Screen) -> list[Text]:
    """The lines of small maps (n, n), one every `pitch` columns, two of their rows to a line."""
    lines = []
    n = maps[0].shape[-1]
    values = [small.tolist() for small in maps]
    for upper in range(0, n, 2):
        line = Text()
        for small in values:
            lower = upper + 1
            for key in range(n):
                top = small[upper][key] if key <= upper else None
                bottom = small[lower][key] if key <= lower < n else None
                line.append(*_character(top, bottom, screen))
            line.append(" " * (pitch - n))
        lines.append(line)
    return lines


def _character(top: float | None, bottom: float | None, screen: Screen) -> tuple[str, str]:
    """A character for two cells, one above the other, and its style; None is nothing to draw."""
    seen = [share for share in (top, bottom) if share is not None]
    if not seen:
        return " ", ""
    if screen.color and screen.utf8:
        return "▄" if top is None else "▀", " on ".join(map(_color, seen))
    mean = sum(seen) / len(seen)
    return (" ", f"on {_color(mean)}") if screen.color else (_shade(mean, screen), "")


def _shade(share: float, screen: Screen) -> str:
    return screen.shades[round(4 * share**WEIGHT_POWER)]


def _style(share: float) -> str:
    """Background of a weight and the text colour that can be read on it."""
    return f"{'#ffffff' if share**WEIGHT_POWER < 0.5 else '#000000'} on {_color(share)}"


def _color(share: float) -> str:
    """The colour of a weight, between the steps of the ramp."""
    place = min(max(share, 0.0), 1.0) ** WEIGHT_POWER * (len(RAMP) - 1)
    lower = min(int(place), len(RAMP) - 2)
    ends = [bytes.fromhex(RAMP[step][1:]) for step in (lower, lower + 1)]
    mixed = (round(a + (place - lower) * (b - a)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
