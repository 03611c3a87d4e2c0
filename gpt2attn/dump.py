"""Attention maps in files: .safetensors, .npz, .json and .csv, all with the same content.

Every format holds one header, a JSON object with `format`, `layers`, `heads`, `ids`, `labels`,
`prompt_lengths` and `metadata`, and the numbers of each captured stage:

    .safetensors  a tensor per stage, (layer, batch, head, query, key); the header under the key
    "gpt2attn"
                  of the file's metadata
    .npz          an array per stage; the header as the text array "header"
    .json         the header's keys and one nested list per stage; minus infinity is null
    .csv          the line "# {header}", then one line per number of each text's own square map

Files are written beside their final name and renamed. `dump_attention` writes safetensors layer by
layer, so a dump may be larger than memory.
"""

from __future__ import annotations

import csv
import json
import math
import struct
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .attention import AttentionSteps
from .capture import AttentionMaps, chosen, kept, kept_dtype, known_stages, provenance
from .files import replacing, save_tensors
from .model import GPT2, as_ids, check_finite

FORMAT = "gpt2attn attention maps 1"
SUFFIXES = (".safetensors", ".npz", ".json", ".csv")
MAX_CSV_ROWS = 5_000_000
MAX_JSON_NUMBERS = 20_000_000
COLUMNS = ["text", "layer", "head", "query", "key", "query_label", "key_label"]
# What reading a file of something else, or a damaged one, can raise.
NOT_OURS = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    RuntimeError,
    EOFError,
    StopIteration,
    BadZipFile,
    SafetensorError,
)
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def check_suffix(path: Path) -> None:
    """Raise ValueError if `path` does not end in a format that can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{path} must end in one of {', '.join(SUFFIXES)}, which chooses the format."
        )


def save_maps(maps: AttentionMaps, path: Path) -> None:
    """Write `maps` in the format of the suffix; ValueError if unknown or too large for it."""
    check_suffix(path)
    header = _header(maps)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        tensors = {name: values.contiguous() for name, values in maps.stages.items()}
        save_tensors(tensors, path, {"format": "pt", "gpt2attn": _json(header)})
    elif suffix == ".npz":
        arrays: Any = {name: _numpy(values) for name, values in maps.stages.items()}
        with replacing(path) as part, part.open("wb") as file:
            np.savez(file, header=np.array(_json(header)), **arrays)
    elif suffix == ".json":
        _save_json(maps, header, path)
    else:
        _save_csv(maps, header, path)


def load_maps(path: Path) -> AttentionMaps:
    """The maps in a file written by this module; ValueError if it holds something else."""
    check_suffix(path)
    read = {
        ".safetensors": _load_safetensors,
        ".npz": _load_npz,
        ".json": _load_json,
        ".csv": _load_csv,
    }
    try:
        header, stages = read[path.suffix.lower()](path)
        if header.pop("format") != FORMAT:
            raise ValueError("another format")
        return AttentionMaps(stages=stages, **header)
    except NOT_OURS as error:
        raise ValueError(f"{path} is not a file of attention maps: {error!r}.") from None


@torch.no_grad()
def dump_attention(
    model: GPT2,
    ids: Tensor | Sequence[int],
    path: Path,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    stages: Iterable[str] = ("weights",),
    dtype: torch.dtype | None = None,
    labels: Sequence[str] | None = None,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Capture one text's maps into a .safetensors file, layer by layer, as the model makes them.

    The file equals what `attention_maps(...).save(path)` writes, but never more than one layer is
    in memory.
    """
    ids = as_ids(ids, model.config.vocab_size)
    layers = chosen(layers, model.config.n_layer, "layer")
    heads = chosen(heads, model.config.n_head, "head")
    n_tokens = ids.shape[1]
    # The maps' header with no data yet: shapes are known before the first layer runs.
    empty = AttentionMaps(
        {},
        layers,
        heads,
        ids.tolist(),
        [list(labels)] if labels else [[f"#{id}" for id in ids[0].tolist()]],
        [n_tokens],
        {**provenance(model), **(metadata or {})},
    )
    shape = (len(layers), 1, len(heads), n_tokens, n_tokens)
    dtype = kept_dtype(dtype, model)
    writer = _LayerWriter(model, layers, heads, known_stages(stages), shape, dtype)
    with replacing(path) as part, part.open("wb") as file:
        writer.start(file, _json(_header(empty)))
        check_finite(model.hidden(ids, observe=writer))


def dump_bytes(
    n_layers: int, n_heads: int, n_tokens: int, n_stages: int, dtype: torch.dtype
) -> int:
    """Bytes of the numbers in a binary dump of one text."""
    return n_layers * n_heads * n_tokens**2 * n_stages * dtype.itemsize


