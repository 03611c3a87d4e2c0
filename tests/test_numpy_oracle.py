"""The model against a NumPy float64 forward pass that shares no line with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from checkpoints import TINY, write_checkpoint
from numpy_gpt2 import NumpyGPT2

from gpt2attn import GPT2, AttentionSteps, load_model

STEPS = ("q", "k", "v", "scores", "scaled", "masked", "weights", "output")


def random_ids(length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def compare(model: GPT2, oracle: NumpyGPT2, length: int, tolerance: float) -> None:
    """All steps of all layers, and the logits, to `tolerance` of the largest number of a kind."""
    ids = random_ids(length, model.config.vocab_size)
    expected_logits, layers = oracle(ids)
    seen: list[int] = []

    def check(layer: int, steps: AttentionSteps) -> None:
        seen.append(layer)
        for name in STEPS:
            assert_near(getattr(steps, name)[0], getattr(layers[layer], name), tolerance)
        concatenated = steps.output.transpose(1, 2).flatten(2)
        attention_output = model.h[layer].attn.c_proj(concatenated)[0]
        assert_near(attention_output, layers[layer].attention_output, tolerance)

    assert_near(model([ids], observe=check)[0], expected_logits, tolerance)
    assert seen == list(range(len(layers)))
    assert_near(model([ids])[0], expected_logits, tolerance)


def assert_near(values: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    assert values.shape == expected.shape
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(values.numpy()), finite)
    size = np.abs(expected[finite]).max()
    np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=tolerance * size)


# 24-bit rounding of sums of 32 and 768 products, carried through 3 and 12 layers: 2e-6 and 5e-6
# measured, so five times that.
@pytest.mark.parametrize("length", [1, 2, 6, 16])
def test_tiny_model_is_the_formulas(tiny_folder: Path, length: int) -> None:
    compare(load_model(tiny_folder), NumpyGPT2(tiny_folder), length, tolerance=1e-5)


def test_float64_model_is_the_formulas_to_the_last_digits(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, dtype=torch.float64)
    compare(model, NumpyGPT2(tiny_folder), 16, tolerance=1e-13)


@pytest.fixture(scope="module")
def full_size() -> Iterator[Path]:
    """GPT-2 small's sizes, 0.5 GB; q, k and v come out at about 1.7, as std x sqrt(768) is."""
    sizes = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    with TemporaryDirectory() as folder:
        yield write_checkpoint(
            Path(folder), {**sizes, "bos_token_id": 0, "eos_token_id": 0}, std=0.06
        )


@pytest.mark.slow
def test_full_size_model_is_the_formulas(full_size: Path) -> None:
    model, oracle = load_model(full_size), NumpyGPT2(full_size)
    for length in (6, 64):
        compare(model, oracle, length, tolerance=2e-5)


def test_oracle_tells_the_two_gelus_apart(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is tight enough to see a wrong formula: erf's GELU in place of tanh's."""
    oracle = NumpyGPT2(tiny_folder)
    ids = random_ids(6, TINY["vocab_size"])
    right, _ = oracle(ids)
    erf = torch.nn.functional.gelu
    monkeypatch.setattr("numpy_gpt2.gelu", lambda x: erf(torch.from_numpy(x)).numpy())
    wrong, _ = oracle(ids)
    assert np.abs(wrong - right).max() > 1e-4 * np.abs(right).max()
