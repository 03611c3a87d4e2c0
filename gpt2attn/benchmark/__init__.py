"""How fast this package is on this machine, beside other programs on the same checkpoint.

Every program has a process of its own, and only one works at any moment. They take turns, round
by round; the memory is read in every round too, since on a shared machine its speed changes from
minute to minute. Medians over the rounds are reported, and ratios between two programs are medians
of the ratios within a round.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from .machine import cores, describe
from .processes import Child, MeasurementError, seconds_to_output
from .programs import TORCH, TRANSFORMERS, Program, bytes_per_token
from .report import Lookup, Report, Result, Step

__all__ = ["MeasurementError", "Program", "Report", "Result", "benchmark"]

PROMPT_LENGTH, N_DECODE, QUICK_N_DECODE = 8, 128, 16
LEAST_POSITIONS = PROMPT_LENGTH + 2
BATCH = 8
PREFILL_LENGTHS = (128, 1000)
N_SAME_IDS = 32
ROUNDS = 5
GROWTH_POSITIONS = (16, 128, 256, 512, 1000)
GROWTH_TURNS, QUICK_GROWTH_TURNS = 20, 3
N_LOOKUP, QUICK_N_LOOKUP = 32, 16
PHRASE_LENGTH, N_PHRASES = 8, 4
REPEATING = 2  # new tokens a pass, from which on a text counts as one that repeats itself
TEXT = "Once upon a time"
# A whole run of transformers, as its documentation writes it.
PIPELINE = """
import sys, torch
from transformers import pipeline
folder, text, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
generate = pipeline("text-generation", model=folder, dtype=torch.float32, device="cpu")
print(generate(text, max_new_tokens=1, do_sample=False)[0]["generated_text"], flush=True)
"""

Notify = Callable[[str], None]


def benchmark(
    model: str | os.PathLike[str],
    programs: Sequence[Program],
    *,
    revision: str | None = None,
    threads: int | None = None,
    rounds: int | None = None,
    quick: bool = False,
    first_run: bool = False,
    work: str | os.PathLike[str] | None = None,
    notify: Notify | None = None,
) -> Report:
    """Measure `programs` in turns over one checkpoint; the first is what the others are held to.

    Decoding: 128 greedy tokens after a prompt of 8, one text and 8 at once. Prefill: 128 and 1,000
    tokens, the logits of the last. Capture: all attention maps of 1,000 tokens, where a program has
    them. Of this package's programs also the time of one token at positions from 16 to 1,000, and
    texts continued with prompt lookup and without. Shorter where the model has fewer positions.
    `quick` decodes 16 tokens in one round. `first_run` adds a start of each program that compiles
    with nothing compiled yet. Conversions for peers are kept in `work`, if given, and used again.

    Raises MeasurementError if the first program cannot be measured; another that cannot has the
    reason in its result, as has one that is not installed.
    """
    from ..checkpoint import read_config
    from ..hub import resolve

    notify = notify or (lambda line: None)
    source = resolve(model, revision=revision, notify=notify)
    config = read_config(source.folder)
    if config.n_positions < LEAST_POSITIONS:
        raise ValueError(
            f"bench needs a model of at least {LEAST_POSITIONS} positions; this one has "
            f"{config.n_positions}."
        )
    most_new = config.n_positions - PROMPT_LENGTH
    settings = {
        "threads": threads or cores(),
        "rounds": rounds or (1 if quick else ROUNDS),
        "prompt_tokens": PROMPT_LENGTH,
        "new_tokens": min(QUICK_N_DECODE if quick else N_DECODE, most_new),
        "batch": BATCH,
        "prefill_tokens": sorted({min(length, config.n_positions) for length in PREFILL_LENGTHS}),
        "growth_turns": QUICK_GROWTH_TURNS if quick else GROWTH_TURNS,
        "lookup_new_tokens": QUICK_N_LOOKUP if quick else N_LOOKUP,
        "first_run": first_run,
    }
    with ExitStack() as stack:
        folder = Path(work) if work else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        bench = _Bench(source.folder, config, folder, settings, notify, stack)
        results = bench.run(programs)
    return Report(
        model=os.fspath(model),
        revision=source.revision,
        machine=describe(),
        settings={**settings, "read_bandwidth": bench.method},
        read_gb_s=bench.read,
        results=results,
    )


class _Text(NamedTuple):
    """To be continued with lookup and without."""

    kind: str
    made_by: str
    ids: list[int]
    sampling: dict[str, Any]


class _Bench:
    """The measurement under way: a child for each program, and the results so far."""

    def __init__(
        self,
        folder: Path,
        config: Any,
        work: Path,
        settings: dict[str, Any],
        notify: Notify,
        stack: ExitStack,
    ) -> None:
        self._folder, self._config, self._work = folder, config, work
        self._settings, self._notify, self._stack = settings, notify, stack
        self._threads: int = settings["threads"]
        self._children: dict[Program, Child] = {}
        self._folders: dict[Program, Path] = {}
        self._results: dict[Program, Result] = {}
        self._compiling: set[Program] = set()
        self.method, self.read = "", list[float]()
        draw = random.Random(0)
        self._rows = [draw.choices(range(config.vocab_size), k=PROMPT_LENGTH) for _ in range(BATCH)]
        self._text = draw.choices(range(config.vocab_size), k=settings["prefill_tokens"][-1])

    def run(self, programs: Sequence[Program]) -> list[Result]:
        for program in dict.fromkeys(programs):
            self._results[program] = Result(program, bytes_per_token(self._config, program))
            self._results[program].problem = program.missing
            if not program.missing:
                self._attempt(program, self._start)
        self._warm_up()
        self._rounds()
        for step in (self._compare, self._growth, self._lookups):
            for program in self._working():
                self._attempt(program, step)
        self._first_tokens()
        self._capture()
        return list(self._results.values())

    def _attempt(self, program: Program, step: Callable[[Program], None]) -> None:
        """One step of one program; what it cannot do ends it, and the first one ends all."""
        try:
            step(program)
        except MeasurementError as error:
            if program == next(iter(self._results)):
                raise MeasurementError(f"{program} cannot be measured: {error}") from None
            self._results[program].problem = f"failed: {error}"

    def _working(self, turn: int = 0) -> list[Program]:
        """Programs that can be measured, another one first in every turn."""
        programs = [one for one, result in self._results.items() if not result.problem]
        turn %= len(programs)
        return programs[turn:] + programs[:turn]

    def _ask(self, program: Program, task: str, **arguments: Any) -> dict[str, Any]:
        return self._children[program].ask(task, **arguments)

    def _start(self, program: Program) -> None:
        self._notify(f"loading {program}")
        if not program.is_ours:
            with Child(self._threads) as child:
                place = {"folder": str(self._folder), "work": str(self._work)}
                self._folders[program] = Path(
                    child.ask("convert", program=program.spec, **place)["folder"]
                )
        child = self._stack.enter_context(Child(self._threads))
        self._children[program] = child
        answer = child.ask(
            "load",
            program=program.spec,
            folder=str(self._folders.setdefault(program, self._folder)),
            threads=self._threads,
            n_positions=self._config.n_positions,
        )
        result = self._results[program]
        result.in_use = answer["in_use"]
        if answer["compiles"]:
            self._compiling.add(program)
        result.add("import_s", answer["import"])
        result.add("load_s", answer["seconds"])

    def _warm_up(self) -> None:
        def step(program: Program) -> None:
            for rows in (self._rows[:1], self._rows):
                self._ask(program, "decode", prompts=rows, n_new=QUICK_N_DECODE // 2)
            for length in self._settings["prefill_tokens"]:
                self._ask(program, "prefill", ids=self._text[:length])

        for program in self._working():
            self._notify(f"warming up {program}")
            self._attempt(program, step)

    def _rounds(self) -> None:
        memory = self._stack.enter_context(Child(self._threads))
        for turn in range(self._settings["rounds"]):
            self._notify(f"round {turn + 1} of {self._settings['rounds']}")
            answer = memory.ask("bandwidth", threads=self._threads)
            self.method = answer["method"]
            self.read.append(answer["gb_s"])
            for rows in (self._rows[:1], self._rows):
                for program in self._working(turn):
                    self._attempt(program, partial(self._decode, rows=rows))
            for length in self._settings["prefill_tokens"]:
                for program in self._working(turn):
                    self._attempt(program, partial(self._prefill, length=length))

    def _decode(self, program: Program, rows: list[list[int]]) -> None:
        n_new = self._settings["new_tokens"]
        answer = self._ask(program, "decode", prompts=rows, n_new=n_new)
        rate = len(rows) * n_new / answer["seconds"]
        self._results[program].add(f"tokens_s_batch_{len(rows)}", rate)

    def _prefill(self, program: Program, length: int) -> None:
        answer = self._ask(program, "prefill", ids=self._text[:length])
        self._results[program].add(f"prefill_{length}_s", answer["seconds"])

    def _compare(self, program: Program) -> None:
        """Its peak memory; then its ids and logits beside the reference's."""
        result = self._results[program]
        result.add("peak_bytes", self._ask(program, "memory")["bytes"])
        answer = self._ask(program, "answers", **self._question)
        same = zip(answer["ids"], self._reference["ids"], strict=True)
        result.same_ids = next(
            (n for n, (a, b) in enumerate(same) if a != b), len(self._reference["ids"])
        )
        logits = zip(answer["logits"], self._reference["logits"], strict=True)
        result.logits_off = max(abs(a - b) for a, b in logits)

    def _growth(self, program: Program) -> None:
        positions = [n for n in GROWTH_POSITIONS if n + 2 <= self._config.n_positions]
        if not (program.is_ours and positions):
            return
        self._notify(f"positions of {program}")
        turns = self._settings["growth_turns"]
        ids = self._text[: positions[-1]]
        answer = self._ask(program, "growth", ids=ids, positions=positions, turns=turns)
        weights, each = bytes_per_token(self._config, program), answer["bytes_per_position"]
        self._results[program].growth = [
            Step(position, weights + position * each, seconds)
            for position, seconds in zip(positions, answer["seconds"], strict=True)
        ]

    def _lookups(self, program: Program) -> None:
        if program not in self._compiling:
            return
        self._notify(f"lookup of {program}")
        of_itself, made_to, flat = self._texts
        answer = self._look_up(program, of_itself)
        repeats = answer["n_passes"] * REPEATING <= self._n_lookup
        for text in (of_itself if repeats else made_to, flat):
            found = Lookup(text.kind, text.made_by, self._n_lookup)
            for turn in range(self._settings["rounds"]):
                found.add(**self._look_up(program, text, turn))
            self._results[program].lookups.append(found)

    def _look_up(self, program: Program, text: _Text, turn: int = 0) -> dict[str, Any]:
        return self._ask(
            program,
            "lookup",
            ids=text.ids,
            n_new=self._n_lookup,
            sampling=text.sampling,
            seed=turn,
            plain_first=turn % 2 == 0,
        )

    @property
    def _n_lookup(self) -> int:
        room = self._config.n_positions - len(self._texts[0].ids)
        return min(self._settings["lookup_new_tokens"], room)

    @cached_property
    def _texts(self) -> tuple[_Text, _Text, _Text]:
        """One that a model may repeat of itself, one that it is made to, and a random one."""
        n_prompt = min(N_PHRASES * PHRASE_LENGTH, self._config.n_positions // 2)
        phrase = self._text[:PHRASE_LENGTH]
        one = phrase[0]
        return (
            _Text(
                "repeating",
                f"greedy after the same {PHRASE_LENGTH} tokens {N_PHRASES} times; the model "
                "repeats itself",
                (N_PHRASES * phrase)[:n_prompt],
                {"temperature": 0},
            ),
            _Text(
                "repeating",
                "one token again and again, made the likeliest by a bias, since this model does "
                "not repeat itself",
                n_prompt * [one],
                {"temperature": 0, "logit_bias": [[one, 1e9]]},
            ),
            _Text(
                "random",
                "drawn from a nearly flat distribution",
                self._text[:n_prompt],
                {"temperature": 1000, "top_k": 0},
            ),
        )

    @property
    def _question(self) -> dict[str, Any]:
        n_new = min(N_SAME_IDS, self._config.n_positions - PROMPT_LENGTH)
        return {"ids": self._rows[0], "n_new": n_new}

    @cached_property
    def _reference(self) -> dict[str, Any]:
        """What the torch kernels of this package compute in float32, as transformers does."""
        program = Program(TORCH, "float32")
        with Child(self._threads) as child:
            place = {"folder": str(self._folder), "n_positions": self._config.n_positions}
            child.ask("load", program=program.spec, threads=self._threads, **place)
            return child.ask("answers", **self._question)

    def _first_tokens(self) -> None:
        """From the start of a process to its first token; the files are warm by now."""
        from .convert import with_tokenizer

        try:
            folder = with_tokenizer(self._folder, self._work)
        except ValueError as error:
            self._notify(f"no time to the first token: {error}")
            return

        def step(program: Program) -> None:
            command = self._first_token_command(program, str(folder))
            seconds = seconds_to_output(command, TEXT, self._threads)
            self._results[program].add("first_token_s", seconds)

        for turn in range(self._settings["rounds"]):
            for program in self._working(turn):
                self._attempt(program, step)
        if self._settings["first_run"]:
            for program in self._working():
                self._attempt(program, partial(self._first_run, folder=str(folder)))

    def _first_run(self, program: Program, folder: str) -> None:
        if program not in self._compiling:
            return
        self._notify(f"first run of {program}, which compiles")
        command = self._first_token_command(program, folder)
        with tempfile.TemporaryDirectory() as empty:
            variables = {"NUMBA_CACHE_DIR": empty}
            seconds = seconds_to_output(command, TEXT, self._threads, variables)
        self._results[program].add("first_run_s", seconds)

    def _first_token_command(self, program: Program, folder: str) -> list[str]:
        threads = str(self._threads)
        if not (program.is_ours or program.name == TRANSFORMERS):
            place = [program.spec, str(self._folders[program]), threads]
            ids = map(str, self._rows[0][:4])
            return [
                sys.executable, "-m", "gpt2attn.benchmark.child", "first-token",
                *place, str(self._config.n_positions), *ids,
            ]  # fmt: skip
        if program.name == TRANSFORMERS:
            return [sys.executable, "-c", PIPELINE, folder, TEXT, threads]
        return [
            sys.executable, "-m", "gpt2attn", "generate", TEXT, "--model", folder, "--threads",
            threads, "--kernels", program.kernels, "--dtype", program.format, "-n", "1",
            "--device", "cpu",
        ]  # fmt: skip

    def _capture(self) -> None:
        """Seconds of all maps, and for ours of one layer's and of none, in turns."""
        having = [program for program in self._working() if program.has_maps]
        for turn in range(self._settings["rounds"]):
            for program in having[turn % len(having) :] + having[: turn % len(having)]:
                for task in ("maps", "one_layer", "no_layer") if program.is_ours else ("maps",):
                    self._attempt(program, partial(self._look, task=task))

    def _look(self, program: Program, task: str) -> None:
        answer = self._ask(program, task, ids=self._text)
        self._results[program].add(f"{task}_s", answer["seconds"])
