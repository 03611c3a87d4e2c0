"""Checkpoint folders: what loads, to which numbers, and what is refused with which sentence.

The oracle is transformers on the same folder; where the same kernels run, the logits are equal.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import stat
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

import gpt2attn.checkpoint
from gpt2attn.checkpoint import CheckpointError, load_model, open_tensors, save_model, weight_files
from gpt2attn.config import ACTIVATIONS, ConfigError, GPT2Config
from gpt2attn.kernels import KERNELS
from gpt2attn.model import GPT2
from gpt2attn.tokenizer import Tokenizer
from gpt2attn.untrusted import JSON_LIMIT, check_header, listed

IDS = torch.tensor([[5, 60, 3, 66, 0, 17, 17, 2], [1, 1, 40, 9, 33, 8, 64, 21]])
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _no_surprise() -> Iterator[None]:
    """A warning that a test does not ask for fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # torch, of a hostile file
        yield


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def logits(folder: Path, **options: Any) -> Tensor:
    return load_model(folder, kernels="torch", **options)(IDS)


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def weights(folder: Path) -> Tensors:
    return {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}


def put_weights(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})


def put_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def renamed(tensors: Tensors, new_name: Callable[[str], str]) -> Tensors:
    return {new_name(key): tensor for key, tensor in tensors.items()}


def unprefixed(key: str) -> str:
    return key.removeprefix("transformer.")


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file as its format says, whatever nonsense the header holds."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# Loading: the numbers.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_d37_logits_equal_transformers(tmp_path: Path, stored: torch.dtype, tied: bool) -> None:
    write_checkpoint(tmp_path, {"tie_word_embeddings": tied}, dtype=stored)
    assert torch.equal(logits(tmp_path), oracle(tmp_path))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(logits(tmp_path, dtype=dtype), oracle(tmp_path, dtype)), dtype


def test_d37_config_never_lowers_the_precision(folder: Path) -> None:
    expected = logits(folder)
    for key in ("dtype", "torch_dtype"):
        put_config(folder, **{key: "float16"})
        assert load_model(folder).dtype == torch.float32
        assert torch.equal(logits(folder), expected)


def test_d37_mixed_and_double_files(folder: Path) -> None:
    expected, tensors = logits(folder), weights(folder)
    put_weights(folder, {key: tensor.double() for key, tensor in tensors.items()})
    assert torch.equal(logits(folder), expected)
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].half()
    put_weights(folder, tensors)
    assert torch.equal(logits(folder), oracle(folder))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_d37_weights_that_are_no_plain_floats(folder: Path, dtype: torch.dtype) -> None:
    tensors = weights(folder)
    tensors["transformer.h.1.mlp.c_fc.weight"] = tensors["transformer.h.1.mlp.c_fc.weight"].to(
        dtype
    )
    put_weights(folder, tensors)
    with pytest.raises(
        CheckpointError, match=r"not a floating-point type: transformer.h.1.mlp.c_fc"
    ):
        load_model(folder)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_d20_each_activation_is_transformers_own(folder: Path, name: str) -> None:
    gelu_new = logits(folder)
    put_config(folder, activation_function=name)
    ours = logits(folder)
    assert torch.equal(ours, oracle(folder))
    # The GELUs by tanh are one function, rounded differently; every other one is far from them.
    same = name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    assert ((ours - gelu_new).abs().max() < 1e-4) == same


