"""Faults that users of GPT-2 programs have reported, D01 to D11 and D39 to D59, tried here.

A number stands for one kind of fault with its inputs and the right values. Those that a module's
own tests cover whole carry their number there; docs/field-reports.md lists all of them.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from cli_runner import run
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, GPT2TokenizerFast

import gpt2attn
from gpt2attn import (
    AttentionMaps,
    KVCache,
    LanguageModel,
    Tokenizer,
    attention_maps,
    generate,
    generation,
    load,
    load_model,
)
from gpt2attn.generation import END_OF_TEXT, LENGTH_LIMIT, Row, decode, left_padded
from gpt2attn.hub import BUILT_IN
from gpt2attn.sampling import Sampling, choose, generator_for, probabilities, top_k, top_p

V = TINY["vocab_size"]
GREEDY = Sampling(temperature=0)
CLOSE = {"rtol": 0, "atol": 1e-4}  # other shapes run other kernels; measured up to 4e-6


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder, kernels="torch")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """Of the same sizes, with 64 positions."""
    folder = write_checkpoint(tmp_path_factory.mktemp("long"), {"n_positions": 64})
    return load_model(folder, kernels="torch")


@pytest.fixture(scope="module")
def pocket():
    return load("pocket", device="cpu")


@pytest.fixture(scope="module")
def gpt2():
    return Tokenizer.gpt2()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny, but with GPT-2's vocabulary."""
    folder = tmp_path_factory.mktemp("words")
    write_checkpoint(folder, {"vocab_size": 50257, "n_positions": 64, "n_layer": 1})
    Tokenizer.gpt2().save(folder)
    return folder


@pytest.fixture
def script(monkeypatch):
    """A function that makes row i choose the ids of list i, one after the other."""

    def choose_these(*scripts):
        seeds = {}

        def scripted(logits, sampling, generator, *, n_new, **context):
            row = seeds.setdefault(generator.initial_seed(), len(seeds))
            return scripts[row][n_new]

        monkeypatch.setattr(generation, "choose", scripted)

    return choose_these


