"""One self-contained page of attention maps: all heads, one head as text and as matrix, no network.

`page.html` is the frame, `page.css` its style; `maps.js` reads and colours the numbers, `matrix.js`
draws one map and `page.js` all the rest. `render_page` puts them and the numbers into one file. The
numbers stand in a script element that is not run: JSON in which every character above ASCII and
every `<`, `>` and `&` is escaped, with each set of maps packed row by row as base64, in float32
where the file stays small enough and in 8 bits where it would not. The page's own
Content-Security-Policy forbids it to load anything and to run any script but this one.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..analysis import rollout
from ..capture import AttentionMaps

# Of packed numbers; it leaves 1 MB of the 25 MB that a page may have to labels and to the frame.
MAX_BYTES = 24_000_000
# Stages whose numbers above the diagonal are all alike, so that only the rows up to it are kept.
CAUSAL = {"weights": 0.0, "masked": -np.inf, "mean": 0.0, "rollout": 0.0}
SCRIPTS = ("maps.js", "matrix.js", "page.js")
MINUS_INFINITY = 255  # of the 8-bit codes, of which 0 to 254 are numbers
# Controls, formats (among them the bidirectional ones), surrogates, line and paragraph separators.
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def render_page(
    maps: AttentionMaps, *, title: str | None = None, value_norms: Tensor | None = None
) -> str:
    """An HTML page of `maps`, complete in itself; several texts get a chooser.

    `value_norms` (layer, head, key), or (layer, batch, head, key) for several texts, are the
    lengths of the value vectors of the captured heads; with them the page shows value-weighted
    maps, a[q, k] ||v_k||. `title` None takes the beginning of the first text. Raises ValueError,
    naming the size and what to do, for more numbers than a page can hold, and for maps that hold
    NaN or look ahead.
    """
    if not maps.stages or not len(maps) or not all(maps.ids):
        raise ValueError("There is nothing to show: the maps hold no stage or a text of no tokens.")
    dtype = _number_type(maps)
    norms = _norms_by_text(maps, value_norms)
    data = {
        "layers": maps.layers,
        "heads": maps.heads,
        "source": _source(maps.metadata),
        "texts": [
            {
                "labels": [visible(label) for label in maps.labels[number]],
                "prompt_length": maps.prompt_lengths[number],
                "maps": {name: _pack(name, v, dtype) for name, v in _kinds(maps[number])},
                "value_norms": None if norms is None else norms[number],
            }
            for number in range(len(maps))
        ],
    }
    script, style = "".join(map(_part, SCRIPTS)), _part("page.css")
    fills = {
        "title": html.escape(visible(title if title is not None else _excerpt(maps.labels[0]))),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": _json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fills[match[1]], _part("page.html"))


def visible(label: str) -> str:
    """`label` with every character that hides, breaks or reorders text spelt as ⟨U+202E⟩."""
    return "".join(
        f"⟨U+{ord(char):04X}⟩" if unicodedata.category(char) in HIDDEN else char for char in label
    )


def page_bytes(maps: AttentionMaps, itemsize: int) -> int:
    """Bytes that the numbers of `maps` take in a page, at 4 bytes each (exact) or at 1."""
    n_maps = len(maps.layers) * len(maps.heads)
    n_causal = n_maps * len(maps.stages.keys() & CAUSAL.keys())
    n_square = n_maps * len(maps.stages.keys() - CAUSAL.keys())
    if "weights" in maps.stages:
        n_causal += len(maps.layers) * (_has_mean(maps) + _has_rollout(maps))
    total = 0
    for n in map(len, maps.ids):
        total += itemsize * (n_causal * n * (n + 1) // 2 + n_square * n * n)
        if itemsize == 1:  # and two float32 to scale each row
            total += 8 * n * (n_causal + n_square)
    return -(-total // 3) * 4


def _number_type(maps: AttentionMaps) -> type[np.generic]:
    """float32 if that fits into a page, else uint8; ValueError if that does not fit either."""
    for dtype in (np.float32, np.uint8):
        n_bytes = page_bytes(maps, np.dtype(dtype).itemsize)
        if n_bytes <= MAX_BYTES:
            return dtype
    n_heads = len(maps.layers) * len(maps.heads)
    raise ValueError(
        f"A page of {n_heads} heads and {sum(map(len, maps.ids)):,} tokens would take "
        f"{n_bytes / 1e6:,.0f} MB even at 8 bits a number, more than the {MAX_BYTES / 1e6:.0f} MB "
        f"that it may have: choose at most {n_heads * MAX_BYTES // n_bytes} heads (fewer layers "
        "or heads), fewer stages or fewer tokens."
    )


def _has_mean(maps: AttentionMaps) -> bool:
    return len(maps.heads) > 1


def _has_rollout(maps: AttentionMaps) -> bool:
    """Rollout follows attention from the embeddings up, so no layer below may be missing."""
    return len(maps.layers) > 1 and maps.layers == list(range(len(maps.layers)))


def _kinds(maps: AttentionMaps) -> Iterator[tuple[str, Tensor]]:
    """(name, (map, query, key)) of each stage of one text, and of what combines its heads."""
    for name, values in maps.stages.items():
        yield name, values.flatten(0, 2)
    if "weights" in maps.stages:
        weights = maps.weights[:, 0].float()
        if _has_mean(maps):
            yield "mean", weights.mean(1)
        if _has_rollout(maps):
            yield "rollout", rollout(weights)


def _pack(name: str, values: Tensor, dtype: type[np.generic]) -> dict[str, Any]:
    """Maps (map, query, key) as the page reads them; `error` is the largest that packing makes."""
    if not (values < torch.inf).all():
        raise ValueError(f"The {name} hold NaN or infinity: the model or its input is damaged.")
    kept = np.ones(values.shape[1:], bool)
    if name in CAUSAL:
        kept = np.tril(kept)
    # Small weights are many and matter: codes of roots lie closer together near 0.
    root = dtype is np.uint8 and bool((values >= 0).all())
    parts, rows, error = [], [], 0.0
    for map in values.detach().cpu():
        numbers = map.double().numpy()
        if (numbers[~kept] != CAUSAL.get(name)).any():
            raise ValueError(f"The {name} look ahead: above the diagonal must be {CAUSAL[name]}.")
        if dtype is np.uint8:
            codes, scale, restored = _quantised(np.sqrt(numbers) if root else numbers, kept)
            parts.append(codes[kept])
            rows.append(scale)
            restored = restored**2 if root else restored
        else:
            restored = numbers.astype("<f4")
            parts.append(restored[kept])
        finite = kept & np.isfinite(numbers)
        error = max(error, np.abs(restored[finite] - numbers[finite]).max(initial=0.0))
    return {
        "dtype": np.dtype(dtype).name,
        "causal": name in CAUSAL,
        "root": root,
        "error": float(error),
        "rows": _base64(np.stack(rows)) if rows else None,
        "data": _base64(np.concatenate(parts)),
    }


def _quantised(numbers: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of 8 bits; (low, step) of each row as float32; and low + code x step, in float64."""
    finite = np.isfinite(numbers) & kept
    low = numbers.min(-1, where=finite, initial=np.inf)
    high = numbers.max(-1, where=finite, initial=-np.inf)
    low, high = (np.where(finite.any(-1), end, 0.0) for end in (low, high))
    scale = np.stack([low, (high - low) / (MINUS_INFINITY - 1)], -1).astype("<f4")
    low, step = scale.astype(float)[:, :, None].swapaxes(0, 1)
    codes = ((numbers - low) / np.where(step > 0, step, 1)).round().clip(0, MINUS_INFINITY - 1)
    codes = np.where(finite, codes, MINUS_INFINITY)
    return codes.astype(np.uint8), scale, low + codes * step


