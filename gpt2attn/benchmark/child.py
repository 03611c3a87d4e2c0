"""The measuring side: reads a task a line from stdin and answers each with a line of JSON.

    python -m gpt2attn.benchmark.child
    python -m gpt2attn.benchmark.child first-token PROGRAM FOLDER THREADS N_POSITIONS ID...

The second form is a whole run of a program: start, load, one token.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .machine import MemoryReader, peak_bytes

PR_SET_PDEATHSIG = 1
# A system may have taken pages of a process that was stopped: before the clock starts, all weights
# are read once, by the same kernels.
WAKING_TOKENS, WAKING_PROMPT = 2, 32


class Session:
    """The tasks, by name; `load` comes before those that need a program."""

    def __init__(self) -> None:
        self._interpreter_bytes = peak_bytes()
        self._engine: Any = None
        self._reader: MemoryReader | None = None

    def load(self, program: str, folder: str, threads: int, n_positions: int) -> dict[str, Any]:
        from .programs import Program, open_engine

        one = Program.parse(program)
        import_seconds = _timed(lambda: _import_library(one.name))
        started = time.perf_counter()
        self._engine = open_engine(one, Path(folder), threads, n_positions)
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "import": import_seconds,
            "in_use": self._engine.in_use,
            "compiles": self._engine.compiles,
        }

    def convert(self, program: str, folder: str, work: str) -> dict[str, Any]:
        from .convert import converted
        from .programs import Program

        return {"folder": str(converted(Program.parse(program), Path(folder), Path(work)))}

    def decode(self, prompts: list[list[int]], n_new: int) -> dict[str, Any]:
        self._engine.decode(prompts, WAKING_TOKENS)
        return {"seconds": _timed(lambda: self._engine.decode(prompts, n_new))}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        self._engine.last_logits(ids[:WAKING_PROMPT])
        return {"seconds": _timed(lambda: self._engine.last_logits(ids))}

    def maps(self, ids: list[int]) -> dict[str, Any]:
        self._engine.last_logits(ids[:WAKING_PROMPT])
        return {"seconds": _timed(lambda: self._engine.maps(ids))}

    def one_layer(self, ids: list[int]) -> dict[str, Any]:
        return {"seconds": _timed(lambda: self._engine.one_layer(ids))}

    def no_layer(self, ids: list[int]) -> dict[str, Any]:
        return {"seconds": _timed(lambda: self._engine.no_layer(ids))}

    def growth(self, ids: list[int], positions: list[int], turns: int) -> dict[str, Any]:
        from .decoding import growth

        gc.collect()
        cache_bytes, seconds = growth(self._engine.model, ids, positions, turns)
        return {"bytes_per_position": cache_bytes, "seconds": seconds}

    def lookup(
        self, ids: list[int], n_new: int, sampling: dict[str, Any], seed: int, plain_first: bool
    ) -> dict[str, Any]:
        from .decoding import compare_lookup

        self._engine.decode([ids], WAKING_TOKENS)
        gc.collect()
        model = self._engine.model
        return asdict(compare_lookup(model, ids, n_new, sampling, seed, plain_first=plain_first))

    def answers(self, ids: list[int], n_new: int) -> dict[str, Any]:
        """What it computes: the logits after `ids`, and the greedy ids that follow."""
        (new,) = self._engine.decode([ids], n_new)
        return {"ids": new, "logits": self._engine.last_logits(ids).tolist()}

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak_bytes() - self._interpreter_bytes}

    def bandwidth(self, threads: int) -> dict[str, Any]:
        self._reader = self._reader or MemoryReader(threads)
        return {"method": self._reader.method, "gb_s": self._reader.gigabytes_per_second()}


def _import_library(name: str) -> None:
    from . import programs

    if name in (programs.OURS, programs.TORCH):
        from .. import checkpoint, generation  # noqa: F401
    elif name == programs.TRANSFORMERS:
        from transformers import GPT2LMHeadModel  # noqa: F401
    elif name == programs.CTRANSLATE2:
        import ctranslate2  # noqa: F401
    else:
        import llama_cpp  # noqa: F401


def _timed(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    del result  # kept until here: giving memory back is not the work
    return seconds


def serve() -> None:
    """Answer until stdin ends."""
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    session = Session()
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = getattr(session, task.pop("task"))(**task)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).split("\n")
            answer = {"error": lines[0] or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


def first_token(program: str, folder: str, threads: str, n_positions: str, *ids: str) -> None:
    from .programs import Program, open_engine

    engine = open_engine(Program.parse(program), Path(folder), int(threads), int(n_positions))
    print(engine.decode([[int(id) for id in ids]], 1)[0][0], flush=True)


def _end_with_parent() -> None:
    """On Linux: a process that is stopped would not notice that nobody wants it any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent()
    if sys.argv[1:2] == ["first-token"]:
        first_token(*sys.argv[2:])
    else:
        serve()