def test_loaded_model_is_for_inference(tiny_folder: Path) -> None:
    model = load_model(tiny_folder)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_two_loads_share_nothing_that_can_change(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    first, second = (load_model(folder, kernels="torch") for _ in range(2))
    expected = second(IDS)
    for parameter in first.parameters():
        parameter.zero_()
    assert torch.equal(second(IDS), expected)
    assert torch.equal(logits(folder), expected)
    assert (folder / "model.safetensors").read_bytes() == before


def test_d10_dropout_has_no_effect(folder: Path) -> None:
    expected = logits(folder)
    put_config(folder, attn_pdrop=0.9, embd_pdrop=0.9, resid_pdrop=0.9)
    model = load_model(folder, kernels="torch")
    assert torch.equal(model(IDS), expected)
    assert torch.equal(model.train()(IDS), expected)


@pytest.mark.parametrize("value", [-1e4, -1e10, float("-inf"), float("nan")])
def test_d12_masked_bias_has_no_influence(folder: Path, value: float) -> None:
    expected, tensors = logits(folder), weights(folder)
    for layer in range(3):
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(value)
    put_weights(folder, tensors)
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.ones(1, 1, 16, 16).tril().to(torch.uint8),
        torch.ones(1, 1, 16, 16).tril().bool(),
        torch.ones(1, 1, 16, 16).tril(),
        torch.ones(1, 1, 4, 4).half(),  # smaller than the context
    ],
)
def test_d25_prefix_and_buffers(folder: Path, prefix: str, mask: Tensor | None) -> None:
    expected = logits(folder)
    tensors = renamed(weights(folder), lambda key: prefix + unprefixed(key))
    if mask is not None:
        tensors |= {f"{prefix}h.{layer}.attn.bias": mask.clone() for layer in range(3)}
        tensors |= {f"{prefix}h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(3)}
    put_weights(folder, tensors)
    assert torch.equal(logits(folder), expected)


def test_d25_some_keys_prefixed_and_some_not(folder: Path) -> None:
    expected, tensors = logits(folder), weights(folder)
    mixed = renamed(tensors, lambda key: unprefixed(key) if ".h.1." in key else key)
    assert 0 < len(mixed.keys() & tensors.keys()) < len(tensors)
    put_weights(folder, mixed)
    assert torch.equal(logits(folder), expected)


def test_d25_only_the_buffers_are_skipped(folder: Path) -> None:
    put_weights(folder, {**weights(folder), "h.0.attn.bias_2": torch.ones(1, 1, 16, 16)})
    with pytest.raises(CheckpointError, match=r"unexpected: h.0.attn.bias_2"):
        load_model(folder)


def test_d25_both_spellings_of_one_tensor(folder: Path) -> None:
    expected, tensors = logits(folder), weights(folder)
    twice = {**tensors, **renamed(tensors, unprefixed)}
    put_weights(folder, {key: tensor.clone() for key, tensor in twice.items()})
    assert torch.equal(logits(folder), expected)
    twice["h.1.attn.c_attn.bias"] = twice["h.1.attn.c_attn.bias"] + 1
    put_weights(folder, {key: tensor.clone() for key, tensor in twice.items()})
    with pytest.raises(CheckpointError, match=r"h.1.attn.c_attn.bias are one tensor, but differ\."):
        load_model(folder)
    twice["h.1.attn.c_attn.bias"] = torch.zeros(5)
    put_weights(folder, {key: tensor.clone() for key, tensor in twice.items()})
    with pytest.raises(CheckpointError, match=r"wrong shape: h.1.attn.c_attn.bias \(5,\) instead"):
        load_model(folder)


def test_d26_head_absent_or_duplicated(folder: Path) -> None:
    expected, tensors = logits(folder), weights(folder)
    assert "lm_head.weight" not in tensors
    for dtype in (torch.float32, torch.float64):
        head = tensors["transformer.wte.weight"].to(dtype, copy=True)
        put_weights(folder, {**tensors, "lm_head.weight": head})
        assert torch.equal(logits(folder), expected)
        assert "lm_head.weight" not in load_model(folder).state_dict()
    put_weights(folder, {**tensors, "lm_head.weight": head + 1})
    with pytest.raises(CheckpointError, match=r"differ; to use both, set tie_word_embeddings to f"):
        load_model(folder)
    put_weights(folder, {**tensors, "lm_head.weight": head[:66]})
    with pytest.raises(CheckpointError, match=r"wrong shape: lm_head.weight \(66, 32\) instead of"):
        load_model(folder)


def test_d28_untied_head(folder: Path) -> None:
    tied, tensors = logits(folder), weights(folder)
    put_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight \(config: tie_word_emb"):
        load_model(folder)
    put_weights(folder, {**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 0.5})
    assert torch.equal(logits(folder), oracle(folder))
    assert (logits(folder) - tied).abs().max() > 0.1


def test_d29_orientation(folder: Path) -> None:
    expected, tensors = logits(folder), weights(folder)
    matrices = [key for key in tensors if ".c_" in key and key.endswith("weight")]
    assert len(matrices) == 12

    def transposed(keys: list[str]) -> Tensors:
        return {**tensors, **{key: tensors[key].t() for key in keys}}

    # Square: no shape can tell, so it is taken as it stands.
    put_weights(folder, transposed([key for key in matrices if key.endswith("attn.c_proj.weight")]))
    assert (logits(folder) - expected).abs().max() > 1
    put_weights(folder, transposed(matrices))
    with pytest.raises(CheckpointError, match=r"stored \[out, in\]: transpose c_attn, c_fc and b"):
        load_model(folder)


def test_d29_orientation_where_every_mlp_matrix_is_square(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"n_inner": TINY["n_embd"]})
    tensors = weights(tmp_path)
    assert torch.equal(logits(tmp_path), oracle(tmp_path))
    put_weights(
        tmp_path, {k: t.t() if ".c_" in k and t.dim() == 2 else t for k, t in tensors.items()}
    )
    with pytest.raises(CheckpointError, match=r"h.0.attn.c_attn.weight \(96, 32\) .* transpose"):
        load_model(tmp_path)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_d30_wrappers_around_all_keys(folder: Path, wrapper: str) -> None:
    expected, tensors = logits(folder), weights(folder)
    put_weights(folder, renamed(tensors, lambda key: wrapper + key))
    assert torch.equal(logits(folder), expected)
    put_weights(folder, renamed(tensors, lambda key: wrapper + unprefixed(key)))
    assert torch.equal(logits(folder), expected)


def test_d30_wrappers_that_are_unknown_or_partial(folder: Path) -> None:
    tensors = weights(folder)
    put_weights(folder, renamed(tensors, lambda key: f"backbone.{key}"))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert "missing: h.0.attn.c_attn.bias, h.0.attn.c_attn.weight, " in str(caught.value)
    assert " and 32 more; unexpected: backbone.transformer.h.0.attn.c_attn.bias" in str(
        caught.value
    )
    put_weights(folder, renamed(tensors, lambda key: f"module.{key}" if "ln_f" in key else key))
    with pytest.raises(
        CheckpointError, match=r"missing: ln_f.bias, ln_f.weight; unexpected: modul"
    ):
        load_model(folder)


def test_d31_other_heads(folder: Path) -> None:
    expected, tensors = logits(folder), weights(folder)
    heads = (
        "score.weight",
        "classifier.weight",
        "classifier.bias",
        "multiple_choice_head.summary.weight",
        "multiple_choice_head.summary.bias",
        "v_head.summary.weight",
        "qa_outputs.weight",
    )
    put_weights(folder, {**tensors, **{key: torch.ones(2, 32) for key in heads}})
    put_config(folder, architectures=["GPT2ForSequenceClassification"])
    with pytest.warns(UserWarning, match=f"other heads are not used: {listed(heads)}") as caught:
        assert torch.equal(logits(folder), expected)
    assert len(caught) == 1
    put_weights(folder, {**tensors, "reward.weight": torch.ones(2, 32)})
    with pytest.raises(CheckpointError, match=r"unexpected: reward.weight"):
        load_model(folder)


# Loading: configs that contradict the weights.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 66, "eos_token_id": 0},
            r"wte.weight \(67, 32\) instead of \(66, 32\) \(config: vocab_size, n",
        ),
        ({"n_positions": 32}, r"wpe.weight \(16, 32\) instead of \(32, 32\) \(config: n_positions"),
        ({"n_ctx": 8, "n_positions": 17}, r"wpe.weight \(16, 32\) instead of \(17, 32\)"),
        (
            {"n_inner": 64},
            r"mlp.c_fc.weight \(32, 128\) instead of \(32, 64\) \(config: n_embd, n_in",
        ),
        ({"n_embd": 64}, r"ln_1.bias \(32,\) instead of \(64,\) \(config: n_embd\)"),
        ({"n_layer": 2}, r"unexpected: h.2.attn.c_attn.bias.* n_layer is 2, .* of blocks is: 3"),
        ({"n_layer": 4}, r"missing: h.3.attn.c_attn.bias.* n_layer is 4, .* of blocks is: 3"),
        ({"n_layer": 1000}, r"n_layer is 1000, but the number of blocks is: 3"),
        ({"vocab_size": 2**24, "n_embd": 2**24}, r"ln_1.bias \(32,\) instead of \(16777216,\)"),
    ],
)
def test_d21_sizes_that_contradict_the_tensors(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    put_config(folder, **changes)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)
    assert time.process_time() - start < 5


