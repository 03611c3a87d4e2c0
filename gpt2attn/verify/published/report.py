"""Published figures, the rows that compare them with a model's, and the report of all rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console

PASSED, FAILED, NOT_RUN, MEASURED = "passed", "failed", "not run", "measured"
VERDICTS = (PASSED, FAILED, NOT_RUN, MEASURED)

_SHORT = 16  # characters of a value that stands in its row; a longer one gets lines of its own


def _number(index: tuple[int, ...]) -> str:
    return f"number {', '.join(map(str, index))}"


@dataclass(frozen=True)
class Row:
    """One comparison: what was published, what the model gives, and the verdict.

    Where many numbers were compared, `expected`, `got` and `difference` are those of the worst.
    "measured" stands for a claim that is too loose to judge: our value beside it. `reason` says why
    a row was not run or could not be computed, or what a measured one is.
    """

    figure: str
    what: str
    expected: Any
    got: Any
    verdict: str
    difference: float | None = None
    tolerance: float | None = None
    reason: str = ""

    def line(self) -> str:
        """The row in one line, or in three where a text is too long for that."""
        text = f"{self.verdict:<8}  {self.what}"
        values = [("expected", self.expected), ("got", self.got)]
        shown = [(name, _shown(value)) for name, value in values if value is not None]
        if all(len(value) <= _SHORT for _, value in shown):
            text += "".join(f", {name} {value}" for name, value in shown)
            if self.tolerance is not None and self.difference is not None:
                text += f" (off by {self.difference:.1e}, {self.tolerance:.1e} allowed)"
            shown = []
        elif self.verdict == PASSED:
            shown = []
        if self.reason:
            text += f": {self.reason}"
        return text + "".join(f"\n{'':10}{name:<8} {value}" for name, value in shown)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a number that is not finite becomes None."""
        values: dict[str, Any] = _finite(asdict(self))
        return values


@dataclass(frozen=True)
class Figure:
    """A published figure: what it is (`kind`), where from, and how it was made.

    `convention` names what the source does in its own way and is followed here. `given` is the
    input, `expected` what came out there, `tolerance` one number or one for each part.
    """

    name: str
    kind: str
    source: str
    given: dict[str, Any]
    expected: Any
    convention: str = ""
    tolerance: Any = None
    tolerance_reason: str = ""

    def exact(self, what: str, expected: Any, got: Any) -> Row:
        """A row that passes if both are equal."""
        verdict = PASSED if expected == got else FAILED
        return Row(self.name, what, expected, got, verdict)

    def close(
        self,
        what: str,
        expected: Any,
        got: Any,
        tolerance: float,
        *,
        place: Callable[[tuple[int, ...]], str] = _number,
    ) -> Row:
        """A row that passes if every number is within `tolerance`; `place` names the worst."""
        wanted, found = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (expected, got))
        if wanted.shape != found.shape:
            reason = f"the model gives {_sizes(found)} numbers, not {_sizes(wanted)}"
            return self.failed(what, reason)
        gap = (wanted - found).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        index = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
        difference = float(gap[index])
        if gap.numel() > 1:
            what = f"{what}, worst of {gap.numel()}: {place(index)}"
        return Row(
            self.name,
            what,
            float(wanted[index]),
            float(found[index]),
            PASSED if difference <= tolerance else FAILED,
            difference,
            tolerance,
        )

    def measured(self, what: str, claim: Any, got: Any, reason: str = "") -> Row:
        """A row that states our value beside a claim."""
        return Row(self.name, what, claim, got, MEASURED, reason=reason)

    def failed(self, what: str, reason: str) -> Row:
        return Row(self.name, what, None, None, FAILED, reason=reason)

    def not_run(self, what: str, reason: str, expected: Any = None) -> Row:
        return Row(self.name, what, expected, None, NOT_RUN, reason=reason)


def read_figures(path: Path) -> list[Figure]:
    """The figures of a file; `prompts_of` in one's input stands for the prompts of another."""
    figures = [Figure(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    by_name = {figure.name: figure for figure in figures}
    for figure in figures:
        if other := figure.given.get("prompts_of"):
            figure.given["prompts"] = by_name[other].given["prompts"]
    return figures


@dataclass(frozen=True)
class PublishedReport:
    """All rows over one checkpoint, in the order of the figures."""

    name: str
    folder: Path
    revision: str | None
    stack: dict[str, str | int]
    figures: Sequence[Figure]
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no row failed; rows that were not run have neither passed nor failed."""
        return not self.counts[FAILED]

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows with each verdict."""
        return {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in VERDICTS}

    def lines(self) -> Iterator[str]:
        """The report for a person: each figure's name and source, then its rows."""
        stack = ", ".join(f"{key} {value}" for key, value in self.stack.items())
        yield f"{self.folder}\n{stack}"
        for figure in self.figures:
            yield f"\n{figure.name}   [{figure.source}]"
            if figure.convention:
                yield f"  {figure.convention}"
            for row in self.rows:
                if row.figure == figure.name:
                    yield "  " + row.line().replace("\n", "\n  ")

    def print(self, console: Console) -> None:
        """The lines, those of failed rows in red, and the summary."""
        for line in self.lines():
            failed = line.lstrip().startswith(FAILED)
            console.print(line, style="red" if failed else None, soft_wrap=True)
        console.print(f"\n{self.summary()}", soft_wrap=True)

    def summary(self) -> str:
        """One or two sentences: the counts, and whether these are the published weights at all."""
        counts = self.counts
        text = (
            f"{self.name}: {counts[PASSED]} of {counts[PASSED] + counts[FAILED]} rows that were "
            f"judged passed, {counts[FAILED]} failed; {counts[NOT_RUN]} were not run and "
            f"{counts[MEASURED]} are measured beside a claim."
        )
        if others := [row.what for row in self.rows if row.reason == OTHER_FILE]:
            text += f" This is not the published GPT-2 small: another {', '.join(others)}."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        sources = {figure.name: figure for figure in self.figures}
        return {
            "model": self.name,
            "folder": str(self.folder),
            "revision": self.revision,
            "ok": self.ok,
            "counts": self.counts,
            "stack": self.stack,
            "rows": [
                {
                    **row.to_dict(),
                    "source": sources[row.figure].source,
                    "convention": sources[row.figure].convention,
                    "tolerance_reason": sources[row.figure].tolerance_reason,
                }
                for row in self.rows
            ],
        }


OTHER_FILE = "not the published file"


def head_place(index: tuple[int, ...]) -> str:
    """A place in a (layer, head) matrix as layer.head."""
    return ".".join(map(str, index))


def _sizes(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "1"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, str):
        return repr(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
