"""Sections 1 to 3: what a token is before attention, and what context does to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..analysis import Drift, context_drift, cosine, neighbours
from .base import Section, Setting, shapes

EXAMPLE_ID = 4200
GPT2_VOCAB_SIZE = 50257
APPLE = (" apple", "She ate an apple after lunch.", "The new phone from apple sold well.")
BANK = (" bank", "I deposited money in the bank.", "We sat on the bank of the river.")
WORD_GROUPS = ((" apple", " orange", " banana"), (" cat", " dog"), (" king", " queen"))
N_NEIGHBOURS = 5


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A token and its row of the embedding table."""

    id: int
    label: str
    row: Tensor  # (C)


@dataclass(frozen=True, eq=False)
class SharedToken:
    """One token in two texts: its cosine before and after its position is added."""

    id: int
    label: str
    texts: tuple[str, str]
    positions: tuple[int, int]
    same_row: bool  # to the last bit
    cosine_with_position: float


@dataclass(frozen=True, eq=False)
class StaticRow(Section):
    """`tokens` are those of the text; `example` is id 4200, in a vocabulary of GPT-2's size."""

    number = 1
    title = "A token is a row of a table"
    tokens: list[TokenRow]
    is_lookup: bool  # what the model starts from is its table's rows, to the last bit
    example: TokenRow | None
    shared: SharedToken | None


def static_row(setting: Setting) -> StaticRow:
    table = setting.model.wte.matrix
    ids = torch.tensor(setting.ids, device=table.device)
    rows = table[ids].cpu()
    example = None
    if len(table) == GPT2_VOCAB_SIZE:
        row = table[EXAMPLE_ID].clone().cpu()
        example = TokenRow(EXAMPLE_ID, setting.label(EXAMPLE_ID), row)
    return StaticRow(
        shapes=shapes(wte=table, rows=rows),
        tokens=[
            TokenRow(id, label, row)
            for id, label, row in zip(setting.ids, setting.labels, rows, strict=True)
        ],
        is_lookup=torch.equal(setting.model.wte(ids).cpu(), rows),
        example=example,
        shared=_shared(setting),
    )


def _shared(setting: Setting) -> SharedToken | None:
    if (found := _occurrences(setting, *APPLE)) is None:
        return None
    id, texts, places = found
    first, second = (_start(setting, texts[i], places[i]) for i in (0, 1))
    return SharedToken(
        id,
        setting.label(id),
        APPLE[1:],
        places,
        torch.equal(first[0], second[0]),
        float(cosine(first[1], second[1])),
    )


def _start(setting: Setting, ids: list[int], position: int) -> tuple[Tensor, Tensor]:
    """A token's row of wte, and what enters block 0: that row plus its position's."""
    device = setting.model.device
    row = setting.model.wte(torch.tensor(ids, device=device))[position]
    return row, row + setting.model.wpe(torch.tensor(position, device=device))


def _occurrences(
    setting: Setting, word: str, *texts: str
) -> tuple[int, list[list[int]], tuple[int, int]] | None:
    """A word's id, the ids of two texts, and where it stands in them; None if it does not."""
    id = setting.word(word)
    first, second = (setting.example(text) for text in texts)
    if id is None or first is None or second is None or id not in first or id not in second:
        return None
    return id, [first, second], (first.index(id), second.index(id))


@dataclass(frozen=True)
class Neighbour:
    id: int
    label: str
    cosine: float


@dataclass(frozen=True)
class Nearest:
    """The nearest rows to one token's, nearest first."""

    id: int
    label: str
    neighbours: list[Neighbour]


@dataclass(frozen=True, eq=False)
class Neighbours(Section):
    """`cosines` (W, W) are those between the rows of the tokens `ids`.

    `average` is the mean cosine of two different rows, over the whole table: what "close" has to
    be read against.
    """

    number = 2
    title = "Neighbours in the table"
    ids: list[int]
    labels: list[str]
    cosines: Tensor
    nearest: list[Nearest]
    average: float


def find_neighbours(setting: Setting) -> Neighbours:
    table = setting.model.wte.matrix
    groups = [
        [id for word in group if (id := setting.word(word)) is not None] for group in WORD_GROUPS
    ]
    ids = [id for group in groups for id in group]
    starts = [group[0] for group in groups if group]
    if len(ids) < 2:  # another language's vocabulary: the text's own tokens
        ids = list(dict.fromkeys(setting.ids))[:7]
        starts = ids[:3]
    rows = table[ids].cpu()
    return Neighbours(
        shapes=shapes(wte=table),
        ids=ids,
        labels=[setting.label(id) for id in ids],
        cosines=cosine(rows[:, None], rows),
        nearest=[
            Nearest(
                id,
                setting.label(id),
                [
                    Neighbour(other, setting.label(other), value)
                    for other, value in neighbours(table, id, N_NEIGHBOURS)
                ],
            )
            for id in starts
        ],
        average=_average_cosine(table),
    )


def _average_cosine(table: Tensor) -> float:
    """Over all pairs of different rows: |sum of directions|^2 holds each pair twice, and itself."""
    total = torch.zeros(table.shape[1], dtype=torch.float64, device=table.device)
    itself = 0.0
    for rows in table.split(8192):
        directions = F.normalize(rows.double(), dim=1)
        total += directions.sum(0)
        itself += float(directions.square().sum())
    n = len(table)
    return (float(total.square().sum()) - itself) / (n * (n - 1)) if n > 1 else 1.0


@dataclass(frozen=True, eq=False)
class DriftExample:
    """One token in two texts, through the layers."""

    id: int
    label: str
    texts: tuple[str, str]
    positions: tuple[int, int]
    drift: Drift


@dataclass(frozen=True, eq=False)
class Context(Section):
    """No examples if the model's vocabulary or context has no room for them."""

    number = 3
    title = "Context moves it"
    examples: list[DriftExample]


def context(setting: Setting) -> Context:
    examples = []
    for word, *texts in (APPLE, BANK):
        if (found := _occurrences(setting, word, *texts)) is None:
            continue
        id, (first, second), places = found
        drift = context_drift(setting.model, first, places[0], second, places[1])
        examples.append(DriftExample(id, setting.label(id), (texts[0], texts[1]), places, drift))
    # One vector at each stage: wte, wte + wpe, and after each block.
    shape = (setting.model.config.n_layer + 2, setting.model.config.n_embd)
    return Context(shapes={"vectors": shape}, examples=examples)
