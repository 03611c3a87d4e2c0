"""Captured maps against transformers and against single runs."""

import numpy as np
import pytest
import torch
from checkpoints import TINY
from transformers import GPT2LMHeadModel

from gpt2attn import AttentionMaps, LanguageModel, attention_maps, load, load_model
from gpt2attn.capture import Recorder, chosen
from gpt2attn.generation import left_padded
from gpt2attn.kernels import KERNELS


def random_row(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"], (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder, kernels="torch")


@pytest.mark.parametrize("batch", [1, 2])
def test_maps_are_transformers_eager_maps_bit_for_bit(tiny_folder, model, batch):
    ids = torch.tensor([random_row(11, seed) for seed in range(batch)])
    theirs = GPT2LMHeadModel.from_pretrained(tiny_folder, attn_implementation="eager")
    expected = torch.stack(theirs(ids, output_attentions=True, use_cache=False).attentions)
    maps = attention_maps(model, ids)
    assert torch.equal(maps.weights, expected)
    assert maps.weights.shape == (3, batch, 4, 11, 11)
    assert torch.equal(maps.head(2, 3, text=batch - 1), expected[2, -1, 3])


class TestSelection:
    def test_layers_and_heads_keep_their_numbers(self, model):
        ids = random_row(7)
        whole = attention_maps(model, ids)
        some = attention_maps(model, ids, layers=[2, 0], heads=[-1, 1])
        assert (some.layers, some.heads) == ([2, 0], [3, 1])
        assert torch.equal(some.head(0, 3), whole.head(0, 3))
        # Layer 1 ran on the fused kernel here and explicitly there, so layer 2 saw other roundings.
        expected = whole.weights[[2, 0]][:, :, [3, 1]]
        torch.testing.assert_close(some.weights, expected, rtol=0, atol=1e-5)
        for heads in ([3, 1], [3, 2, 1, 0]):
            some_heads = attention_maps(model, ids, heads=heads)
            assert torch.equal(some_heads.weights, whole.weights[:, :, heads])
        with pytest.raises(ValueError, match="layer 1 was not captured, only 2, 0"):
            some.head(1, 3)

    def test_other_layers_stay_on_the_fused_kernel(self, model):
        recorder = Recorder(model, 1, 7, layers=[1])
        seen = []
        recorder_call = recorder.__call__

        class Spy:
            layers = recorder.layers

            def __call__(self, layer, steps):
                seen.append(layer)
                recorder_call(layer, steps)

        model.hidden(random_row(7), observe=Spy())
        assert seen == [1]
        assert recorder.stages["weights"].shape[0] == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"layers": [3]}, "layer 3 is not there: this model has the layers 0 to 2"),
            ({"layers": [-4]}, "layer -4 is not there"),
            ({"heads": [4]}, "head 4 is not there: this model has the heads 0 to 3"),
            ({"heads": []}, "heads 0 to 3"),
            ({"layers": ["a"]}, "layer a is not there"),
            ({"layers": [1.0]}, "layer 1.0 is not there"),
            ({"heads": [True]}, "head True is not there"),
            ({"layers": 1}, "layers are given as a list, such as \\[0\\], not 1"),
            ({"dtype": torch.int8}, "kept in float64, float32, float16 or bfloat16, not in torch"),
            ({"dtype": "float16"}, "not in 'float16'"),
            ({"stages": ["softmax"]}, "'softmax' does not exist; there are scores, scaled"),
        ],
    )
    def test_d16_what_does_not_exist_is_named_with_the_legal_range(self, model, arguments, message):
        with pytest.raises(ValueError, match=message):
            attention_maps(model, [1, 2], **arguments)

    def test_chosen_drops_repeats(self):
        assert chosen([1, -1, 1], 4, "layer") == [1, 3]

    @pytest.mark.parametrize("numbers", [np.array([2, 0]), torch.tensor([2, -3]), range(2, -1, -2)])
    def test_numbers_of_any_library_do(self, model, numbers):
        """Such as argsort gives them."""
        maps = attention_maps(model, [1, 2], layers=numbers)
        assert maps.layers == [2, 0]
        assert {type(layer) for layer in maps.layers} == {int}


