"""The compiled decode step against torch's kernels and float64."""

import copy
import errno
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import TINY, write_checkpoint
from numba.core.caching import IndexDataCacheFile, NullCache

from gpt2attn import KVCache, attention_maps, generate, load_model, save_model
from gpt2attn.generation import Row, decode
from gpt2attn.kernels import compiling, prefill, step, use_kernels
from gpt2attn.kernels import decode as decode_kernels
from gpt2attn.kernels.formats import GROUP, STORED, quantize, widen
from gpt2attn.kernels.step import MAX_ROWS, MAX_ROWS_WIDENED, MIN_PREFILL
from gpt2attn.kernels.team import SHARED_SIZE, find_pool
from gpt2attn.sampling import Sampling

# Other sums of float32 numbers; transformers' own distance from float64 here is about 4e-6.
CLOSE = {"rtol": 0, "atol": 5e-5}


def random_ids(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"], shape, generator=generator)


def both(folder, n_threads=2):
    """The same model with torch's kernels and with the compiled step."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        fast = load_model(folder, kernels="auto")
    finally:
        torch.set_num_threads(before)
    assert fast.compiled is not None
    return load_model(folder, kernels="torch"), fast


def run(model, chunks, mask=None):
    cache = KVCache.for_model(model, chunks[0].shape[0])
    out = []
    for chunk in chunks:
        seen = None if mask is None else mask[:, : cache.length + chunk.shape[1]]
        out.append(model(chunk, cache=cache, attention_mask=seen))
    return torch.cat(out, dim=1), cache


@pytest.mark.parametrize("n_threads", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("settings", [{}, {"n_inner": 37}, {"n_embd": 24, "n_head": 2}])
def test_any_chunking_and_number_of_threads(tmp_path, n_threads, settings):
    torch_model, fast = both(write_checkpoint(tmp_path, settings), n_threads)
    ids = random_ids(2, 16)
    for sizes in ([16], [8, 8], [5, 1, 1, 3, 6], [1] * 16):
        chunks = ids.split(sizes, dim=1)
        logits, cache = run(fast, chunks)
        expected, torch_cache = run(torch_model, chunks)
        torch.testing.assert_close(logits, expected, **CLOSE)
        torch.testing.assert_close(cache.keys, torch_cache.keys, **CLOSE)
        torch.testing.assert_close(cache.values, torch_cache.values, **CLOSE)


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"activation_function": "gelu_fast"},
        {"activation_function": "gelu_pytorch_tanh"},
        {"layer_norm_epsilon": 1e-2},
        {"tie_word_embeddings": False},
    ],
)
def test_every_setting_reaches_it(tmp_path, settings):
    torch_model, fast = both(write_checkpoint(tmp_path, settings))
    chunks = random_ids(2, 12).split([4, 1, 7], dim=1)
    torch.testing.assert_close(run(fast, chunks)[0], run(torch_model, chunks)[0], **CLOSE)


def test_it_is_as_close_to_float64_as_torch(tiny_folder):
    torch_model, fast = both(tiny_folder)
    chunks = random_ids(2, 16).split([6] + [1] * 10, dim=1)
    exact, _ = run(load_model(tiny_folder, dtype=torch.float64), chunks)
    distance, reference = (
        float((run(model, chunks)[0].double() - exact).abs().max()) for model in (fast, torch_model)
    )
    assert distance <= 2 * reference


@pytest.mark.parametrize("dtype", STORED)
def test_a_token_gets_the_same_bits_alone_and_beside_others(tiny_folder, dtype):
    fast = load_model(tiny_folder, kernels="auto", dtype=dtype)
    ids = random_ids(2, 14)
    one_by_one, _ = run(fast, ids.split([8] + [1] * 6, dim=1))
    together, _ = run(fast, ids.split([8, 6], dim=1))
    assert torch.equal(one_by_one, together)
    alone, _ = run(fast, ids[1:].split([8] + [1] * 6, dim=1))
    assert torch.equal(one_by_one[1, 8:], alone[0, 8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_has_no_say(tiny_folder, dtype, default):
    chunks = random_ids(2, 9).split([4, 1, 4], dim=1)
    expected = run(load_model(tiny_folder, dtype=dtype), chunks)[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        logits = run(load_model(tiny_folder, dtype=dtype), chunks)[0]
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", STORED)
def test_stored_weights_can_be_cast_as_a_whole(tiny_folder, dtype):
    ids = random_ids(2, 9)
    stored = load_model(tiny_folder, dtype=dtype)
    exact = copy.deepcopy(stored).double()(ids)
    torch.testing.assert_close(exact.float(), stored(ids), **CLOSE)
    torch.testing.assert_close(
        copy.deepcopy(stored).bfloat16()(ids).double(), exact, rtol=0, atol=0.5
    )


def test_int8_weights_and_float_ones_are_not_taken_for_each_other(tiny_folder):
    whole, stored = load_model(tiny_folder), load_model(tiny_folder, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="scale"):
        whole.load_state_dict(stored.state_dict())
    with pytest.raises(RuntimeError, match="scale"):
        stored.load_state_dict(whole.state_dict())
    again = load_model(tiny_folder, dtype=torch.int8)
    for block in again.h:
        block.mlp.c_fc.scale.zero_()
    again.load_state_dict(stored.state_dict())
    assert torch.equal(again(random_ids(1, 9)), stored(random_ids(1, 9)))


def test_padding_is_left_out(tiny_folder):
    torch_model, fast = both(tiny_folder)
    ids, mask = random_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = mask[2, :1] = mask[1, 11:] = 0
    chunks = ids.split([7, 1, 1, 3], dim=1)
    logits, _ = run(fast, chunks, mask)
    expected, _ = run(torch_model, chunks, mask)
    real = mask.bool()
    torch.testing.assert_close(logits[real], expected[real], **CLOSE)
    assert logits.isfinite().all()


def test_the_same_greedy_text_in_a_batch_and_alone(tmp_path):
    torch_model, fast = both(write_checkpoint(tmp_path, {"n_positions": 128}))
    prompts = [random_ids(n, seed=n).tolist() for n in (9, 3, 1)]
    texts = []
    for model in (torch_model, fast):
        rows = [Row(prompt, Sampling(temperature=0), 0) for prompt in prompts]
        for _ in decode(model, rows, 60):
            pass
        texts.append([row.ids for row in rows])
    assert texts[0] == texts[1]
    assert texts[1][0] == list(generate(fast, prompts[0], 60, temperature=0))


@pytest.mark.parametrize(
    "arguments", [{"observe": lambda *_: None}, {"edit": lambda layer, site, x: x}]
)
def test_who_looks_or_edits_gets_torchs_products(tiny_folder, arguments):
    torch_model, fast = both(tiny_folder)
    fast.compiled.hidden = None  # a call would raise
    ids = random_ids(1, 6)
    results = [
        model.hidden(ids, cache=KVCache.for_model(model), **arguments)
        for model in (torch_model, fast)
    ]
    torch.testing.assert_close(*results, **CLOSE)


def test_larger_passes_and_first_ones_run_on_torch(tiny_folder):
    torch_model, fast = both(tiny_folder)
    fast.compiled.hidden = None  # a call would raise
    ids = random_ids(2, MAX_ROWS // 2 + 1)
    results = [model(ids, cache=KVCache.for_model(model, 2)) for model in (torch_model, fast)]
    torch.testing.assert_close(*results, **CLOSE)


class TestPrefill:
    """Passes over many tokens."""

    # Heads of 16, 48 and 64 numbers: one vector, some with a remainder, whole ones.
    SIZES = pytest.mark.parametrize(
        "sizes", [{}, {"n_embd": 96, "n_head": 2, "n_inner": 37}, {"n_embd": 128, "n_head": 2}]
    )
    N = 150

    @staticmethod
    def folder(path, settings=None):
        return write_checkpoint(
            path, {"n_positions": 256, "n_embd": 64, "n_layer": 2, **(settings or {})}
        )

    @staticmethod
    def without_torch(model):
        """The model, whose blocks would raise if they were called one by one."""
        assert TestPrefill.N >= MIN_PREFILL
        for block in model.h:
            # Not its attribute, which would be seen, and torch would be called.
            block.__class__ = type("Uncalled", (type(block),), {"forward": None})
        return model

    @staticmethod
    def assert_as_exact(got, by_torch, exact):
        """No farther from float64 than twice torch's own distance, as wide weights have it."""
        distances = [float((x.double() - exact).abs().max()) for x in (got, by_torch)]
        assert distances[0] <= 2 * distances[1]

    def three(self, folder, n_threads=2):
        return (*both(folder, n_threads), load_model(folder, dtype=torch.float64))

    @SIZES
    @pytest.mark.parametrize("n_threads", [1, 2, 3])
    @pytest.mark.parametrize("by_torch", [True, False])
    def test_prompts_with_and_without_a_cache(
        self, tmp_path, sizes, n_threads, by_torch, monkeypatch
    ):
        monkeypatch.setattr(prefill, "torch_multiplies_faster", lambda: by_torch)
        torch_model, fast, exact = self.three(self.folder(tmp_path, sizes), n_threads)
        ids = random_ids(2, self.N + 8)
        self.assert_as_exact(fast(ids), torch_model(ids), exact(ids))
        for parts in ([self.N, 8], [3, self.N + 5], [70, 80, 8]):
            results = [run(model, ids.split(parts, dim=1)) for model in (fast, torch_model, exact)]
            self.assert_as_exact(*(logits for logits, _ in results))
            for name in ("keys", "values"):
                self.assert_as_exact(
                    *(getattr(cache, name)[:, :, :, : cache.length] for _, cache in results)
                )

    @pytest.mark.parametrize(
        "settings",
        [
            {"scale_attn_weights": False},
            {"scale_attn_by_inverse_layer_idx": True},
            {"reorder_and_upcast_attn": True},
            {"activation_function": "gelu_pytorch_tanh"},
            {"layer_norm_epsilon": 1e-2},
            {"tie_word_embeddings": False},
        ],
    )
    def test_every_setting_reaches_it(self, tmp_path, settings):
        torch_model, fast, exact = self.three(self.folder(tmp_path, settings))
        ids = random_ids(1, 256)
        self.assert_as_exact(self.without_torch(fast)(ids), torch_model(ids), exact(ids))

    def test_padding_is_left_out(self, tmp_path):
        models = self.three(self.folder(tmp_path))
        ids, mask = random_ids(3, self.N + 9), torch.ones(3, self.N + 9, dtype=torch.long)
        mask[0, :40] = mask[2, :1] = mask[1, self.N :] = 0
        for parts in ([self.N + 9], [self.N, 9], [50, self.N - 41]):
            torch_logits, logits, exact = (
                run(model, ids.split(parts, dim=1), mask)[0] for model in models
            )
            real = mask.bool()
            self.assert_as_exact(logits[real], torch_logits[real], exact[real])
            assert logits.isfinite().all()

    @SIZES
    @pytest.mark.parametrize("by_torch", [True, False])
    def test_the_last_logits_alone(self, tmp_path, sizes, by_torch, monkeypatch):
        monkeypatch.setattr(prefill, "torch_multiplies_faster", lambda: by_torch)
        torch_model, fast, exact = self.three(self.folder(tmp_path, sizes))
        ids, mask = random_ids(3, self.N + 9), torch.ones(3, self.N + 9, dtype=torch.long)
        mask[0, :40] = 0
        real, tokens = mask.bool(), mask[None, :, None, :, None]
        for parts in ([self.N, 9], [50, self.N - 41]):
            chunks = ids.split(parts, dim=1)
            torchs, torch_cache = run(torch_model, chunks, mask)
            correct, exact_cache = run(exact, chunks, mask)
            limit = 2 * float((torchs - correct)[real].abs().max())
            cache = KVCache.for_model(fast, 3)
            for chunk in chunks:
                seen = mask[:, : cache.length + chunk.shape[1]]
                logits = fast.last_logits(chunk, cache=cache, attention_mask=seen)
                assert float((logits - correct[:, cache.length - 1]).abs().max()) <= limit
            for name in ("keys", "values"):
                caches = (cache, torch_cache, exact_cache)
                n = cache.length
                self.assert_as_exact(*(getattr(c, name)[:, :, :, :n] * tokens for c in caches))

    @SIZES
    def test_what_an_observer_sees(self, tmp_path, sizes):
        models = self.three(self.folder(tmp_path, sizes))
        self.without_torch(models[1])
        ids, mask = random_ids(2, self.N), torch.ones(2, self.N, dtype=torch.long)
        mask[0, :30] = 0
        for padding in (None, mask):
            seen = [[], [], []]
            for model, steps in zip(models, seen, strict=True):
                model(ids, attention_mask=padding, observe=lambda _, s, kept=steps: kept.append(s))
            for a, b, exact in zip(*seen, strict=True):
                assert (a.upcast, a.scale) == (b.upcast, b.scale)
                real = torch.ones(2, 1, self.N, 1) if padding is None else mask[:, None, :, None]
                for name in ("q", "k", "v", "output", "weights", "scores", "scaled"):
                    self.assert_as_exact(*(getattr(s, name) * real for s in (b, a, exact)))
                assert torch.equal(b.masked == -torch.inf, a.masked == -torch.inf)
                assert torch.equal(b.weights == 0, b.masked == -torch.inf)

    def test_maps_of_all_and_of_some_layers(self, tmp_path):
        torch_model, fast, exact = self.three(self.folder(tmp_path, {"n_layer": 3}))
        self.without_torch(fast)
        ids, cut = random_ids(2, self.N), torch.ones(2, self.N, dtype=torch.long)
        cut[1, :20] = 0
        for arguments in ({}, {"layers": [1]}, {"heads": [2, 0]}, {"attention_mask": cut}):
            maps = [
                attention_maps(model, ids, **arguments).weights
                for model in (fast, torch_model, exact)
            ]
            self.assert_as_exact(*maps)
            assert torch.equal(maps[0].triu(1), torch.zeros_like(maps[0]))
        assert torch.equal(maps[0][:, 1, :, :20], torch.zeros_like(maps[0][:, 1, :, :20]))
        assert torch.equal(maps[0][:, 1, :, :, :20], torch.zeros_like(maps[0][:, 1, :, :, :20]))

    @pytest.mark.parametrize("dtype", STORED)
    @pytest.mark.parametrize("by_torch", [True, False])
    def test_narrow_weights(self, tmp_path, dtype, by_torch, monkeypatch):
        monkeypatch.setattr(prefill, "torch_multiplies_faster", lambda: by_torch)
        folder = self.folder(tmp_path)
        expected = TestFormats.widened(folder, dtype)
        fast = self.without_torch(load_model(folder, kernels="auto", dtype=dtype))
        torch.testing.assert_close(fast(random_ids(1, 200)), expected(random_ids(1, 200)), **CLOSE)

    @pytest.mark.parametrize("embeddings", [True, False])
    def test_a_gradient_goes_through_torchs_operations(self, tmp_path, embeddings):
        torch_model, fast = both(self.folder(tmp_path))
        gradients = []
        for model in (torch_model, fast):
            model.requires_grad_(True)
            for table in (model.wte, model.wpe):
                table.requires_grad_(embeddings)
            model(random_ids(1, self.N)).square().sum().backward()
            gradients.append(model.h[0].mlp.c_fc.weight.grad)
            cache = KVCache.for_model(model)
            with torch.no_grad():
                model(random_ids(1, self.N), cache=cache)
            assert model(random_ids(1, 1), cache=cache).requires_grad
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)

    def test_a_large_batch_of_single_tokens_is_left_to_torch(self, tmp_path):
        torch_model, fast = both(self.folder(tmp_path))
        chunks = random_ids(MIN_PREFILL, 4).split([3, 1], dim=1)
        fast.compiled.hidden = None  # a call would raise
        torch.testing.assert_close(run(fast, chunks)[0], run(torch_model, chunks)[0], **CLOSE)

    @pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
    def test_numbers_that_are_none_are_not_passed_over(self, tmp_path, number):
        _, fast = both(self.folder(tmp_path))
        fast.h[0].attn.c_attn.weight.data[0] *= number
        ids = random_ids(1, self.N)
        assert not self.without_torch(fast)(ids).isfinite().all()
        with pytest.raises(ValueError, match="NaN or infinite"):
            attention_maps(fast, ids)


