"""Texts that outgrow the context: refused, stopped, or carried on in windows."""

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2attn import AttentionMaps, KVCache, LanguageModel, generate, load_model
from gpt2attn.beam import beam_search
from gpt2attn.generation import END_OF_TEXT, LENGTH_LIMIT, MAX_NEW_TOKENS, Row, decode
from gpt2attn.sampling import Sampling, choose, generator_for
from gpt2attn.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
RULES = [
    GREEDY,
    Sampling(1.2, top_k=None),
    # Both read the whole text, far beyond a window.
    Sampling(0, repetition_penalty=1.5, no_repeat_ngram_size=3),
    Sampling(0.9, typical_p=0.9, banned_words=[[3, 4]]),
]
CLOSE = {"rtol": 0, "atol": 1e-4}  # cached and batched rounding; measured up to 4e-6


@pytest.fixture(scope="module", params=[1, 2, 5, 16], ids=lambda n: f"{n} positions")
def any_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("positions")
    return load_model(write_checkpoint(folder, {"n_positions": request.param}))


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder)


@pytest.fixture(scope="module")
def lm(model):
    return LanguageModel(model, Tokenizer.gpt2())


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"] - 1, (length,), generator=generator).tolist()


def run(model, rows, max_new_tokens, **options):
    for _ in decode(model, rows, max_new_tokens, **options):
        pass
    return rows


def naive(model, ids, max_new_tokens, sampling, seed, end_ids=()):
    """New ids, their log-probabilities and where the last window began, without any cache."""
    limit, text, generator, logprobs = model.config.n_positions, list(ids), generator_for(seed), []
    start = max(len(ids) - limit, 0)
    for n_new in range(max_new_tokens):
        if len(text) - start > limit:
            start = len(text) - (limit + 1) // 2
        with torch.no_grad():
            logits = model([text[start:]])[0, -1]
        id = choose(logits, sampling, generator, history=text, n_new=n_new, end_ids=end_ids)
        if id in end_ids:
            break
        logprobs.append(float(logits.double().log_softmax(0)[id]))
        text.append(id)
    return text[len(ids) :], logprobs, start


class TestSlide:
    @pytest.mark.parametrize("sampling", RULES)
    def test_40_new_tokens_at_16_positions_equal_a_naive_loop(self, model, sampling):
        for seed in range(2):
            for options in ({}, {"use_cache": False}, {"observe": lambda layer, steps: None}):
                (row,) = run(
                    model, [Row(prompt(5, seed), sampling, seed)], 40, overflow="slide", **options
                )
                ids, logprobs, start = naive(model, prompt(5, seed), 40, sampling, seed)
                assert (row.ids, row.start, row.finish_reason) == (ids, start, MAX_NEW_TOKENS)
                assert row.logprobs == pytest.approx(logprobs, rel=0, abs=1e-4)

    @settings(
        deadline=None,
        max_examples=6,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        lengths=st.lists(st.integers(1, 35), min_size=1, max_size=6),
        sampling=st.sampled_from(RULES),
        end_ids=st.sampled_from([(), (5,), (1, 2, 3, 4, 6, 7)]),
        is_observed=st.booleans(),
    )
    def test_each_row_of_a_batch_slides_on_its_own(
        self, any_model, lengths, sampling, end_ids, is_observed
    ):
        observe = (lambda layer, steps: None) if is_observed else None
        rows = [Row(prompt(n, i), sampling, i) for i, n in enumerate(lengths)]
        run(any_model, rows, 40, overflow="slide", stop_ids=end_ids, observe=observe)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            ids, logprobs, _ = naive(any_model, prompt(n, i), 40, sampling, i, end_ids)
            assert row.ids == ids
            assert row.logprobs == pytest.approx(logprobs, rel=0, abs=1e-4)
            ended = len(ids) < 40
            assert row.finish_reason == (END_OF_TEXT if ended else MAX_NEW_TOKENS)

    def test_nothing_changes_before_the_context_is_full(self, model):
        stopped = list(generate(model, prompt(5), 40, temperature=0))
        slid = list(generate(model, prompt(5), 40, temperature=0, overflow="slide"))
        assert len(stopped) == 11
        assert slid[: len(stopped)] == stopped
        assert len(slid) == 40

    def test_a_new_window_is_the_last_half_computed_afresh(self, model):
        """Its first forward pass holds all its tokens, so nothing cached is used in it."""
        sizes = []
        (row,) = run(
            model,
            [Row(prompt(12), GREEDY, 0)],
            15,
            overflow="slide",
            observe=lambda layer, steps: sizes.append(steps.weights.shape[2:]) if not layer else 0,
        )
        expected = [(12, 12), *((1, n) for n in (13, 14, 15, 16)), (8, 8)]
        expected += [*((1, n) for n in range(9, 17)), (8, 8)]
        assert [tuple(size) for size in sizes] == expected
        assert row.start == 12 + 14 - 8

    def test_of_a_long_prompt_the_last_context_counts(self, model):
        ids = prompt(50)
        (row,) = run(model, [Row(ids, GREEDY, 0)], 1, overflow="slide")
        (last,) = run(model, [Row(ids[-16:], GREEDY, 0)], 1, overflow="slide")
        assert row.ids == last.ids
        assert row.start == 34

    def test_memory_stays_that_of_one_context_and_a_quarter(self, model, monkeypatch):
        made = []
        for_model = KVCache.for_model.__func__

        def counted(cls, *arguments):
            made.append(for_model(cls, *arguments))
            return made[-1]

        monkeypatch.setattr(KVCache, "for_model", classmethod(counted))
        run(model, [Row(prompt(n), GREEDY, 0) for n in (3, 9, 14)], 200, overflow="slide")
        assert max(cache.max_len for cache in made) == 20


