"""What a benchmark found: every single run, the medians, and two tables for a person."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .programs import Program

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class Result:
    """One program: each metric's runs in the order of the rounds.

    `same_ids` of the reference's greedy ids come out in front, and `logits_off` is the largest
    difference of the logits after the prompt. `problem` says why there are no runs, or no more.
    """

    program: Program
    bytes_per_token: int
    in_use: str = ""
    problem: str = ""
    runs: dict[str, list[float]] = field(default_factory=dict)
    same_ids: int | None = None
    logits_off: float | None = None

    def add(self, metric: str, value: float) -> None:
        self.runs.setdefault(metric, []).append(value)

    def median(self, metric: str) -> float | None:
        """None if it was never measured."""
        runs = self.runs.get(metric)
        return statistics.median(runs) if runs else None

    @property
    def read_gb_s(self) -> list[float]:
        """GB/s of weights read while one text is decoded, of each round."""
        return [rate * self.bytes_per_token / 1e9 for rate in self.runs.get("tokens_s_batch_1", [])]


@dataclass(frozen=True)
class Report:
    """All results, the first of which the others are held to, and how they came about."""

    model: str
    revision: str | None
    machine: dict[str, Any]
    settings: dict[str, Any]
    read_gb_s: list[float]  # of each round
    results: list[Result]

    def share(self, result: Result) -> float | None:
        """GB/s of decoding over the read bandwidth of the same round, the median of the rounds."""
        shares = [a / b for a, b in zip(result.read_gb_s, self.read_gb_s, strict=False)]
        return statistics.median(shares) if shares else None

    def times(self, result: Result, metric: str) -> float | None:
        """How many times as fast the first program is: the median of the rounds' ratios."""
        ours, theirs = self.results[0].runs.get(metric), result.runs.get(metric)
        if not ours or not theirs:
            return None
        pairs = zip(ours, theirs, strict=False)
        seconds = metric.endswith("_s")
        return statistics.median(b / a if seconds else a / b for a, b in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        return {
            "model": self.model,
            "revision": self.revision,
            "machine": self.machine,
            "settings": self.settings,
            "read_gb_s": {"median": statistics.median(self.read_gb_s), "runs": self.read_gb_s},
            "programs": [self._program(result) for result in self.results],
        }

    def _program(self, result: Result) -> dict[str, Any]:
        rates = result.read_gb_s
        return {
            "program": str(result.program),
            "name": result.program.name,
            "format": result.program.format,
            "in_use": result.in_use,
            "problem": result.problem,
            "bytes_per_token": result.bytes_per_token,
            "medians": {metric: result.median(metric) for metric in result.runs},
            "gb_s": statistics.median(rates) if rates else None,
            "share_of_read_bandwidth": self.share(result),
            "first_is_faster_by": {
                metric: self.times(result, metric)
                for metric in result.runs
                if metric != "peak_bytes"
            },
            "same_ids": result.same_ids,
            "logits_off": result.logits_off,
            "runs": result.runs,
        }

    def parts(self) -> list[str | Table]:
        """The whole report, to be printed one after the other with rich."""
        header, footer = self.header(), self.footer()
        return [*header, "", self.speed_table(), "", self.other_table(), "", *footer]

    def header(self) -> list[str]:
        """Lines on the machine, the method, and which kernels computed."""
        versions = ", ".join(f"{name} {text}" for name, text in self.machine["versions"].items())
        settings = self.settings
        read = statistics.median(self.read_gb_s)
        return [
            f"{self.model} on {self.machine['cpu']}, {_count(settings['threads'], 'thread')} "
            f"on {_count(self.machine['cores'], 'core')}",
            versions,
            f"{_count(settings['rounds'], 'round')} in turns, medians; "
            f"{settings['new_tokens']} tokens after a prompt of {settings['prompt_tokens']}",
            f"memory: {read:.1f} GB/s, {settings['read_bandwidth']}",
            *(f"{one.program}: {one.in_use}" for one in self.results if one.in_use),
        ]

    def footer(self) -> list[str]:
        """What the tables leave out: why figures are missing, and the cost of one layer's maps."""
        lines = [f"{one.program}: {one.problem}" for one in self.results if one.problem]
        ours = self.results[0]
        one, none = ours.runs.get("one_layer_s", []), ours.runs.get("no_layer_s", [])
        if one and none:
            cost = statistics.median(a / b for a, b in zip(one, none, strict=False)) - 1
            n = self.settings["prefill_tokens"][-1]
            lines.append(f"{ours.program}: looking at one layer of {n:,} tokens costs {cost:+.0%}")
        return lines

    def speed_table(self) -> Table:
        """Decoding and prefill; the first program's are the times of the others'."""
        short, long = self.settings["prefill_tokens"][0], self.settings["prefill_tokens"][-1]
        batch, decode, prefill = self.settings["batch"], "tokens_s_batch_1", f"prefill_{long}_s"
        table = _table(
            "program", "tokens/s", "first is faster", f"tokens/s, batch {batch}", "GB/s read",
            "of memory's", f"{short:,} tokens, s", f"{long:,} tokens, s", "first is faster",
        )  # fmt: skip
        for result in self.results:
            median, is_first = result.median, result is self.results[0]
            rates = result.read_gb_s
            table.add_row(
                str(result.program),
                _number(median(decode)),
                "" if is_first else _number(self.times(result, decode), ".2f", " x"),
                _number(median(f"tokens_s_batch_{batch}")),
                _number(statistics.median(rates) if rates else None),
                _number(self.share(result), ".0%"),
                _number(median(f"prefill_{short}_s"), ".3f"),
                _number(median(prefill), ".3f"),
                "" if is_first else _number(self.times(result, prefill), ".2f", " x"),
            )
        return table

    def other_table(self) -> Table:
        """Start, memory, maps, and whether all compute the same."""
        long = self.settings["prefill_tokens"][-1]
        table = _table(
            "program", "load, s", "first token, s", "peak, MB", f"maps of {long:,}, s",
            "same ids", "logits off by",
        )  # fmt: skip
        for result in self.results:
            median, peak = result.median, result.median("peak_bytes")
            table.add_row(
                str(result.program),
                _number(median("load_s"), ".2f"),
                _number(median("first_token_s"), ".2f"),
                _number(None if peak is None else peak / 1e6, ".0f"),
                _number(median("maps_s"), ".2f"),
                "" if result.same_ids is None else str(result.same_ids),
                _number(result.logits_off, ".1e"),
            )
        return table


def _number(value: float | None, format: str = ".1f", unit: str = "") -> str:
    return "" if value is None else f"{value:{format}}{unit}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _table(*headers: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, no_wrap=number == 0, justify="right" if number else "left")
    return table