def test_d24_added_vocabulary_rows(folder: Path) -> None:
    tensors = weights(folder)
    tensors["transformer.wte.weight"] = torch.cat(
        [tensors["transformer.wte.weight"], torch.ones(1, 32)]
    )
    put_weights(folder, tensors)
    with pytest.raises(
        CheckpointError, match=r"wte.weight \(68, 32\) instead of \(67, 32\) .*vocab"
    ):
        load_model(folder)
    put_config(folder, vocab_size=68)
    assert torch.equal(logits(folder), oracle(folder))


def test_d22_cross_attention_tensors(folder: Path) -> None:
    extra = {"transformer.h.0.crossattention.q_attn.weight": torch.ones(32, 32)}
    put_weights(folder, {**weights(folder), **extra})
    with pytest.raises(
        CheckpointError, match=r"cross-attention, which .*: h.0.crossattention.q_attn"
    ):
        load_model(folder)


def test_everything_wrong_is_in_one_message(folder: Path) -> None:
    tensors = weights(folder)
    del tensors["transformer.h.2.ln_1.weight"], tensors["transformer.ln_f.bias"]
    tensors["transformer.h.0.attn.rotary"] = torch.ones(1)
    tensors["transformer.wpe.weight"] = torch.ones(15, 32)
    tensors["transformer.h.1.ln_2.bias"] = torch.ones(32, dtype=torch.int32)
    put_weights(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert str(caught.value) == (
        f"{folder} does not fit its config.json: missing: h.2.ln_1.weight, ln_f.bias; "
        "unexpected: h.0.attn.rotary; wrong shape: transformer.wpe.weight (15, 32) instead of "
        "(16, 32) (config: n_positions, n_embd); not a floating-point type: "
        "transformer.h.1.ln_2.bias I32."
    )


def test_a_file_without_tensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors_bytes({}))
    with pytest.raises(CheckpointError, match=r"missing: h.0.attn.c_attn.bias, .* and 32 more"):
        load_model(folder)