class TestCompiling:
    """What keeps compiled code on disk may fail; the code runs all the same."""

    def test_it_is_known_whether_the_first_pass_compiles(self, tiny_folder, tmp_path, monkeypatch):
        _, fast = both(tiny_folder)
        list(generate(fast, [1, 2], 3, temperature=0))
        assert not fast.compiled.compiles_first
        (tmp_path / "step.py").write_text("")
        monkeypatch.setattr(step, "__file__", str(tmp_path / "step.py"))
        assert not fast.compiled.compiles_first  # Numba says where it keeps it
        monkeypatch.setattr(decode_kernels._blocks, "_cache", NullCache())
        assert fast.compiled.compiles_first

    SOURCE = """
from gpt2attn.kernels.compiling import compiled, is_kept

@compiled()
def double(x):
    return 2 * x
"""

    @staticmethod
    def new_module(path):
        """As a new process would import it: nothing is compiled yet."""
        spec = importlib.util.spec_from_file_location("compiled_here", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @pytest.mark.parametrize("damage", [b"", b"\x80garbage", None])
    def test_damaged_files_cost_only_time(self, tmp_path, damage):
        path = tmp_path / "compiled_here.py"
        path.write_text(self.SOURCE)
        assert self.new_module(path).double(21) == 42
        files = [file for file in tmp_path.rglob("*") if file.suffix in (".nbi", ".nbc")]
        assert len(files) == 2
        assert self.new_module(path).is_kept(self.new_module(path).double)
        for chosen in (files, files[:1], files[1:]):
            for file in chosen:
                file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
            again = self.new_module(path)
            assert again.double(21) == 42
            assert sum(again.double.stats.cache_misses.values()) == 1
            later = self.new_module(path)  # what was damaged is whole again
            assert later.double(21) == 42
            assert sum(later.double.stats.cache_hits.values()) == 1

    def runs_and_keeps_nothing(self, folder):
        path = folder / "compiled_here.py"
        path.write_text(self.SOURCE)
        module = self.new_module(path)
        assert module.double(21) == 42
        assert not module.is_kept(module.double)

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), PermissionError()])
    def test_neither_does_a_disk_that_takes_nothing(self, tmp_path, monkeypatch, error):
        def refuse(*_):
            raise error

        monkeypatch.setattr(IndexDataCacheFile, "save", refuse)
        self.runs_and_keeps_nothing(tmp_path)

    def test_nor_a_machine_without_a_folder(self, tmp_path, monkeypatch):
        def nowhere(_):
            raise RuntimeError("cannot cache function: no locator available")

        monkeypatch.setattr(compiling, "_Cache", nowhere)
        self.runs_and_keeps_nothing(tmp_path)


