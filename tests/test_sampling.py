"""Sampling rules on hand-made distributions, and against transformers' processors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpt2attn.sampling import (
    Sampling,
    choose,
    draw,
    generator_for,
    new_seed,
    probabilities,
    top_k,
    top_p,
)

PLAIN = Sampling(temperature=1.0, top_k=None)
LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


def kept(logits):
    return (logits > -math.inf).nonzero().squeeze(1).tolist()


class TestTemperature:
    def test_one_is_the_softmax(self):
        torch.testing.assert_close(
            probabilities(LOGITS, PLAIN), torch.tensor([0.5, 0.25, 0.125, 0.125]).double()
        )

    def test_zero_is_greedy_and_ties_go_to_the_lowest_id(self):
        logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
        assert probabilities(logits, Sampling(temperature=0)).tolist() == [0, 1, 0, 0]

    @pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
    def test_d53_a_tiny_one_stays_finite_and_is_greedy(self, temperature):
        row = probabilities(torch.randn(50) * 9, Sampling(temperature=temperature, top_k=None))
        assert row.isfinite().all()
        assert row.max() == 1

    def test_a_high_one_flattens(self):
        row = probabilities(LOGITS, Sampling(temperature=1e9, top_k=None))
        torch.testing.assert_close(row, torch.full((4,), 0.25).double(), rtol=0, atol=1e-8)


class TestTopK:
    @pytest.mark.parametrize(
        ("k", "expected"),
        [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3])],
    )
    def test_keeps_the_largest_and_of_ties_the_lowest_ids(self, k, expected):
        assert kept(top_k(LOGITS, k)) == expected

    @pytest.mark.parametrize("k", [0, None, 64, 65, 1000])
    def test_d52_zero_none_and_the_whole_vocabulary_keep_all(self, k):
        logits = torch.randn(64)
        assert torch.equal(top_k(logits, k), logits)

    def test_ties_at_the_edge(self):
        logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0])
        assert kept(top_k(logits, 3)) == [1, 2, 4]


class TestTopP:
    @pytest.mark.parametrize(
        ("p", "expected"),
        [
            (1e-6, [0]),
            (0.4, [0]),
            (0.5, [0]),  # reached exactly: the next one is not needed
            (0.51, [0, 1]),
            (0.75, [0, 1]),
            (0.76, [0, 1, 2]),  # of two equal ones the lower id
            (0.9, [0, 1, 2, 3]),
            (1.0, [0, 1, 2, 3]),
            (None, [0, 1, 2, 3]),
        ],
    )
    def test_keeps_the_smallest_set_that_reaches_p(self, p, expected):
        assert kept(top_p(LOGITS.double(), p)) == expected

    def test_after_top_k_it_counts_what_is_left(self):
        row = probabilities(LOGITS, Sampling(temperature=1.0, top_k=2, top_p=0.67))
        torch.testing.assert_close(row[:2].float(), torch.tensor([2 / 3, 1 / 3]))
        row = probabilities(LOGITS, Sampling(temperature=1.0, top_k=2, top_p=0.66))
        assert row.tolist() == [1, 0, 0, 0]


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.05, 5),
    k=st.integers(1, 70),
    p=st.floats(0.01, 0.999),
)
def test_equal_to_transformers_warpers(seed, temperature, k, p):
    logits = torch.randn(64, generator=torch.Generator().manual_seed(seed)).double() * 3
    theirs = logits[None]
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(k), TopPLogitsWarper(p)):
        theirs = warper(None, theirs)
    ours = probabilities(logits, Sampling(temperature, k, p))
    # Both in float64; a token sits within 1e-12 of the cut about never.
    torch.testing.assert_close(ours, theirs[0].softmax(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "0.9"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"top_p": "0.9"},
    ],
)
def test_values_out_of_range_are_refused_by_name(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Sampling(**arguments)


@pytest.mark.parametrize(
    "logits",
    [
        [math.nan, 1.0],
        [-math.inf, -math.inf],
        [math.inf, 1.0],
    ],
)
def test_rows_that_allow_no_token_are_refused(logits):
    with pytest.raises(ValueError, match="allow no token"):
        probabilities(torch.tensor(logits), PLAIN)


def test_one_row_at_a_time():
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        probabilities(LOGITS.repeat(2, 1), PLAIN)


@given(seed=st.integers(0, 2**63))
def test_an_id_of_probability_zero_is_never_drawn(seed):
    chances = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).double()
    assert draw(chances, generator_for(seed)) in (1, 3)


def test_draws_follow_the_probabilities():
    generator, chances = generator_for(7), LOGITS.exp().double()
    counts = torch.zeros(4)
    for _ in range(8000):
        counts[draw(chances, generator)] += 1
    # Four standard deviations of a share of 8,000 draws are at most 0.0224.
    torch.testing.assert_close(counts / 8000, chances.float(), rtol=0, atol=0.0224)


def test_d54_seeds_are_private_and_repeatable():
    state = torch.random.get_rng_state()
    logits = torch.randn(50, generator=generator_for(1))
    runs = [[choose(logits, PLAIN, generator) for _ in range(20)]
            for generator in (generator_for(0), generator_for(0), generator_for(1))]
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert 0 <= new_seed() < 2**32
    assert generator_for(-1).initial_seed() == 2**64 - 1
    with pytest.raises(ValueError, match="seed must be a whole number"):
        generator_for(1.5)


def test_a_greedy_choice_uses_up_no_random_number():
    generator = generator_for(3)
    before = generator.get_state()
    choose(LOGITS, Sampling(temperature=0), generator)
    assert torch.equal(generator.get_state(), before)