def test_names_of_strangers_are_safe_to_print(folder: Path) -> None:
    put_weights(
        folder, {**weights(folder), "\x1b[2Jboo\n": torch.ones(1), "x" * 9999: torch.ones(1)}
    )
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_listed_counts_like_people_do() -> None:
    assert listed(["h.10", "h.9", "h.1", "h.²", "h"]) == "h, h.1, h.9, h.10, h.²"
    assert listed(range(20), limit=3) == "0, 1, 2 and 17 more"


# Loading: numbers that are none.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_without_a_value_are_refused_by_name(folder: Path, value: float) -> None:
    tensors = weights(folder)
    tensors["transformer.h.1.mlp.c_proj.weight"][100, 31] = value
    put_weights(folder, tensors)
    with pytest.raises(CheckpointError, match=r"NaN or infinity in h.1.mlp.c_proj.weight; allow"):
        load_model(folder)
    with pytest.warns(UserWarning, match=r"NaN or infinity in h.1.mlp.c_proj.weight\."):
        model = load_model(folder, allow_nonfinite=True)
    assert not model.h[1].mlp.c_proj.weight[100, 31].isfinite()


@pytest.mark.parametrize("kernels", KERNELS)
def test_large_finite_weights_are_no_infinities(folder: Path, kernels: str) -> None:
    tensors = weights(folder)
    tensors["transformer.h.1.mlp.c_proj.weight"][:, :] = 3e38  # their sum overflows
    put_weights(folder, tensors)
    load_model(folder, kernels=kernels)
    with pytest.raises(CheckpointError, match=r"float16 ends at 65,504; try bfloat16 or float32"):
        load_model(folder, dtype=torch.float16, kernels=kernels)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_dtypes_that_do_not_compute(tiny_folder: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="dtype must be float32, float64, float16 or bfloat16"):
        load_model(tiny_folder, dtype=dtype, kernels="torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_device_that_is_not_there(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="device cuda was asked for, but torch finds no CUDA here"):
        load_model(tiny_folder, device="cuda")


def test_what_is_no_device_and_no_dtype(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="device must be one of torch's, such as cpu, not 'gpu'"):
        load_model(tiny_folder, device="gpu")
    with pytest.raises(ValueError, match=r"torch.float32 \.\.\.\), not 'float16'"):
        load_model(tiny_folder, dtype="float16")


# Files and folders.


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "no config.json: it is empty"),
        (("vocab.json",), "no config.json; it needs config.json and model.safetensors"),
        (
            ("model.ckpt.index", "model.ckpt.meta", "hparams.json", "encoder.json", "vocab.bpe"),
            r"no config.json, but TensorFlow files; .* \(encoder.json and vocab.bpe are vocab.json",
        ),
        (("config.json", "tf_model.h5"), "no model.safetensors, but TensorFlow files; get the"),
        (("config.json", "flax_model.msgpack"), "no model.safetensors, but Flax files"),
        (("config.json", "q4.gguf"), "no model.safetensors, but GGUF files"),
        (("config.json", "onnx/decoder.onnx"), "no model.safetensors, but ONNX files"),
        (("config.json", "model.pt"), "no model.safetensors, but PyTorch pickle files"),
        (("config.json", "adapter.safetensors"), "but differently named safetensors files"),
        (("config.json", "model.fp16.safetensors"), r"under that name, not model.fp16.safetensors"),
        (
            ("adapter_config.json", "adapter_model.safetensors"),
            r"but an adapter \(LoRA\).*merge it",
        ),
        (("config.json",), "no model.safetensors; it needs config.json and model.safetensors"),
    ],
)
def test_d32_folders_with_something_else(
    tmp_path: Path, files: tuple[str, ...], message: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_d32_a_file_instead_of_a_folder(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match="give the folder that holds it"):
        load_model(tiny_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="give the folder that holds it"):
        gpt2attn.checkpoint.read_config(tiny_folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        gpt2attn.checkpoint.read_config(tiny_folder / "nowhere")


def put_shards(folder: Path, tensors: Tensors, weight_map: dict[str, Any] | None = None) -> None:
    """The tensors alternately in two shards, with their index or a hostile one."""
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, name in enumerate(names):
        put_weights(folder, {key: tensors[key] for key in list(tensors)[number::2]}, name)
    real = {key: names[number % 2] for number, key in enumerate(tensors)}
    index = {
        "metadata": {"total_size": 1},
        "weight_map": real if weight_map is None else weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink(missing_ok=True)


def test_sharded(folder: Path) -> None:
    expected, tensors = logits(folder), weights(folder)
    put_shards(folder, tensors)
    assert len(weight_files(folder)) == 2
    assert torch.equal(logits(folder), expected)
    assert torch.equal(logits(folder), oracle(folder))
    last = folder / "model-00002-of-00002.safetensors"
    put_weights(folder, tensors, last.name)
    with pytest.raises(CheckpointError, match=r"repeats .* from another shard"):
        load_model(folder)
    last.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shards {last.name}"):
        load_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "{}/other.safetensors",
        "sub/../../other.safetensors",
        "..\\other.safetensors",
        "C:other.safetensors",
        "",
        7,
        None,
        "other.bin",
        "\0.safetensors",
    ],
)
def test_d33_shards_that_leave_the_folder(folder: Path, name: Any) -> None:
    outside = folder.parent / "other.safetensors"
    os.mkfifo(outside)  # whoever opens it waits for ever
    if isinstance(name, str):
        name = name.format(folder.parent)
    tensors = weights(folder)
    put_shards(folder, tensors, dict.fromkeys(tensors, name))
    with pytest.raises(ValueError, match=r"not the plain name of a .safetensors file") as caught:
        load_model(folder)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"weight_map": 3}', b"[" * 100_000, b"\xff"])
