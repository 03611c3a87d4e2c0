"""`gpt2attn download`: fetch a model ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import Debug, Revision, note


def download(
    name: Annotated[str, typer.Argument(help="A Hub repository, such as gpt2 (about 550 MB).")],
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Fetch a model from the Hub into its cache, and print the folder.

    Example:  gpt2attn download gpt2
    """
    from ..hub import download as fetch

    source = fetch(name, revision=revision, notify=note)
    print(source.folder)
