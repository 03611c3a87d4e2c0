"""`gpt2attn generate --interactive`: a text that the user and the model write in turns."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .common import note
from .generate_output import Output, summary

if TYPE_CHECKING:
    from ..text_generation import Session


def converse(session: Session, output: Output, text: str, max_new_tokens: int) -> None:
    """Continue `text`, if there is any, and then after each line that is typed or piped in.

    On a terminal, Ctrl-C ends the model's turn and a mistake the user's; the text so far stays.
    """
    typed = sys.stdin.isatty()
    if text:
        _turn(session, output, text, max_new_tokens, typed=typed, echo=True)
    for line in _typed_lines() if typed else _piped_lines():
        try:
            _turn(session, output, line, max_new_tokens, typed=typed, echo=not typed)
        except ValueError as error:
            if not typed:
                raise
            note(f"error: {error}")
    note(f"{len(session.ids)} tokens in all")


def _turn(
    session: Session, output: Output, line: str, max_new_tokens: int, *, typed: bool, echo: bool
) -> None:
    session.append(line)
    started = time.perf_counter()
    try:
        with _outlives_ctrl_c() if typed else contextlib.nullcontext():
            result = output.stream(line, session.stream(max_new_tokens), echo=echo)
    except KeyboardInterrupt:
        if not typed:
            raise
        note("\ninterrupted; the text so far stays")
    else:
        note(summary(result, time.perf_counter() - started))


@contextlib.contextmanager
def _outlives_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt here, however often it comes.

    The program's own handler is for a program that ends: after it, a second Ctrl-C kills.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then has line editing and history
    while True:
        note("> ", end="")
        try:
            yield input()
        except EOFError:
            note("")
            return


def _piped_lines() -> Iterator[str]:
    for number, raw in enumerate(sys.stdin.buffer, 1):
        try:
            yield raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin, line {number}, is not UTF-8: {error.reason}.") from None