class TestMapsOfASlidingText:
    def test_they_are_those_of_the_last_window_and_say_where_it_begins(self, lm, tmp_path):
        result = lm.generate(
            prompt(5), 40, seed=1, overflow="slide", attention=True, layers=[0, 2], heads=[1]
        )
        maps = result.attention
        start = maps.metadata["window_start"]
        text = result.prompt_ids + result.ids
        assert start > 5
        assert maps.ids == [text[start:-1]]
        assert maps.prompt_lengths == [0]
        whole = lm.attention(text[start:-1], layers=[0, 2], heads=[1])
        torch.testing.assert_close(maps.weights, whole.weights, **CLOSE)
        maps.save(tmp_path / "maps.json")
        assert AttentionMaps.load(tmp_path / "maps.json") == maps

    def test_those_of_a_text_that_never_slid_begin_at_0(self, tiny_folder):
        lm = LanguageModel(load_model(tiny_folder, kernels="torch"), Tokenizer.gpt2())
        maps = lm.generate(prompt(5), 6, seed=1, overflow="slide", attention=True).attention
        assert (maps.metadata["window_start"], maps.prompt_lengths) == (0, [5])
        plain = lm.generate(prompt(5), 6, seed=1, attention=True).attention
        assert "window_start" not in plain.metadata
        assert torch.equal(maps.weights, plain.weights)

    def test_each_row_of_a_batch_has_its_own_window(self, lm):
        prompts = [prompt(n, n) for n in (3, 16, 30, 9)]
        results = lm.generate(prompts, 21, seed=1, overflow="slide", attention=True)
        for ids, result in zip(prompts, results, strict=True):
            maps, text = result.attention, ids + result.ids
            start = maps.metadata["window_start"]
            assert maps.ids == [text[start : start + len(maps.ids[0])]]
            assert maps.prompt_lengths == [max(len(ids) - start, 0)]
            whole = lm.attention(maps.ids[0])
            torch.testing.assert_close(maps.weights, whole.weights, **CLOSE)

    def test_rows_that_ended_keep_their_maps_while_others_slide(self, lm):
        alone = lm.generate(prompt(4), 12, temperature=0).text
        prompts = [prompt(4), prompt(7, 1)]
        results = lm.generate(
            prompts, 40, temperature=0, overflow="slide", stop=alone[2:8], attention=True
        )
        assert results[0].finish_reason == "stop string"
        assert len(results[1].ids) > len(results[0].ids) + 16
        for result in results:
            maps = result.attention
            torch.testing.assert_close(maps.weights, lm.attention(maps.ids[0]).weights, **CLOSE)
        assert results[0].attention.ids == [prompt(4) + results[0].ids[:-1]]

    def test_a_stream_shows_the_window_of_the_moment(self, lm):
        stream = lm.stream(prompt(14), 9, seed=1, overflow="slide", attention=True, layers=[0])
        seen = []
        for _ in stream.steps():
            maps = stream.attention
            seen.append((maps.metadata["window_start"], maps.weights.shape[-1]))
        # 16 positions: three choices, then the last 8 tokens, computed afresh.
        assert seen == [(0, 14), (0, 15), (0, 16), *((9, n) for n in range(8, 14))]


