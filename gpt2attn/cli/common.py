"""What the commands share: their options, their prompts, and where their output goes.

Nothing here imports torch: `--help` must answer at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..records import utf16_hint

if TYPE_CHECKING:
    from ..language_model import LanguageModel

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_debug = False


def _set_debug(value: bool) -> None:
    global _debug
    _debug = _debug or value


def debug_wanted() -> bool:
    return _debug


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="GPT2ATTN_MODEL",
        metavar="NAME_OR_PATH",
        help="`pocket` (built in, no download), a checkpoint folder, or a Hub repository.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="Branch, tag or commit of a Hub repository.", show_default="the newest cached"
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
DType = Annotated[
    Literal["float32", "bfloat16", "float16", "int8"],
    typer.Option(
        help="How weights are stored; with --kernels torch, and on CUDA, also what is computed in. "
        "int8 with auto, on a CPU."
    ),
]
Kernels = Annotated[
    Literal["auto", "torch"],
    typer.Option(
        help="auto: the fast ones, where they fit the model and the machine; torch: PyTorch's, bit "
        "for bit transformers'."
    ),
]
Threads = Annotated[
    int | None,
    # Many more than there are processors crash the library that runs them.
    typer.Option(min=1, max=1024, help="CPU threads.", show_default="one for each core"),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Read pytorch_model.bin, as plain tensors, if need be."),
]
AllowNonfinite = Annotated[
    bool,
    typer.Option("--allow-nonfinite", help="Only warn of weights with NaN or infinity."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Special = Annotated[
    bool, typer.Option("--special", help="Read <|endoftext|> in the text as that one token.")
]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_set_debug, expose_value=True, help="Show tracebacks."),
]


def note(text: str, *, end: str = "\n") -> None:
    """A line for the person at the terminal, kept apart from the results."""
    print(text, end=end, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """`text` without control characters, which could rewrite the terminal, but for line ends."""
    return _CONTROLS.sub(lambda match: f"<0x{ord(match[0]):02X}>", text)


def write(text: str) -> None:
    """Write `text` to stdout at once, exactly; on a terminal, only what can be seen of it."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """One line of JSON; raises ValueError for a NaN or an infinity, which JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(
            "The result holds NaN or infinity, which JSON does not have: the model's weights are "
            "damaged, or too large for its number format."
        ) from None
    print(text)


def check_output(path: Path, inputs: Iterable[Path | None]) -> None:
    """Raise ValueError, before any work, for an output that could not be written or is an input."""
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} does not exist; make it first.")
    if path.exists() and any(file and file.exists() and file.samefile(path) for file in inputs):
        raise ValueError(f"{path} is the input too and would be overwritten; name another output.")


def read_text(text: str | None, file: Path | None, *, what: str) -> str:
    """The text of an argument, a file or, with neither, stdin; nothing is stripped."""
    if text is not None and file is not None:
        raise ValueError(f"Give the {what} as an argument or as a file, not both.")
    if text is not None and text != "-":
        return text
    if file is not None:
        return _utf8(file.read_bytes(), str(file))
    if text is None and sys.stdin.isatty():
        raise ValueError(f"There is no {what}: give it as an argument, as a file or on stdin.")
    return _utf8(sys.stdin.buffer.read(), "stdin")


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}"
            f"{utf16_hint(raw)}."
        ) from None


def load_language_model(
    model: str,
    revision: str | None,
    device: str,
    dtype: str,
    kernels: str,
    threads: int | None,
    allow_pickle: bool,
    allow_nonfinite: bool,
) -> LanguageModel:
    """`load` with the options of the command line; a note says why fast kernels do not fit."""
    import torch

    from ..kernels import use_kernels
    from ..language_model import load

    if threads is not None:
        torch.set_num_threads(threads)
    lm = load(
        model,
        revision=revision,
        device=device,
        dtype=getattr(torch, dtype),
        kernels=kernels,
        allow_pickle=allow_pickle,
        allow_nonfinite=allow_nonfinite,
        notify=note,
    )
    if kernels == "auto" and lm.model.compiled is None:
        note(f"kernels: {use_kernels(lm.model, kernels)}")
    return lm
