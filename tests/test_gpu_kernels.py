"""The CUDA decode step, whose tensors are tested on a CPU, and the script that checks it on a GPU.

On a CPU every step runs as it is; only on CUDA is it captured as a graph.
"""

from __future__ import annotations

import gc
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

from gpt2attn import GPT2, KVCache, generate, load_model
from gpt2attn.generation import Row, decode
from gpt2attn.kernels.cuda import GraphStep
from gpt2attn.sampling import Sampling

# Logits reach 6 here. Masked places add zeros to other sums, and softmax runs over more of them.
TOLERANCE = 1e-5
MASK = torch.tensor([[1] * 12, [0] * 3 + [1] * 9, [0] + [1] * 11])


@pytest.fixture
def static(tiny_folder: Path) -> GPT2:
    model = load_model(tiny_folder, kernels="torch")
    model.compiled = GraphStep(model)
    return model


@pytest.mark.parametrize("mask", [None, MASK], ids=["plain", "padded"])
def test_attention_over_the_whole_cache_equals_that_over_its_beginning(static, tiny_folder, mask):
    plain = load_model(tiny_folder, kernels="torch")
    ids = torch.randint(67, (3, 12), generator=torch.Generator().manual_seed(0))
    caches = [KVCache.for_model(model, 3) for model in (plain, static)]
    for buffer in (caches[1].keys, caches[1].values):
        buffer.fill_(float("nan"))  # as fresh memory may be
    for start, end in [(0, 4), *((i, i + 1) for i in range(4, 12))]:
        expected, got = (
            model(
                ids[:, start:end],
                cache=cache,
                attention_mask=None if mask is None else mask[:, :end],
            )
            for model, cache in zip((plain, static), caches, strict=True)
        )
        assert float((expected - got).abs().max()) < TOLERANCE
    kept = slice(None, 12)
    for expected, got in zip(
        (caches[0].keys, caches[0].values), (caches[1].keys, caches[1].values), strict=True
    ):
        assert float((expected - got)[:, :, :, kept].abs().max()) < TOLERANCE


def test_a_cache_that_was_cut_goes_on_from_there(static, tiny_folder):
    plain = load_model(tiny_folder, kernels="torch")
    cache = KVCache.for_model(static)
    for id in range(10):
        static([[id]], cache=cache)
    cache.truncate(4)
    got = static([[60]], cache=cache)
    expected = plain([[0, 1, 2, 3, 60]])[:, -1:]
    assert float((expected - got).abs().max()) < TOLERANCE


def test_generation_runs_on_it(static, tiny_folder):
    plain = load_model(tiny_folder, kernels="torch")
    expected = list(generate(plain, [5, 6, 7], 9, temperature=0))
    assert list(generate(static, [5, 6, 7], 9, temperature=0)) == expected
    rows = [Row([5, 6, 7], Sampling(temperature=0), 0), Row([9], Sampling(temperature=0), 0)]
    for _ in decode(static, rows, 9):
        pass
    assert rows[0].ids == expected
    assert rows[1].ids == list(generate(plain, [9], 9, temperature=0))


def test_what_it_takes(static):
    x, cache = torch.zeros(2, 1, 32), KVCache.for_model(static, 2)
    takes = static.compiled.takes
    assert takes(x, cache, None)
    assert not takes(x, None, None)
    assert not takes(x, cache, lambda layer, steps: None)
    assert not takes(torch.zeros(2, 2, 32), cache, None)
    assert not takes(x.requires_grad_(), cache, None)
    y = torch.randn(2, 32)
    assert torch.equal(static.unembed(y, decoding=True), y @ static.wte.weight.t())


def test_what_belongs_to_a_cache_goes_with_it(static):
    cache = KVCache.for_model(static)
    static([[1]], cache=cache)
    assert len(static.compiled._steps) == 1
    del cache
    gc.collect()
    assert len(static.compiled._steps) == 0


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(script: ModuleType, *arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_the_gpu_script_checks_on_a_cpu(gpu_check, tiny_folder):
    status, printed, table = check(gpu_check, str(tiny_folder), "--device", "cpu", "--quick")
    assert status == 0, table
    found = json.loads(printed)
    assert found["ok"]
    assert found["verify"]["ok"]
    assert found["fast_kernels"]["tokens"] == found["fast_kernels"]["same_choice"] == 8
    assert "speed" not in found
    assert "8 of 8 choices equal" in table


def test_the_gpu_script_finds_kernels_that_are_wrong(gpu_check, tiny_folder, monkeypatch):
    def load(folder, *, device, kernels):
        model = load_model(folder, device=device, kernels="torch")
        if kernels == "auto":
            model.ln_f.weight.mul_(1.001)
        return model

    assert gpu_check.compare_kernels(tiny_folder, "cpu", 8)["ok"]
    monkeypatch.setattr(gpu_check, "load_model", load)
    assert not gpu_check.compare_kernels(tiny_folder, "cpu", 8)["ok"]


def test_the_gpu_script_measures(gpu_check, static, monkeypatch):
    """Its measuring, with the static step in a graph's place, so that it runs at all."""
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    monkeypatch.setattr(gpu_check, "READ_FLOATS", 2**16)
    assert gpu_check.read_bandwidth("cpu") > 0
    figures = gpu_check.measure_model(static, "float32", read=100.0)
    assert set(figures) == {
        "tokens_s", "share_of_read", "step_s", "step_share_of_read", "prefill_s",
    }  # fmt: skip
    assert min(figures.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run the script itself")
def test_the_gpu_script_needs_a_gpu(gpu_check):
    status, _, error = check(gpu_check)
    assert status == 2
    assert "finds no CUDA" in error
