"""`gpt2attn tokens`: text to token ids and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import Debug, Json, Model, Revision, Special, print_json, read_text, write


def tokens(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to split; `-` or nothing reads stdin.", show_default=False),
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    ids: Annotated[
        str | None, typer.Option(help="Token ids, such as '464,3290', to turn into text instead.")
    ] = None,
    special: Special = False,
    model: Model = "gpt2",
    revision: Revision = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the tokens of a text, or the text of token ids.

    Example:  gpt2attn tokens "Apple raised its price target"
    """
    from ..tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model, revision=revision)
    if ids is not None and (text is not None or text_file is not None or special):
        raise ValueError("--ids goes with neither a text, --text-file nor --special.")
    if ids is None:
        chosen = tokenizer.encode(read_text(text, text_file, what="text"), special=special)
    else:
        chosen = _parse_ids(ids)
    if as_json:
        print_json(
            {"ids": chosen, "labels": tokenizer.labels(chosen), "text": tokenizer.decode(chosen)}
        )
    elif ids is not None:
        write(f"{tokenizer.decode(chosen)}\n")
    else:
        width = len(str(len(chosen)))
        for position, (id, label) in enumerate(zip(chosen, tokenizer.labels(chosen), strict=True)):
            print(f"{position:>{width}}  {id:>6}  {label}")


def _parse_ids(text: str) -> list[int]:
    try:
        # As --json prints them, too.
        bare = text.strip().removeprefix("[").removesuffix("]")
        return [int(part) for part in bare.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"--ids takes whole numbers with commas or spaces between them, not {text!r}."
        ) from None