class TestErrorAndStop:
    @pytest.mark.parametrize(("length", "n_new"), [(10, 7), (16, 1), (15, 2), (17, 0), (3, 100)])
    def test_error_refuses_before_any_compute(self, model, monkeypatch, length, n_new):
        def fail(*arguments, **options):
            raise AssertionError("computed")

        with monkeypatch.context() as patch:
            patch.setattr(type(model), "hidden", fail)
            with pytest.raises(ValueError, match=rf"{length} tokens.*{n_new} new.*16 positions"):
                generate(model, prompt(length), n_new, overflow="error")
            rows = [Row([1], GREEDY, 0), Row(prompt(length), GREEDY, 0)]
            with pytest.raises(ValueError, match=r"Prompt \d has"):
                decode(model, rows, max(n_new, 1), overflow="error")
        assert len(list(generate(model, prompt(10), 6, overflow="error"))) == 6

    def test_what_fits_is_as_in_stop_mode(self, model):
        ids = [
            list(generate(model, prompt(10), 6, seed=1, overflow=overflow))
            for overflow in ("error", "stop", "slide")
        ]
        assert ids[0] == ids[1] == ids[2]

    def test_stop_ends_each_row_where_its_context_is_full(self, model):
        rows = run(model, [Row(prompt(n), GREEDY, 0) for n in (10, 16, 3)], 9, overflow="stop")
        assert [len(row.ids) for row in rows] == [6, 0, 9]
        assert [row.finish_reason for row in rows] == [LENGTH_LIMIT, LENGTH_LIMIT, MAX_NEW_TOKENS]
        assert len(list(generate(model, prompt(10), 6))) == 6

    def test_beams_stop_or_refuse_but_do_not_slide(self, model):
        (beam,) = beam_search(model, prompt(10), 9, n_beams=2)
        assert (len(beam.ids), beam.finish_reason) == (6, LENGTH_LIMIT)
        with pytest.raises(ValueError, match=r"10 tokens \(and 9 new ones.*ask for at most 6"):
            beam_search(model, prompt(10), 9, n_beams=2, overflow="error")
        with pytest.raises(ValueError, match="Beam search keeps to one window"):
            beam_search(model, prompt(10), 9, n_beams=2, overflow="slide")

    def test_another_word_is_refused(self, model):
        for bad in ("wrap", None):
            with pytest.raises(ValueError, match="overflow must be one of error, stop, slide"):
                generate(model, [1], 3, overflow=bad)


class TestFinishedRows:
    def test_they_are_no_longer_computed_once_they_are_half(self, model, monkeypatch):
        alone = list(generate(model, prompt(4), 10, temperature=0))
        batch_sizes = []
        hidden = type(model).hidden

        def counted(self, ids, **options):
            batch_sizes.append(len(ids))
            return hidden(self, ids, **options)

        monkeypatch.setattr(type(model), "hidden", counted)
        rows = [Row(prompt(4), GREEDY, 0), Row(prompt(3, 2), GREEDY, 0)]
        for step, _ in enumerate(decode(model, rows, 10)):
            if step == 1:
                rows[1].finish_reason = "enough"
        assert batch_sizes == [2, 2, *[1] * 8]
        assert rows[0].ids == alone
        assert len(rows[1].ids) == 2


class TestGivenCache:
    def test_what_it_holds_is_not_computed_again(self, model):
        ids = prompt(9)
        cache = KVCache.for_model(model)
        with torch.no_grad():
            model([ids[:6]], cache=cache)
        row = Row(ids, GREEDY, 0)
        next(decode(model, [row], 5, cache=cache))
        assert cache.length == 9
        assert row.ids == list(generate(model, ids, 1, temperature=0))

    def test_it_must_lack_the_last_token(self, model):
        cache = KVCache.for_model(model)
        with torch.no_grad():
            model([[1, 2]], cache=cache)
        for rows in ([Row([1, 2], GREEDY, 0)], [Row([1, 2, 3], GREEDY, 0)] * 2):
            with pytest.raises(ValueError, match="A cache goes with one row"):
                decode(model, rows, 5, cache=cache)
