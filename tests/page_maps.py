"""Maps for the tests of the page, made from random scores by the definition of each stage."""

from __future__ import annotations

import math

import torch

from gpt2attn import AttentionMaps

STAGES = ("scores", "scaled", "masked", "weights")
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<!--",
    "\"'`&amp;&lt;",
    "\u2028\u2029",
    "\u202egnp.exe\u2066",
    "\x00",
    "\r\n",
    "\ud83d",
    "{{script}}",
    "]]>",
    "https://example.com/a.png",
    "שלום",
    "é🙂",
]


def made_maps(
    n_tokens: int,
    *,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
    stages: tuple[str, ...] = STAGES,
    prompt_length: int | None = None,
    labels: list[str] | None = None,
) -> AttentionMaps:
    """One text, 3 layers of 4 heads of width 16; scores wide enough for peaks and near-zeros."""
    layers, heads = layers or [0, 1, 2], heads or [0, 1, 2, 3]
    generator = torch.Generator().manual_seed(n_tokens)
    shape = (len(layers), 1, len(heads), n_tokens, n_tokens)
    scores = torch.randn(shape, generator=generator) * 12
    scaled = scores / 4
    masked = scaled.masked_fill(torch.ones(n_tokens, n_tokens).triu(1).bool(), -math.inf)
    made = {"scores": scores, "scaled": scaled, "masked": masked, "weights": masked.softmax(-1)}
    return AttentionMaps(
        {name: made[name] for name in stages},
        layers,
        heads,
        [list(range(n_tokens))],
        [labels or [f"␣t{i}" for i in range(n_tokens)]],
        [prompt_length or n_tokens],
        {"model": "made", "sha256": {"model.safetensors": "ab"}, "seed": 7},
    )
