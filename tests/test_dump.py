"""Every file format gives back an equal object, and none is ever half written."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open

from gpt2attn import AttentionMaps, attention_maps, load_model
from gpt2attn.dump import SUFFIXES, dump_attention, dump_bytes
from gpt2attn.generation import left_padded

HOSTILE = [
    "\n",
    '"',
    "</script>",
    "<0xF0>",
    "\ufffd",
    "\x00",
    "\u2028",
    "a,b",
    "'",
    "\r\n",
    "é",
    "␣",
]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder, kernels="torch")


@pytest.fixture(params=SUFFIXES)
def path(request, tmp_path):
    return tmp_path / f"maps{request.param}"


def hostile_maps(model, **options):
    ids = list(range(len(HOSTILE)))
    return attention_maps(model, ids, labels=[HOSTILE], metadata={"model": 'x\n"y'}, **options)


@pytest.mark.parametrize("stages", [["weights"], ["scores", "scaled", "masked", "weights"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_load_gives_back_an_equal_object(model, path, stages, dtype):
    maps = hostile_maps(model, stages=stages, dtype=dtype, layers=[2, 0], heads=[1])
    maps.save(path)
    loaded = AttentionMaps.load(path)
    assert loaded == maps
    assert loaded.labels == [HOSTILE]
    assert loaded.weights.dtype == dtype


def test_batches_of_unequal_texts_keep_their_padding(model, path):
    ids, mask = left_padded([[1, 2, 3, 4, 5], [6], [7, 8, 9]])
    maps = attention_maps(model, ids, attention_mask=mask, stages=["masked", "weights"])
    maps.save(path)
    assert AttentionMaps.load(path) == maps


def test_equality_sees_every_part(model):
    maps = attention_maps(model, [1, 2, 3])
    assert maps == attention_maps(model, [1, 2, 3])
    for other in (
        attention_maps(model, [1, 2, 4]),
        attention_maps(model, [1, 2, 3], labels=[["a", "b", "c"]]),
        attention_maps(model, [1, 2, 3], metadata={"seed": 1}),
        attention_maps(model, [1, 2, 3], layers=[0]),
        attention_maps(model, [1, 2, 3], dtype=torch.float64),
    ):
        assert maps != other
    assert maps != "maps"


def test_metadata_says_where_the_numbers_come_from(model, path):
    attention_maps(model, [1, 2], metadata={"model": "tiny"}).save(path)
    metadata = AttentionMaps.load(path).metadata
    assert metadata.keys() >= {"model", "dtype", "device", "torch", "gpt2attn", "mask"}


class TestOtherReaders:
    def test_numpy_reads_npz_without_pickle(self, model, tmp_path):
        maps = hostile_maps(model)
        maps.save(tmp_path / "m.npz")
        with np.load(tmp_path / "m.npz", allow_pickle=False) as file:
            assert np.array_equal(file["weights"], maps.weights.numpy())
            assert json.loads(str(file["header"]))["labels"] == [HOSTILE]

    def test_json_has_no_nan_or_infinity_and_null_for_the_mask(self, model, tmp_path):
        maps = hostile_maps(model, stages=["masked"])
        maps.save(tmp_path / "m.json")
        text = (tmp_path / "m.json").read_text(encoding="utf-8")
        value = json.loads(text, parse_constant=pytest.fail)
        assert value["masked"][0][0][0][0][1] is None
        assert value["masked"][0][0][0][1][0] == pytest.approx(
            float(maps.stage("masked")[0, 0, 0, 1, 0])
        )
        assert "</script>" in value["labels"][0]

    def test_csv_has_one_line_a_number_and_a_json_comment(self, model, tmp_path):
        import csv

        maps = hostile_maps(model)
        maps.save(tmp_path / "m.csv")
        with (tmp_path / "m.csv").open(encoding="utf-8", newline="") as file:
            assert json.loads(file.readline().removeprefix("# "))["layers"] == [0, 1, 2]
            rows = list(csv.DictReader(file))
        assert len(rows) == 3 * 4 * len(HOSTILE) ** 2
        row = rows[len(HOSTILE) + 1]
        assert (row["query"], row["key"], row["query_label"], row["key_label"]) == (
            "1",
            "1",
            '"',
            '"',
        )
        assert float(row["weights"]) == pytest.approx(float(maps.weights[0, 0, 0, 1, 1]), rel=1e-8)


class TestRefusals:
    def test_an_unknown_suffix(self, model, tmp_path):
        with pytest.raises(ValueError, match=r"must end in one of \.safetensors"):
            attention_maps(model, [1]).save(tmp_path / "maps.png")

    def test_a_csv_or_json_that_is_too_large(self, model, tmp_path, monkeypatch):
        monkeypatch.setattr("gpt2attn.dump.MAX_CSV_ROWS", 107)
        monkeypatch.setattr("gpt2attn.dump.MAX_JSON_NUMBERS", 107)
        for suffix, what in ((".csv", "rows"), (".json", "numbers")):
            with pytest.raises(ValueError, match=f"108 {what} are too many .* choose .safetensors"):
                attention_maps(model, [1, 2, 3]).save(tmp_path / f"maps{suffix}")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "content", [b"", b"{}", b"# {}\n", b'# {"format": 1}\na,b\n', b"PK\x03\x04", b"null"]
    )
    def test_a_file_of_something_else(self, path, content):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a file of attention maps"):
            AttentionMaps.load(path)

    def test_a_file_that_is_not_there(self, path):
        with pytest.raises(FileNotFoundError):
            AttentionMaps.load(path)


class TestStreaming:
    @pytest.mark.parametrize("stages", [["weights"], ["masked", "weights"]])
    @pytest.mark.parametrize("heads", [None, [2, 1]])
    def test_equals_a_dump_from_memory(self, model, tmp_path, stages, heads):
        options = {
            "layers": [2, 0],
            "heads": heads,
            "stages": stages,
            "dtype": torch.float16,
            "metadata": {"model": "tiny"},
        }
        ids = [5, 6, 7, 8, 9]
        dump_attention(model, ids, tmp_path / "m.safetensors", **options)
        assert AttentionMaps.load(tmp_path / "m.safetensors") == attention_maps(
            model, ids, **options
        )

    def test_the_size_is_known_beforehand(self, model, tmp_path):
        assert dump_bytes(12, 12, 1024, 1, torch.float32) == 603_979_776
        path = tmp_path / "m.safetensors"
        dump_attention(model, [1, 2, 3], path)
        n_bytes = dump_bytes(3, 4, 3, 1, torch.float32)
        assert n_bytes < path.stat().st_size < n_bytes + 2000
        with safe_open(path, "np") as file:
            assert file.get_tensor("weights").nbytes == n_bytes

    @pytest.mark.parametrize("name", ["m", "mm"])
    def test_the_numbers_start_at_a_multiple_of_8(self, model, tmp_path, name):
        path = tmp_path / "m.safetensors"
        dump_attention(model, [1, 2, 3], path, metadata={"model": name})
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0

    def test_a_failure_leaves_nothing_behind(self, model, tmp_path):
        class FullError(Exception):
            pass

        def fail(*_, **__):
            raise FullError

        original = model.h[1].mlp.activation
        model.h[1].mlp.activation = fail
        try:
            with pytest.raises(FullError):
                dump_attention(model, [1, 2, 3], tmp_path / "m.safetensors")
        finally:
            model.h[1].mlp.activation = original
        assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_file_under_the_final_name(tiny_folder, tmp_path):
    program = f"""
import sys, time, torch
from pathlib import Path
from gpt2attn import load_model
from gpt2attn.dump import dump_attention
model = load_model({str(tiny_folder)!r}, kernels="torch")
activation = model.h[2].mlp.activation
def slow(x):
    print("half way", flush=True)
    time.sleep(60)
    return activation(x)
model.h[2].mlp.activation = slow
dump_attention(model, [1, 2, 3], Path({str(tmp_path / "m.safetensors")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half way\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.1)
    assert not (tmp_path / "m.safetensors").exists()