class TestStages:
    def test_each_follows_from_the_one_before(self, model):
        maps = attention_maps(
            model, random_row(9), stages=["scores", "scaled", "masked", "weights"], heads=[1, 2]
        )
        scores, scaled, masked, weights = maps.stages.values()
        assert torch.equal(scaled, scores * 8**-0.5)
        future = torch.ones(9, 9).triu(1).bool()
        assert torch.equal(masked, scaled.masked_fill(future, -torch.inf))
        # The layer took its softmax over all four heads at once.
        torch.testing.assert_close(weights, masked.softmax(-1), rtol=0, atol=1e-6)

    def test_a_stage_that_was_not_captured_is_an_error_not_an_empty_answer(self, model):
        maps = attention_maps(model, [1, 2], stages=["scores"])
        with pytest.raises(ValueError, match="'weights' was not captured, only scores"):
            _ = maps.weights

    def test_float16_maps_are_the_rounded_ones(self, model):
        maps = attention_maps(model, random_row(9), dtype=torch.float16)
        assert torch.equal(maps.weights, attention_maps(model, random_row(9)).weights.half())


class TestPadding:
    @pytest.mark.parametrize("stage", ["weights", "scores", "masked"])
    def test_d18_each_text_is_as_alone_and_pads_are_zero(self, model, stage):
        rows = [random_row(n, n) for n in (9, 4, 6)]
        ids, mask = left_padded(rows)
        maps = attention_maps(model, ids, attention_mask=mask, stages=[stage])
        assert maps.ids == rows
        assert maps.prompt_lengths == [9, 4, 6]
        for number, row in enumerate(rows):
            alone = attention_maps(model, row, stages=[stage])
            mine = maps[number]
            assert mine.stage(stage).shape == (3, 1, 4, len(row), len(row))
            torch.testing.assert_close(mine.stage(stage), alone.stage(stage), rtol=0, atol=1e-4)
            pads = 9 - len(row)
            block = maps.stage(stage)[:, number]
            assert (block[..., :pads, :] == 0).all()
            assert (block[..., :pads] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long, torch.float32])
    def test_right_padding_is_refused(self, model, dtype):
        mask = torch.tensor([[1, 1, 0]], dtype=dtype)
        with pytest.raises(ValueError, match="padding \\(0\\) on the left"):
            attention_maps(model, [[1, 2, 0]], attention_mask=mask)

    def test_indexing_counts_from_both_ends_and_stops(self, model):
        maps = attention_maps(model, [[1, 2], [3, 4]])
        assert maps[-1].ids == [[3, 4]]
        assert len(list(maps)) == 2
        with pytest.raises(IndexError, match="no text 2: the maps hold 2, counted from 0"):
            maps[2]
        with pytest.raises(IndexError, match="no text 2"):
            maps.head(0, 0, text=2)
        for wrong in ("weights", slice(2), 1.0):
            with pytest.raises(TypeError, match="is text i, a whole number"):
                maps[wrong]

    def test_a_glance_at_maps_is_one_line(self, model):
        maps = attention_maps(model, [[1, 2], [3, 4]], layers=[0, 2])
        text = "2 texts: weights (2, 2, 4, 2, 2) float32; layers 0, 2; heads 0-3"
        assert repr(maps) == f"<AttentionMaps of {text}>"


def test_d15_the_first_row_is_one_and_zeros_and_nothing_is_renormalised(model):
    maps = attention_maps(model, random_row(9))
    first = torch.zeros(9)
    first[0] = 1
    assert torch.equal(maps.weights[..., 0, :], first.expand(3, 1, 4, 9))