class TestFormats:
    """Weights with fewer bits: what they stand for, and that every path computes with just that."""

    # Sizes that the vector code covers whole, and sizes with something left over everywhere.
    SETTINGS = pytest.mark.parametrize(
        "settings", [{"n_embd": 128, "n_head": 2}, {"n_inner": 72}, {"tie_word_embeddings": False}]
    )
    NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])

    @staticmethod
    def widened(folder, dtype):
        """The model of torch's kernels whose float32 weights are those that `dtype` stands for."""
        model = load_model(folder, kernels="torch")
        stored = load_model(folder, kernels="auto", dtype=dtype)
        for name, layer in stored.named_modules():
            if getattr(layer, "is_stored", False):
                model.get_submodule(name).weight.data = layer.matrix
        return model

    @NARROW
    @SETTINGS
    def test_every_path_computes_with_what_they_stand_for(self, tmp_path, settings, dtype):
        folder = write_checkpoint(tmp_path, {"n_positions": 96, **settings})
        fast, expected = (
            load_model(folder, kernels="auto", dtype=dtype),
            self.widened(folder, dtype),
        )
        assert fast.compiled is not None
        ids = random_ids(2, 60)
        exact = self.widened(folder, dtype).double()(ids)
        distance = float((expected(ids) - exact).abs().max())
        for sizes in ([60], [20, 1, 1, 7, 31], [1] * 60):
            logits, _ = run(fast, ids.split(sizes, dim=1))
            assert float((logits - exact).abs().max()) <= 2 * distance
        assert ids.numel() > MAX_ROWS_WIDENED  # so that without a cache all products are torch's
        torch.testing.assert_close(fast(ids), expected(ids), rtol=0, atol=2 * distance)

    def test_float16_of_a_float16_file_is_the_file(self, tmp_path, tiny_folder):
        half = load_model(tiny_folder, dtype=torch.float16, kernels="torch")
        save_model(half, tmp_path)
        expected = load_model(tmp_path, kernels="torch")
        stored = load_model(tmp_path, kernels="auto", dtype=torch.float16)
        use_kernels(stored, "torch")
        assert stored.wte.weight.dtype == torch.float16
        assert stored.wpe.weight.dtype == stored.ln_f.weight.dtype == torch.float32
        assert torch.equal(stored(random_ids(2, 16)), expected(random_ids(2, 16)))

    @pytest.mark.parametrize("input_dim", [0, 1])
    def test_int8_is_off_by_half_a_step_at_most(self, input_dim):
        weight = torch.randn(3 * GROUP, 3 * GROUP) * torch.logspace(-6, 2, 3 * GROUP)
        weight[:GROUP, :GROUP] = 0
        stored, scale = quantize(weight, input_dim)
        wide = widen(stored, scale, input_dim)
        step = scale.repeat_interleave(GROUP, input_dim)
        assert bool(((wide - weight).abs() <= 0.5001 * step).all())
        largest = weight.unflatten(input_dim, (3, GROUP)).abs().amax(input_dim + 1)
        got = wide.unflatten(input_dim, (3, GROUP)).abs().amax(input_dim + 1)
        torch.testing.assert_close(got, largest, rtol=1e-6, atol=0)

    def test_bfloat16_is_saved_as_it_is_stored_and_int8_refused(self, tmp_path, tiny_folder):
        stored = load_model(tiny_folder, kernels="auto", dtype=torch.bfloat16)
        use_kernels(stored, "torch")
        save_model(stored, tmp_path)
        again = load_model(tmp_path, kernels="torch")
        assert torch.equal(again(random_ids(1, 9)), stored(random_ids(1, 9)))
        with pytest.raises(ValueError, match="int8 weights are not saved"):
            save_model(load_model(tiny_folder, kernels="auto", dtype=torch.int8), tmp_path)

    def test_int8_needs_the_kernels_that_know_it(self, tiny_folder):
        with pytest.raises(ValueError, match='int8 is there with kernels="auto" on the CPU'):
            load_model(tiny_folder, dtype=torch.int8, kernels="torch")

    def test_heads_that_int8_cannot_be_cut_at_run_on_torch(self, tmp_path):
        folder = write_checkpoint(tmp_path, {"n_embd": 20, "n_head": 4})
        model = load_model(folder, kernels="auto", dtype=torch.int8)
        assert model.compiled is None
        expected = self.widened(folder, torch.int8)(random_ids(1, 9))
        torch.testing.assert_close(model(random_ids(1, 9)), expected, **CLOSE)


