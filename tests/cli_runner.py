"""Runs the command line in this process: what it prints and its exit status, without paying for a
new torch.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from gpt2attn.cli import main


@dataclass
class Result:
    status: int
    stdout: str
    stderr: str


def run(*arguments: str, stdin: bytes = b"") -> Result:
    """`gpt2attn ARGUMENTS` with `stdin` piped in."""
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
            main()
        except SystemExit as stop:
            status = stop.code or 0
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))
    return Result(status, *texts)
