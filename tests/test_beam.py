"""Beam search against transformers' generate, against brute force, and its limits."""

import math

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel

from gpt2attn import KVCache, load_model
from gpt2attn.beam import beam_search
from gpt2attn.generation import END_OF_TEXT, LENGTH_LIMIT, MAX_NEW_TOKENS
from gpt2attn.hub import BUILT_IN
from gpt2attn.sampling import Sampling, choose

V = TINY["vocab_size"]
# Transformers adds log-probabilities in float32, and logits of several rows round differently from
# those of one; measured up to 4e-6 of the score.
SCORE = {"rel": 2e-5, "abs": 2e-5}
PROCESSORS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "min_new_tokens": 5},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "banned_words": [[3], [5, 7]]},
    {"min_new_tokens": 8},
    {"banned_ids": [5, 8], "logit_bias": {4: 1.5, 7: -2.0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("wide"), {"n_positions": 64})


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def hf_model(folder):
    return GPT2LMHeadModel.from_pretrained(folder)


def prompt(length, seed=0, size=V - 1):
    return torch.randint(size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def hf_generate(hf_model, ids, max_new_tokens, end_ids=(), **options):
    """Ours to its names: of one id, its bias on sequences is a bias on logits."""
    names = {"banned_words": "bad_words_ids", "banned_ids": "suppress_tokens"}
    options = {names.get(name, name): value for name, value in options.items()}
    if "logit_bias" in options:
        biases = options.pop("logit_bias")
        options["sequence_bias"] = {(id,): bias for id, bias in biases.items()}
    return hf_model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


def new_ids(sequence, n_prompt, end_ids):
    """The new ids of one of transformers' rows, without end-of-text and the padding behind it."""
    ids = sequence[n_prompt:].tolist()
    return ids[: next((place for place, id in enumerate(ids) if id in end_ids), len(ids))]


def assert_as_transformers(
    model, hf_model, ids, max_new_tokens, *, n_beams, end_ids=(), processors=None, **options
):
    processors = processors or {}
    expected = hf_generate(
        hf_model,
        ids,
        max_new_tokens,
        end_ids,
        num_beams=n_beams,
        num_return_sequences=n_beams,
        **options,
        **processors,
    )
    beams = beam_search(
        model,
        ids,
        max_new_tokens,
        n_beams=n_beams,
        n_best=n_beams,
        end_ids=end_ids,
        sampling=Sampling(0, **processors),
        **options,
    )
    assert [beam.ids for beam in beams] == [
        new_ids(row, len(ids), end_ids) for row in expected.sequences
    ]
    scores = expected.sequences_scores.tolist()
    assert [beam.score for beam in beams] == pytest.approx(scores, **SCORE)
    return beams


def common_id(model, ids):
    """An id that comes up early in these continuations, so that a text can end there."""
    (beam,) = beam_search(model, ids, 6, n_beams=2)
    return beam.ids[3]


class TestAgainstTransformers:
    @pytest.mark.parametrize("n_beams", [2, 5])
    @pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize("early_stopping", [False, True, "never"])
    def test_ids_and_scores_with_texts_that_end_early(
        self, model, hf_model, n_beams, length_penalty, early_stopping
    ):
        ids = prompt(5)
        beams = assert_as_transformers(
            model,
            hf_model,
            ids,
            25,
            n_beams=n_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            end_ids=[common_id(model, ids)],
        )
        if length_penalty < 2:  # at 2 the longest texts win
            assert END_OF_TEXT in {beam.finish_reason for beam in beams}

    # The same examples every time: of random ones some would hold two beams that only rounding
    # tells apart.
    @settings(deadline=None, max_examples=25, derandomize=True)
    @given(
        length=st.integers(1, 20),
        seed=st.integers(0, 10_000),
        n_beams=st.integers(2, 5),
        max_new_tokens=st.integers(8, 30),
        length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
        n_end=st.integers(0, 2),
        processors=st.sampled_from(PROCESSORS),
    )
    def test_random_settings(self, model, hf_model, length, seed, n_end, **options):
        ids = prompt(length, seed)
        end_ids = sorted({common_id(model, ids), seed % V})[:n_end]
        # Transformers drops a ban of end-of-text.
        end_ids = [id for id in end_ids if id not in (3, 5, 8)]
        assert_as_transformers(model, hf_model, ids, end_ids=end_ids, **options)

    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("seed", range(3))
    def test_greedy_choices_with_processors(self, model, hf_model, processors, seed):
        ids = prompt(6, seed)
        end_ids = [common_id(model, ids)]
        expected = hf_generate(hf_model, ids, 25, end_ids, **processors).sequences[0]
        assert greedy(model, ids, 25, end_ids, processors) == new_ids(expected, 6, end_ids)


def greedy(model, ids, max_new_tokens, end_ids, processors):
    sampling, cache, history = Sampling(0, **processors), KVCache.for_model(model), list(ids)
    for n_new in range(max_new_tokens):
        with torch.no_grad():
            logits = model([history[cache.length :]], cache=cache)[0, -1]
        id = choose(logits, sampling, None, history=history, n_new=n_new, end_ids=end_ids)
        if id in end_ids:
            break
        history.append(id)
    return history[len(ids) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "pocket"])
def test_full_size(name, random_checkpoint, tmp_path):
    folder = BUILT_IN.get(name) or random_checkpoint(name, tmp_path)
    model, hf_model = (
        load_model(folder),
        GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32),
    )
    ids, end_ids = prompt(20, size=50_256), [50256]
    processors = {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
        "banned_words": [[262], [13, 198]],
        "banned_ids": [11, 198],
        "logit_bias": {290: 1.5, 318: -2.0},
    }
    for rules, n_beams in (({}, 2), ({}, 5), (processors, 5)):
        assert_as_transformers(
            model, hf_model, ids, 10, n_beams=n_beams, end_ids=end_ids, processors=rules
        )
    for rules in ({}, processors):
        expected = hf_generate(hf_model, ids, 10, end_ids, **rules).sequences[0]
        assert greedy(model, ids, 10, end_ids, rules) == new_ids(expected, 20, end_ids)


