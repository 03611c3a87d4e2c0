"""`verify` passes what is right, and names the first wrong stage of what is not."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import gpt2attn.model
import gpt2attn.verify
from gpt2attn.checkpoint import load_model
from gpt2attn.kernels import activations
from gpt2attn.model import GPT2
from gpt2attn.verify import Report, Row, VerifyError, comparison, make_cases, verify
from gpt2attn.verify.report import (
    AUTO,
    AUTO_EAGER,
    DIFFERS,
    FUSED,
    GENERATE,
    OBSERVED,
    OURS,
    ROUNDING,
    WITHIN,
)

ALL_THREADS = torch.get_num_threads()
# Of the larger sizes, a block and some of the vocabulary, which would only make them slow.
ONE_BLOCK = {"n_layer": 1, "vocab_size": 5000, "bos_token_id": 4999, "eos_token_id": 4999}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products: a second thread costs more than it brings, much more on a busy machine."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(ALL_THREADS)


@pytest.fixture
def all_threads(one_thread: None) -> Iterator[None]:
    torch.set_num_threads(ALL_THREADS)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def report(tiny_folder: Path) -> Report:
    return verify(tiny_folder)


def test_tiny_model_is_bit_equal(report: Report) -> None:
    assert report.ok
    assert report.bit_equality_claimed
    assert report.bit_equal
    assert report.first_difference is None
    assert "17 of 17 stages bit for bit" in report.summary()


def test_rows_cover_every_stage_in_the_order_of_the_forward_pass(report: Report) -> None:
    layers = range(TINY["n_layer"])
    maps_and_blocks = [name for i in layers for name in (f"attention map {i}", f"block {i}")]
    ends = ["final LayerNorm", "logits"]
    assert [(row.pair, row.stage) for row in report.rows] == [
        *((OBSERVED, stage) for stage in ["embeddings", *maps_and_blocks, *ends]),
        *((FUSED, stage) for stage in ["embeddings", *(f"block {i}" for i in layers), *ends]),
        (GENERATE, "decode logits"),
        (GENERATE, "greedy ids"),
        (AUTO_EAGER, "attention maps"),
        (AUTO_EAGER, "logits"),
        (AUTO, "decode logits"),
        (AUTO, "greedy ids"),
        (OURS, "cached against uncached"),
        (OURS, "chunked prefill"),
        (OURS, "left-padded against single rows"),
    ]


def test_the_fast_kernels_are_as_near_to_float64_as_transformers(report: Report) -> None:
    logits, ids = (row for row in report.rows if row.pair == AUTO)
    assert logits.verdict == ROUNDING
    assert 0 < logits.ours_to_float64 <= 2 * logits.theirs_to_float64
    assert ids.bit_equal


def test_our_own_paths_agree_within_tolerance_and_say_so(report: Report) -> None:
    for row in report.rows[-3:]:
        assert row.verdict == WITHIN
        assert 0 < row.max_difference <= 1e-4
        assert set(row.place) == {"row", "token", "index"}
        assert row.note == "same greedy ids"


def test_report_holds_stack_and_ids(report: Report) -> None:
    """D59."""
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["stack"]["torch"] == torch.__version__
    assert values["stack"]["threads"] == torch.get_num_threads()
    assert values["stack"]["dtype"] == "float32"
    assert values["stack"]["transformers"].startswith("5.24.")
    assert [len(case["ids"][0]) for case in values["cases"]] == [6, 1, 6, 16, 1, 6, 16, 8]
    assert values["cases"][-1]["mask"][2] == [0] * 6 + [1] * 2
    assert any("ids of 1 x 6: " in line for line in report.header())


def test_table_has_a_line_for_each_row(report: Report) -> None:
    table = report.table()
    assert table.row_count == len(report.rows)
    assert next(iter(table.columns[5].cells)) == "bit-equal"


def test_inputs_are_limited_by_the_context_and_seeded() -> None:
    cases = make_cases(50257, 1024, [7, 8], quick=False, seed=0)
    assert [tuple(case.ids.shape) for case in cases[1:-1]] == [
        (batch_size, length) for batch_size in (1, 3) for length in (1, 6, 64, 1000)
    ]
    again, other = (
        make_cases(50257, 1024, [7, 8], quick=True, seed=0),
        make_cases(50257, 1024, [7, 8], quick=True, seed=1),
    )
    assert max(case.ids.shape[1] for case in again) == 64
    assert torch.equal(again[2].ids, cases[2].ids)
    assert not torch.equal(other[2].ids, cases[2].ids)
    assert {case.ids.shape[1] for case in make_cases(9, 1, None, quick=False, seed=0)} == {1}


def test_one_position_is_enough(tmp_path: Path) -> None:
    assert verify(write_checkpoint(tmp_path, {"n_positions": 1})).ok


def _loaded_with(change: Callable[[GPT2], object]) -> Callable[..., GPT2]:
    def load(*args: object, **options: object) -> GPT2:
        model = load_model(*args, **options)
        change(model)
        return model

    return load


def _transpose_a_square(model: GPT2) -> None:
    weight = model.h[1].attn.c_proj.weight
    weight.copy_(weight.t().clone())


def _lower_epsilons(model: GPT2) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6


def _scale_by_head_dim(model: GPT2) -> None:
    for block in model.h:
        block.attn.scale = 1 / block.attn.head_dim


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (_transpose_a_square, "block 1"),
        (_lower_epsilons, "attention map 0"),
        (_scale_by_head_dim, "attention map 0"),
    ],
)
def test_a_fault_in_the_model_is_found_and_named(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[GPT2], object], stage: str
) -> None:
    monkeypatch.setattr(gpt2attn.verify, "load_model", _loaded_with(change))
    _assert_first_difference(verify(tiny_folder, quick=True), stage, OBSERVED)


def test_the_erf_gelu_is_found(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(activations.ACTIVATION_FUNCTIONS, "gelu_new", F.gelu)
    _assert_first_difference(verify(tiny_folder, quick=True), "block 0", OBSERVED)


def test_a_mask_off_by_one_is_found(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_many(n_query: int, n_key: int, device: object = "cpu") -> Tensor:
        return torch.ones(n_query, n_key, dtype=torch.bool).tril(n_key - n_query + 1)

    monkeypatch.setattr(gpt2attn.model, "causal_mask", one_too_many)
    row = _assert_first_difference(verify(tiny_folder, quick=True), "attention map 0", OBSERVED)
    assert row.place["key"] <= row.place["query"] + 1


def test_positions_that_ignore_the_mask_are_found(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_column(self: GPT2, mask: Tensor | None, T: int, past: int) -> Tensor:
        return torch.arange(past, past + T)[None]

    monkeypatch.setattr(GPT2, "_positions", by_column)
    row = _assert_first_difference(verify(tiny_folder, quick=True), "embeddings", OBSERVED)
    assert row.case.startswith("3 x 8 left-padded")
    assert row.place["row"] > 0  # row 0 has no padding


def test_positions_that_ignore_the_cache_are_found(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GPT2._positions

    def from_zero(self: GPT2, mask: Tensor | None, T: int, past: int) -> Tensor:
        return (right(self, mask, T, past) - past).clamp(min=0)

    monkeypatch.setattr(GPT2, "_positions", from_zero)
    report = verify(tiny_folder, quick=True)
    _assert_first_difference(report, "decode logits", GENERATE)
    assert {row.stage for row in report.rows if not row.ok} >= {
        "greedy ids",
        "cached against uncached",
        "chunked prefill",
    }


def _assert_first_difference(report: Report, stage: str, pair: str) -> Row:
    row = report.first_difference
    assert not report.ok
    assert row is not None
    assert (row.stage, row.pair, row.verdict) == (stage, pair, DIFFERS)
    assert row.ours_to_float64 > 2 * row.theirs_to_float64
    assert stage in report.summary()
    return row


def test_the_same_function_rounded_otherwise_passes_but_is_not_called_equal(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(activations.ACTIVATION_FUNCTIONS, "gelu_new", activations.gelu_fast)
    report = verify(tiny_folder, quick=True)
    assert report.ok
    assert not report.bit_equal
    row = next(row for row in report.rows if row.stage == "block 0")
    assert row.verdict == ROUNDING
    assert 0 < row.ours_to_float64 < 1e-4
    assert "the others to rounding" in report.summary()


def test_another_transformers_version_is_judged_by_float64_only(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    report = verify(tiny_folder, quick=True)
    assert report.ok
    assert not report.bit_equality_claimed


def test_activations_that_overflow_are_no_match(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.bias"][0] = 3e38
    tensors["transformer.h.1.mlp.c_proj.weight"][0] = 1e30
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = verify(folder, quick=True)
    assert not report.ok
    row = report.first_difference
    assert (row.stage, row.note) == (
        "attention map 2",
        "not finite",
    )  # block 1 gives both sides infinity
    assert row.to_dict()["max_difference"] is None
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": False, "n_inner": 37, "activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ],
)
def test_other_settings_are_bit_equal(tmp_path: Path, config: dict[str, object]) -> None:
    report = verify(write_checkpoint(tmp_path, config, seed=1), quick=True)
    assert report.ok
    assert report.bit_equal


def test_bfloat16_is_judged_by_float64(tiny_folder: Path) -> None:
    report = verify(tiny_folder, quick=True, dtype=torch.bfloat16)
    assert report.ok
    assert not report.bit_equality_claimed
    assert report.stack["dtype"] == "bfloat16"


def test_missing_transformers_is_named_with_the_remedy(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(VerifyError, match=r'pip install "gpt2attn\[verify\]"'):
        verify(tiny_folder)


def test_a_folder_that_transformers_fills_with_random_numbers_is_no_reference(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(tiny_folder / "model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    load_model(tmp_path)
    with pytest.raises(VerifyError, match="fills in random numbers"):
        verify(tmp_path)


def test_a_folder_that_transformers_refuses_is_one_sentence(
    tiny_folder: Path, tmp_path: Path
) -> None:
    values = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "dtype": "no such type"}))
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes())
    load_model(tmp_path)
    with pytest.raises(VerifyError, match=r"transformers 5\.24\.\S+ cannot load"):
        verify(tmp_path)


def test_greedy_ids_may_part_only_at_a_near_tie() -> None:
    fed = Row("decode logits", GENERATE, "prompt", 1e-5, {"row": 0}, 0.0, 1e-5, 1e-5, 2e-5)
    logits = torch.tensor([[[0.0, 3.0, 1.0], [2.0, 2.0 - 1e-5, 0.0], [0.0, 0.0, 5.0]]])
    theirs = logits.argmax(dim=-1)
    near_tie, plain_fault = torch.tensor([[1, 1, 0]]), torch.tensor([[2, 0, 2]])
    compare = comparison._compared_ids
    assert compare("prompt", theirs, theirs, logits, fed).bit_equal
    row = compare("prompt", near_tie, theirs, logits, fed)
    assert (row.verdict, row.place) == (WITHIN, {"row": 0, "step": 1})
    row = compare("prompt", plain_fault, theirs, logits, fed)
    assert (row.verdict, row.place) == (DIFFERS, {"row": 0, "step": 0})
    assert (row.max_difference, row.note) == (2.0, "2 instead of 1")
    unexplained = dataclasses.replace(fed, limit=0.0)
    assert not compare("prompt", near_tie, theirs, logits, unexplained).ok


def test_a_difference_of_a_hundredth_is_never_called_equal() -> None:
    """D07."""
    ours, theirs = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    ours[0, 1, 2] = 0.01
    row = Row("logits", FUSED, "x", tolerance=1e-4)
    row = comparison._judged(row, ours, theirs, theirs.double())
    assert (row.verdict, row.place) == (DIFFERS, {"row": 0, "token": 1, "index": 2})
    assert row.max_difference == pytest.approx(0.01)


def test_distances_are_judged_over_all_cases_of_a_stage() -> None:
    lucky = Row("logits", FUSED, "1 x 1", 1e-6, {"row": 0}, 0.0, 2e-6, 5e-7, 1e-6)
    usual = Row("logits", FUSED, "3 x 64", 3e-6, {"row": 1}, 0.0, 3e-6, 3e-6, 6e-6)
    assert lucky.verdict == DIFFERS
    for merged in (lucky.merged(usual), usual.merged(lucky)):
        assert merged.verdict == ROUNDING
        assert (merged.case, merged.max_difference, merged.limit) == ("3 x 64", 3e-6, 6e-6)
    fault = Row("logits", FUSED, "3 x 8 left-padded", 1.0, {"row": 2}, 0.0, 1.0, 1e-6, 2e-6)
    assert usual.merged(fault).verdict == DIFFERS


def test_a_case_that_is_not_finite_outweighs_the_others() -> None:
    usual = Row("logits", FUSED, "1 x 6", 3e-6, {"row": 1}, 0.0, 3e-6, 3e-6, 6e-6)
    ours, theirs = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
    ours[0, 0, 1] = float("nan")
    row = comparison._judged(Row("logits", FUSED, "1 x 1"), ours, theirs, theirs.double())
    for merged in (usual.merged(row), row.merged(usual)):
        assert (merged.verdict, merged.note, merged.case) == (DIFFERS, "not finite", "1 x 1")


def test_verify_leaves_no_hooks_and_no_settings_behind(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    models: list[GPT2] = []
    monkeypatch.setattr(gpt2attn.verify, "load_model", _loaded_with(models.append))
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.is_grad_enabled())
    random_state = torch.get_rng_state()
    verify(tiny_folder, quick=True)
    after = (logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.is_grad_enabled())
    assert before == after
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in models[0].modules())


@pytest.mark.slow
@pytest.mark.usefixtures("all_threads")
def test_a_thousand_tokens_are_bit_equal(tmp_path: Path) -> None:
    # The width and context of GPT-2 small; its vocabulary would only make this slow.
    sizes = {"n_positions": 1024, "n_embd": 768, "n_head": 12, "n_layer": 2}
    report = verify(write_checkpoint(tmp_path, sizes, std=0.06))
    assert [case.length for case in report.cases].count(1000) == 2
    assert report.ok, report.summary()
    assert report.bit_equal, report.summary()
    maps, logits = (row for row in report.rows if row.pair == AUTO_EAGER)
    assert (maps.verdict, logits.verdict) == (WITHIN, ROUNDING)
    assert 0 < maps.max_difference <= 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize(
    ("size", "changes"), [("gpt2-medium", ONE_BLOCK), ("gpt2-xl", ONE_BLOCK), ("gpt2", {})]
)
def test_published_sizes_are_bit_equal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    random_checkpoint: Callable[..., Path],
    size: str,
    changes: dict[str, int],
) -> None:
    monkeypatch.setattr(comparison, "GREEDY_STEPS", 16)  # smaller models take all 64
    report = verify(random_checkpoint(size, tmp_path, **changes), quick=True)
    assert report.ok, report.summary()
    assert report.bit_equal, report.summary()
