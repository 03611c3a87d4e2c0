"""Prompt lookup: the ids of plain decoding, in fewer passes where the text repeats itself."""

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from gpt2attn import generate, load_model
from gpt2attn.generation import Row, decode
from gpt2attn.kernels.formats import STORED
from gpt2attn.lookup import LONGEST_GUESS, SUFFIX, Lookup
from gpt2attn.sampling import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("lookup"), {"n_positions": 96})


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, kernels="auto")


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A model whose every layer adds nothing, so that the likeliest next token is the last one."""
    model = load_model(
        write_checkpoint(tmp_path_factory.mktemp("echo"), {"n_positions": 96}), kernels="auto"
    )
    for block in model.h:
        for part in (block.attn.c_proj, block.mlp.c_proj):
            part.weight.data.zero_()
            part.bias.data.zero_()
    model.wpe.weight.data.zero_()
    model.ln_f.weight.data.fill_(1)
    model.ln_f.bias.data.zero_()
    # Rows of one length around the mean 0: no other row is nearer to the last one than itself.
    rows = torch.randn(
        TINY["vocab_size"], TINY["n_embd"], generator=torch.Generator().manual_seed(0)
    )
    rows -= rows.mean(1, keepdim=True)
    model.wte.weight.data.copy_(rows / rows.norm(dim=1, keepdim=True))
    return model


def n_passes(model, monkeypatch, *arguments, **options):
    """How often the blocks run, and the ids."""
    calls = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda *a, **k: calls.append(1) or hidden(*a, **k))
    ids = list(generate(model, *arguments, **options))
    monkeypatch.undo()
    return len(calls), ids


PROMPTS = {"repeats itself": [5, 6, 7, 8] * 5, "does not": list(range(20)), "short": [3]}


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.4, "top_k": 3}])
def test_the_ids_are_those_of_plain_decoding(folder, dtype, prompt, sampling):
    model = load_model(folder, kernels="auto", dtype=dtype)
    for seed in range(3):
        options = {"seed": seed, **sampling}
        plain = list(generate(model, prompt, 70, **options))
        assert list(generate(model, prompt, 70, lookup=True, **options)) == plain


def test_rules_that_read_the_text_and_both_ends_are_the_same(model):
    prompt = [5, 6, 7, 8] * 5
    for options in (
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "max_new_tokens": 30},
        {"max_new_tokens": 300},  # ends at the length limit
        {"max_new_tokens": 1},
        {"max_new_tokens": 0},
    ):
        rows = []
        for lookup in (False, True):
            most = options.get("max_new_tokens", 40)
            rules = {name: v for name, v in options.items() if name != "max_new_tokens"}
            row = Row(prompt, Sampling(temperature=0.5, **rules), 3, n_top=2)
            for _ in decode(model, [row], most, lookup=lookup):
                pass
            rows.append((row.ids, row.logprobs, row.top, row.finish_reason))
        assert rows[0] == rows[1]
    plain = list(generate(model, prompt, 40, temperature=0))
    stopped = list(generate(model, prompt, 40, temperature=0, stop_id=plain[9], lookup=True))
    assert stopped == plain[: plain.index(plain[9])]


def test_a_repetition_takes_few_passes(echo, monkeypatch):
    prompt = [9, 4, 4, 4, 4]
    plain = n_passes(echo, monkeypatch, prompt, 80, temperature=0)
    guessed = n_passes(echo, monkeypatch, prompt, 80, temperature=0, lookup=True)
    assert plain == (80, [4] * 80)
    # The prompt, then guesses of 4, 8, 15, 15 and so on, each with one token more.
    assert guessed == (1 + 1 + 1 + -(-(80 - 1 - 5 - 9) // (LONGEST_GUESS + 1)), [4] * 80)


def test_what_it_does_not_go_with_is_told(folder, model):
    with pytest.raises(ValueError, match='kernels="auto"'):
        generate(load_model(folder, kernels="torch"), [1, 2], 3, lookup=True)
    rows = [Row([1, 2], Sampling(), 0), Row([3], Sampling(), 0)]
    with pytest.raises(ValueError, match="one text at a time"):
        decode(model, rows, 3, lookup=True)
    for options in ({"overflow": "slide"}, {"use_cache": False}, {"observe": lambda *_: None}):
        with pytest.raises(ValueError, match="one text at a time"):
            generate(model, [1, 2], 3, lookup=True, **options)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 20))
def test_a_guess_is_what_followed_last(ids, at_most):
    """Against a search of the whole text."""
    guess = Lookup(ids).guess(at_most)
    places = [
        end
        for end in range(SUFFIX, len(ids))
        if ids[end - SUFFIX : end] == ids[len(ids) - SUFFIX :]
    ]
    if not places:
        assert guess == []
        return
    text = list(ids)
    for place in range(places[-1], places[-1] + min(4, at_most)):
        text.append(text[place])
    assert guess == text[len(ids) :]


def test_a_wrong_guess_makes_the_next_one_shorter():
    lookup = Lookup([1, 2, 3] * 10)
    lookup.learn(4, 4)
    assert len(lookup.guess(99)) == 8
    lookup.learn(8, 2)
    assert len(lookup.guess(99)) == 3
    lookup.learn(0, 0)
    assert len(lookup.guess(99)) == 3
    lookup.learn(3, 0)
    assert len(lookup.guess(99)) == 2