def prompt(length, seed=0, size=V - 1):
    return torch.randint(size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def finished(model, rows, max_new_tokens=20, **options):
    for _ in decode(model, rows, max_new_tokens, **options):
        pass
    return rows


def greedy(model, ids, max_new_tokens=20):
    return list(generate(model, ids, max_new_tokens, temperature=0))


def refused(result, *parts):
    """One sentence, status 2, no traceback."""
    assert result.status == 2, result
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


class TestMasksPositionsCacheBatches:
    @pytest.mark.parametrize("n_pads", range(1, 11))
    def test_d01_left_padding(self, long_model, n_pads):
        """Logits, maps and greedy text of each row are its own, whatever stands at the padding."""
        rows = [prompt(11, 1), prompt(11 - n_pads, 2)]
        ids, mask = left_padded(rows)
        padded = [ids.masked_fill(mask == 0, pad_id) for pad_id in (0, 7, 66)]
        logits = [long_model(each, attention_mask=mask) for each in padded]
        for other in logits[1:]:
            assert torch.equal(logits[0][mask.bool()], other[mask.bool()])
        maps = attention_maps(long_model, padded[1], attention_mask=mask)
        for i, row in enumerate(rows):
            torch.testing.assert_close(logits[0][i, -len(row) :], long_model([row])[0], **CLOSE)
            alone = attention_maps(long_model, [row])
            torch.testing.assert_close(maps[i].weights, alone.weights, rtol=0, atol=1e-5)
        together = finished(long_model, [Row(row, GREEDY, 0) for row in rows])
        assert [row.ids for row in together] == [greedy(long_model, row) for row in rows]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_d02_forward_and_generation_agree_on_padded_input(self, long_model, side):
        """Forward takes padding on either side; generation takes rows, and pads them itself."""
        prompts = [prompt(6, 1), prompt(3, 2)]
        ids, mask = left_padded(prompts)
        if side == "right":
            ids[1], mask[1] = ids[1].roll(3), mask[1].roll(3)
        logits = long_model(ids, attention_mask=mask).double().log_softmax(-1)
        rows = [Row(ids, GREEDY, 0, n_top=V) for ids in prompts]
        next(decode(long_model, rows))
        for row, row_logits, row_mask in zip(rows, logits, mask, strict=True):
            last = row_logits[row_mask.nonzero().max()]
            ours = torch.zeros(V, dtype=torch.float64)
            for id, logprob in row.top[0]:
                ours[id] = logprob
            torch.testing.assert_close(ours, last, **CLOSE)
        with pytest.raises(TypeError, match="attention_mask"):
            generate(long_model, ids[:1], attention_mask=mask[:1])

    def test_d04_running_past_n_positions(self, model):
        """Prompt and new tokens together may have n_positions, though the last one is never fed."""
        for length, n_new, n_got in ((15, 5, 1), (16, 5, 0), (10, 6, 6), (10, 7, 6), (10, 8, 6)):
            (row,) = finished(model, [Row(prompt(length), GREEDY, 0)], n_new)
            assert len(row.ids) == n_got
            assert (row.finish_reason == LENGTH_LIMIT) == (n_got < n_new)
            if n_got < n_new:
                with pytest.raises(ValueError, match=f"{length} tokens.*{n_new} new.*16 positions"):
                    generate(model, prompt(length), n_new, overflow="error")
            slid = list(generate(model, prompt(length), n_new, temperature=0, overflow="slide"))
            assert len(slid) == n_new
            assert slid[:n_got] == row.ids
        with pytest.raises(ValueError, match=r"17 tokens.*16 positions"):
            generate(model, prompt(17), 1)
        with pytest.raises(ValueError, match="17 positions, but this model has 16"):
            model([prompt(17)])
        assert len(greedy(model, prompt(3), 5)) == 5

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    def test_d04_on_a_gpu_an_error_leaves_it_usable(self, tiny_folder):
        model = load_model(tiny_folder, device="cuda")
        with pytest.raises(ValueError, match="17 tokens"):
            generate(model, prompt(17), 1)
        with pytest.raises(ValueError, match="17 positions"):
            model([prompt(17)])
        assert len(greedy(model, prompt(10), 6)) == 6

    def test_d05_no_token_sees_the_future(self, model, tmp_path):
        single = load_model(write_checkpoint(tmp_path, {"n_positions": 1}))
        assert single([[5]]).shape == (1, 1, V)
        with pytest.raises(ValueError, match="2 positions, but this model has 1"):
            single([[5, 6]])
        for n in range(1, 17):
            ids = prompt(n)
            assert (attention_maps(model, [ids]).weights.triu(1) == 0).all()
            other = [*ids[:-1], (ids[-1] + 1) % V]
            for observe in (None, lambda layer, steps: None):
                logits = model([ids], observe=observe), model([other], observe=observe)
                assert torch.equal(logits[0][:, :-1], logits[1][:, :-1])

    def test_d06_rows_that_may_look_at_nothing(self, model, tmp_path):
        ids, mask = left_padded([prompt(6), prompt(2, 1)])
        logits = model(ids, attention_mask=mask)
        maps = attention_maps(model, ids, attention_mask=mask, stages=("weights", "masked"))
        assert logits.isfinite().all()
        assert maps.weights.isfinite().all()
        assert not maps.stage("masked").isnan().any()
        torch.testing.assert_close(logits[1, 4:], model([prompt(2, 1)])[0], **CLOSE)
        for suffix in ("json", "csv", "npz", "safetensors"):
            maps.save(tmp_path / f"maps.{suffix}")
            assert AttentionMaps.load(tmp_path / f"maps.{suffix}") == maps
        for all_pads in (torch.tensor([[0] * 6, [1] * 6]), torch.zeros(2, 6)):
            with pytest.raises(ValueError, match="row 0 is all padding"):
                model(ids, attention_mask=all_pads)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"),
        # bfloat16 has 8 bits: logits of about 10 are rounded to 1/32 at each of some 40 places.
        [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 1.0)],
    )
    def test_d07_with_and_without_a_cache(self, tiny_folder, dtype, tolerance):
        """50 prompts, alone and four together; a greedy choice differs at near ties only."""
        model = load_model(tiny_folder, dtype=dtype, kernels="torch")
        for seed in range(50):
            n_rows = (1, 4)[seed % 2]
            ids = torch.tensor([prompt(6, 10 * seed + row) for row in range(n_rows)])
            cache = KVCache.for_model(model, n_rows)
            with torch.no_grad():
                cached = torch.cat([model(part, cache=cache) for part in ids.split(1, 1)], 1)
                whole = model(ids)
            torch.testing.assert_close(cached, whole, rtol=0, atol=tolerance)
            margin = whole.double().topk(2).values.diff().abs().squeeze(-1)
            differ = cached.argmax(-1) != whole.argmax(-1)
            assert (margin[differ] < 2 * tolerance).all()

    def test_d08_streaming_gives_the_same_ids(self, pocket):
        for options in ({"temperature": 0}, {"seed": 4}):
            stream = pocket.stream("The king", 12, **options)
            ids = [step.id for step in stream.steps()]
            for _ in range(2):
                assert pocket.generate("The king", 12, **options).ids == ids
        rows = finished(pocket.model, [Row(pocket.encode("The king"), GREEDY, 0)] * 1, 12)
        uncached = generate(
            pocket.model, pocket.encode("The king"), 12, temperature=0, use_cache=False
        )
        assert rows[0].ids == list(uncached)

    def test_d11_finished_rows(self, long_model, gpt2):
        """Row 0 ends after 2 tokens, row 1 after 8; what is fed later shows nowhere."""
        prompts = next(
            pair
            for pair in ([prompt(6, seed), prompt(4, seed + 50)] for seed in range(50))
            if len(set(greedy(long_model, pair[0], 3))) == 3
            and greedy(long_model, pair[0], 3)[2] not in greedy(long_model, pair[1], 8)
        )
        alone = [greedy(long_model, ids, 9) for ids in prompts]
        ends = (alone[0][2], next(id for id in alone[1][8:]))
        config = dataclasses.replace(long_model.config, eos_token_id=list(ends))
        ending = load_model_like(long_model, config)
        lm = LanguageModel(ending, gpt2)
        results = lm.generate(prompts, 30, temperature=0, attention=True)
        singles = [lm.generate(ids, 30, temperature=0, attention=True) for ids in prompts]
        for result, single, ids in zip(results, singles, prompts, strict=True):
            assert (result.ids, result.finish_reason) == (single.ids, END_OF_TEXT)
            assert result.logprobs == pytest.approx(single.logprobs, rel=0, abs=1e-4)
            assert len(result.logprobs) == len(result.ids)
            assert result.attention.ids == [ids + result.ids]
            torch.testing.assert_close(result.attention.weights, single.attention.weights, **CLOSE)
        assert results[0].ids == alone[0][:2]
        first_end = next(i for i, id in enumerate(alone[1]) if id in ends)
        assert results[1].ids == alone[1][:first_end]


