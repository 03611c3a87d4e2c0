"""Streams, steps and sessions: the text of a run, piece by piece and turn by turn."""

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint

import gpt2attn
from gpt2attn import LanguageModel, Tokenizer, generation, load_model
from gpt2attn.text_generation import INTERRUPTED

SMILE = [47249, 222]  # 😀, one character in two tokens
END = 50256


@pytest.fixture(scope="module")
def lm():
    return gpt2attn.load("pocket", device="cpu")


@pytest.fixture(scope="module")
def tiny_lm(tiny_folder):
    return LanguageModel(load_model(tiny_folder), Tokenizer.gpt2())


@pytest.fixture
def script(monkeypatch):
    """A function that makes every row choose the given ids, one after the other."""

    def choose_these(ids):
        def scripted(logits, sampling, generator, *, n_new, **context):
            return ids[n_new]

        monkeypatch.setattr(generation, "choose", scripted)

    return choose_these


def test_rows_that_no_token_owns_are_not_chosen(tmp_path):
    lm = LanguageModel(
        load_model(write_checkpoint(tmp_path, {"vocab_size": 50304})), Tokenizer.gpt2()
    )
    lm.model.wte.weight.data[50257:] *= 50  # now some of them are the likeliest after any token
    assert int(lm.model.last_logits([lm.encode("Hello")]).argmax()) > END
    drawn = lm.generate(["Hello", "And"], 6, seed=1, temperature=3.0, banned_ids=[0])
    greedy = lm.generate("Hello", 6, temperature=0, top_logprobs=2)
    beams = lm.beam_search("Hello", 6, num_beams=2, num_return=2)
    for result in (*drawn, greedy, *beams):
        assert result.ids
        assert all(0 < id <= END for id in result.ids)
        assert result.text == lm.tokenizer.decode(result.ids)
    assert greedy.top_logprobs[0][0][0] > END  # the model's own, as every log-probability is


class TestSteps:
    def test_ids_texts_logprobs_and_alternatives(self, lm):
        stream = lm.stream("Once upon a time", 12, seed=1, top_logprobs=3)
        steps = list(stream.steps())
        result = stream.generation
        assert [step.id for step in steps] == result.ids
        assert "".join(step.text for step in steps) == result.text
        assert [step.logprob for step in steps] == result.logprobs
        assert [step.top_logprobs for step in steps] == result.top_logprobs
        with torch.no_grad():
            logits = lm.model([result.prompt_ids + result.ids])[0, 3:-1].double()
        expected = logits.log_softmax(1).topk(3)
        for step, ids, values in zip(steps, expected.indices, expected.values, strict=True):
            assert [id for id, _ in step.top_logprobs] == ids.tolist()
            logprobs = [logprob for _, logprob in step.top_logprobs]
            assert logprobs == pytest.approx(values.tolist(), abs=1e-4)  # cached rounding

    def test_pieces_and_steps_are_one_iteration(self, lm):
        stream = lm.stream("Once upon a time", 8, temperature=0)
        first = next(stream)
        second = next(stream.steps())
        rest = "".join(stream)
        assert first + second.text + rest == stream.generation.text
        assert stream.generation.top_logprobs is None
        assert second.top_logprobs == []

    def test_streaming_changes_nothing(self, lm):
        for options in ({"temperature": 0}, {"seed": 3, "top_p": 0.9}):
            stream = lm.stream("The king", 15, **options)
            assert "".join(stream) == lm.generate("The king", 15, **options).text
            assert stream.generation.ids == lm.generate("The king", 15, **options).ids

    @pytest.mark.parametrize("bad", [-1, 1.5, True, None])
    def test_a_number_of_alternatives_that_is_none_is_refused(self, lm, bad):
        with pytest.raises(ValueError, match="top_logprobs must be a whole number from 0 up"):
            lm.stream("a", 3, top_logprobs=bad)


class TestCharactersAndStops:
    def test_complete_characters_come_at_once_and_halves_never(self, lm, script):
        script([*SMILE, *lm.encode(" é"), 64])
        stream = lm.stream("a", 4)
        assert [step.text for step in stream.steps()] == ["", "😀", " é", "a"]

    def test_half_a_character_at_the_end_is_as_in_a_full_decode(self, lm, script):
        script([64, SMILE[0], END])
        stream = lm.stream("a", 2)
        assert [step.text for step in stream.steps()] == ["a", "\ufffd"]
        # Ended by the model instead, no token is left to carry it.
        stream = lm.stream("a", 9)
        steps = list(stream.steps())
        assert [(step.id, step.text) for step in steps] == [
            (64, "a"),
            (SMILE[0], ""),
            (None, "\ufffd"),
        ]
        assert steps[-1].logprob is None
        assert stream.generation.text == lm.tokenizer.decode([64, SMILE[0]])
        assert stream.generation.finish_reason == "end of text"

    def test_nothing_of_a_stop_string_is_in_a_step(self, lm, script):
        script(lm.encode(" a S") + lm.encode("TO") + lm.encode("P b"))
        stream = lm.stream("x", 9, stop=["STOP"])
        steps = list(stream.steps())
        assert "".join(step.text for step in steps) == " a "
        assert stream.generation.stop_string == "STOP"
        script([*lm.encode(" a S"), *lm.encode("TO"), END])
        steps = list(lm.stream("x", 9, stop=["STOP"]).steps())
        assert (steps[-1].id, steps[-1].text) == (None, "STO")


