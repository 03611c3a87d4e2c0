"""What a comparison with transformers finds: its inputs, a row for each stage, and the report."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BIT_EQUAL, WITHIN, ROUNDING, DIFFERS = "bit-equal", "within tolerance", "rounding", "differs"

OBSERVED, FUSED = "observed / eager", "fused / sdpa"
GENERATE, OURS = "decode / generate", "ours / ours"
AUTO_EAGER, AUTO = "auto / eager", "auto / generate"
PAIRS = (OBSERVED, FUSED, GENERATE, AUTO_EAGER, AUTO, OURS)


@dataclass(frozen=True)
class Case:
    """One input: `ids` (B, T) on the CPU; `mask` (B, T), False for left padding, or None."""

    name: str
    ids: Tensor
    mask: Tensor | None = None

    def real(self, tensor: Tensor) -> Tensor:
        """`tensor` (B, T, ...) or (B, H, T, S) with zeros at padding, which is not compared."""
        if self.mask is None:
            return tensor
        mask = self.mask.to(tensor.device)
        if tensor.dim() == 4:
            return tensor.masked_fill(~(mask[:, None, :, None] & mask[:, None, None, :]), 0.0)
        return tensor.masked_fill(~mask[:, :, None], 0.0)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def last(self, n: int) -> Case:
        """The last `n` positions of all rows."""
        return Case(self.name, self.ids[:, -n:], None if self.mask is None else self.mask[:, -n:])

    def followed_by(self, ids: Tensor) -> Case:
        """The same rows, longer by `ids` (B, N)."""
        mask = self.mask
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(ids, dtype=torch.bool)], dim=1)
        return Case(self.name, torch.cat([self.ids, ids], dim=1), mask)

    def to_dict(self) -> dict[str, Any]:
        mask = None if self.mask is None else self.mask.int().tolist()
        return {"name": self.name, "ids": self.ids.tolist(), "mask": mask}


@dataclass(frozen=True)
class Row:
    """One stage of one pair of paths over all its cases.

    `max_difference` and its `place` are of the worst case, `case`. The distances from the float64
    run and the limit for ours are the largest of all cases, None where it was not asked. Where ids
    are compared, `max_difference` is the margin by which the reference preferred its own choice.
    """

    stage: str
    pair: str  # one of PAIRS
    case: str
    max_difference: float = 0.0
    place: dict[str, int] | None = None  # None: equal to the last bit
    tolerance: float = 0.0
    ours_to_float64: float | None = None
    theirs_to_float64: float | None = None
    limit: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.place is None:
            return BIT_EQUAL
        if self.max_difference <= self.tolerance:
            return WITHIN
        distance = self.ours_to_float64
        if self.limit is not None and distance is not None and distance <= self.limit:
            return ROUNDING
        return DIFFERS

    @property
    def ok(self) -> bool:
        return self.verdict != DIFFERS

    @property
    def bit_equal(self) -> bool:
        return self.verdict == BIT_EQUAL

    @property
    def where(self) -> str:
        if self.place is None:
            return ""
        return f"{self.case}: " + " ".join(f"{axis} {index}" for axis, index in self.place.items())

    def merged(self, other: Row) -> Row:
        """This stage over the cases of both rows."""
        worst = max(self, other, key=lambda row: (row.max_difference, row.place is not None))

        def largest(name: str) -> float | None:
            known = [getattr(row, name) for row in (self, other) if getattr(row, name) is not None]
            return max(known, default=None)

        return replace(
            worst,
            ours_to_float64=largest("ours_to_float64"),
            theirs_to_float64=largest("theirs_to_float64"),
            limit=largest("limit"),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a number that is not finite becomes None, with its verdict beside it."""
        values = {
            **asdict(self),
            "verdict": self.verdict,
            "ok": self.ok,
            "bit_equal": self.bit_equal,
        }
        return {key: None if value == math.inf else value for key, value in values.items()}


@dataclass(frozen=True)
class Report:
    """The rows of one checkpoint, in the order of the forward pass, and how they were measured."""

    name: str
    folder: Path
    revision: str | None
    stack: dict[str, str | int]
    bit_equality_claimed: bool
    cases: list[Case]
    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether no difference is a fault."""
        return all(row.ok for row in self.rows)

    @property
    def bit_equal(self) -> bool:
        """Whether every comparison of torch's kernels with transformers is equal to the bit."""
        return all(row.bit_equal for row in self._same_kernels())

    def _same_kernels(self) -> list[Row]:
        return [row for row in self.rows if row.pair not in (AUTO_EAGER, AUTO, OURS)]

    @property
    def first_difference(self) -> Row | None:
        """The first stage of the forward pass that is wrong."""
        return next((row for row in self.rows if not row.ok), None)

    def summary(self) -> str:
        """One sentence: no fault, or the first stage that differs and where."""
        row = self.first_difference
        if row is not None:
            return (
                f"{self.name} differs from transformers, first in {row.stage} ({row.pair}): "
                f"by {row.max_difference:.3g} at {row.where}."
            )
        compared = self._same_kernels()
        equal = sum(row.bit_equal for row in compared)
        return (
            f"{self.name} equals transformers: {equal} of {len(compared)} stages bit for bit"
            f"{'' if equal == len(compared) else ', the others to rounding'}."
        )

    def header(self) -> list[str]:
        """Lines that say what was compared, with which software and on which ids; these are cut."""
        stack = ", ".join(f"{key} {value}" for key, value in self.stack.items())
        claim = (
            "bit-equality is claimed"
            if self.bit_equality_claimed
            else "rounding is judged by float64"
        )
        lines = [f"{self.folder}", f"{stack}: {claim}"]
        for case in self.cases:
            row = case.ids[0].tolist()
            shown = ", ".join(map(str, row[:8])) + (", ..." if len(row) > 8 else "")
            lines.append(f"ids of {case.name}: {shown}{', ...' if len(case.ids) > 1 else ''}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Everything, every id included, as JSON can hold it."""
        first = self.first_difference
        return {
            "model": self.name,
            "folder": str(self.folder),
            "revision": self.revision,
            "ok": self.ok,
            "bit_equal": self.bit_equal,
            "bit_equality_claimed": self.bit_equality_claimed,
            "first_difference": None if first is None else first.to_dict(),
            "stack": self.stack,
            "cases": [case.to_dict() for case in self.cases],
            "rows": [row.to_dict() for row in self.rows],
        }

    def print(self, console: Console) -> None:
        """What was compared, the table and the summary."""
        for line in self.header():
            console.print(line)
        console.print(self.table())
        console.print(self.summary())

    def table(self) -> Table:
        """The rows as a rich table."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for header in ("stage", "ours / theirs"):
            table.add_column(header, no_wrap=True)
        for header in ("difference", "ours to float64", "theirs"):
            table.add_column(header, justify="right", no_wrap=header == "difference")
        table.add_column("verdict", no_wrap=True)
        table.add_column("largest difference at")
        for row in self.rows:
            distances = (row.max_difference, row.ours_to_float64, row.theirs_to_float64)
            table.add_row(
                row.stage,
                row.pair,
                *(
                    "" if number is None else f"{number:.1e}" if number else "0"
                    for number in distances
                ),
                f"within {row.tolerance:.0e}" if row.verdict == WITHIN else row.verdict,
                "; ".join(filter(None, (row.where, row.note))),
                style=None if row.ok else "bold red",
            )
        return table