def load_model_like(model, config):
    """The same weights under another config."""
    with torch.device("meta"):
        other = gpt2attn.GPT2(config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval().requires_grad_(False)


class TestTokenizer:
    @pytest.mark.parametrize("text", ["Hello , world ? yes . do n't", " ?", " 's"])
    def test_d39_decoding_cleans_nothing_up(self, gpt2, text):
        assert gpt2.decode(gpt2.encode(text)) == text
        fast = GPT2TokenizerFast.from_pretrained(BUILT_IN["pocket"])
        assert gpt2.encode(text) == fast.encode(text)
        assert gpt2.encode(" ?") == [5633]

    def test_d43_a_megabyte_without_spaces(self, gpt2, tmp_path):
        started = time.process_time()
        for unit in ("a", "^", "漢"):
            text = unit * (1_000_000 // len(unit.encode()))
            assert gpt2.decode(gpt2.encode(text)) == text
        assert time.process_time() - started < 20  # linear: about 1; quadratic: hours
        (tmp_path / "long.txt").write_text("a" * 1_000_000)
        result = run("tokens", "--json", "--text-file", tmp_path / "long.txt")
        assert len(json.loads(result.stdout)["ids"]) == 250_000

    def test_d44_lone_surrogates_and_undecodable_bytes(self, gpt2, folder, tmp_path):
        """Refused with the place, wherever they come from; a pair of escapes is its character."""
        assert gpt2.encode("\ud83d\ude00") == [47249, 222]
        stray = b"caf\xe9"
        for text, place in (("\ud83d", "position 0"), ("a\ude00", "position 1")):
            with pytest.raises(ValueError, match=f"lone surrogate.*{place}"):
                gpt2.encode(text)
        argument = os.fsdecode(stray) if sys.platform != "win32" else "caf\udce9"
        refused(run("generate", argument, "-m", folder), "stray byte 0xE9), at position 3")
        (tmp_path / "prompt.txt").write_bytes(stray)
        for how, stdin in ((["--prompt-file", tmp_path / "prompt.txt"], b""), ([], stray)):
            refused(run("generate", *how, "-m", folder, stdin=stdin), "byte 3 is 0xe9")
        for line, words in (
            (b'{"text": "\\ud83d"}', "line 1, has \\ud83d without the other half"),
            (b'"caf\xe9"', "line 1, is not UTF-8"),
        ):
            (tmp_path / "in.jsonl").write_bytes(line + b"\n")
            many = ("--input", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
            refused(run("generate", *many, "-m", folder), words)
        (tmp_path / "in.jsonl").write_bytes(b'"\\ud83d\\ude00"\n')
        assert run("generate", *many, "-m", folder, "-n", "1").status == 0
        row = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))
        assert (row["prompt_ids"], row["prompt"]) == ([47249, 222], "😀")

    def test_d45_end_of_text_typed_by_a_user(self, folder, gpt2):
        """Text by default, the token on request, in the API and in every command with a text."""
        text = "a<|endoftext|> b"
        as_text = [64, 27, 91, 437, 1659, 5239, 91, 29, 275]
        assert gpt2.encode(text) == as_text
        assert gpt2.encode("<|endoftext|>", special=True) == [50256]
        assert gpt2.decode([64, 50256, *as_text], skip_special=True) == "a" + text
        for more, ids in (([], as_text), (["--special"], [64, 50256, 275])):
            result = run("generate", text, "-m", folder, "-n", "0", "--json", *more)
            assert json.loads(result.stdout)["prompt_ids"] == ids
            assert json.loads(run("tokens", text, "--json", *more).stdout)["ids"] == ids

    def test_d46_streams_never_show_half_a_character(self, pocket, script):
        smile, rest = [47249, 222], pocket.encode("é漢")
        ids = [*smile, *rest]
        script(ids)
        stream = pocket.stream("a", len(ids), seed=0)
        pieces = [step.text for step in stream.steps()]
        assert "".join(pieces) == pocket.tokenizer.decode(ids) == "😀é漢"
        assert pieces[:3] == ["", "😀", "é"]  # each as soon as it is complete
        for n in range(len(ids) + 1):
            script(ids)
            pieces = list(pocket.stream("a", n, seed=0))
            assert "".join(pieces) == pocket.tokenizer.decode(ids[:n])
        script(ids, [64, *smile, 65, 66, 67], rest + rest)
        results = pocket.generate(["a", "b", "c"], 4, seed=0)
        assert [r.text for r in results] == [pocket.tokenizer.decode(r.ids) for r in results]

    def test_d47_byte_symbols_are_in_no_text(self, pocket, script):
        assert pocket.encode("\n\n\n") == [628, 198]
        assert pocket.encode("\x00") == [188]
        assert pocket.tokenizer.labels([628, 198, 188, 220]) == ["⏎⏎", "⏎", "<0x00>", "␣"]
        script([628, 198, 197, 220, 188])
        text = pocket.generate("a b", 5, seed=0).text
        assert text == "\n\n\n\t \x00"
        for typed in ("Ġ", "Ċ", "ĉ", "aĠb"):
            assert pocket.tokenizer.decode(pocket.encode(typed)) == typed

    def test_d48_an_empty_prompt(self, pocket, folder, model, tmp_path):
        """Nothing is put in its place: it is refused, and the remedy named."""
        assert pocket.encode("") == []
        for empty in ("", [], [[]], ["a", ""], [[64], []]):
            with pytest.raises(ValueError, match=r"[Pp]rompt.* is empty: give at least one token"):
                pocket.generate(empty, 3)
        for ids in ([], [[]], torch.empty(0, dtype=torch.long), torch.empty(2, 0)):
            with pytest.raises(ValueError, match="no token ids: give at least one token"):
                model(ids)
            with pytest.raises(ValueError, match="no token ids"):
                generate(model, ids)
        (tmp_path / "empty.txt").touch()
        for how in ([""], ["--prompt-file", tmp_path / "empty.txt"], []):
            refused(run("generate", *how, "-m", folder), "The prompt is empty")
        (tmp_path / "in.jsonl").write_text('"a"\n""\n')
        many = ("--input", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
        refused(run("generate", *many, "-m", folder), "line 2: The prompt is empty")

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({}, "no vocab.json and no merges.txt"),
            ({"spiece.model": "x"}, "SentencePiece"),
            ({"vocab.txt": "[PAD]\n"}, "WordPiece"),
        ],
    )
    def test_d49_another_tokenizer_or_none(self, tiny_folder, tmp_path, files, message):
        """Ids need no tokenizer; text is refused, with no vocabulary of another model in its place.

        Of tokenizer.json alone: test_tokenizer.py.
        """
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        assert len(greedy(load_model(tmp_path), [1, 2], 3)) == 3
        with pytest.raises(FileNotFoundError, match=message):
            load(tmp_path)
        refused(run("generate", "a", "-m", tmp_path), message)


