"""What pictures and the terminal share: colours, labels made visible, maps made smaller, words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

from ..analysis import over_queries, sink_share, uniform_weights

if TYPE_CHECKING:
    from ..capture import AttentionMaps

# Single hues in even steps of CIELAB lightness, 88 to 20, which colour-blind people read too; the
# palest step still differs from white paper.
BLUE = ("#cfdfed", "#a1c1df", "#70a4d1", "#4186be", "#1969a2", "#134d7a", "#0e3253")
BROWN = ("#e8dbca", "#d5b998", "#c39669", "#ad7543", "#925628", "#713c1c", "#4d2614")
# Where a weight stands on its ramp is its square root: half of a map lies below 5%.
WEIGHT_POWER = 0.5
WEIGHT_TICKS = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)


def select(
    maps: AttentionMaps, layer: int | None, head: int | None, text: int
) -> tuple[AttentionMaps, int | None, int | None]:
    """One text's maps, and the layer and head to show: what alone was captured needs no naming.

    Raises ValueError for a text, layer or head that is not there, and for a head without its layer.
    """
    if not -len(maps) <= text < len(maps):
        raise ValueError(f"There is no text {text}: the maps hold {len(maps)}, counted from 0.")
    if layer is None and len(maps.layers) == 1:
        layer = maps.layers[0]
    if head is None and layer is not None and len(maps.heads) == 1:
        head = maps.heads[0]
    if layer is None and head is not None:
        raise ValueError(f"Head {head} is in every layer: give the layer too.")
    if layer is not None:
        stage = next(iter(maps.stages))
        maps.head(layer, maps.heads[0] if head is None else head, text=text, stage=stage)
    return maps[text], layer, head


def source_of(maps: AttentionMaps) -> str:
    """The model of one text's maps and, if some of its tokens were generated, how many."""
    model = shortened(str(maps.metadata.get("model", "")), 48)
    n_new = len(maps.ids[0]) - maps.prompt_lengths[0]
    return " · ".join(filter(None, [model, f"the last {n_new} generated" if n_new else ""]))


def pooled(weights: Tensor, most: int) -> tuple[Tensor, int]:
    """(..., M, M) with M at most `most`, of (..., T, T), and how many tokens make a block.

    An entry is the share that the queries of one block give, on average, to all keys of another:
    rows still add up to 1, and blocks that the mask hides stay 0.
    """
    n_tokens = weights.shape[-1]
    block = -(-n_tokens // most)
    if block == 1:
        return weights, 1
    missing = -n_tokens % block
    blocks = pad(weights.float(), (0, missing, 0, missing)).unflatten(-1, (-1, block)).sum(-1)
    blocks = blocks.unflatten(-2, (-1, block)).sum(-2) / block
    blocks[..., -1, :] *= block / (block - missing)
    return blocks, block


def block_note(block: int) -> str:
    """What a cell of a pooled map is."""
    return (
        f"Each cell stands for {block} x {block} tokens: what {block} queries, on average, give to "
        f"{block} keys."
    )


def first_token_note(weights: Tensor) -> str:
    """How much the first token gets in (..., T, T) maps, against even attention; "" for one token.

    Everybody who sees a trained model's maps for the first time takes the sink for a fault.
    """
    n_tokens = weights.shape[-1]
    if n_tokens == 1:
        return ""
    share = float(over_queries(sink_share(weights).float()).mean())
    even = float(over_queries(sink_share(uniform_weights(n_tokens))))
    note = (
        f"The first token gets {share:.0%} of the attention of those after it; attention spread "
        f"evenly would give it {even:.0%}."
    )
    if share > max(1.5 * even, 0.2):
        note += (
            " That is no fault: a trained head rests there when it finds nothing to read "
            "(an attention sink)."
        )
    return note


def visible(text: str, known: frozenset[int] | None = None) -> str:
    """`text` with <U+XXXX> for all that would print as nothing, break a line or turn its direction.

    `known` are the code points that can be drawn; None is all.
    """
    return "".join(
        char
        if char.isprintable() and (known is None or ord(char) in known)
        else f"<U+{ord(char):04X}>"
        for char in text
    )


def shortened(text: str, length: int) -> str:
    """`text` in at most `length` characters, its middle cut out if need be."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 3
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def wrapped(text: str, fits: Callable[[str], bool]) -> list[str]:
    """`text` in lines of whole words, each of which `fits`, unless one word alone does not."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and not fits(longer):
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
