"""Work on many texts: how many workers, and what they load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .common import note

if TYPE_CHECKING:
    from ..corpus import Loader

Workers = Annotated[
    int,
    typer.Option(
        min=1,
        max=256,  # each has a Python, a torch and a model in memory
        help="Processes that share the threads, each with the model; for many texts.",
    ),
]
Engine = Annotated[
    Literal["local", "ray"],
    typer.Option(
        help="Where the workers are. ray: a Ray cluster, that of RAY_ADDRESS or a new one here."
    ),
]


def find_model(
    model: str,
    revision: str | None,
    device: str,
    dtype: str,
    kernels: str,
    allow_pickle: bool,
    allow_nonfinite: bool,
    *,
    engine: str,
) -> Loader:
    """`corpus.locate` with the options of the command line."""
    from ..corpus import locate

    if engine == "ray" and device == "auto":
        device = "cpu"  # this machine does not tell what the others have
    return locate(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        kernels=kernels,
        notify=note,
        allow_pickle=allow_pickle,
        allow_nonfinite=allow_nonfinite,
    )
