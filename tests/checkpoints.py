"""Random checkpoints in Hugging Face format, written by transformers itself, the oracle.

Every parameter is drawn wide, biases and LayerNorms included: at GPT-2's own std of 0.02 the wrong
GELU moves a logit by 1e-5 only, at these widths by more than 1e-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

# The vocabulary is no multiple of a vector width, and n_embd, 3 * n_embd and 4 * n_embd all differ.
TINY: dict[str, Any] = {
    "vocab_size": 67,
    "n_positions": 16,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "bos_token_id": 66,
    "eos_token_id": 66,
}


def wide_hf_model(
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    std: float = 0.3,
    attn_implementation: str = "eager",
) -> GPT2LMHeadModel:
    """A transformers GPT-2 of TINY's sizes with `config` on top, its weights N(0, std).

    LayerNorm weights are around 1.
    """
    settings = GPT2Config(**{**TINY, **(config or {})}, attn_implementation=attn_implementation)
    model = GPT2LMHeadModel(settings).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
        parameter.normal_(mean, std, generator=generator)
    return model


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Save `wide_hf_model(config, seed)` into `folder` as `dtype`; returns the folder."""
    wide_hf_model(config, seed, std=std).to(dtype).save_pretrained(folder)
    return folder
