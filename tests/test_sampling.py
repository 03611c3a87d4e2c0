"""Sampling rules on hand-made distributions, and against transformers' processors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from gpt2attn.sampling import (
    Sampling,
    ban,
    ban_words,
    choose,
    draw,
    generator_for,
    largest,
    logit_bias,
    min_new_tokens,
    min_p,
    new_seed,
    no_repeat_ngram,
    probabilities,
    process,
    repetition_penalty,
    top_k,
    top_p,
    typical_p,
)

PLAIN = Sampling(temperature=1.0, top_k=None)
GREEDY = Sampling(temperature=0)
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


class TestMinP:
    @pytest.mark.parametrize(
        ("p", "expected"),
        [(0, [0, 1, 2, 3]), (0.25, [0, 1, 2, 3]), (0.26, [0, 1]), (0.5, [0, 1]), (1, [0])],
    )
    def test_keeps_what_is_at_least_p_times_the_likeliest(self, p, expected):
        logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).double().log()
        assert kept(min_p(logits, p)) == expected
        assert kept(min_p(logits, None)) == [0, 1, 2, 3]

    def test_one_keeps_all_that_tie_for_the_first_place(self):
        assert kept(min_p(torch.tensor([1.0, 2.0, 2.0]), 1)) == [1, 2]


class TestTypicalP:
    # The entropy of (1/2, 1/4, 1/8, 1/8) is 1.75 bits; the surprises are 1, 2, 3 and 3 bits.
    @pytest.mark.parametrize(
        ("p", "expected"),
        [(0.1, [1]), (0.3, [0, 1]), (0.7, [0, 1]), (0.8, [0, 1, 2, 3]), (1, [0, 1, 2, 3])],
    )
    def test_keeps_the_most_typical_first_and_ties_together(self, p, expected):
        assert kept(typical_p(LOGITS, p)) == expected
        assert kept(typical_p(LOGITS, None)) == [0, 1, 2, 3]

    def test_one_possible_token_stays(self):
        assert kept(typical_p(torch.tensor([-math.inf, 3.0]), 0.2)) == [1]


class TestRepetitionPenalty:
    def test_d51_positive_divided_negative_multiplied_each_id_once(self):
        logits = torch.tensor([1.0, 4.0, -4.0, 0.0])
        assert repetition_penalty(logits, [1, 2, 2], 2.0).tolist() == [1, 2, -8, 0]
        assert logits.tolist() == [1, 4, -4, 0]

    def test_d51_one_and_an_empty_history_change_nothing(self):
        assert repetition_penalty(LOGITS, [1, 2], 1.0) is LOGITS
        assert repetition_penalty(LOGITS, [], 2.0) is LOGITS

    def test_an_impossible_token_stays_impossible(self):
        logits = torch.tensor([-math.inf, 0.0])
        assert repetition_penalty(logits, [0, 1], 0.5).tolist() == [-math.inf, 0]


class TestNoRepeatNgram:
    @pytest.mark.parametrize(
        ("size", "history", "banned"),
        [
            (0, [1, 1], []),
            (1, [], []),
            (1, [3, 0, 3], [0, 3]),
            (2, [1], []),
            (2, [1, 1], [1]),
            (2, [1, 2, 1, 3, 1], [2, 3]),
            (3, [1, 2, 3, 1, 2], [3]),
            (3, [1, 2, 3, 2, 1], []),
            (4, [1, 2, 3], []),
        ],
    )
    def test_no_ngram_comes_twice(self, size, history, banned):
        logits = no_repeat_ngram(torch.zeros(5), history, size)
        assert sorted(set(range(5)) - set(kept(logits))) == banned


class TestBans:
    @pytest.mark.parametrize(
        ("history", "banned"),
        [([], [4]), ([0], [1, 4]), ([2, 0], [1, 3, 4]), ([0, 2], [4]), ([0, 2, 0], [1, 3, 4])],
    )
    def test_a_word_is_stopped_at_its_last_id(self, history, banned):
        logits = ban_words(torch.zeros(6), history, [[4], [0, 1], [2, 0, 3]])
        assert sorted(set(range(6)) - set(kept(logits))) == banned

    def test_banned_ids_and_biases(self):
        assert kept(ban(torch.zeros(4), [1, 3, 1])) == [0, 2]
        assert logit_bias(torch.zeros(3), [(1, -math.inf), (2, 1.5)]).tolist() == [
            0,
            -math.inf,
            1.5,
        ]

    def test_d55_end_of_text_is_impossible_for_exactly_the_first_new_tokens(self):
        for n_new, possible in ((0, [0, 2]), (2, [0, 2]), (3, [0, 1, 2]), (9, [0, 1, 2])):
            logits = min_new_tokens(torch.zeros(3), n_new, 3, end_ids=[1, 50256, -1])
            assert kept(logits) == possible

    def test_a_rule_that_leaves_nothing_is_an_error(self):
        with pytest.raises(ValueError, match="The rules leave no token"):
            probabilities(LOGITS, Sampling(banned_ids=range(4)))
        with pytest.raises(ValueError, match="The rules leave no token"):
            choose(LOGITS, Sampling(0, no_repeat_ngram_size=1), None, history=[3, 1, 0, 2])


def rows():
    """Logits of several shapes: smooth, with many ties, with impossible tokens, nearly one-hot."""

    def row(size, seed, kind):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(size, generator=generator, dtype=torch.float64) * 3
        if kind == "ties":
            logits = logits.round()
        if kind == "impossible":
            logits[torch.rand(size, generator=generator) < 0.5] = -math.inf
            logits[int(torch.randint(size, (), generator=generator))] = 1.0
        if kind == "one-hot":
            logits[int(torch.randint(size, (), generator=generator))] = 1e3
        return logits

    return st.builds(
        row,
        st.integers(1, 40),
        st.integers(0, 2**32 - 1),
        st.sampled_from(["smooth", "ties", "impossible", "one-hot"]),
    )


# Not hypothesis' own floats: it likes 0.5 and 1/3, where rounding alone decides on which side of a
# cut the tied tokens of a row fall.
def shares():
    return st.integers(0, 2**32 - 1).map(lambda seed: 0.01 + 0.98 * random_share(seed))


def random_share(seed):
    return float(torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def theirs(warper, logits, history=()):
    return warper(torch.tensor([list(history)], dtype=torch.long), logits[None])[0]


class TestFiltersAgainstTransformers:
    @given(logits=rows(), k=st.integers(1, 45))
    def test_top_k(self, logits, k):
        ours, expected = top_k(logits, k), theirs(TopKLogitsWarper(k), logits)
        order = np.lexsort((np.arange(len(logits)), -logits.numpy()))[:k]
        possible = [int(id) for id in order if logits[id] > -math.inf]
        assert kept(ours) == sorted(possible)
        # Transformers keeps all that tie with the k-th.
        tied = (expected == logits[order[-1]]) & (ours == -math.inf)
        assert torch.equal(ours, expected.masked_fill(tied, -math.inf))

    @given(logits=rows(), p=shares())
    def test_top_p(self, logits, p):
        ours, expected = top_p(logits, p), theirs(TopPLogitsWarper(p), logits)
        # Of ties at the cut transformers keeps any: the values are the same, not always the ids.
        assert torch.equal(ours.sort().values, expected.sort().values)
        for id in kept(ours):
            assert not any(logits[:id][ours[:id] == -math.inf] == logits[id])

    @given(logits=rows(), p=shares())
    def test_min_p(self, logits, p):
        assert torch.equal(min_p(logits, p), theirs(MinPLogitsWarper(p), logits))

    @given(logits=rows(), p=shares())
    def test_typical_p(self, logits, p):
        assert torch.equal(typical_p(logits, p), theirs(TypicalLogitsWarper(p), logits))


HISTORIES = st.lists(st.integers(0, 5), max_size=12)


class TestProcessorsAgainstTransformers:
    """Rows of at least 6 ids; transformers needs a history for none but a repetition penalty."""

    @given(logits=rows(), history=HISTORIES, penalty=st.floats(0.1, 10))
    def test_repetition_penalty(self, logits, history, penalty):
        logits = torch.cat([logits, torch.arange(-3.0, 3.0).double()])
        expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), logits, history)
        assert torch.equal(repetition_penalty(logits, history, penalty), expected)

    @given(history=HISTORIES, size=st.integers(1, 5))
    def test_no_repeat_ngram(self, history, size):
        expected = theirs(NoRepeatNGramLogitsProcessor(size), torch.zeros(6), history)
        assert torch.equal(no_repeat_ngram(torch.zeros(6), history, size), expected)

    @given(
        history=HISTORIES,
        words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5),
    )
    def test_ban_words(self, history, words):
        expected = theirs(NoBadWordsLogitsProcessor(words), torch.zeros(6), history)
        assert torch.equal(ban_words(torch.zeros(6), history, words), expected)

    @given(
        ids=st.lists(st.integers(0, 5), min_size=1),
        biases=st.dictionaries(st.integers(0, 5), st.floats(-50, 50, width=32), min_size=1),
    )
    def test_ban_and_logit_bias(self, ids, biases):
        logits = torch.arange(6.0)
        expected = theirs(SuppressTokensLogitsProcessor(ids), logits)
        assert torch.equal(ban(logits, ids), expected)
        expected = theirs(SequenceBiasLogitsProcessor({(i,): b for i, b in biases.items()}), logits)
        assert torch.equal(logit_bias(logits, tuple(biases.items())), expected)

    @given(history=HISTORIES, minimum=st.integers(0, 8), n_prompt=st.integers(0, 12))
    def test_min_new_tokens(self, history, minimum, n_prompt):
        n_prompt = min(n_prompt, len(history))
        processor = MinNewTokensLengthLogitsProcessor(n_prompt, minimum, [2, 4])
        expected = theirs(processor, torch.zeros(6), history)
        ours = min_new_tokens(torch.zeros(6), len(history) - n_prompt, minimum, [2, 4])
        assert torch.equal(ours, expected)


@given(
    logits=rows(),
    temperature=st.floats(0.05, 5),
    k=st.integers(1, 70),
    p=st.tuples(shares(), shares(), shares()),
    penalty=st.floats(0.5, 2),
    history=HISTORIES,
)
def test_the_whole_chain_is_transformers_in_its_order(logits, temperature, k, p, penalty, history):
    # One draw of noise on top, so that no token sits on a cut.
    noise = torch.rand(len(logits) + 6, generator=torch.Generator().manual_seed(k)).double()
    logits = torch.cat([logits, torch.zeros(6).double()]) + noise
    n_prompt = len(history) // 2
    expected = logits
    for processor in (
        SequenceBiasLogitsProcessor({(1,): -2.0, (3,): 4.5}),
        RepetitionPenaltyLogitsProcessor(penalty),
        NoRepeatNGramLogitsProcessor(3),
        NoBadWordsLogitsProcessor([[2], [0, 4]]),
        MinNewTokensLengthLogitsProcessor(n_prompt, 2, [5]),
        SuppressTokensLogitsProcessor([1]),
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(k),
        TopPLogitsWarper(p[0]),
        MinPLogitsWarper(p[1] / 4),
        TypicalLogitsWarper(p[2]),
    ):
        expected = theirs(processor, expected, history)
    sampling = Sampling(
        temperature,
        k,
        p[0],
        min_p=p[1] / 4,
        typical_p=p[2],
        repetition_penalty=penalty,
        no_repeat_ngram_size=3,
        min_new_tokens=2,
        banned_ids=[1],
        banned_words=[[2], [0, 4]],
        logit_bias={1: -2.0, 3: 4.5},
    )
    context = {"history": history, "n_new": len(history) - n_prompt, "end_ids": [5]}
    ours = probabilities(logits, sampling, **context)
    # Both in float64, summed in another order.
    torch.testing.assert_close(ours, expected.softmax(0), rtol=1e-9, atol=1e-12)
    id = choose(logits, sampling, generator_for(k), **context)
    assert expected[id] > -math.inf


def test_a_greedy_choice_obeys_the_processors_and_no_filter():
    logits = torch.tensor([3.0, 2.0, 1.0, 2.0])
    assert choose(logits, Sampling(0, banned_ids=[0]), None) == 1
    assert choose(logits, Sampling(0, repetition_penalty=2.0), None, history=[0, 1]) == 3
    sampling = Sampling(0, 1, 0.1, min_p=1, typical_p=0.1, min_new_tokens=1)
    assert choose(logits, sampling, None, n_new=0, end_ids=[0]) == 1
    assert choose(logits, sampling, None, n_new=1, end_ids=[0]) == 0


def test_processing_keeps_the_dtype_and_the_logits_that_came_in():
    logits = torch.arange(4.0)
    sampling = Sampling(repetition_penalty=2.0, logit_bias={0: 1}, banned_ids=[1])
    assert process(logits, sampling, history=[3]).tolist() == [1, -math.inf, 2, 1.5]
    assert process(logits, sampling, history=[3]).dtype == torch.float32
    assert logits.tolist() == [0, 1, 2, 3]


@given(logits=rows(), k=st.integers(1, 45))
def test_largest_first_and_of_ties_the_lowest_place(logits, k):
    order = np.lexsort((np.arange(len(logits)), -logits.numpy()))
    assert largest(logits, k).tolist() == order[:k].tolist()


def test_settings_are_values():
    ids = [1, 2]
    sampling = Sampling(banned_ids=ids, banned_words=[ids], logit_bias={7: -1})
    ids.append(3)
    assert (sampling.banned_ids, sampling.banned_words) == ((1, 2), ((1, 2),))
    assert sampling == Sampling(banned_ids=(1, 2), banned_words=[(1, 2)], logit_bias=[(7, -1)])
    assert hash(sampling) != hash(PLAIN)


@pytest.mark.parametrize(
    ("sampling", "has_processors", "needs_history"),
    [
        (Sampling(0.5, 3, 0.5, min_p=0.1, typical_p=0.5), False, False),
        (Sampling(min_new_tokens=1), True, False),
        (Sampling(banned_ids=[1]), True, False),
        (Sampling(banned_words=[[1]]), True, False),
        (Sampling(logit_bias={1: 1}), True, False),
        (Sampling(banned_words=[[1, 2]]), True, True),
        (Sampling(repetition_penalty=1.1), True, True),
        (Sampling(no_repeat_ngram_size=2), True, True),
    ],
)
def test_what_a_setting_costs(sampling, has_processors, needs_history):
    assert (sampling.has_processors, sampling.needs_history) == (has_processors, needs_history)


def test_what_does_not_fit_the_model_is_refused():
    for sampling in (
        Sampling(banned_ids=[3, 4]),
        Sampling(banned_words=[[0], [4, 1]]),
        Sampling(logit_bias={4: 1}),
    ):
        with pytest.raises(ValueError, match=r"Token id 4 is banned or biased.*0 to 3"):
            sampling.check(4, 10)
        with pytest.raises(ValueError, match="0 to 3"):
            probabilities(LOGITS, sampling)
        sampling.check(5, 10)
    Sampling(min_new_tokens=10).check(4, 10)
    with pytest.raises(ValueError, match="min_new_tokens is 11, more than max_new_tokens, 10"):
        Sampling(min_new_tokens=11).check(4, 10)


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
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"typical_p": 0},
        {"typical_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": None},
        {"no_repeat_ngram_size": -1},
        {"no_repeat_ngram_size": 1.5},
        {"min_new_tokens": -1},
        {"min_new_tokens": True},
        {"banned_ids": "word"},
        {"banned_ids": 3},
        {"banned_ids": [-1]},
        {"banned_ids": [1.0]},
        {"banned_words": "word"},
        {"banned_words": ["word"]},
        {"banned_words": [3]},
        {"banned_words": [[]]},
        {"banned_words": [[1, -1]]},
        {"logit_bias": [1]},
        {"logit_bias": 3},
    ],
)
def test_values_out_of_range_are_refused_by_name(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Sampling(**arguments)


@pytest.mark.parametrize("biases", [{-1: 1.0}, {1: math.nan}, {1: math.inf}, {1: "x"}, {"a": 1}])
def test_a_bias_that_is_none_is_refused(biases):
    with pytest.raises(ValueError, match=r"^logit_bias must give token ids"):
        Sampling(logit_bias=biases)


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
    with pytest.raises(ValueError, match="allow no token"):
        choose(torch.tensor(logits), GREEDY, None)


def test_one_row_at_a_time():
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        probabilities(LOGITS.repeat(2, 1), PLAIN)
    with pytest.raises(ValueError, match=r"\(0,\)"):
        probabilities(LOGITS[:0], PLAIN)


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
    runs = [
        [choose(logits, PLAIN, generator) for _ in range(20)]
        for generator in (generator_for(0), generator_for(0), generator_for(1))
    ]
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
