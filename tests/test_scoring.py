"""Scoring against plain transformers loops: Hugging Face's stride loop and lm-eval's windows."""

import copy
import math
from unittest import mock

import pytest
import torch
from checkpoints import wide_hf_model

from gpt2attn import Tokenizer, load_model, scoring
from gpt2attn.scoring import (
    continuation_logprob,
    continuation_logprobs,
    encode_pair,
    score,
    score_last_words,
    score_many,
    score_texts,
    wikitext_text,
    wikitext_words,
    windows,
)

CONFIG = {"n_positions": 64, "vocab_size": 97, "bos_token_id": 96, "eos_token_id": 96}


def pair(tmp_path_factory, dtype=torch.float32, kernels="auto", **config):
    """The same float32 weights in transformers and here."""
    folder = tmp_path_factory.mktemp("scored")
    hf = wide_hf_model({**CONFIG, **config}, std=0.2, attn_implementation="sdpa")
    hf.save_pretrained(folder)
    return hf.to(dtype), load_model(folder, dtype=dtype, kernels=kernels)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return pair(tmp_path_factory)


@pytest.fixture(scope="module")
def both64(tmp_path_factory):
    """In float64, where two correct computations agree to 1e-9."""
    return pair(tmp_path_factory, torch.float64)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """With GPT-2's vocabulary."""
    return pair(tmp_path_factory, vocab_size=50257, bos_token_id=50256, eos_token_id=50256)


def text(n_tokens, seed=0, vocab_size=97):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (n_tokens,), generator=generator).tolist()


