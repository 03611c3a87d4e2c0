"""Checkpoint folders in Hugging Face format <-> `GPT2`.

A checkpoint's tensors carry the names of our modules, so loading is: read the names and shapes from
the file's header, compare them with what the config promises, and only then take the data. float32
files are mapped, not copied. A pickle can run code, so pytorch_model.bin is read on request only,
and only as plain tensors.
"""

from __future__ import annotations

import json
import os
import pickletools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import GPT2Config
from .files import replacing, save_tensors
from .hub import CONFIG, INDEX, WEIGHTS, resolve, shard_names
from .kernels import use_kernels
from .kernels.formats import STORED, store_weights
from .model import GPT2
from .untrusted import check_header, listed, local_file, one_line, refuse_placeholder

PICKLE = "pytorch_model.bin"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Wrappers that training programs put around a model; stripped only from all keys alike.
WRAPPERS = ("module.", "_orig_mod.", "model.")
# Masks that old files carry as buffers; ours is computed. Not to be confused with attn.c_attn.bias.
MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
OTHER_HEADS = ("score.", "classifier.", "multiple_choice_head.", "v_head.", "qa_outputs.")
CROSS_ATTENTION = re.compile(r"crossattention|q_attn|ln_cross_attn")
# What a table of plain tensors is pickled with. torch.load permits more, a bytearray of any length
# that the file asks for among it.
PICKLED = re.compile(
    r"collections OrderedDict|torch (Size|\w+Storage)|torch\.serialization _get_layout"
    r"|torch\._utils _rebuild_(parameter|tensor|tensor_v2|sparse_tensor)"
)
LEGACY_PICKLES = 5  # in a file from before torch 1.6, before the numbers
# Which config keys fix the shape of a tensor, for error messages; n_embd alone fixes the others.
SHAPE_KEYS = {
    "wte.weight": "vocab_size, n_embd",
    "lm_head.weight": "vocab_size, n_embd",
    "wpe.weight": "n_positions, n_embd",
    "mlp.c_fc.weight": "n_embd, n_inner",
    "mlp.c_fc.bias": "n_inner",
    "mlp.c_proj.weight": "n_inner, n_embd",
}
OTHER_FORMATS = {
    "TensorFlow": ("*.ckpt*", "tf_model.h5"),
    "Flax": ("flax_model.msgpack",),
    "GGUF": ("*.gguf",),
    "ONNX": ("*.onnx", "onnx"),
    "PyTorch pickle": ("*.bin", "*.pt", "*.pth"),
    "differently named safetensors": ("*.safetensors",),
}


