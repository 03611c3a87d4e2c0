"""The decode loop against transformers' generate and against itself without a cache."""

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from transformers import GPT2LMHeadModel

from gpt2attn import generate, load_model
from gpt2attn.generation import (
    END_OF_TEXT,
    LENGTH_LIMIT,
    MAX_NEW_TOKENS,
    Row,
    StopStrings,
    decode,
)
from gpt2attn.sampling import Sampling

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("wide"), {"n_positions": 64})


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"] - 1, (length,), generator=generator).tolist()


def run(model, rows, max_new_tokens=20, **options):
    for _ in decode(model, rows, max_new_tokens, **options):
        pass
    return rows


@pytest.mark.parametrize("length", [1, 5, 20])
def test_greedy_ids_are_transformers_generate(folder, model, length):
    theirs = GPT2LMHeadModel.from_pretrained(folder)
    ids = torch.tensor([prompt(length)])
    expected = theirs.generate(
        ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(generate(model, ids, 40, temperature=0)) == expected[0, length:].tolist()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_cache_changes_nothing(model, temperature):
    for seed in range(5):
        ids = prompt(7, seed)
        runs = [
            list(generate(model, ids, 30, temperature=temperature, seed=seed, use_cache=use_cache))
            for use_cache in (True, False)
        ]
        assert runs[0] == runs[1]
        assert len(runs[0]) == 30


def test_the_first_step_takes_the_logits_of_forward(model):
    ids = prompt(9)
    (first,) = generate(model, ids, 1, temperature=0)
    assert first == int(model([ids])[0, -1].argmax())


def test_logprobs_are_of_the_unfiltered_softmax(model):
    row = Row(prompt(5), Sampling(temperature=0.5, top_k=3), seed=1)
    run(model, [row], 6)
    logits = model([row.prompt_ids + row.ids])[0, 4:-1].double()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None]).squeeze(1)
    # Cached against uncached rounding.
    torch.testing.assert_close(torch.tensor(row.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_d04_prompt_and_new_tokens_fill_the_context_exactly(model):
    (row,) = run(model, [Row(prompt(60), GREEDY, 0)], 100)
    assert (len(row.ids), row.finish_reason) == (4, LENGTH_LIMIT)
    (row,) = run(model, [Row(prompt(60), GREEDY, 0)], 4)
    assert (len(row.ids), row.finish_reason) == (4, MAX_NEW_TOKENS)
    (row,) = run(model, [Row(prompt(64), GREEDY, 0)], 4)
    assert (row.ids, row.finish_reason) == ([], LENGTH_LIMIT)
    (row,) = run(model, [Row(prompt(3), GREEDY, 0)], 0)
    assert (row.ids, row.finish_reason) == ([], MAX_NEW_TOKENS)


def test_bad_calls_fail_at_once_and_leave_the_model_usable(model):
    with pytest.raises(ValueError, match=r"65 tokens \(and 5 new ones.*64 positions"):
        generate(model, prompt(65), 5)
    with pytest.raises(ValueError, match="Prompt 1 is empty"):
        decode(model, [Row([1], GREEDY, 0), Row([], GREEDY, 0)])
    with pytest.raises(ValueError, match="no token ids"):
        generate(model, [])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        decode(model, [Row([67], GREEDY, 0)])
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="max_new_tokens must be a whole number"):
            generate(model, [1], bad)
    with pytest.raises(ValueError, match="continues one row of ids, not 2"):
        generate(model, [[1, 4], [2, 3]])
    with pytest.raises(TypeError, match="unexpected keyword"):
        generate(model, [1], attention_mask=None)
    assert len(list(generate(model, [1], 3))) == 3


def test_stop_id_ends_the_text_and_is_not_part_of_it(model):
    ids = list(generate(model, prompt(5), 20, temperature=0))
    stop = ids[4]
    assert (
        list(generate(model, prompt(5), 20, temperature=0, stop_id=stop)) == ids[: ids.index(stop)]
    )
    (row,) = run(model, [Row(prompt(5), GREEDY, 0)], stop_ids=[stop, 0])
    assert row.finish_reason == END_OF_TEXT
    assert row.ids == ids[: min(ids.index(id) for id in (stop, 0) if id in ids)]


class TestBatches:
    def test_rows_of_unequal_length_are_as_alone(self, model):
        lengths = [12, 1, 7, 12]
        together = run(model, [Row(prompt(n, n), GREEDY, 0) for n in lengths])
        for row, n in zip(together, lengths, strict=True):
            (alone,) = run(model, [Row(prompt(n, n), GREEDY, 0)])
            assert row.ids == alone.ids
            # Batched products round otherwise than single ones.
            torch.testing.assert_close(
                torch.tensor(row.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-4
            )

    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 20, repetition_penalty=1.2)])
    def test_16_unequal_prompts_equal_16_single_runs(self, model, sampling):
        lengths = [*range(1, 13), 40, 50, 60, 64]
        prompts = [prompt(length, length) for length in lengths]
        rows = [Row(ids, sampling, seed) for seed, ids in enumerate(prompts)]
        run(model, rows, 25, stop_ids=[10, 20, 30])
        for seed, (row, ids) in enumerate(zip(rows, prompts, strict=True)):
            (alone,) = run(model, [Row(ids, sampling, seed)], 25, stop_ids=[10, 20, 30])
            assert (row.ids, row.finish_reason) == (alone.ids, alone.finish_reason)
            # Batched products round otherwise than single ones.
            assert row.logprobs == pytest.approx(alone.logprobs, rel=0, abs=1e-4)
        assert {row.finish_reason for row in rows} == {END_OF_TEXT, MAX_NEW_TOKENS, LENGTH_LIMIT}

    def test_d11_each_row_ends_on_its_own(self, model):
        alone = [run(model, [Row(prompt(n, n), GREEDY, 0)])[0].ids for n in (5, 9)]
        stop = alone[0][2]
        rows = run(model, [Row(prompt(n, n), GREEDY, 0) for n in (5, 9)], stop_ids=[stop])
        for row, ids in zip(rows, alone, strict=True):
            expected = ids[: ids.index(stop)] if stop in ids else ids
            assert row.ids == expected
            assert len(row.logprobs) == len(row.ids)
        assert rows[0].finish_reason == END_OF_TEXT
        assert len(rows[1].ids) > len(rows[0].ids)

    def test_rows_near_the_limit_end_there_while_others_go_on(self, model):
        rows = run(model, [Row(prompt(62), GREEDY, 0), Row(prompt(3), GREEDY, 0)], 30)
        assert [len(row.ids) for row in rows] == [2, 30]
        assert [row.finish_reason for row in rows] == [LENGTH_LIMIT, MAX_NEW_TOKENS]

    def test_d54_a_row_depends_on_its_own_seed_only(self, model):
        sampling = Sampling(temperature=1.5, top_k=None)
        rows = run(model, [Row(prompt(4), sampling, seed) for seed in range(8)])
        assert len({tuple(row.ids) for row in rows}) == 8
        shuffled = run(model, [Row(prompt(4), sampling, seed) for seed in (5, 0, 3)])
        assert [row.ids for row in shuffled] == [rows[seed].ids for seed in (5, 0, 3)]

    def test_a_row_can_be_ended_from_outside(self, model):
        rows = [Row(prompt(4), GREEDY, 0), Row(prompt(6), GREEDY, 0)]
        for step, _ in enumerate(decode(model, rows, 10)):
            if step == 2:
                rows[0].finish_reason = "enough"
        assert [len(row.ids) for row in rows] == [3, 10]


