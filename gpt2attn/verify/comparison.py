"""Stage by stage, ours against transformers, and one of our ways of running against another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..attention import AttentionSteps
from ..model import GPT2
from .report import AUTO, AUTO_EAGER, FUSED, GENERATE, OBSERVED, OURS, PAIRS, Case, Row
from .sides import (
    Reference,
    greedy_ids,
    in_parts,
    our_logits,
    run_ours,
    run_theirs,
    their_greedy,
    their_logits,
)

GREEDY_STEPS = 64
TOLERANCE, MAP_TOLERANCE = 1e-4, 1e-5
# Tokens in a case that is run with a cache too: larger ones cost much and show nothing new.
MOST_CACHED = 1000
MOST_STEPS = 64  # tokens in a row that is fed one token at a time

# Names of a tensor's axes by their number: residual values and logits, attention maps.
AXES = {3: ("row", "token", "index"), 4: ("row", "head", "query", "key")}

CACHED, CHUNKED = "cached against uncached", "chunked prefill"
PADDED = "left-padded against single rows"

Notify = Callable[[str], None]


class Comparison:
    """Runs both sides, case by case, and merges what is found into one row for each stage."""

    def __init__(self, model: GPT2, reference: Reference, fast: GPT2 | None = None) -> None:
        """`fast` is the same model with the kernels "auto"."""
        self.model, self.reference, self.fast = model, reference, fast
        self._rows: dict[tuple[str, str], Row] = {}

    def run(self, cases: Sequence[Case], notify: Notify) -> None:
        """Compare everything; `cases` are a prompt, plain batches and a left-padded batch."""
        prompt, *plain, padded = cases
        for case in cases:
            notify(case.name)
            self.stages(OBSERVED, case)
            self.stages(FUSED, case)
            if case.ids.numel() <= MOST_CACHED:
                notify(f"{case.name}, with a cache")
                self.stages(OBSERVED, case, use_cache=True)
                self.stages(FUSED, case, use_cache=True)
        notify("one pass of the fast kernels")
        self.fast_pass(_largest(case for case in plain if len(case.ids) == 1))
        self.fast_pass(padded)
        notify("greedy decoding")
        self.greedy(prompt)
        self.greedy(padded)
        notify("cached, in chunks and padded, against plain")
        self.cached(_largest(case for case in plain if case.length <= MOST_STEPS))
        self.chunked(_largest(case for case in plain if len(case.ids) == 1))
        self.padded(padded)

    def rows(self) -> list[Row]:
        """A row for each stage, in the order of PAIRS and of the forward pass."""
        order = ["embeddings"]
        for layer in range(self.model.config.n_layer):
            order += [f"attention map {layer}", f"block {layer}"]
        order += ["final LayerNorm", "attention maps", "logits", "decode logits", "greedy ids"]
        order += [CACHED, CHUNKED, PADDED]
        return sorted(
            self._rows.values(), key=lambda row: (PAIRS.index(row.pair), order.index(row.stage))
        )

    def stages(self, pair: str, case: Case, *, use_cache: bool = False) -> None:
        """Every stage of one forward pass; ours are compared as they come and kept if unequal."""
        name = f"{case.name}, cache" if use_cache else case.name
        theirs: dict[str, Tensor] = {}
        unequal: dict[str, tuple[Tensor, Tensor]] = {}

        def compare(stage: str, ours: Tensor) -> None:
            ours, expected = case.real(ours), case.real(theirs.pop(stage))
            if torch.equal(ours, expected):
                self._add(Row(stage, pair, name))
            else:
                unequal[stage] = ours, expected

        def judge(stage: str, exact: Tensor) -> None:
            if stage in unequal:
                row = Row(stage, pair, name, tolerance=self._tolerance(pair))
                self._add(_judged(row, *unequal.pop(stage), case.real(exact)))

        run_theirs(self.reference.for_pair(pair), case, theirs.__setitem__, use_cache=use_cache)
        run_ours(self.model, case, compare, observed=pair == OBSERVED, use_cache=use_cache)
        if unequal:
            run_theirs(self.reference.judge(), case, judge)

    def fast_pass(self, case: Case) -> None:
        """The attention maps and logits of one pass of the fast kernels, against eager ones."""
        # Of 16 bits they only store weights, and compute in float32, where transformers does not.
        if self.fast is None or self.model.dtype != torch.float32:
            return
        theirs: dict[str, Tensor] = {}
        run_theirs(self.reference.for_pair(OBSERVED), case, theirs.__setitem__)

        def observe(layer: int, steps: AttentionSteps) -> None:
            maps = case.real(steps.weights), case.real(theirs.pop(f"attention map {layer}"))
            difference, place = _largest_gap(*maps)
            place = {"layer": layer, **place}
            name = "attention maps"
            self._add(Row(name, AUTO_EAGER, case.name, difference, place, MAP_TOLERANCE))

        logits = self.fast(case.ids, attention_mask=case.mask, observe=observe)
        self._logits("logits", AUTO_EAGER, case, logits, theirs["logits"])

    def greedy(self, case: Case) -> None:
        """Their `generate` against our decode loops: the logits of every step, and the ids."""
        n_steps = min(GREEDY_STEPS, self.model.config.n_positions - case.length)
        if n_steps < 1:
            return
        theirs = their_greedy(self.reference.for_pair(FUSED), case, n_steps)
        their_ids = theirs.sequences[:, case.length :].cpu()
        logits = torch.stack(theirs.logits, dim=1).to(self.model.dtype)  # (B, n_steps, V)
        fed = case.followed_by(their_ids[:, :-1])
        sizes = [case.length] + [1] * (n_steps - 1)
        for model, pair in ((self.model, GENERATE), (self.fast, AUTO)):
            if model is None:
                continue
            ours = in_parts(model, fed, sizes, last_only=True)
            row = self._logits("decode logits", pair, fed, ours, logits)
            if ours.isfinite().all():  # our loop refuses to choose among NaNs, as the row will say
                our_ids = greedy_ids(model, case, n_steps)
                self._add(_compared_ids(case.name, our_ids, their_ids, logits, row))

    def cached(self, case: Case) -> None:
        """One token at a time after a prefill of half, against one pass."""
        half = case.length // 2
        parts = in_parts(self.model, case, [case.length - half] + [1] * half)
        self._logits(CACHED, OURS, case, parts, our_logits(self.model, case))

    def chunked(self, case: Case) -> None:
        """A prefill in three unequal chunks, against one pass."""
        first, second = case.length // 2, case.length // 3
        sizes = [size for size in (first, second, case.length - first - second) if size]
        parts = in_parts(self.model, case, sizes)
        self._logits(CHUNKED, OURS, case, parts, our_logits(self.model, case))

    def padded(self, case: Case) -> None:
        """A left-padded batch, against each of its rows alone."""
        assert case.mask is not None
        together = our_logits(self.model, case)
        alone = torch.zeros_like(together)
        for number, (ids, mask) in enumerate(zip(case.ids, case.mask, strict=True)):
            alone[number, mask] = our_logits(self.model, Case("", ids[mask][None]))[0]
        self._logits(PADDED, OURS, case, together, alone)

    def _logits(self, stage: str, pair: str, case: Case, ours: Tensor, theirs: Tensor) -> Row:
        """Compare logits of the last positions of `case`; float64 is asked if they are too far."""
        last = case.last(ours.shape[1])
        ours, theirs = last.real(ours), last.real(theirs)
        tolerance = self._tolerance(pair)
        row = Row(stage, pair, case.name, tolerance=tolerance, note=_greedy_note(ours, theirs))
        if not torch.equal(ours, theirs):
            difference, place = _largest_gap(ours, theirs)
            if difference <= tolerance:
                row = replace(row, max_difference=difference, place=place)
            else:
                exact = their_logits(self.reference.judge(), case)[:, -last.length :]
                row = _judged(row, ours, theirs, last.real(exact))
        self._add(row)
        return row

    def _tolerance(self, pair: str) -> float:
        """What needs no judge: nothing where the same kernels run, and nothing in 16 bits."""
        same_kernels = pair != OURS and self.model.device.type == "cpu"
        return 0.0 if same_kernels or self.model.dtype != torch.float32 else TOLERANCE

    def _add(self, row: Row) -> None:
        key = row.stage, row.pair
        self._rows[key] = self._rows[key].merged(row) if key in self._rows else row


def _largest(cases: Iterable[Case]) -> Case:
    return max(cases, key=lambda case: case.ids.numel())


def _judged(row: Row, ours: Tensor, theirs: Tensor, exact: Tensor) -> Row:
    """`row` with the difference and both distances from the float64 run filled in."""
    difference, place = _largest_gap(ours, theirs)
    distance, reference = _largest_gap(ours, exact)[0], _largest_gap(theirs, exact)[0]
    if max(distance, reference) == math.inf:
        return replace(
            row,
            max_difference=math.inf,
            ours_to_float64=math.inf,
            limit=0.0,
            place=place,
            note="not finite",
        )
    least = torch.finfo(ours.dtype).eps * float(exact.abs().max())
    return replace(
        row,
        max_difference=difference,
        place=place,
        ours_to_float64=distance,
        theirs_to_float64=reference,
        limit=2 * max(reference, least),
    )


def _largest_gap(a: Tensor, b: Tensor) -> tuple[float, dict[str, int]]:
    """The largest absolute difference, infinite where a number is NaN, and its place."""
    gap = (a - b).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
    index = torch.unravel_index(gap.argmax(), gap.shape)
    place = dict(zip(AXES[gap.dim()], map(int, index), strict=True))
    return float(gap[index]), place


def _greedy_note(ours: Tensor, theirs: Tensor) -> str:
    """How many greedy choices differ, and how clear the clearest of them was."""
    flipped = ours.argmax(dim=-1) != theirs.argmax(dim=-1)
    if not flipped.any():
        return "same greedy ids"
    best, second = theirs[flipped].topk(2, dim=-1).values.unbind(dim=-1)
    margin = float((best - second).max())
    return f"{int(flipped.sum())} greedy ids differ, margin up to {margin:.2g}"


def _compared_ids(case: str, ours: Tensor, theirs: Tensor, logits: Tensor, fed: Row) -> Row:
    """Greedy ids (B, N): a row may part from theirs where the margin is within `fed`'s rounding.

    A logit that is off by d can turn a margin of 2 d around.
    """
    best, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
    allowed = 2 * fed.max_difference if fed.ok else 0.0
    note = f"{theirs.numel()} ids, smallest margin {float((best - second).min()):.2g}"
    row = Row("greedy ids", fed.pair, case, tolerance=allowed, note=note)
    for number, differs in enumerate(ours != theirs):
        if not differs.any():
            continue
        step = int(differs.nonzero()[0])  # what follows is another text
        chosen, expected = int(ours[number, step]), int(theirs[number, step])
        margin = float(logits[number, step, expected] - logits[number, step, chosen])
        place, note = {"row": number, "step": step}, f"{chosen} instead of {expected}"
        row = row.merged(Row("greedy ids", fed.pair, case, margin, place, allowed, note=note))
    return row