class CheckpointError(ValueError):
    """A folder without a complete GPT-2 checkpoint; the message says why, with the path."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: name, shape and type from the header, its data on demand."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: F32, F16, BF16, ...
    read: Callable[[], Tensor]


def load_model(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    allow_pickle: bool = False,
    allow_nonfinite: bool = False,
    kernels: str = "auto",
) -> GPT2:
    """The model in a checkpoint folder, a Hub repository or the built-in `pocket`, for inference.

    `kernels` "auto" decodes and reads long prompts with compiled code where that fits the model and
    the machine, and with torch elsewhere; "torch" keeps every operation torch's own, bit for bit
    transformers'.
    `dtype` bfloat16, float16 or int8 is with "auto" on the CPU what the big matrices are stored in,
    while all arithmetic is float32 (`kernels.formats`); with "torch", and on CUDA, the weights are
    stored and computed in `dtype`, which is then not int8. What the file holds, and its config, do
    not change it. `allow_pickle` permits pytorch_model.bin where there is no safetensors file, read
    as plain tensors without running code. Weights with NaN or infinity are refused, or with
    `allow_nonfinite` reported by a warning.

    A float32 model on the CPU is a private map of its file: do not write into the file itself while
    the model is in use; `save_model` puts a new one in its place, which is safe.

    Raises CheckpointError or ConfigError, naming every tensor that is missing, unexpected or
    misshapen, before any data is read.
    """
    device = _checked_device(device)
    only_stored = kernels == "auto" and device.type == "cpu" and dtype in STORED
    if dtype not in DTYPES.values() and not only_stored:
        raise ValueError(
            "dtype must be float32, float64, float16 or bfloat16 of torch (torch.float32 ...), not "
            f'{dtype!r}; int8 is there with kernels="auto" on the CPU.'
        )
    folder = resolve(name, revision=revision).folder
    config = read_config(folder)
    with open_tensors(folder, allow_pickle=allow_pickle) as entries:
        model, chosen, copies = fitted(entries, folder, config)
        _check_copies(chosen, copies, folder)
        computed = torch.float32 if only_stored else dtype
        state = {key: chosen[key].read().to(device, computed) for key in model.state_dict()}
    nonfinite = _nonfinite(state)
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False).eval()
    if only_stored:
        del state
        store_weights(model, dtype)
        if dtype.is_floating_point:  # too large for 16 bits
            nonfinite |= _nonfinite(model.state_dict())
    if nonfinite:
        _report_nonfinite(nonfinite, model, chosen, folder, allow_nonfinite)
    use_kernels(model, kernels)
    return model


def save_model(model: GPT2, folder: str | os.PathLike[str]) -> None:
    """Write config.json and model.safetensors so that transformers loads them to the same logits.

    The tied embedding is stored once; int8 weights are refused. Each file is written beside its
    final name and then renamed, so `folder` may be the one that `model` was loaded from. Raises
    OSError, with one sentence and the path, if they cannot be written.
    """
    folder = Path(folder).expanduser()
    if model.table.scale is not None:
        raise ValueError("int8 weights are not saved: load the model with another dtype first.")
    tensors = {}
    places = set()
    for key, tensor in model.state_dict().items():
        name = key if key.startswith("lm_head.") else f"transformer.{key}"
        # safetensors refuses one tensor under two names: a head that was tied to the embedding.
        tensors[name] = tensor.clone() if tensor.data_ptr() in places else tensor.contiguous()
        places.add(tensor.data_ptr())
    dtype = str(model.dtype).removeprefix("torch.")
    config = json.dumps({**model.config.to_dict(), "torch_dtype": dtype}, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
        with replacing(folder / CONFIG) as path:
            path.write_text(config, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot save the model in {folder}: {reason}.") from error


def read_config(folder: Path) -> GPT2Config:
    """The folder's config.json; raises CheckpointError if there is no such folder or file."""
    if not folder.is_dir():
        what = "is a file; give the folder that holds it" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}.")
    with _faults_of(folder):
        path = local_file(folder, CONFIG)
        if path is None:
            raise CheckpointError(f"{folder} has no {CONFIG}{_what_is_there(folder)}.")
    return GPT2Config.from_file(path)


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The files that `load_model` reads: model.safetensors, else the shards, else the pickle.

    Raises CheckpointError if there are none, saying what the folder holds instead.
    """
    with _faults_of(folder):
        if path := local_file(folder, WEIGHTS):
            return [path]
        if path := local_file(folder, INDEX):
            return _shards(path)
        if local_file(folder, PICKLE) is None:
            raise CheckpointError(f"{folder} has no {WEIGHTS}{_what_is_there(folder)}.")
        if not allow_pickle:
            raise CheckpointError(
                f"{folder} has only {PICKLE}, a pickle, which could run code; convert it to "
                "safetensors, or allow it with allow_pickle=True (--allow-pickle), which reads "
                "plain tensors only."
            )
        return [folder / PICKLE]


@contextmanager
def open_tensors(folder: Path, *, allow_pickle: bool = False) -> Iterator[dict[str, Entry]]:
    """All tensors of a checkpoint by their name in the file; data is mapped and read on demand."""
    with ExitStack() as stack:
        entries: dict[str, Entry] = {}
        for path in weight_files(folder, allow_pickle=allow_pickle):
            with _faults_of(path):
                found = _unpickle(path) if path.name == PICKLE else _open(path, stack)
            if twice := entries.keys() & found.keys():
                raise CheckpointError(f"{path} repeats {listed(twice)} from another shard.")
            entries |= found
        yield entries


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be one of torch's, such as cpu, not {device!r}.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but torch finds no CUDA here; use cpu.")
    return device


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is looked at into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _shards(index: Path) -> list[Path]:
    names = shard_names(index)
    paths = [local_file(index.parent, name) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        raise CheckpointError(f"{index.parent} lacks the shards {listed(missing)}.")
    if not names:
        raise CheckpointError(f"{index} names no shards; download it again.")
    return [index.parent / name for name in names]


def _open(path: Path, stack: ExitStack) -> dict[str, Entry]:
    check_header(path)
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
    except SafetensorError as error:
        reason = one_line(str(error).removeprefix("Error while deserializing header: "))
        raise CheckpointError(f"{path} is damaged: {reason}; download it again.") from None

    def entry(name: str) -> Entry:
        part = file.get_slice(name)
        return Entry(name, tuple(part.get_shape()), part.get_dtype(), lambda: file.get_tensor(name))

    return {name: entry(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _unpickle(path: Path) -> dict[str, Entry]:
    refuse_placeholder(path)
    try:
        # Files from before torch 1.6 are no zip archives, and only those can be mapped.
        zipped = is_zipfile(path)
        if not (_all_plain_zipped if zipped else _all_plain_legacy)(path):
            raise ValueError
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception:  # in too many ways to name, and torch's advice is to run the code
        raise CheckpointError(
            f"{path} is damaged or holds more than plain tensors, and nothing else is read from a "
            "pickle; get the model's safetensors file."
        ) from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise CheckpointError(f"{path} is no table of tensors; save the model's state_dict alone.")
    dtypes = {dtype: name for name, dtype in DTYPES.items()}

    def entry(name: str, tensor: Tensor) -> Entry:
        dtype = dtypes.get(tensor.dtype, str(tensor.dtype))
        if tensor.layout != torch.strided or tensor.is_meta:
            dtype = f"{tensor.layout} on {tensor.device}"
        return Entry(name, tuple(tensor.shape), dtype, tensor.contiguous)

    return {name: entry(name, tensor) for name, tensor in state.items()}


def _all_plain_zipped(path: Path) -> bool:
    """Whether the archive unpickles to plain tensors and nothing in it grows when it is read."""
    with ZipFile(path) as archive:
        if any(part.compress_type != ZIP_STORED for part in archive.infolist()):
            return False
        pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
        return all(_is_plain(BytesIO(archive.read(name))) for name in pickles)


def _all_plain_legacy(path: Path) -> bool:
    with path.open("rb") as file:
        return all(_is_plain(file) for _ in range(LEGACY_PICKLES))


def _is_plain(pickle: BinaryIO) -> bool:
    """Whether the pickle that starts here names only what tables of tensors need; it is not run."""
    return all(
        PICKLED.fullmatch(str(argument))
        for operation, argument, _ in pickletools.genops(pickle)
        if operation.name == "GLOBAL"
    )


def fitted(
    entries: Mapping[str, Entry], folder: Path, config: GPT2Config
) -> tuple[GPT2, dict[str, Entry], list[tuple[str, Entry]]]:
    """A model without data, its entries under its names, and second copies of some of them.

    Raises CheckpointError, naming every tensor that is missing, unexpected or misshapen. Reads no
    data.
    """
    chosen, copies = _by_module_name(entries, folder, config)
    with torch.device("meta"):
        model = GPT2(config)
    _check_tensors(model, chosen, copies, folder)
    return model, chosen, copies


def _by_module_name(
    entries: Mapping[str, Entry], folder: Path, config: GPT2Config
) -> tuple[dict[str, Entry], list[tuple[str, Entry]]]:
    """Entries under our module names, and second copies of some, which must equal the first.

    Without wrapper and `transformer.` prefixes, mask buffers and other heads.
    """
    prefix = ""
    while wrapper := next((w for w in WRAPPERS if _all_start_with(prefix + w, entries)), ""):
        prefix += wrapper
    chosen: dict[str, Entry] = {}
    copies: list[tuple[str, Entry]] = []
    others = []
    for entry in entries.values():
        name = entry.name.removeprefix(prefix).removeprefix("transformer.")
        if MASK_BUFFER.fullmatch(name):
            continue
        if name.startswith(OTHER_HEADS):
            others.append(name)
        elif name in chosen:
            copies.append((name, entry))
        elif name == "lm_head.weight" and config.tie_word_embeddings:
            copies.append(("wte.weight", entry))
        else:
            chosen[name] = entry
    if others:
        warnings.warn(f"{folder}: other heads are not used: {listed(others)}.", stacklevel=4)
    return chosen, copies


def _all_start_with(prefix: str, names: Mapping[str, Entry]) -> bool:
    return bool(names) and all(name.startswith(prefix) for name in names)


def _check_tensors(
    model: GPT2, chosen: dict[str, Entry], copies: list[tuple[str, Entry]], folder: Path
) -> None:
    """Raise one CheckpointError with all that is missing, unexpected, misshapen or not a float."""
    wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    found = [(key, entry) for key, entry in [*chosen.items(), *copies] if key in wanted]
    unexpected = chosen.keys() - wanted.keys()
    cross = {key for key in unexpected if CROSS_ATTENTION.search(key)}
    blocks = {int(match[1]) for key in chosen if (match := re.match(r"h\.(\d{1,9})\.", key))}
    n_layer, n_blocks = model.config.n_layer, max(blocks, default=-1) + 1
    problems = {
        "missing": [
            f"{key} (config: tie_word_embeddings is false)" if key == "lm_head.weight" else key
            for key in wanted.keys() - chosen.keys()
        ],
        "unexpected": unexpected - cross,
        f"n_layer is {n_layer}, but the number of blocks is": [n_blocks] * (n_blocks != n_layer),
        "cross-attention, which a decoder-only GPT-2 does not have": cross,
        "wrong shape": [
            f"{entry.name} {entry.shape} instead of {wanted[key]}{_hint(key, wanted[key], entry)}"
            for key, entry in found
            if entry.shape != wanted[key]
        ],
        "not a floating-point type": [
            f"{entry.name} {entry.dtype}" for _, entry in found if entry.dtype not in DTYPES
        ],
    }
    text = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items() if names)
    if text:
        raise CheckpointError(f"{folder} does not fit its config.json: {text}.")


def _hint(key: str, wanted: tuple[int, ...], found: Entry) -> str:
    if ".c_" in key and found.shape == wanted[::-1]:
        return " (stored [out, in]: transpose c_attn, c_fc and both c_proj of every block)"
    keys = next((keys for suffix, keys in SHAPE_KEYS.items() if key.endswith(suffix)), "n_embd")
    return f" (config: {keys})"


def _check_copies(chosen: dict[str, Entry], copies: list[tuple[str, Entry]], folder: Path) -> None:
    for key, copy in copies:
        first, second = chosen[key].read(), copy.read()
        if not torch.equal(first, second.to(first.dtype)):
            text = f"{folder}: {chosen[key].name} and {copy.name} are one tensor, but differ"
            if copy.name.endswith("lm_head.weight"):
                text += "; to use both, set tie_word_embeddings to false in config.json"
            raise CheckpointError(f"{text}.")


def _nonfinite(state: Mapping[str, Tensor]) -> set[str]:
    return {key for key, tensor in state.items() if _has_nonfinite(tensor)}


def _report_nonfinite(
    bad: set[str], model: GPT2, chosen: dict[str, Entry], folder: Path, allowed: bool
) -> None:
    state = model.state_dict()
    text = f"{folder}: NaN or infinity in {listed(bad)}"
    if any(state[key].dtype == torch.float16 != DTYPES[chosen[key].dtype] for key in bad):
        text += ", where float16 ends at 65,504; try bfloat16 or float32"
    if not allowed:
        raise CheckpointError(
            f"{text}; allow_nonfinite=True (--allow-nonfinite, where a command has it) only warns."
        )
    warnings.warn(f"{text}.", stacklevel=3)


def _has_nonfinite(tensor: Tensor) -> bool:
    # A sum needs no memory and a tenth of isfinite's time; but a finite one may overflow.
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return not bool(total.isfinite()) and not bool(tensor.isfinite().all())


def _what_is_there(folder: Path) -> str:
    """What else the folder offers, with the remedy, to end an error message."""
    found = [
        kind
        for kind, patterns in OTHER_FORMATS.items()
        if any(any(folder.glob(pattern)) for pattern in patterns)
    ]
    if not found:
        return f"; it needs {CONFIG} and {WEIGHTS}" if any(folder.iterdir()) else ": it is empty"
    if any(folder.glob("adapter_*")):
        return (
            ", but an adapter (LoRA), which is no model by itself; merge it into the model that it "
            "was made for (merge_and_unload) and save that"
        )
    text = f", but {' and '.join(found)} files; get the model in safetensors format"
    if found == ["differently named safetensors"]:
        text += (
            f" under that name, not {listed(path.name for path in folder.glob('*.safetensors'))}"
        )
    if (folder / "encoder.json").is_file():
        text += " (encoder.json and vocab.bpe are vocab.json and merges.txt under older names)"
    return text
