"""A process for each program, told from here to measure one thing at a time.

Thread pools of several libraries in one process disturb each other, and a pool that waits may spin
on a core. So each program has its own process, which is stopped (SIGSTOP) whenever it is not its
turn: only one works at any moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS",
)  # fmt: skip


class MeasurementError(ValueError):
    """A program could not do what it was told; the message is its own."""


def environment(threads: int) -> dict[str, str]:
    """This process's environment for programs with `threads` threads and without a network."""
    return {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Child:
    """`python -m gpt2attn.benchmark.child`, which answers one line of JSON with another."""

    def __init__(self, threads: int) -> None:
        self._errors = _error_file()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpt2attn.benchmark.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(threads),
            text=True,
            encoding="utf-8",
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, task: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one task; the process works for this long and is stopped afterwards.

        Raises MeasurementError with what it says, or with its last words if it died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal("SIGCONT")
        try:
            self._process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MeasurementError(self._last_words())
        self._signal("SIGSTOP")
        answer = json.loads(line)
        if "error" in answer:
            raise MeasurementError(answer["error"])
        return answer

    def _signal(self, name: str) -> None:
        if hasattr(signal, name) and self._process.poll() is None:
            self._process.send_signal(getattr(signal, name))

    def _last_words(self) -> str:
        status = self._process.wait()
        return f"the process ended with status {status}: {_last_line(self._errors)}"


def seconds_to_output(
    command: list[str], prompt: str, threads: int, variables: Mapping[str, str] | None = None
) -> float:
    """Seconds from the start of `command` to the first output beyond `prompt`, which it may echo.

    `variables` are added to its environment. Raises MeasurementError if it fails.
    """
    started = time.perf_counter()
    with (
        _error_file() as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**environment(threads), **(variables or {})},
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.read(len(prompt.encode()) + 1)
        seconds = time.perf_counter() - started
        process.communicate()
        if process.returncode:
            raise MeasurementError(_last_line(errors))
    return seconds


def _error_file() -> IO[str]:
    """Where a process writes its errors: a pipe that nobody reads would stop it when full."""
    return tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().split("\n") if line.strip()]
    return lines[-1].strip() if lines else "no message"
