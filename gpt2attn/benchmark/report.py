"""What a benchmark found: every single run, the medians, and two tables for a person."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .programs import Program

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Step:
    """Decoding the token at `position`: bytes of weights and cache that it reads, and each run."""

    position: int
    n_bytes: int
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_s(self) -> float:
        return self.n_bytes / self.median / 1e9

    def to_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "bytes": self.n_bytes,
            "seconds": self.median,
            "gb_s": self.gb_s,
            "runs": self.seconds,
        }


@dataclass(frozen=True)
class Lookup:
    """Continuing a text with and without prompt lookup, in each round."""

    text: str  # "repeating" or "random"
    made_by: str  # in words
    n_new: int
    plain_s: list[float] = field(default_factory=list)
    lookup_s: list[float] = field(default_factory=list)
    n_passes: list[int] = field(default_factory=list)  # with lookup
    n_same: list[int] = field(default_factory=list)  # ids, before the first that differs

    def add(self, plain_s: float, lookup_s: float, n_passes: int, n_same: int) -> None:
        self.plain_s.append(plain_s)
        self.lookup_s.append(lookup_s)
        self.n_passes.append(n_passes)
        self.n_same.append(n_same)

    @property
    def times(self) -> float:
        """How many times as fast lookup is: the median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.plain_s, self.lookup_s, strict=True))

    @property
    def tokens_per_pass(self) -> float:
        return self.n_new / statistics.median(self.n_passes)

    @property
    def same_ids(self) -> bool:
        return all(n == self.n_new for n in self.n_same)

    def tokens_s(self, seconds: list[float]) -> float:
        return self.n_new / statistics.median(seconds)

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "made_by": self.made_by,
            "new_tokens": self.n_new,
            "tokens_s": self.tokens_s(self.plain_s),
            "tokens_s_lookup": self.tokens_s(self.lookup_s),
            "lookup_is_faster_by": self.times,
            "tokens_per_pass": self.tokens_per_pass,
            "same_ids": self.same_ids,
            "runs": {
                "plain_s": self.plain_s,
                "lookup_s": self.lookup_s,
                "passes": self.n_passes,
                "same_ids": self.n_same,
            },
        }


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
    growth: list[Step] = field(default_factory=list)  # by position
    lookups: list[Lookup] = field(default_factory=list)

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
            "growth": [step.to_dict() for step in result.growth],
            "lookup": [lookup.to_dict() for lookup in result.lookups],
            "runs": result.runs,
        }

    def parts(self) -> list[str | Table]:
        """The whole report, to be printed one after the other with rich."""
        tables = [self.speed_table(), self.other_table()]
        if any(result.growth for result in self.results):
            tables.append(self.growth_table())
        if any(result.lookups for result in self.results):
            tables.append(self.lookup_table())
        spaced = [part for table in tables for part in (table, "")]
        return [*self.header(), "", *spaced, *self.footer(), *self.faults()]

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
        """What the tables leave out: reasons, texts, and figures that there is one of."""
        lines = [f"{one.program}: {one.problem}" for one in self.results if one.problem]
        ours = self.results[0]
        one, none = ours.runs.get("one_layer_s", []), ours.runs.get("no_layer_s", [])
        if one and none:
            cost = statistics.median(a / b for a, b in zip(one, none, strict=False)) - 1
            n = self.settings["prefill_tokens"][-1]
            lines.append(f"{ours.program}: looking at one layer of {n:,} tokens costs {cost:+.0%}")
        for result in self.results:
            lines += _growth_lines(result) + _first_run_lines(result)
        texts = [one for result in self.results for one in result.lookups]
        return [*lines, *dict.fromkeys(f"{one.text} text: {one.made_by}" for one in texts)]

    def faults(self) -> list[str]:
        """Each text that lookup continued with other ids than plain decoding: there may be none."""
        return [
            f"{result.program}: wrong: with lookup the {one.text} text has another id after "
            f"{min(one.n_same)} of {one.n_new} new tokens"
            for result in self.results
            for one in result.lookups
            if not one.same_ids
        ]

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

    def growth_table(self) -> Table:
        """One token's time at several positions, with the bytes that it reads there."""
        table = _table("program", "position", "ms a token", "MB read", "GB/s read")
        for result in self.results:
            for step in result.growth:
                table.add_row(
                    str(result.program) if step is result.growth[0] else "",
                    f"{step.position:,}",
                    _number(1e3 * step.median, ".2f"),
                    _number(step.n_bytes / 1e6),
                    _number(step.gb_s),
                )
        return table

    def lookup_table(self) -> Table:
        """Texts continued with prompt lookup and without."""
        table = _table(
            "program", "text", "tokens/s", "with lookup", "faster", "tokens a pass", "same ids",
        )  # fmt: skip
        for result in self.results:
            for one in result.lookups:
                table.add_row(
                    str(result.program) if one is result.lookups[0] else "",
                    one.text,
                    _number(one.tokens_s(one.plain_s)),
                    _number(one.tokens_s(one.lookup_s)),
                    _number(one.times, ".2f", " x"),
                    _number(one.tokens_per_pass),
                    "yes" if one.same_ids else "no",
                )
        return table


def _growth_lines(result: Result) -> list[str]:
    """How much longer the last position takes than the first, beside how much more it reads."""
    if len(result.growth) < 2:
        return []
    first, last = result.growth[0], result.growth[-1]
    longer = statistics.median(b / a for a, b in zip(first.seconds, last.seconds, strict=True))
    return [
        f"{result.program}: from position {first.position:,} to {last.position:,} a token's time "
        f"grows by {longer - 1:.1%}, the bytes it reads by {last.n_bytes / first.n_bytes - 1:.1%}"
    ]


def _first_run_lines(result: Result) -> list[str]:
    first, later = result.median("first_run_s"), result.median("first_token_s")
    if first is None or later is None:
        return []
    return [
        f"{result.program}: the first run ever, which compiles, takes {first:.1f} s to its first "
        f"token, {first - later:.1f} s more than later ones"
    ]


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