class TestWhereItDoesNotFit:
    def test_the_reason_is_told(self, tmp_path, tiny_folder):
        relu = load_model(write_checkpoint(tmp_path, {"activation_function": "relu"}))
        half = load_model(tiny_folder, dtype=torch.bfloat16, kernels="torch")
        assert use_kernels(relu, "auto") == "torch (the activation is relu)"
        assert use_kernels(half, "auto") == "torch (it computes in bfloat16)"
        assert use_kernels(load_model(tiny_folder), "torch") == "torch"
        assert use_kernels(load_model(tiny_folder), "auto").startswith("numba, ")
        with pytest.raises(ValueError, match="kernels must be one of auto, torch, not 'cuda'"):
            load_model(tiny_folder, kernels="cuda")

    def test_without_numba_everything_runs_on_torch(self, tiny_folder):
        program = (
            "import sys; sys.modules['numba'] = None\n"
            "from gpt2attn import load_model\n"
            "from gpt2attn.kernels import use_kernels\n"
            f"model = load_model({str(tiny_folder)!r}, kernels='auto')\n"
            "print(model.compiled, use_kernels(model, 'auto'))"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert result.stdout == "None torch (numba is not installed)\n", result.stderr

    def test_a_cast_drops_the_step_that_knows_the_old_weights(self, tiny_folder):
        _, fast = both(tiny_folder)
        assert fast.double().compiled is None
        expected = load_model(tiny_folder, dtype=torch.float64)(random_ids(1, 3))
        torch.testing.assert_close(fast(random_ids(1, 3)), expected, rtol=0, atol=1e-12)

    def test_a_cast_and_back_gets_it_again(self, tiny_folder):
        _, fast = both(tiny_folder)
        assert fast.double().kernels == "torch"
        assert fast.float().kernels == "auto"

    def test_weights_changed_in_place_are_seen(self, tiny_folder):
        torch_model, fast = both(tiny_folder)
        for model in (torch_model, fast):
            model.h[1].mlp.c_fc.weight.data = model.h[1].mlp.c_fc.weight.data.clone()
        use_kernels(fast, "auto")
        for model in (torch_model, fast):
            model.h[1].mlp.c_fc.weight.data *= 0.5
        chunks = random_ids(1, 6).split([5, 1], dim=1)
        torch.testing.assert_close(run(fast, chunks)[0], run(torch_model, chunks)[0], **CLOSE)


class TestOtherMemory:
    """Compiled code reads and writes by address: what it is given must be what it expects."""

    @pytest.mark.parametrize(
        "settings",
        [{"n_layer": 1}, {"n_embd": 64, "n_head": 2}, {"n_embd": 32}, {"dtype": torch.float64}],
    )
    def test_a_cache_of_another_model_is_refused(self, tmp_path, settings):
        torch_model, fast = both(TestPrefill.folder(tmp_path))
        dtype = settings.pop("dtype", torch.float32)
        other = KVCache(replace(fast.config, **settings), 1, dtype=dtype)
        for model in (torch_model, fast):
            for n in (1, 150):
                with pytest.raises(ValueError, match=r"make it with KVCache\.for_model"):
                    model(random_ids(1, n), cache=other)

    def test_other_data_of_a_parameter_is_seen(self, tiny_folder):
        torch_model, fast = both(tiny_folder)
        chunks = random_ids(1, 6).split([5, 1], dim=1)
        run(fast, chunks)
        for model in (torch_model, fast):
            for block in model.h:
                block.mlp.c_fc.weight.data = block.mlp.c_fc.weight.data * 0.5
            model.wte.weight.data = model.wte.weight.data * 2
            model.ln_f.bias.data = model.ln_f.bias.data + 1
        torch.testing.assert_close(run(fast, chunks)[0], run(torch_model, chunks)[0], **CLOSE)

    def test_other_weights_are_seen(self, tmp_path):
        folders = [write_checkpoint(tmp_path / name, seed=n) for n, name in enumerate("ab")]
        chunks = random_ids(1, 6).split([5, 1], dim=1)
        _, fast = both(folders[0])
        run(fast, chunks)
        fast.load_state_dict(load_model(folders[1]).state_dict(), assign=True)
        expected = run(load_model(folders[1], kernels="torch"), chunks)[0]
        torch.testing.assert_close(run(fast, chunks)[0], expected, **CLOSE)

    @pytest.mark.parametrize("change", ["parameter", "table", "module", "forward", "block"])
    def test_what_stands_in_anothers_place_is_seen(self, tmp_path, change):
        _, fast = both(TestPrefill.folder(tmp_path))
        chunks = random_ids(1, 151).split([150, 1], dim=1)
        before = run(fast, chunks)[0]
        layer = fast.h[1].mlp.c_fc
        if change == "parameter":
            layer.weight = torch.nn.Parameter(layer.weight * 0.5, requires_grad=False)
        elif change == "table":
            fast.wte.weight = torch.nn.Parameter(fast.wte.weight * 2, requires_grad=False)
        elif change == "module":
            fast.h[1].mlp.c_fc = torch.nn.Sequential(layer, torch.nn.Softsign())
        elif change == "forward":
            layer.forward = lambda x: torch.ones(*x.shape[:-1], layer.bias.shape[0])
        else:
            del fast.h[1]
        logits = run(fast, chunks)[0]
        assert (logits - before).abs().amax() > 0.1
        fast.compiled = None
        torch.testing.assert_close(logits, run(fast, chunks)[0], **CLOSE)

    def test_parameters_of_a_functional_call_are_seen(self, tiny_folder):
        torch_model, fast = both(tiny_folder)
        cache = KVCache.for_model(fast)
        fast(random_ids(1, 4), cache=cache)
        other = {"h.0.mlp.c_fc.weight": torch.zeros_like(fast.h[0].mlp.c_fc.weight)}
        logits = [
            torch.func.functional_call(model, other, random_ids(1, 1), {"cache": cache.fork()})
            for model in (fast, torch_model)
        ]
        torch.testing.assert_close(*logits, **CLOSE)

    def test_an_odd_layout_of_the_unembedding_runs_on_torch(self, tiny_folder):
        _, fast = both(tiny_folder)
        fast.wte.weight.data = fast.wte.weight.data.t().contiguous().t()
        assert use_kernels(fast, "auto") == "torch (the weights are not contiguous)"

    def test_a_copy_runs_on_its_own_weights(self, tiny_folder):
        _, fast = both(tiny_folder)
        chunks = random_ids(1, 6).split([5, 1], dim=1)
        expected = run(fast, chunks)[0]
        copies = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))]
        fast.wte.weight.data.zero_()
        for model in copies:
            assert model.compiled is not None
            torch.testing.assert_close(run(model, chunks)[0], expected, **CLOSE)

    def test_hooks_are_called(self, tmp_path):
        _, fast = both(TestPrefill.folder(tmp_path))
        for module in (fast.h[1].mlp, fast.ln_f):
            calls = []
            hook = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            run(fast, random_ids(1, 152).split([150, 1, 1], dim=1))
            hook.remove()
            run(fast, random_ids(1, 152).split([150, 1, 1], dim=1))
            assert len(calls) == 3