def after(hf, ids):
    """(T, V) log-probabilities of what comes after each of `ids`."""
    with torch.no_grad():
        return hf(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def stride_loop(hf, ids, context, stride):
    """The loop of Hugging Face's guide to perplexity; None for a token that it leaves out."""
    found = [None] * len(ids)
    previous_end = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        logprobs = after(hf, ids[begin:end])
        for place in range(previous_end, end):
            if place > begin:
                found[place] = float(logprobs[place - begin - 1, ids[place]])
        previous_end = end
        if end == len(ids):
            break
    return found


def rolling_windows(hf, ids, prefix_id, max_length, context_len):
    """lm-eval's get_rolling_token_windows: inputs of up to max_length tokens, a prefix once."""
    n_predicted = min(max_length, len(ids))
    requests = [([prefix_id, *ids[: n_predicted - 1]], ids[:n_predicted])]
    step = max_length - context_len + 1
    while n_predicted < len(ids):
        end = min(n_predicted + step, len(ids))
        requests.append((ids[end - max_length - 1 : end - 1], ids[n_predicted:end]))
        n_predicted = end
    found = []
    for read, targets in requests:
        logprobs = after(hf, read)[-len(targets) :]
        found += [float(row[id]) for row, id in zip(logprobs, targets, strict=True)]
    return found


def assert_same(result, expected, tolerance):
    """Token for token, the unscored ones too."""
    unscored = [value is None for value in expected]
    assert result.logprobs.isnan().tolist() == unscored
    assert (result.ranks == 0).tolist() == unscored
    expected = [value for value in expected if value is not None]
    got = result.logprobs[result.ranks > 0]
    assert got.tolist() == pytest.approx(expected, abs=tolerance, rel=0)
    assert result.n_scored == len(expected)
    assert result.total == pytest.approx(math.fsum(got.tolist()), abs=1e-9)


class TestStrideLoop:
    @pytest.mark.parametrize("n_tokens", [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 65, 150])
    @pytest.mark.parametrize(("context", "stride"), [(16, 1), (16, 5), (16, 8), (16, 15), (16, 16)])
    def test_every_token_equals_the_loop(self, both64, n_tokens, context, stride):
        hf, model = both64
        ids = text(n_tokens)
        result = score(model, ids, context=context, stride=stride)
        assert_same(result, stride_loop(hf, ids, context, stride), 1e-9)
        assert (result.ids, result.context, result.stride) == (ids, context, stride)

    @pytest.mark.parametrize("context", [2, 3, 7, 63, 64, None])
    def test_every_context_has_a_default_stride_of_half(self, both64, context):
        hf, model = both64
        ids = text(140, seed=1)
        result = score(model, ids, context=context)
        assert (result.context, result.stride) == (context or 64, (context or 64) // 2)
        assert_same(result, stride_loop(hf, ids, context or 64, (context or 64) // 2), 1e-9)

    def test_float32_equals_the_loop_within_1e_4(self, both):
        hf, model = both
        ids = text(200, seed=2)
        assert_same(score(model, ids, stride=10), stride_loop(hf, ids, 64, 10), 1e-4)

    @pytest.mark.parametrize("stride", [1, 16, 512])
    def test_perplexity_with_1024_positions(self, tmp_path_factory, stride):
        hf, model = pair(tmp_path_factory, n_positions=1024, n_layer=1)
        ids = text(1060 if stride == 1 else 1600, seed=3)
        expected = [x for x in stride_loop(hf, ids, 1024, stride) if x is not None]
        result = score(model, ids, stride=stride)
        assert result.n_scored == len(ids) - 1 == len(expected)
        naive = math.exp(-math.fsum(expected) / len(expected))
        assert result.perplexity == pytest.approx(naive, rel=1e-6)

    def test_ranks_count_the_likelier_tokens_from_1(self, both64):
        hf, model = both64
        ids = text(40)
        logprobs = after(hf, ids)
        expected = [
            1 + int((logprobs[i - 1] > logprobs[i - 1, ids[i]]).sum()) for i in range(1, 40)
        ]
        assert score(model, ids).ranks.tolist() == [0, *expected]
        assert {1, 97} & set(score(model, [ids[0], int(logprobs[0].argmax())]).ranks.tolist()) == {
            1
        }

    def test_a_prefix_stands_once_and_is_not_scored(self, both64):
        hf, model = both64
        ids = text(100, seed=4)
        result = score(model, ids, context=20, stride=7, prefix_id=96)
        expected = stride_loop(hf, [96, *ids], 20, 7)
        assert expected[0] is None
        assert_same(result, expected[1:], 1e-9)
        assert (result.ids, result.prefix_id, result.n_scored) == (ids, 96, 100)

    def test_half_precision_gives_float32_probabilities(self, tmp_path_factory):
        _, half = pair(tmp_path_factory, torch.bfloat16, kernels="torch")
        logits = half([text(30)])[0].float().log_softmax(-1)
        expected = logits[:-1].gather(1, torch.tensor(text(30))[1:, None])[:, 0]
        assert torch.allclose(score(half, text(30)).logprobs[1:].float(), expected, atol=1e-6)


class TestRollingWindows:
    @pytest.mark.parametrize("n_tokens", [1, 2, 5, 6, 17, 64, 65, 130])
    @pytest.mark.parametrize(("max_length", "context_len"), [(5, 1), (5, 3), (5, 5), (64, 1)])
    def test_every_token_equals_lm_eval(self, both64, n_tokens, max_length, context_len):
        hf, model = both64
        ids = text(n_tokens, seed=5)
        result = score(
            model,
            ids,
            context=max_length + 1,
            stride=max_length - context_len + 1,
            prefix_id=96,
            full_last=True,
        )
        assert_same(result, rolling_windows(hf, ids, 96, max_length, context_len), 1e-9)


class TestWindows:
    @pytest.mark.parametrize("full_last", [False, True])
    def test_each_token_is_scored_once_with_enough_before_it(self, full_last):
        for n_tokens in range(40):
            for context in range(2, 12):
                for stride in range(1, context + 1):
                    found = list(windows(n_tokens, context, stride, full_last=full_last))
                    scored = [i for w in found for i in range(w.first, w.end)]
                    assert all(w.end - w.start <= context for w in found)
                    assert all(
                        i - w.start >= min(i, max(1, context - stride))
                        for w in found
                        for i in range(w.first, w.end)
                    )
                    if stride < context:
                        assert scored == list(range(1, n_tokens))
                    elif not full_last:
                        assert scored == [i for i in range(n_tokens) if i % context]

    def test_the_drawing_in_the_docstring(self):
        lines = scoring.__doc__.splitlines()
        (tokens,) = (line for line in lines if line.startswith("    token"))
        left = tokens.index("0")
        for number, (start, first, end) in enumerate(windows(14, 8, 3)):
            (line,) = (line for line in lines if line.startswith(f"    window {number}"))
            marks = "-" if number == 0 else "." * (first - start)
            expected = " " * start + marks + "s" * (end - first)
            assert line[left : left + 2 * 14 : 2].rstrip() == expected
        assert number == 2

    def test_full_last_moves_only_the_last(self):
        short, full = (list(windows(30, 8, 3, full_last=flag)) for flag in (False, True))
        assert full[:-1] == short[:-1]
        assert short[-1] == (24, 29, 30)
        assert full[-1] == (22, 29, 30)


class TestMany:
    LENGTHS = (3, 150, 1, 0, 64, 20, 2, 65, 3, 0)

    @pytest.mark.parametrize("batch_tokens", [1, 70, 500, 100_000])
    def test_a_batch_gives_what_each_gives_alone_in_order(self, both64, batch_tokens):
        _, model = both64
        rows = [text(n, seed=n) for n in self.LENGTHS]
        results = list(score_many(model, rows, stride=20, batch_tokens=batch_tokens))
        assert [result.ids for result in results] == rows
        for row, result in zip(rows, results, strict=True):
            alone = score(model, row, stride=20)
            assert torch.allclose(
                result.logprobs, alone.logprobs, rtol=0, atol=1e-9, equal_nan=True
            )
            assert result.ranks.equal(alone.ranks)

    def test_an_endless_input_is_read_as_it_is_needed(self, both):
        _, model = both
        n_read = 0

        def rows():
            nonlocal n_read
            while True:
                n_read += 1
                yield text(50, seed=n_read)

        results = score_many(model, rows(), batch_tokens=200)
        first = [next(results) for _ in range(3)]
        assert [result.ids for result in first] == [text(50, seed=n) for n in (1, 2, 3)]
        assert n_read * 50 <= 200 * scoring._BATCHES_IN_POOL + 50

    def test_progress_hears_of_every_scored_token(self, both):
        _, model = both
        counts = []
        result = score(model, text(300), batch_tokens=64, progress=counts.append)
        assert sum(counts) == result.n_scored == 299
        assert len(counts) > 3

    def test_an_empty_text_has_no_perplexity(self, both):
        _, model = both
        for ids in ([], [5]):
            result = score(model, ids)
            assert (result.n_scored, result.total, result.ids) == (0, 0.0, ids)
            assert math.isnan(result.perplexity)


class TestMemory:
    def test_logits_and_batches_stay_bounded(self, words):
        _, model = words
        ids = text(1500, vocab_size=50257)
        passed, unembedded = [], []
        hidden, unembed = model.hidden, model.unembed

        def counted_hidden(ids):
            passed.append(ids.numel())
            return hidden(ids)

        def counted_unembed(x):
            unembedded.append(len(x))
            return unembed(x)

        with (
            mock.patch.object(model, "hidden", counted_hidden),
            mock.patch.object(model, "unembed", counted_unembed),
        ):
            result = score(model, ids, batch_tokens=1000)
        assert result.n_scored == sum(unembedded) == 1499
        assert 900 < max(passed) <= 1000
        # A third of a batch at most, and not needlessly small.
        assert 300 < max(unembedded) <= scoring.LOGITS_AT_ONCE / 50257

    def test_slices_give_the_same(self, both64):
        _, model = both64
        ids = text(150)
        whole = score(model, ids)
        with mock.patch.object(scoring, "LOGITS_AT_ONCE", 7 * 97):
            sliced = score(model, ids)
        assert torch.allclose(sliced.logprobs[1:], whole.logprobs[1:], rtol=0, atol=1e-9)
        assert sliced.ranks.equal(whole.ranks)


class TestNumbers:
    def test_perplexity_and_bits_per_byte_by_hand(self):
        result = scoring.Score(
            [1, 2, 3],
            torch.tensor([math.nan, -math.log(2), -math.log(8)], dtype=torch.float64),
            torch.tensor([0, 1, 5]),
            64,
            32,
            n_bytes=8,
        )
        assert result.n_scored == 2
        assert result.total == pytest.approx(-4 * math.log(2))
        assert result.perplexity == pytest.approx(4)
        assert result.bits_per_byte == pytest.approx(0.5)

    def test_what_a_float_cannot_hold_is_infinite_and_nan_stays(self):
        assert scoring.perplexity(-1e6, 2) == math.inf
        assert math.isnan(scoring.perplexity(math.nan, 2))
        assert math.isnan(scoring.bits_per_byte(0.0, 0))

    def test_a_broken_model_is_not_a_perfect_one(self, tmp_path_factory):
        _, broken = pair(tmp_path_factory)
        with torch.no_grad():
            broken.ln_f.bias.fill_(math.nan)
        with pytest.raises(ValueError, match="became NaN or infinite"):
            score(broken, text(9))


class TestTexts:
    SENTENCES = ("Apple raised its price target", "día 😀", "x")

    def test_bytes_are_those_of_the_scored_tokens(self, words):
        _, model = words
        tokenizer = Tokenizer.gpt2()
        for bos in (False, True):
            results = list(score_texts(model, tokenizer, self.SENTENCES, bos=bos))
            for sentence, result in zip(self.SENTENCES, results, strict=True):
                ids = tokenizer.encode(sentence)
                first = 0 if bos else len(tokenizer.token_bytes(ids[0]))
                assert (result.ids, result.prefix_id) == (ids, 50256 if bos else None)
                assert result.n_bytes == len(sentence.encode()) - first
                alone = score(model, ids, prefix_id=50256 if bos else None)
                assert result.perplexity == pytest.approx(alone.perplexity, rel=1e-5, nan_ok=True)
        assert results[0].bits_per_byte == pytest.approx(
            -results[0].total / math.log(2) / len(self.SENTENCES[0])
        )

    def test_ids_and_special_tokens(self, words):
        _, model = words
        tokenizer = Tokenizer.gpt2()
        texts = ["a<|endoftext|>b", [64, 65]]
        plain, ids = score_texts(model, tokenizer, texts)
        special, _ = score_texts(model, tokenizer, texts, special=True)
        assert (special.ids, ids.ids) == ([64, 50256, 65], [64, 65])
        assert len(plain.ids) > 5


class TestContinuation:
    def test_sum_and_each_token_equal_one_forward_pass(self, both64):
        hf, model = both64
        context, continuation = text(10), text(5, seed=1)
        result = continuation_logprob(model, context, continuation)
        logprobs = after(hf, context + continuation)[9:-1]
        expected = [float(row[id]) for row, id in zip(logprobs, continuation, strict=True)]
        assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-9, rel=0)
        assert result.total == pytest.approx(math.fsum(expected), abs=1e-9)
        assert (result.is_greedy, result.n_dropped) == (False, 0)

    def test_the_greedy_continuation_and_no_other_is_greedy(self, both64):
        hf, model = both64
        ids = text(6)
        for _ in range(4):
            ids.append(int(after(hf, ids)[-1].argmax()))
        result = continuation_logprob(model, ids[:6], ids[6:])
        assert result.is_greedy
        assert result.ranks.tolist() == [1, 1, 1, 1]
        changed = [*ids[6:9], (ids[9] + 1) % 97]
        assert not continuation_logprob(model, ids[:6], changed).is_greedy

    @pytest.mark.parametrize("n_context", [1, 54, 55, 56, 90])
    def test_a_long_context_loses_its_start_as_in_lm_eval(self, both64, n_context):
        hf, model = both64
        context, continuation = text(n_context), text(10, seed=1)
        result = continuation_logprob(model, context, continuation)
        read = (context + continuation)[-(64 + 1) :][:-1]
        logprobs = after(hf, read)[-10:]
        expected = [float(row[id]) for row, id in zip(logprobs, continuation, strict=True)]
        assert result.logprobs.tolist() == pytest.approx(expected, abs=1e-9, rel=0)
        assert result.n_dropped == max(0, n_context + 10 - 65)

    def test_a_batch_gives_what_each_gives_alone_in_order(self, both64):
        _, model = both64
        pairs = [(text(n, seed=n), text(m, seed=m)) for n, m in [(3, 2), (60, 9), (1, 64), (9, 1)]]
        for batch_tokens in (1, 70, 4096):
            results = list(continuation_logprobs(model, pairs, batch_tokens=batch_tokens))
            for result, (context, continuation) in zip(results, pairs, strict=True):
                alone = continuation_logprob(model, context, continuation)
                assert torch.allclose(result.logprobs, alone.logprobs, rtol=0, atol=1e-9)
                assert (result.is_greedy, result.n_dropped) == (alone.is_greedy, alone.n_dropped)

    @pytest.mark.parametrize(
        ("context", "continuation", "context_ids", "continuation_ids"),
        [
            ("Hello", " World", [15496], [2159]),
            ("Hello ", "World", [15496], [2159]),  # the blank goes where the token has it
            ("A mult", "ilayer", [32, 1963], [346, 2794]),
            ("", "Hello", [50256], [15496]),
        ],
    )
    def test_pairs_of_text(self, context, continuation, context_ids, continuation_ids):
        found = encode_pair(Tokenizer.gpt2(), context, continuation)
        assert found == (context_ids, continuation_ids)


class TestProtocols:
    def test_wikitext_lines_are_joined_as_hugging_face_joins_rows(self):
        # The rows of the data set: a blank line is "", others keep their newline.
        lines = [" \n", " = Title = \n", " \n", " A word . \n"]
        rows = ["", " = Title = \n", "", " A word . \n"]
        assert wikitext_text(lines) == "\n\n".join(rows)
        assert wikitext_words(lines) == 3 + 3 + 4

    def test_last_word_and_last_token(self, words):
        hf, model = words
        tokenizer = Tokenizer.gpt2()
        passages = ["He met Diana", "one two three", "Ask the unbelievableness\n", "a  b"]
        word_sum = token_sum = 0.0
        for passage in passages:
            before, word = passage.rstrip().rsplit(" ", 1)
            ids = tokenizer.encode(passage.rstrip())
            n_word = len(ids) - len(tokenizer.encode(before.rstrip()))
            logprobs = after(hf, ids)
            each = [float(logprobs[i - 1, ids[i]]) for i in range(len(ids) - n_word, len(ids))]
            assert tokenizer.decode(ids[-n_word:]).strip() == word
            word_sum += sum(each)
            token_sum += each[-1]
        result = score_last_words(model, tokenizer, passages)
        assert result.n_passages == 4
        assert result.word_perplexity == pytest.approx(math.exp(-word_sum / 4), rel=1e-4)
        assert result.token_perplexity == pytest.approx(math.exp(-token_sum / 4), rel=1e-4)

    def test_accuracies_count_whole_words_and_last_tokens(self, words):
        _, model = words
        tokenizer = Tokenizer.gpt2()
        by_rank = {
            "a b": ([1], 0),
            "a cd": ([1, 1], 0),
            "a ef": ([2, 1], 0),
            "a gh": ([1, 2], 0),
        }

        def results(model, pairs, **options):
            for _, (ranks, _) in zip(pairs, by_rank.values(), strict=True):
                ranks = torch.tensor(ranks)
                logprobs = -ranks.double()
                greedy = bool((ranks == 1).all())
                yield scoring.Continuation(float(logprobs.sum()), greedy, logprobs, ranks, 0)

        with mock.patch.object(scoring, "continuation_logprobs", results):
            found = score_last_words(model, tokenizer, by_rank)
        assert (found.word_accuracy, found.token_accuracy) == (0.5, 0.75)
        assert found.word_perplexity == pytest.approx(math.exp((1 + 2 + 3 + 3) / 4))
        assert found.token_perplexity == pytest.approx(math.exp((1 + 1 + 1 + 2) / 4))


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"context": 1}, r"context must be .* from 2 to 65 .* not 1\."),
            ({"context": 66}, r"from 2 to 65"),
            ({"context": 8.0}, r"context must be a whole number"),
            ({"stride": 0}, r"stride must be .* from 1 to the context, 64, not 0\."),
            ({"context": 10, "stride": 11}, r"from 1 to the context, 10, not 11"),
            ({"prefix_id": 97}, r"ids run from 0 to 96"),
            ({"batch_tokens": 0}, r"batch_tokens must be a whole number from 1 up"),
        ],
    )
    def test_options_are_refused_before_any_compute(self, both, options, message):
        _, model = both
        with pytest.raises(ValueError, match=message):
            score_many(model, iter([]), **options)
        with pytest.raises(ValueError, match=message):
            score(model, [1, 2], **options)

    def test_rows(self, both):
        _, model = both
        with pytest.raises(ValueError, match="Token id 97"):
            score(model, [1, 97])
        with pytest.raises(ValueError, match="score_many takes several"):
            score(model, [[1, 2], [3, 4]])

    def test_continuations(self, both):
        _, model = both
        with pytest.raises(ValueError, match=r"The context is empty: .*end-of-text"):
            continuation_logprob(model, [], [1])
        with pytest.raises(ValueError, match="The continuation is empty"):
            continuation_logprob(model, [1], [])
        with pytest.raises(ValueError, match="65 tokens, but this model has 64 positions"):
            continuation_logprob(model, [1], text(65))

    def test_passages(self, words):
        _, model = words
        with pytest.raises(ValueError, match=r"two words or more.*'one '"):
            score_last_words(model, Tokenizer.gpt2(), ["one "])
        with pytest.raises(ValueError, match="no passages"):
            score_last_words(model, Tokenizer.gpt2(), [])


def test_equal_logits_share_the_better_rank(both64):
    model = copy.deepcopy(both64[1])
    model.wte.weight.zero_()  # all logits are 0
    assert score(model, text(5)).ranks.tolist() == [0, 1, 1, 1, 1]