class TestSamplingAndStopping:
    def test_d51_repetition_penalty_of_rows_in_a_batch(self, long_model):
        """Prompt and new ids of the row count, padding does not; see test_sampling.py for the sign.

        The padding's id, 0, is the first that every row would choose.
        """
        sampling = Sampling(0, repetition_penalty=1.8, logit_bias={0: 1e3})
        rows = [Row([id + 1 for id in prompt(n, n, V - 2)], sampling, 0) for n in (9, 2, 5)]
        finished(long_model, rows)
        for row in rows:
            (alone,) = finished(long_model, [Row(row.prompt_ids, sampling, 0)])
            assert row.ids == alone.ids
            assert row.ids[0] == 0
        weak = Sampling(0, repetition_penalty=1.0)
        (plain,) = finished(long_model, [Row(prompt(5), weak, 0)])
        assert plain.ids == greedy(long_model, prompt(5))
        for penalty in (0, -1):
            with pytest.raises(ValueError, match="repetition_penalty must be a number above 0"):
                Sampling(repetition_penalty=penalty)

    def test_d52_top_k_and_the_size_of_the_vocabulary(self, tmp_path):
        logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
        for k, n_kept in ((50, 50), (63, 63), (64, 64), (65, 64), (1000, 64), (0, 64), (1, 1)):
            assert int((top_k(logits, k) > -torch.inf).sum()) == n_kept
        one = Sampling(1.0, 1)
        ties = torch.tensor([0.0, 2.0, 2.0])
        assert probabilities(logits, one).argmax() == logits.argmax()
        assert probabilities(ties, one).tolist() == [0, 1, 0]
        with pytest.raises(ValueError, match="top_k must be a whole number from 0 up"):
            Sampling(top_k=-1)
        small = {"vocab_size": 25, "bos_token_id": 24, "eos_token_id": 24}
        model = load_model(write_checkpoint(tmp_path, small))
        assert Sampling().top_k == 50
        assert len(list(generate(model, [1, 2], 5, seed=0))) == 5

    def test_d53_the_limits_of_temperature_and_top_p(self):
        logits = torch.randn(50, generator=torch.Generator().manual_seed(0)).double() * 5
        for temperature in (0, 1e-4, 1e-30):
            chances = probabilities(logits, Sampling(temperature, None))
            assert chances.isfinite().all()
            assert chances.argmax() == logits.argmax()
            assert chances.max() == pytest.approx(1)
            id = choose(logits, Sampling(temperature, None), generator_for(0))
            assert id == logits.argmax()
        for bad in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="temperature must be a number from 0 up"):
                Sampling(bad)
        for bad in (0, 1.1, "0.9"):
            with pytest.raises(ValueError, match="top_p must be above 0 and at most 1"):
                Sampling(top_p=bad)
        mass = logits.softmax(0).sort(descending=True).values.cumsum(0)
        for p in (1e-6, 0.3, 0.9, 1.0):
            kept = int((top_p(logits, p) > -torch.inf).sum())
            assert kept == int((mass < p).sum()) + 1 or p == 1
        ties = torch.tensor([1.0, 3.0, 3.0, -torch.inf])
        assert top_p(ties, 0.2).tolist() == [-torch.inf, 3, -torch.inf, -torch.inf]
        one_hot = torch.tensor([-torch.inf, 0.0, -torch.inf])
        for p in (1e-6, 1.0):
            assert probabilities(one_hot, Sampling(1.0, None, p)).tolist() == [0, 1, 0]

    def test_d54_seeds_and_rows(self, long_model):
        """8 copies of a prompt with 8 seeds are 8 single runs, in any order and twice."""
        sampling = Sampling(1.5, top_k=None)
        before = torch.random.get_rng_state()
        runs = [
            finished(long_model, [Row(prompt(4), sampling, seed) for seed in range(8)])
            for _ in range(2)
        ]
        assert [row.ids for row in runs[0]] == [row.ids for row in runs[1]]
        assert len({tuple(row.ids) for row in runs[0]}) == 8
        for row in runs[0]:
            single = list(generate(long_model, prompt(4), 20, seed=row.seed, temperature=1.5,
                                   top_k=None))  # fmt: skip
            assert row.ids == single
        seeds = random.Random(0).sample(range(8), 8)
        shuffled = finished(long_model, [Row(prompt(4), sampling, seed) for seed in seeds])
        assert [row.ids for row in shuffled] == [runs[0][seed].ids for seed in seeds]
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_d55_a_minimum_of_new_tokens(self, long_model):
        """End-of-text, always the first choice, is impossible for exactly three new tokens."""
        eager = {"logit_bias": {5: 1e3}}
        for minimum in (0, 3):
            sampling = Sampling(0, min_new_tokens=minimum, **eager)
            (row,) = finished(long_model, [Row(prompt(6), sampling, 0)], 20, stop_ids=[5])
            assert (len(row.ids), row.finish_reason) == (minimum, END_OF_TEXT)
        with pytest.raises(ValueError, match="min_new_tokens is 21, more than max_new_tokens, 20"):
            generate(long_model, prompt(6), 20, min_new_tokens=21)

    def test_d56_stop_strings(self, pocket, script):
        """Matched on generated text alone, cut before the earliest, each row for itself."""

        def pieces(*texts):
            return [id for text in texts for id in pocket.encode(text)]

        cases = [
            (["STOP"], ["a", " S", "TO", "P", "b"], "a S"[:2], "STOP"),
            (["ello w"], [" hello", " world"], " h", "ello w"),
            (["x"], ["ab", "xc"], "ab", "x"),
            (["bcd", "abc"], ["z", "ab", "cd"], "z", "abc"),
            (["STOP"], [" ST", "ART", "!"], " START!", None),
            (["prompt"], ["a", "b"], "ab", None),  # stands in the prompt only
            (["mpt!"], ["!", "a"], "!a", None),  # completed by the prompt's end
        ]
        for stops, texts, expected, found in cases:
            ids = pieces(*texts)
            script(ids)
            stream = pocket.stream("the prompt", len(ids), seed=0, stop=stops)
            assert "".join(stream) == expected
            result = stream.generation
            assert result.stop_string == found
            assert result.finish_reason == ("stop string" if found else "max new tokens")
        with pytest.raises(ValueError, match="at least one character"):
            pocket.stream("a", stop=[""])
        script(pieces("ab", "cd", "ef"), pieces("xy", "STOP", "z"))
        rows = pocket.generate(["1", "2"], 3, seed=0, stop="cd")
        assert [(row.text, row.finish_reason) for row in rows] == [
            ("ab", "stop string"),
            (pocket.tokenizer.decode(rows[1].ids), "max new tokens"),
        ]
        assert len(rows[1].ids) == 3

    def test_d57_generation_defaults_of_a_checkpoint_do_not_apply(self, folder, tmp_path):
        defaults = {
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "repetition_penalty": 3.0,
            "no_repeat_ngram_size": 3,
            "num_beams": 5,
            "max_length": 12,
        }
        for path in folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((folder / "config.json").read_text()) | defaults
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
        options = ("generate", "one two", "-n", "33", "--seed", "1", "--json", "-m")
        plain, other = (
            json.loads(run(*options, where).stdout.splitlines()[-1]) for where in (folder, tmp_path)
        )
        assert len(other["ids"]) == 33
        assert other["ids"] == plain["ids"]
        assert run("generate", "one two", "-n", "0", "-m", tmp_path).stdout == "one two\n"
        assert load(tmp_path).generate("one two", 0).text == ""