class TestThreads:
    @pytest.mark.parametrize("n_threads", [1, 2, 3])
    def test_threads_of_its_own_where_torchs_pool_cannot_be_called(self, tmp_path, n_threads):
        folder = TestPrefill.folder(tmp_path)
        torch_model, fast = both(folder, n_threads)
        fast.compiled._decode.team._pool = None
        chunks = random_ids(1, 160).split([150, 1, 9], dim=1)
        torch.testing.assert_close(run(fast, chunks)[0], run(torch_model, chunks)[0], **CLOSE)
        workers = fast.compiled._decode.team._workers
        assert len(workers) == min(n_threads, TINY["n_head"]) - 1

    def test_torchs_pool_is_found_on_linux(self):
        if sys.platform == "linux":
            assert find_pool() is not None

    def test_several_threads_share_one_model(self, tiny_folder):
        _, fast = both(tiny_folder)
        inputs = [random_ids(1, 9, seed=seed).split([3, 1, 5], dim=1) for seed in range(6)]
        expected = [run(fast, chunks)[0] for chunks in inputs]
        results = [None] * len(inputs)

        def work(number):
            results[number] = run(fast, inputs[number])[0]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))

    @pytest.mark.parametrize("limit", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}])
    def test_a_pool_may_give_fewer_threads(self, tmp_path, limit):
        program = f"""
import torch
torch.set_num_threads(4)
from gpt2attn import generate, load_model
fast = load_model({str(TestPrefill.folder(tmp_path))!r}, kernels="auto")
slow = load_model({str(tmp_path)!r}, kernels="torch")
assert fast.compiled.n_threads == 4
prompt = [n % 67 for n in range(150)]
print(*(list(generate(m, prompt, 20, temperature=0)) for m in (fast, slow)), sep="\\n")
"""
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **limit},
        )
        fast, slow = result.stdout.splitlines()
        assert fast == slow, result.stderr

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_it_works_in_a_forked_child(self, tiny_folder):
        program = f"""
import os, torch
torch.set_num_threads(2)
from gpt2attn import generate, load_model
model = load_model({str(tiny_folder)!r}, kernels="auto")
torch.set_num_threads(1)  # torch's own pool does not survive a fork
expected = list(generate(model, [1, 2], 8, temperature=0))
if os.fork() == 0:
    own = load_model({str(tiny_folder)!r}, kernels="auto")
    own.compiled.n_threads = 2
    results = [list(generate(m, [1, 2], 8, temperature=0)) for m in (model, own)]
    os._exit(results != [expected, expected])
print(os.wait()[1], list(generate(model, [1, 2], 8, temperature=0)) == expected)
"""
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert result.stdout == "0 True\n", result.stderr

    def test_an_interrupt_sends_the_other_threads_home(self, tiny_folder):
        _, fast = both(tiny_folder)
        expected = list(generate(fast, [1, 2], 8, temperature=0))
        team = fast.compiled._decode.team

        def interrupted(thread, n_threads, shared, *_):
            from gpt2attn.kernels.team import barrier

            if thread == 0:
                raise KeyboardInterrupt
            barrier(shared, n_threads)

        # In torch's pool nothing of Python runs that could be interrupted.
        with pytest.raises(KeyboardInterrupt):
            team._run_in_own(interrupted, np.zeros(SHARED_SIZE, np.int64), ())
        team._pool = None
        assert list(generate(fast, [1, 2], 8, temperature=0)) == expected