class _LayerWriter:
    """An observer that writes each layer to its place in a safetensors file."""

    def __init__(
        self,
        model: GPT2,
        layers: list[int],
        heads: list[int],
        stages: list[str],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.layers = layers
        self._heads = None if heads == list(range(model.config.n_head)) else heads
        self._stages, self._shape, self._dtype = stages, shape, dtype

    def start(self, file: Any, header: str) -> None:
        """Write the format's header: its length in 8 bytes, then JSON with shapes and places."""
        size = math.prod(self._shape) * self._dtype.itemsize
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", "gpt2attn": header}}
        for number, stage in enumerate(self._stages):
            entries[stage] = {
                "dtype": SAFETENSORS_TYPES[self._dtype],
                "shape": list(self._shape),
                "data_offsets": [number * size, (number + 1) * size],
            }
        raw = json.dumps(entries).encode()
        raw += b" " * (
            -len(raw) % 8
        )  # the data starts at a multiple of 8, as the format's own writer does it
        file.write(struct.pack("<Q", len(raw)) + raw)
        self._file, self._start, self._size = file, 8 + len(raw), size
        file.truncate(self._start + len(self._stages) * size)

    def __call__(self, layer: int, steps: AttentionSteps) -> None:
        layer_size = self._size // len(self.layers)
        for number, stage in enumerate(self._stages):
            values = kept(steps, stage, self._heads).to("cpu", self._dtype).contiguous()
            self._file.seek(
                self._start + number * self._size + self.layers.index(layer) * layer_size
            )
            self._file.write(values.view(torch.uint8).numpy())


def _header(maps: AttentionMaps) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "layers": maps.layers,
        "heads": maps.heads,
        "ids": maps.ids,
        "labels": maps.labels,
        "prompt_lengths": maps.prompt_lengths,
        "metadata": maps.metadata,
    }


def _json(value: Any) -> str:
    """JSON in ASCII: no byte of a label can be mistaken for the end of a line or of a header."""
    return json.dumps(value, allow_nan=False)


def _numpy(values: Tensor) -> np.ndarray:
    if values.dtype == torch.bfloat16:
        raise ValueError(
            "NumPy has no bfloat16: capture with dtype float32 or float16 for this format."
        )
    return values.contiguous().numpy()


def _load_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {})["gpt2attn"])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _load_npz(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with np.load(path, allow_pickle=False) as file:
        stages = {name: torch.from_numpy(file[name]) for name in file.files if name != "header"}
        return json.loads(str(file["header"])), stages


def _save_json(maps: AttentionMaps, header: dict[str, Any], path: Path) -> None:
    count = sum(values.numel() for values in maps.stages.values())
    if count > MAX_JSON_NUMBERS:
        raise ValueError(
            f"{count:,} numbers are too many for JSON (at most {MAX_JSON_NUMBERS:,}); "
            "choose .safetensors or .npz, or fewer layers and heads."
        )
    value = {
        **header,
        "dtypes": {name: str(v.dtype).removeprefix("torch.") for name, v in maps.stages.items()},
        **{name: json_numbers(values) for name, values in maps.stages.items()},
    }
    with replacing(path) as part:
        part.write_text(_json(value) + "\n", encoding="utf-8")


def _digits(values: Tensor) -> int:
    """How many significant digits give a number of this type back exactly."""
    return 17 if values.dtype == torch.float64 else 9


def json_numbers(values: Tensor) -> Any:
    """`values` as nested lists that JSON gives back exactly; minus infinity is None."""
    digits = _digits(values)

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return None if value == -math.inf else float(f"{value:.{digits}g}")

    return plain(values.tolist())


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return -math.inf if value is None else value


def _load_json(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    value = json.loads(path.read_text(encoding="utf-8"))
    dtypes = value.pop("dtypes")
    stages = {
        name: torch.tensor(_from_json(value.pop(name)), dtype=getattr(torch, dtype))
        for name, dtype in dtypes.items()
    }
    return value, stages


def _save_csv(maps: AttentionMaps, header: dict[str, Any], path: Path) -> None:
    rows = len(maps.layers) * len(maps.heads) * sum(len(ids) ** 2 for ids in maps.ids)
    if rows > MAX_CSV_ROWS:
        raise ValueError(
            f"{rows:,} rows are too many for CSV (at most {MAX_CSV_ROWS:,}); "
            "choose .safetensors or .npz, or fewer layers and heads."
        )
    names = list(maps.stages)
    dtypes = {name: str(maps.stages[name].dtype).removeprefix("torch.") for name in names}
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {_json({**header, 'dtypes': dtypes})}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *names])
        for text, labels in enumerate(maps.labels):
            for layer, head in product(maps.layers, maps.heads):
                values = [_numbers(maps.head(layer, head, text=text, stage=name)) for name in names]
                places = product(enumerate(labels), enumerate(labels))
                writer.writerows(
                    [text, layer, head, query, key, query_label, key_label, *numbers]
                    for ((query, query_label), (key, key_label)), *numbers in zip(
                        places, *values, strict=True
                    )
                )


def _numbers(values: Tensor) -> list[str]:
    digits = _digits(values)
    return [f"{value:.{digits}g}" for value in values.flatten().tolist()]


def _load_csv(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with path.open(encoding="utf-8", newline="") as file:
        first = file.readline()
        if not first.startswith("# "):
            raise ValueError("the first line is not '# ' and a JSON object")
        header = json.loads(first[2:])
        dtypes = header.pop("dtypes")
        reader = csv.reader(file)
        if next(reader) != [*COLUMNS, *dtypes]:
            raise ValueError("the columns are others")
        columns = list(zip(*(row[len(COLUMNS) :] for row in reader), strict=True))
    width = max(map(len, header["ids"]))
    shape = (len(header["layers"]), len(header["ids"]), len(header["heads"]), width, width)
    stages = {}
    for (name, dtype), column in zip(dtypes.items(), columns, strict=True):
        values = torch.tensor([float(number) for number in column], dtype=getattr(torch, dtype))
        stages[name] = torch.zeros(shape, dtype=values.dtype)
        for text, ids in enumerate(header["ids"]):
            n, size = len(ids), shape[0] * shape[2] * len(ids) ** 2
            block, values = values[:size], values[size:]
            stages[name][:, text, :, width - n :, width - n :] = block.view(
                shape[0], shape[2], n, n
            )
    return header, stages