def test_d58_a_folder_needs_no_network(tmp_path, tiny_folder):
    """With sockets that raise; names, caches, proxies and offline mode: test_hub.py."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "gpt2").mkdir(exist_ok=True)
        (tmp_path / "gpt2" / name).write_bytes((tiny_folder / name).read_bytes())
    Tokenizer.gpt2().save(tmp_path / "gpt2")
    program = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "import gpt2attn\n"
        "lm = gpt2attn.load('gpt2')\n"  # the folder of that name, not the repository
        "print(lm.model.config.n_layer, len(lm.generate([1, 2], 3).ids))"
    )
    environment = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.stdout == "3 3\n", result.stderr


def test_d59_nothing_is_helpfully_rewritten(tiny_folder, pocket):
    """The weights are the file's, no token is put in front, and logits are not centred."""
    stored = load_file(tiny_folder / "model.safetensors")
    for name, value in load_model(tiny_folder).state_dict().items():
        assert torch.equal(value, stored[f"transformer.{name}"])
    assert pocket.encode("Apple raised") == [16108, 4376]
    assert pocket.generate("Apple raised", 1).prompt_ids == [16108, 4376]
    ids = torch.tensor([prompt(9)])
    logits = load_model(tiny_folder)(ids)
    theirs = GPT2LMHeadModel.from_pretrained(tiny_folder)
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(ids, use_cache=False).logits, rtol=0, atol=1e-5)
    assert logits.mean(-1).abs().max() > 0.01
