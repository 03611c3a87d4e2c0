"""The five steps against NumPy in float64, and the mask's own rules."""

import numpy as np
import pytest
import torch

from gpt2attn.attention import attend, causal_mask

B, H, T, S, D = 2, 4, 3, 7, 5  # no two alike, so that no swap of axes can pass


def heads(seed, *shape, std=1.5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


@pytest.fixture
def qkv():
    return heads(0, B, H, T, D), heads(1, B, H, S, D), heads(2, B, H, S, D)


def numpy_steps(q, k, v, scale, allowed):
    q, k, v = (x.double().numpy() for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2)
    scaled = scores * scale
    masked = np.where(allowed.numpy(), scaled, -np.inf)
    exponentials = np.exp(masked - masked.max(-1, keepdims=True))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    return scores, scaled, masked, weights, weights @ v


def test_every_step_is_its_formula(qkv):
    allowed = causal_mask(T, S)
    steps = attend(*qkv, scale=D**-0.5, allowed=allowed)
    expected = numpy_steps(*qkv, D**-0.5, allowed)
    # float32 against float64 over sums of 5 and 7 terms of order 10: a few units of 1e-6.
    for name, value in zip(
        ("scores", "scaled", "masked", "weights", "output"), expected, strict=True
    ):
        np.testing.assert_allclose(getattr(steps, name).numpy(), value, rtol=1e-5, atol=1e-5)
    assert steps.weights.shape == (B, H, T, S)
    assert steps.output.shape == (B, H, T, D)


def test_upcast_puts_the_scale_into_a_float32_product(qkv):
    q, k, v = (x.bfloat16() for x in qkv)
    steps = attend(q, k, v, scale=0.3, allowed=causal_mask(T, S), upcast=True)
    assert steps.scores.dtype == steps.masked.dtype == torch.float32
    assert steps.weights.dtype == steps.output.dtype == torch.bfloat16
    expected = numpy_steps(q, k, v, 0.3, causal_mask(T, S))[2]
    np.testing.assert_allclose(steps.masked.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_causal_mask_aligns_its_triangle_to_the_last_key():
    mask = causal_mask(3, 5)
    assert mask.tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]


def test_rows_are_positive_and_sum_to_one(qkv):
    weights = attend(*qkv, scale=1.0, allowed=causal_mask(T, S)).weights
    assert (weights >= 0).all()
    # Seven roundings of numbers below 1.
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T), rtol=0, atol=1e-6)


def test_a_query_that_may_look_nowhere_gets_zeros_not_nan(qkv):
    allowed = causal_mask(T, S).clone()
    allowed[1] = False
    steps = attend(*qkv, scale=1.0, allowed=allowed)
    assert (steps.weights[:, :, 1] == 0).all()
    assert (steps.output[:, :, 1] == 0).all()
    assert steps.weights.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "factor"),
    # float16 ends at 65,504, so its largest scores are kept just below that.
    [(torch.float32, 60), (torch.bfloat16, 60), (torch.float16, 40)],
)
def test_d12_extreme_scores_leave_masked_weights_at_exactly_zero(qkv, dtype, factor):
    q, k, v = (x.to(dtype) for x in qkv)
    steps = attend(q * factor, k * factor, v, scale=1.0, allowed=causal_mask(T, S))
    assert steps.scores.abs().max() > 2e4
    assert (steps.weights.masked_select(~causal_mask(T, S)) == 0).all()
    assert not steps.weights.isnan().any()