def _norms_by_text(maps: AttentionMaps, norms: Tensor | None) -> list[str] | None:
    """Each text's value norms (layer, head, key), packed; ValueError for another shape."""
    if norms is None:
        return None
    if norms.dim() == 3:
        norms = norms[:, None]
    width = max(map(len, maps.ids))
    expected = (len(maps.layers), len(maps), len(maps.heads), width)
    if norms.shape != expected:
        raise ValueError(
            f"value_norms must be (layer, batch, head, key) {expected}, as the maps are, not "
            f"{tuple(norms.shape)}."
        )
    numbers = norms.detach().cpu().to(torch.float32).numpy()
    return [
        _base64(numbers[:, number, :, width - len(ids) :].astype("<f4"))
        for number, ids in enumerate(maps.ids)
    ]


def _source(metadata: dict[str, Any]) -> list[list[str]]:
    """The metadata as pairs of text."""
    return [
        [visible(str(key)), visible(value if isinstance(value, str) else json.dumps(value))]
        for key, value in metadata.items()
    ]


def _excerpt(labels: list[str]) -> str:
    """The beginning of a text, for a title: whole tokens, their marks for blanks read as blanks."""
    text = "".join(labels[:200]).replace("␣", " ").replace("⏎", " ").strip()
    return f"Attention: {text if len(text) <= 60 else text[:59] + '…'}"


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that no parser of HTML can take for the end of its element."""
    escaped = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
    return re.sub("[<>&]", lambda match: escaped[match[0]], json.dumps(value, allow_nan=False))


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _base64(numbers: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers).tobytes()).decode()