class TestLanguageModel:
    def test_labels_ids_and_origin_come_with_the_maps(self, lm):
        maps = lm.attention("Apple raised its price target")
        assert maps.ids == [[16108, 4376, 663, 2756, 2496]]
        assert maps.labels == [lm.tokenizer.labels(maps.ids[0])]
        assert maps.metadata["dtype"] == "float32"
        assert len(maps.metadata["sha256"]["model.safetensors"]) == 64

    @pytest.mark.parametrize("kernels", KERNELS)
    def test_kernels_and_how_weights_are_stored_are_told(self, folder, kernels):
        lm = load(folder, device="cpu", dtype=torch.bfloat16, kernels=kernels)
        told = {"kernels": kernels, "weights_dtype": "bfloat16"}
        told["dtype"] = "float32" if kernels == "auto" else "bfloat16"
        generated = lm.generate("one two", 2, attention=True).attention
        for found in (lm.attention("one two"), generated, lm.trace("one two", 0, 1)):
            assert told.items() <= found.metadata.items()

    @pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
    def test_ids_of_any_library_are_one_text(self, lm, kind):
        ids = lm.encode("one two three")
        prompt = kind(ids)
        assert lm.attention(prompt) == lm.attention(ids)
        assert lm.score(prompt).ids == ids
        assert lm.generate(prompt, 2, seed=1) == lm.generate(ids, 2, seed=1)
        assert {type(id) for id in lm.encode(prompt)} == {int}

    @pytest.mark.parametrize(
        ("prompt", "kind"),
        [([1.0, 2.0], "float"), (torch.tensor([[1, 2], [3, 4]]), "Tensor")],
    )
    def test_what_is_no_prompt_is_named(self, lm, prompt, kind):
        with pytest.raises(ValueError, match=f"one row of token ids, .* of the type {kind}"):
            lm.trace(prompt, 0, 0)

    def test_several_texts_make_a_batch(self, lm):
        maps = lm.attention(["one two three", "four"])
        assert [len(ids) for ids in maps.ids] == [3, 1]
        torch.testing.assert_close(maps[1].weights, lm.attention("four").weights, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="Text 1 is empty"):
            lm.attention(["a", ""])

    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_maps_of_generation_equal_one_full_forward(self, lm, temperature):
        prompts = ["Apple raised its price target", "A", "one two three four five six seven"]
        results = lm.generate(prompts, 20, temperature=temperature, seed=5, attention=True)
        for result in results:
            maps = result.attention
            # The last token was chosen, not fed.
            assert maps.ids == [result.prompt_ids + result.ids[:-1]]
            assert maps.prompt_lengths == [len(result.prompt_ids)]
            assert maps.labels == [lm.tokenizer.labels(maps.ids[0])]
            assert maps.metadata["seed"] == result.seed
            whole = attention_maps(lm.model, maps.ids[0])
            torch.testing.assert_close(maps.weights, whole.weights, rtol=0, atol=1e-4)

    def test_each_row_is_cut_at_its_own_end(self, lm):
        free = lm.generate(["A", "one two three"], 12, temperature=0)
        # A greedy token of row 0 becomes the end of text, so that row ends before the other.
        end = free[0].ids[3]
        from dataclasses import replace

        lm = LanguageModel(lm.model, lm.tokenizer, lm.source)
        lm.model.config, config = replace(lm.model.config, eos_token_id=end), lm.model.config
        try:
            results = lm.generate(["A", "one two three"], 12, temperature=0, attention=True)
        finally:
            lm.model.config = config
        assert results[0].finish_reason == "end of text"
        assert results[0].attention.ids == [results[0].prompt_ids + results[0].ids]
        for result in results:
            whole = attention_maps(lm.model, result.attention.ids[0])
            torch.testing.assert_close(result.attention.weights, whole.weights, rtol=0, atol=1e-4)

    def test_a_stream_has_the_maps_so_far_at_every_step(self, lm):
        stream = lm.stream("one two three", 6, temperature=0, attention=True, layers=[1], heads=[0])
        sizes = []
        for _ in stream:
            sizes.append(stream.attention.weights.shape)
        assert sizes[0] == (1, 1, 1, 3, 3)
        assert stream.generation.attention.weights.shape == (1, 1, 1, 8, 8)
        assert [shape[-1] for shape in sizes] == sorted(shape[-1] for shape in sizes)

    def test_attention_is_none_unless_asked_for(self, lm):
        assert lm.generate("A", 3).attention is None
        assert isinstance(lm.generate("A", 3, attention=True).attention, AttentionMaps)