def test_d54_the_global_generator_is_untouched(model):
    state = torch.random.get_rng_state()
    first = list(generate(model, [1], 10, seed=0))
    assert list(generate(model, [1], 10, seed=0)) == first
    assert torch.equal(torch.random.get_rng_state(), state)


def test_generation_leaves_gradient_mode_alone_between_steps(model):
    steps = generate(model, [1, 2], 5)
    next(steps)
    assert torch.is_grad_enabled()
    assert list(steps)


class TestStopStrings:
    def cut(self, stops, pieces):
        cutter = StopStrings(stops)
        out = [cutter.push(piece) for piece in pieces]
        return [*out, cutter.finish()], cutter.found

    @pytest.mark.parametrize(
        ("stops", "pieces", "expected", "found"),
        [
            (["STOP"], ["a S", "TO", "P b"], "a ", "STOP"),
            (["STOP"], ["xxST", "OPyy"], "xx", "STOP"),
            (["STOP"], ["a ST", "ART"], "a START", None),
            (["STOP"], ["STO", "STOP"], "STO", "STOP"),
            (["aab"], ["a", "a", "a", "b"], "a", "aab"),
            (["x"], ["abxcx"], "ab", "x"),
            (["bc", "abcd"], ["ab", "c", "d"], "a", "bc"),
            (["bc", "abcd"], ["abcd"], "", "abcd"),
            (["\n\n"], ["line\n", "\nmore"], "line", "\n\n"),
            ([], ["any", "thing"], "anything", None),
            (["é"], ["caf", "é!"], "caf", "é"),
        ],
    )
    def test_d56_text_is_cut_before_the_first_one(self, stops, pieces, expected, found):
        out, seen = self.cut(stops, pieces)
        assert "".join(out) == expected
        assert seen == found

    def test_d56_nothing_of_a_stop_leaks_and_failed_starts_are_released(self):
        out, _ = self.cut(["STOP"], ["a S", "TO", "Xb"])
        assert out == ["a ", "", "STOXb", ""]

    @pytest.mark.parametrize("bad", [[""], "", [3]])
    def test_d56_empty_ones_are_refused(self, bad):
        if bad == "":
            bad = [bad]
        with pytest.raises(ValueError, match="at least one character"):
            StopStrings(bad)

    def test_one_string_is_one_stop_not_its_letters(self):
        assert StopStrings("ab").push("xaybab") == "xayb"
        assert StopStrings(None).push("xaybab") == "xaybab"