class TestSession:
    def test_turns_equal_runs_over_the_whole_text(self, lm):
        session = lm.session("Once upon a time", seed=5)
        ids = lm.encode("Once upon a time")
        for turn, (line, n_new) in enumerate([("", 6), (" and then", 4), ("", 5), ("\nThe", 7)]):
            session.append(line)
            ids += lm.encode(line)
            expected = lm.generate(ids, n_new, seed=5 + turn)
            assert "".join(session.stream(n_new)) == expected.text
            ids += expected.ids
            assert session.ids == ids
        assert session.text == lm.tokenizer.decode(ids)

    def test_only_what_is_new_is_computed(self, lm, monkeypatch):
        widths = []
        hidden = type(lm.model).hidden

        def counted(self, ids, **options):
            widths.append(len(ids[0]))
            return hidden(self, ids, **options)

        monkeypatch.setattr(type(lm.model), "hidden", counted)
        session = lm.session("Once upon a time", temperature=0)
        for line in ("", " and then", ""):
            session.append(line)
            list(session.stream(3))
        # Four tokens; the last one of the turn before and two; that one alone.
        assert widths == [4, 1, 1, 3, 1, 1, 1, 1, 1]

    def test_a_stop_string_is_no_part_of_the_text(self, lm):
        text = lm.generate("Once upon a time", 20, temperature=0).text
        stop = text[9:14]
        session = lm.session("Once upon a time", temperature=0, stop=stop)
        stream = session.stream(20)
        assert "".join(stream) == text[: text.index(stop)]
        assert session.text == "Once upon a time" + text[: text.index(stop)]
        session.append("!")
        again = lm.generate(session.ids, 5, temperature=0, stop=stop)
        assert "".join(session.stream(5)) == again.text

    def test_a_turn_that_is_left_counts_as_far_as_it_came(self, lm):
        session = lm.session("Once upon a time", seed=2)
        stream = session.stream(20)
        steps = [next(stream.steps()) for _ in range(3)]
        assert session.ids[4:] == [step.id for step in steps]
        assert list(stream) == []
        assert stream.generation.finish_reason == INTERRUPTED
        expected = lm.generate(session.ids, 5, seed=3)
        assert "".join(session.stream(5)) == expected.text

    def test_end_of_text_ends_the_turn_only(self, lm, script):
        session = lm.session("a")
        script([64, END])
        assert "".join(session.stream(9)) == "a"
        script([65, 66, END])
        assert "".join(session.stream(9)) == "bc"
        assert session.text == "aabc"

    def test_a_full_context_stops_and_takes_no_more(self, tiny_lm):
        session = tiny_lm.session([5] * 13, seed=1)
        stream = session.stream(20)
        list(stream)
        assert (len(stream.generation.ids), stream.generation.finish_reason) == (3, "length limit")
        with pytest.raises(ValueError, match=r"16 tokens and would get 2 more.*overflow slide"):
            session.append([1, 2])
        assert len(session.ids) == 16
        assert list(session.stream(5)) == []

    def test_a_sliding_text_equals_a_naive_loop(self, tiny_lm):
        session = tiny_lm.session([5, 6, 7], temperature=0, overflow="slide")
        text, start = [5, 6, 7], 0
        # Lines that fit beside what is cached, that make the window overflow, and one that alone
        # is longer than the context.
        for line, n_new in (([], 4), ([1, 2], 30), ([3] * 9, 5), ([4] * 20, 12), ([], 3)):
            session.append(line)
            text += line
            start = max(start, len(text) - 16)
            for _ in range(n_new):
                if len(text) - start > 16:
                    start = len(text) - 8
                with torch.no_grad():
                    text.append(int(tiny_lm.model([text[start:]])[0, -1].argmax()))
            list(session.stream(n_new))
            assert session.ids == text

    def test_a_stop_string_may_begin_before_the_window_it_ends_in(self, tiny_lm):
        plain = tiny_lm.generate([5, 6, 7], 20, temperature=0, overflow="slide")
        session = tiny_lm.session([5, 6, 7], temperature=0, overflow="slide", stop=plain.text[3:15])
        list(session.stream(20))  # its 15th token is chosen in the window from token 9 on
        assert session.ids == [5, 6, 7, *plain.ids[:3]]
        list(session.stream(8))
        assert session.ids == [5, 6, 7, *plain.ids[:11]]

    def test_an_empty_text_cannot_go_on(self, lm):
        session = lm.session()
        with pytest.raises(ValueError, match="The prompt is empty"):
            session.stream(3)
        session.append("Once")
        assert len(list(session.stream(3).steps())) == 3


def test_progress_counts_every_new_token(lm):
    counts = []
    results = lm.generate(["Once", "The king said"], 7, seed=1, progress=counts.append)
    assert sum(counts) == sum(len(result.ids) for result in results)
    assert len(counts) == 7


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda ids: list(np.array(ids))])
def test_ids_may_be_arrays_and_tensors(lm, kind):
    ids = [464, 3290]
    result = lm.generate(kind(ids), 2, temperature=0)
    assert result == lm.generate(ids, 2, temperature=0, seed=result.seed)
    assert {type(id) for id in result.prompt_ids} == {int}
    assert lm.attention(kind(ids)).ids == [ids]
    assert lm.score(kind(ids)).ids == ids
    (one,) = lm.generate(kind([ids]), 2, temperature=0, seed=result.seed)
    assert one == result


@pytest.mark.parametrize("prompt", [b"bytes", None, 5, {"text": "one"}])
@pytest.mark.parametrize("name", ["generate", "stream", "session", "attention", "score"])
def test_what_is_neither_text_nor_ids_is_refused(lm, name, prompt):
    kind = type(prompt).__name__
    with pytest.raises(ValueError, match=f"A prompt is text or token ids, not {kind}"):
        getattr(lm, name)(prompt)
