"""Runs the command line in this process: what it prints and its exit status, without paying for a
new torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from gpt2attn.cli import main


@dataclass
class Result:
    status: int
    stdout: str
    stderr: str


def run_forked(*arguments: str, stdout: int) -> Result:
    """`gpt2attn ARGUMENTS` in a fork, its output in the file descriptor `stdout`."""
    with tempfile.TemporaryFile() as messages:
        child = os.fork()
        if child == 0:
            status = 99
            try:
                torch.set_num_threads(1)  # the threads of a pool do not come along in a fork
                for number, target in ((1, stdout), (2, messages.fileno())):
                    os.dup2(target, number)
                streams = [os.fdopen(number, "w", closefd=False) for number in (1, 2)]
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams
                sys.argv = ["gpt2attn", *map(str, arguments)]
                main()
            except SystemExit as stop:
                status = int(stop.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, result = os.waitpid(child, 0)
        messages.seek(0)
        return Result(os.waitstatus_to_exitcode(result), "", messages.read().decode("utf-8"))


def run(*arguments: str, stdin: bytes = b"", program: Callable[[], object] = main) -> Result:
    """`gpt2attn ARGUMENTS`, or another program's, with `stdin` piped in."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    source = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    status = 0
    with (
        mock.patch.object(sys, "argv", ["gpt2attn", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", source),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            program()
        except SystemExit as stop:
            status = stop.code or 0
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))
    return Result(status, *texts)


def refused(result, *parts):
    """One sentence on stderr, nothing on stdout, status 2."""
    assert result.status == 2, result
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