def test_d33_an_index_that_is_none(folder: Path, raw: bytes) -> None:
    put_shards(folder, weights(folder))
    (folder / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(ValueError, match=r"index.json( is empty|: the file | is not an index)"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="names no shards"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_d33_links_that_leave_the_folder(folder: Path, name: str) -> None:
    expected = logits(folder)
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(Path("..") / name)
    with pytest.raises(CheckpointError, match=f"{name} is a link to .* outside the model's folder"):
        load_model(folder)
    (folder / name).unlink()
    (folder.parent / name).rename(folder / "within")
    (folder / name).symlink_to("within")
    (folder.parent / "link").symlink_to(folder)
    assert torch.equal(logits(folder.parent / "link"), expected)


def test_d33_shards_and_pickles_that_are_links(folder: Path) -> None:
    tensors = weights(folder)
    put_shards(folder, tensors)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to("../elsewhere")
    with pytest.raises(
        CheckpointError, match=f"{shard} is a link to .* outside the model's folder"
    ):
        load_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").symlink_to("../elsewhere")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a link to .* outside"):
        load_model(folder, allow_pickle=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_d33_the_links_of_the_hub_cache(folder: Path, sharded: bool) -> None:
    expected = logits(folder)
    if sharded:
        put_shards(folder, weights(folder))
    repository = folder.parent / "models--owner--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(repository / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert torch.equal(logits(snapshot), expected)


def test_d38_one_set_of_weights_is_chosen(folder: Path) -> None:
    tensors = weights(folder)
    others = {key: tensor + 1 for key, tensor in tensors.items()}
    put_shards(folder, others)
    from_shards = logits(folder)
    torch.save({key: tensor + 2 for key, tensor in tensors.items()}, folder / "pytorch_model.bin")
    put_weights(folder, others, "adapter.safetensors")
    assert torch.equal(logits(folder, allow_pickle=True), from_shards)
    put_weights(folder, tensors)
    assert weight_files(folder, allow_pickle=True) == [folder / "model.safetensors"]
    assert torch.equal(logits(folder, allow_pickle=True), oracle(folder))
    assert not torch.equal(logits(folder), from_shards)


PLACEHOLDERS = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
    (b"<!DOCTYPE html>\n<html><body>404</body></html>", "HTML page"),
    (b"\n\n<html></html>", "HTML page"),
    (b"", "is empty"),
]


@pytest.mark.parametrize(
    ("content", "message"), [*PLACEHOLDERS, (b"\x10\0\0\0\0\0\0", "cut short within its header")]
)
def test_d34_placeholders_for_safetensors(folder: Path, content: bytes, message: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert str(path) in str(caught.value)
    path.unlink()
    put_shards(folder, {"a": torch.ones(3), "b": torch.ones(3)})
    (folder / "model-00002-of-00002.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize(("content", "message"), [*PLACEHOLDERS, (b"\x80\x04]q\0.", "damaged or")])
def test_d34_placeholders_for_a_pickle(folder: Path, content: bytes, message: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, allow_pickle=True)


def test_d34_cut_short_at_any_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 4, len(whole) // 2, 1000, 100, 9, 8):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"is cut short.* download it again") as caught:
            load_model(folder)
        assert f"{size:,}" in str(caught.value)


def test_unreadable_files_are_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(gpt2attn.checkpoint, "check_header", denied)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors cannot be read: Permission denied"
    ):
        load_model(folder)


GOOD = entry([4], [0, 16])
MALFORMED = {
    "length 2^64 - 1": safetensors_bytes(b"{}", length=2**64 - 1),
    "length past the end": safetensors_bytes({"a": GOOD}, bytes(16), length=5000),
    "length 0": safetensors_bytes(b"", bytes(16)),
    "header over the limit": safetensors_bytes(b" " * JSON_LIMIT + b"{}"),
    "list": safetensors_bytes([1]),
    "not UTF-8": safetensors_bytes(b'{"\xff\xfe": 1}'),
    "no JSON": safetensors_bytes(b"{'a'}"),
    "cut short": safetensors_bytes({"a": GOOD}, bytes(8)),
    "trailing byte": safetensors_bytes({"a": GOOD}, bytes(17)),
    "hole": safetensors_bytes({"a": entry([2], [0, 8]), "b": entry([1], [12, 16])}, bytes(16)),
    "first offset": safetensors_bytes({"a": entry([2], [8, 16])}, bytes(16)),
    "reversed": safetensors_bytes({"a": entry([2], [16, 8])}, bytes(16)),
    "negative": safetensors_bytes({"a": entry([4], [-16, 0])}, bytes(16)),
    "offset of 20 digits": safetensors_bytes({"a": entry([4], [0, 10**19])}, bytes(16)),
    "offset of 400 digits": safetensors_bytes({"a": entry([4], [0, 10**400])}, bytes(16)),
    "offsets missing": safetensors_bytes({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)),
    "one offset": safetensors_bytes({"a": entry([4], [16])}, bytes(16)),
    "offsets of text": safetensors_bytes({"a": entry([4], ["0", "16"])}, bytes(16)),
    "shape against bytes": safetensors_bytes({"a": entry([3], [0, 16])}, bytes(16)),
    "shape that overflows": safetensors_bytes({"a": entry([2**62, 4], [0, 16])}, bytes(16)),
    "shape that overflows to 0": safetensors_bytes({"a": entry([2**62, 4], [0, 0])}),
    "fractional shape": safetensors_bytes({"a": entry([4.0], [0, 16])}, bytes(16)),
    "negative shape": safetensors_bytes({"a": entry([-4], [0, 16])}, bytes(16)),
    "NaN": safetensors_bytes({"a": entry([float("nan")], [0, 16])}, bytes(16)),
    "unknown type": safetensors_bytes({"a": entry([4], [0, 16], "Q9")}, bytes(16)),
    "NUL padding": safetensors_bytes(json.dumps({"a": GOOD}).encode() + b"\0\0", bytes(16)),
    "metadata of numbers": safetensors_bytes({"__metadata__": {"a": 1}, "a": GOOD}, bytes(16)),
    "metadata list": safetensors_bytes({"__metadata__": [1], "a": GOOD}, bytes(16)),
    "one name twice": safetensors_bytes(
        b'{"a": %b, "a": %b}' % ((json.dumps(GOOD).encode(),) * 2), bytes(16)
    ),
    "one name twice, escaped": safetensors_bytes(
        b'{"a": %b, "\\u0061": %b}' % ((json.dumps(GOOD).encode(),) * 2), bytes(16)
    ),
    "two names, one place": safetensors_bytes({"a": GOOD, "b": GOOD}, bytes(16)),
    "overlap": safetensors_bytes({"a": entry([3], [0, 12]), "b": entry([2], [8, 16])}, bytes(16)),
    "lone surrogate": safetensors_bytes(b'{"\\ud800": %b}' % json.dumps(GOOD).encode(), bytes(16)),
    "deep": safetensors_bytes(b'{"a":' * 200_000),
    "deep lists": safetensors_bytes(b"[" * 900_000 + b"]" * 90_000),
    "wide": safetensors_bytes(b"[" + b"{}," * 330_000 + b"{}]"),
    "many names": safetensors_bytes(
        b"{" + b",".join(b'"%d":{}' % number for number in range(80_000)) + b"}"
    ),
    "zip": b"PK\x03\x04" + bytes(60),
    "old pickle": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(60),
    "new pickle": b"\x80\x04\x95" + bytes(3) + b"\x01\x02" + bytes(60),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_d35_malformed_safetensors(folder: Path, case: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(MALFORMED[case])
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert time.process_time() - start < 1
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_d35_refusing_takes_less_than_50_mb(folder: Path) -> None:
    for number, content in enumerate(MALFORMED.values()):
        (folder / f"{number}.case").write_bytes(content)
    program = """
import resource, shutil, sys
from pathlib import Path
from gpt2attn.checkpoint import CheckpointError, load_model
folder = Path(sys.argv[1])
load_model(folder, kernels="torch")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for case in sorted(folder.glob("*.case")):
    shutil.copyfile(case, folder / "model.safetensors")
    try:
        load_model(folder)
    except CheckpointError:
        continue
    sys.exit(f"{case} was loaded")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 50_000  # in units of 1,024 bytes


@pytest.mark.parametrize("form", ["spaces after", "spaces before", "reversed", "extra field"])
def test_d35_unusual_but_valid_safetensors(folder: Path, form: str) -> None:
    expected, path = logits(folder), folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if form == "reversed":
        header = dict(reversed(header.items()))
    if form == "extra field":
        header["transformer.wte.weight"]["note"] = "kept"
    text = json.dumps(header).encode()
    text = {"spaces after": text + b"   ", "spaces before": b" \n" + text}.get(form, text)
    path.write_bytes(safetensors_bytes(text, data))
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("length", [0x3C20, 0x203C, 0x3C0A, 0x3C3C])
def test_d35_a_header_whose_length_looks_like_a_page(folder: Path, length: int) -> None:
    """The bytes of the length spell ` <`, `< `, a newline and `<`, `<<`."""
    expected, path = logits(folder), folder / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(safetensors_bytes(raw[8:end].ljust(length), raw[end:]))
    assert torch.equal(logits(folder), expected)


def test_d35_claims_of_eight_gigabytes_take_no_memory(folder: Path) -> None:
    """Neither a header's claim nor a config's is believed before the file has the bytes."""
    claim = {"transformer.wte.weight": entry([2**26, 32], [0, 2**33])}
    put_config(folder, vocab_size=2**24, n_embd=2**12)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"does not fit its config.json"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(claim))
    with pytest.raises(CheckpointError, match=r"is cut short: .* of 8,589,9"):
        load_model(folder)
    # In units of 1,024 bytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_d35_any_damage_loads_or_is_one_sentence(
    tiny_folder: Path, tmp_path: Path, data: Any
) -> None:
    whole = bytearray((tiny_folder / "model.safetensors").read_bytes())
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header_end))
        whole[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    shutil.copyfile(tiny_folder / "config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(whole)
    try:
        model = load_model(tmp_path)
    except CheckpointError as error:
        model, sentence = None, str(error)
    assert sentence.isprintable() if model is None else model(IDS).isfinite().all()


class _Bomb:
    """Unpickled, it writes the file it names."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_d36_no_pickle_runs_code(folder: Path, name: str, zipped: bool) -> None:
    marker, tensors = folder.parent / "marker", weights(folder)
    (folder / "model.safetensors").unlink()
    bomb = {**tensors, "bomb": _Bomb(marker)}
    torch.save(bomb, folder / name, _use_new_zipfile_serialization=zipped)
    for allow_pickle in (False, True):
        with pytest.raises(CheckpointError):
            load_model(folder, allow_pickle=allow_pickle)
    (folder / name).write_bytes(pickle.dumps(bomb))
    with pytest.raises(CheckpointError):
        load_model(folder, allow_pickle=True)
    assert not marker.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_d36_plain_tensors_on_request(folder: Path, zipped: bool) -> None:
    expected, tensors = logits(folder), weights(folder)
    (folder / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]  # one storage, as in old files
    key = "transformer.h.0.attn.c_proj.weight"
    tensors[key] = tensors[key].t().contiguous().t()  # not contiguous
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"a pickle, which could run code; convert it to saf"):
        load_model(folder)
    assert torch.equal(logits(folder, allow_pickle=True), expected)
    model = load_model(folder, allow_pickle=True)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    for wrong in ({"model": tensors, "optimizer": {}}, list(tensors.values()), {3: torch.ones(1)}):
        torch.save(wrong, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(
            CheckpointError, match="no table of tensors; save the model's state_dict"
        ):
            load_model(folder, allow_pickle=True)
    torch.save({**tensors, key: tensors[key].to_sparse()}, path)
    with pytest.raises(CheckpointError, match=f"not a floating-point type: {key} torch.sparse_coo"):
        load_model(folder, allow_pickle=True)


def test_d36_a_sharded_pickle_is_not_followed(folder: Path) -> None:
    tensors = weights(folder)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(tensors, "../../secret.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for allow_pickle in (False, True):
        with pytest.raises(CheckpointError, match=r"no model.safetensors, but PyTorch pickle fil"):
            load_model(folder, allow_pickle=allow_pickle)


class _Asks:
    """Unpickled, it is as many bytes as the file says."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (2**33,)


@pytest.mark.parametrize("zipped", [True, False])
def test_d36_a_pickle_gets_no_memory_for_asking(folder: Path, zipped: bool) -> None:
    tensors, path = weights(folder), folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.save({**tensors, "ask": _Asks()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="damaged or holds more than plain tensors"):
        load_model(folder, allow_pickle=True)
    torch.save(tensors, folder / "stored", _use_new_zipfile_serialization=True)
    with ZipFile(folder / "stored") as stored, ZipFile(path, "w", ZIP_DEFLATED) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(CheckpointError, match="damaged or holds more than plain tensors"):
        load_model(folder, allow_pickle=True)  # what is packed may unpack to any size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


# Memory.


@pytest.mark.slow
def test_a_full_size_file_is_mapped_not_copied(tmp_path: Path) -> None:
    config = GPT2Config()
    with torch.device("meta"):
        shapes = {key: list(tensor.shape) for key, tensor in GPT2(config).state_dict().items()}
    header, end = {}, 0
    for key, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        header[key], end = entry(shape, [end, end + size]), end + size
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(header))
    os.truncate(path, path.stat().st_size + end)  # a hole, which reads as zeros
    (tmp_path / "config.json").write_text("{}")
    program = """
import resource, sys
if sys.argv[1] == "bare":
    import torch
else:
    from gpt2attn import load_model
    model = load_model(sys.argv[1], kernels="torch")  # numba has memory of its own
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    bare, loaded = (
        int(
            subprocess.run(
                [sys.executable, "-c", program, argument], capture_output=True, check=True
            ).stdout
        )
        for argument in ("bare", tmp_path)
    )
    size = path.stat().st_size
    assert size > 497_000_000
    assert loaded - bare < 1.3 * size + 250e6
    assert loaded - bare < 1.1 * size + 60e6  # what it takes: the map, and our modules


# Saving.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_d27_saving_round_trips(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    write_checkpoint(tmp_path / "first", {"tie_word_embeddings": tied, "n_inner": 37})
    model = load_model(tmp_path / "first", dtype=dtype, kernels="torch")
    save_model(model, tmp_path / "deep" / "second")
    again = load_model(tmp_path / "deep" / "second", dtype=dtype, kernels="torch")
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert torch.equal(oracle(tmp_path / "deep" / "second", dtype), model(IDS))
    saved = load_file(tmp_path / "deep" / "second" / "model.safetensors")
    assert saved.keys() == weights(tmp_path / "first").keys()
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    reference = GPT2LMHeadModel.from_pretrained(tmp_path / "deep" / "second")
    assert reference.dtype == dtype  # config.json says so


def test_one_tensor_under_two_names_is_saved_under_both(tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, {"tie_word_embeddings": False}))
    model.lm_head.weight, model.h[1].ln_1.bias = model.wte.weight, model.h[0].ln_1.bias
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path)(IDS), model(IDS))
    torch.testing.assert_close(oracle(tmp_path), model(IDS), rtol=0, atol=1e-4)


def test_saving_and_loading_read_a_name_alike(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_model(load_model(folder), "~/saved")
    Tokenizer.gpt2().save("~/saved")
    assert (tmp_path / "saved" / "vocab.json").is_file()
    assert torch.equal(logits("~/saved"), logits(folder))


def test_saving_over_the_folder_it_was_loaded_from(folder: Path) -> None:
    model = load_model(folder, kernels="torch")
    expected = model(IDS)
    for _ in range(2):
        save_model(model, folder)
        assert torch.equal(model(IDS), expected)
        assert torch.equal(logits(folder), expected)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["config.json", "generation_config.json", "model.safetensors"]
    )


def test_saved_files_have_the_users_permissions(folder: Path) -> None:
    model, before = load_model(folder), os.umask(0o027)
    try:
        save_model(model, folder)
    finally:
        os.umask(before)
    for name in ("config.json", "model.safetensors"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o640


def test_a_full_disk_leaves_the_old_files(folder: Path) -> None:
    model, before = load_model(folder), {path: path.read_bytes() for path in folder.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=f"cannot save the model in {folder}: File too large"):
            save_model(model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    model = load_model(folder)
    with pytest.raises(
        OSError, match=r"cannot save the model in .*config.json/x: Not a directory\."
    ):
        save_model(model, folder / "config.json" / "x")
    with pytest.raises(OSError, match=r"cannot save the model in /proc/nowhere: No such file or d"):
        save_model(model, "/proc/nowhere")  # read-only even for root


def test_open_tensors_reads_headers_only(folder: Path) -> None:
    with open_tensors(folder) as entries:
        wte = entries["transformer.wte.weight"]
        assert (wte.shape, wte.dtype) == ((67, 32), "F32")
        assert torch.equal(wte.read(), weights(folder)["transformer.wte.weight"])


def test_config_errors_name_the_file(folder: Path) -> None:
    put_config(folder, n_head=5)
    with pytest.raises(ConfigError, match=r"config.json: n_embd 32 is not divisible by n_head 5"):
        load_model(folder)


def test_check_header_accepts_what_it_need_not_judge(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": {"data_offsets": "?"}, "b": 3}))
    check_header(path)