def test_as_many_beams_as_the_vocabulary_find_the_best_of_all_continuations(model):
    ids = prompt(4)
    with torch.no_grad():
        first = model([ids])[0, -1].double().log_softmax(0)
        rows = [[*ids, id] for id in range(V)]
        second = model(rows)[:, -1].double().log_softmax(1)
    totals, places = (first[:, None] + second).flatten().topk(10)
    beams = beam_search(model, ids, 2, n_beams=V, n_best=10)
    assert [beam.ids for beam in beams] == [list(divmod(int(place), V)) for place in places]
    assert [beam.score for beam in beams] == pytest.approx((totals / 2).tolist(), abs=1e-4)


def test_a_score_is_the_mean_log_probability_of_the_tokens(model):
    ids = prompt(7)
    for beam in beam_search(model, ids, 12, n_beams=4, n_best=4):
        with torch.no_grad():
            logprobs = model([ids + beam.ids])[0, 6:-1].double().log_softmax(1)
        chosen = logprobs.gather(1, torch.tensor(beam.ids)[:, None]).squeeze(1)
        assert beam.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
        assert beam.score == pytest.approx(sum(beam.logprobs) / 12)
        assert beam.finish_reason == MAX_NEW_TOKENS


def test_equal_scores_go_to_the_lowest_ids(wide_hf_model, tmp_path):
    blank = wide_hf_model(std=0.0)
    blank.save_pretrained(tmp_path)
    beams = beam_search(load_model(tmp_path), [1], 2, n_beams=3, n_best=3)
    assert [beam.ids for beam in beams] == [[0, 0], [0, 1], [0, 2]]
    assert [beam.score for beam in beams] == pytest.approx([-math.log(V)] * 3)


class TestLimits:
    def test_d04_a_text_that_fills_the_context_ends_there(self, model):
        beams = beam_search(model, prompt(60), 100, n_beams=3, n_best=2)
        assert [(len(beam.ids), beam.finish_reason) for beam in beams] == [(4, LENGTH_LIMIT)] * 2
        assert beams[0].ids == beam_search(model, prompt(60), 4, n_beams=3)[0].ids
        (beam,) = beam_search(model, prompt(64), 4, n_beams=3, n_best=2)
        assert (beam.ids, beam.score, beam.finish_reason) == ([], 0.0, LENGTH_LIMIT)
        (beam,) = beam_search(model, prompt(3), 0, n_beams=2)
        assert (beam.ids, beam.finish_reason) == ([], MAX_NEW_TOKENS)

    def test_no_more_beams_than_the_rules_allow(self, model):
        two_ids = Sampling(0, banned_ids=[id for id in range(V) if id not in (8, 9)])
        beams = beam_search(model, prompt(3), 1, n_beams=5, n_best=5, sampling=two_ids)
        assert sorted(beam.ids for beam in beams) == [[8], [9]]
        beams = beam_search(model, prompt(3), 2, n_beams=5, n_best=5, sampling=two_ids)
        assert sorted(beam.ids for beam in beams) == [[8, 8], [8, 9], [9, 8], [9, 9]]

    def test_texts_that_cannot_go_on_are_dropped(self, model):
        allowed = {8, 9, 10}
        once = Sampling(
            0, no_repeat_ngram_size=1, banned_ids=[id for id in range(V) if id not in allowed]
        )
        beams = beam_search(model, [1], 9, n_beams=4, n_best=4, end_ids=[8], sampling=once)
        assert {beam.finish_reason for beam in beams} == {END_OF_TEXT}
        assert all(set(beam.ids) <= {9, 10} for beam in beams)
        with pytest.raises(ValueError, match="The rules leave no token"):
            beam_search(model, [1], 9, n_beams=4, sampling=once)

    def test_logits_that_are_no_numbers_are_an_error(self, folder):
        broken = load_model(folder)
        broken.ln_f.bias.data[0] = math.nan
        with pytest.raises(ValueError, match="allow no token"):
            beam_search(broken, [1], 5, n_beams=2)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"n_beams": 1}, r"n_beams must be a whole number from 2 up \(one beam is greedy"),
            ({"n_beams": 2.0}, "n_beams must be a whole number"),
            ({"n_best": 0}, "n_best must be a whole number from 1 up, not 0"),
            ({"n_best": 4}, "n_best is 4, more than n_beams, 3"),
            ({"length_penalty": math.nan}, "length_penalty must be a number from -10 to 10"),
            ({"length_penalty": "1"}, "length_penalty must be a number"),
            ({"early_stopping": "always"}, "True, False or \"never\", not 'always'"),
            ({"sampling": Sampling()}, "temperature must be 0, not 0.8"),
            ({"sampling": Sampling(0, min_new_tokens=6)}, "more than max_new_tokens, 5"),
            ({"sampling": Sampling(0, banned_ids=[V])}, "outside the vocabulary"),
            ({"max_new_tokens": -1}, "max_new_tokens must be a whole number"),
            ({"ids": [V]}, "outside the vocabulary"),
            ({"ids": []}, "no token ids"),
            ({"ids": [1] * 65}, "65 tokens.*64 positions"),
            ({"ids": [[1], [2]]}, "continues one row of ids, not 2"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_any_compute(self, model, options, message):
        arguments = {"ids": [1, 2], "max_new_tokens": 5, "n_beams": 3, **options}
        with pytest.raises(ValueError, match=message):
            beam_search(model, **arguments)
