"""`gpt2attn info`: what a checkpoint is, read from its config and headers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .common import AllowPickle, Debug, Json, Model, Revision, note, print_json

if TYPE_CHECKING:
    from ..config import GPT2Config


def info(
    model: Model = "gpt2",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a model's sizes, parameters, files and cache memory, and what --kernels auto would run.

    Example:  gpt2attn info --model pocket
    """
    facts = _facts(model, revision, allow_pickle)
    if as_json:
        print_json(facts)
        return
    config, files = facts.pop("config"), facts.pop("files")
    lines = [
        *(
            (key.replace("_", " "), f"{value:,}" if isinstance(value, int) else value)
            for key, value in facts.items()
        ),
        *config.items(),
        *(
            ("file", f"{file['path']}  {file['bytes']:,} bytes  sha256 {file['sha256']}")
            for file in files
        ),
    ]
    width = max(len(name) for name, _ in lines) + 2
    for name, value in lines:
        print(f"{name:<{width}}{value}")


def _kernels(config: GPT2Config) -> str:
    """What `--kernels auto` would run here, as the package finds it of a model with one block."""
    from ..kernels import use_kernels
    from ..language_model import chosen_device
    from ..model import GPT2

    small = GPT2(replace(config, n_layer=1, n_positions=1, vocab_size=1))
    return use_kernels(small.to(chosen_device("auto")), "auto")


def _facts(model: str, revision: str | None, allow_pickle: bool) -> dict[str, Any]:
    from ..checkpoint import fitted, open_tensors, read_config, weight_files
    from ..files import sha256
    from ..hub import resolve

    source = resolve(model, revision=revision, notify=note)
    config = read_config(source.folder)
    files = weight_files(source.folder, allow_pickle=allow_pickle)
    with open_tensors(source.folder, allow_pickle=allow_pickle) as entries:
        whole, *_ = fitted(entries, source.folder, config)
        parameters = sum(p.numel() for p in whole.parameters())
        types = sorted({entry.dtype for entry in entries.values()})
    cache_bytes = 2 * config.n_layer * config.n_embd * 4
    return {
        "model": source.name,
        "folder": str(source.folder),
        "revision": source.revision or "none (local files)",
        "parameters": parameters,
        "stored_as": ", ".join(types),
        "head_dim": config.head_dim,
        "heads_in_all": config.n_layer * config.n_head,
        "cache_bytes_per_token": cache_bytes,
        "cache_bytes_full": cache_bytes * config.n_positions,
        "kernels": _kernels(config),
        "config": config.to_dict(),
        "files": [
            {"path": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in files
        ],
    }
