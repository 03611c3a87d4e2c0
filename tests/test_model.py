"""The forward pass against transformers, bit for bit where the same kernels run."""

from dataclasses import replace

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from transformers import GPT2LMHeadModel

from gpt2attn import GPT2, KVCache, load_model
from gpt2attn.model import as_ids


def reference(folder, attention="eager", dtype=torch.float32):
    return GPT2LMHeadModel.from_pretrained(folder, attn_implementation=attention, dtype=dtype)


def random_ids(*shape, seed=0, vocab_size=TINY["vocab_size"]):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def observed(model, ids, **arguments):
    """Logits and the stack of maps (layer, batch, head, query, key)."""
    maps = []
    logits = model(ids, observe=lambda layer, steps: maps.append(steps.weights), **arguments)
    return logits, torch.stack(maps)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder, kernels="torch")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 6, 16])
def test_observed_is_eager_and_fused_is_sdpa_bit_for_bit(tiny_folder, model, batch, length):
    ids = random_ids(batch, length)
    logits, maps = observed(model, ids)
    eager = reference(tiny_folder)(ids, use_cache=False, output_attentions=True)
    assert torch.equal(logits, eager.logits)
    assert torch.equal(maps, torch.stack(eager.attentions))
    assert torch.equal(model(ids), reference(tiny_folder, "sdpa")(ids, use_cache=False).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_cached_pass_is_transformers_cached_pass_bit_for_bit(tiny_folder, model, attention):
    theirs = reference(tiny_folder, attention)
    observe = (lambda layer, steps: None) if attention == "eager" else None
    ids, cache, their_cache = random_ids(2, 12), KVCache.for_model(model, 2), None
    for chunk in ids.split([5, 4, 1, 1, 1], dim=1):
        expected = theirs(chunk, use_cache=True, cache=their_cache)
        their_cache = expected.cache
        assert torch.equal(model(chunk, cache=cache, observe=observe), expected.logits)


@pytest.mark.parametrize(
    ("scaled", "inverse"), [(True, False), (True, True), (False, False), (False, True)]
)
@pytest.mark.parametrize("upcast", [False, True])
def test_d19_scaling_flags_reach_every_path(tmp_path, scaled, inverse, upcast):
    flags = {
        "scale_attn_weights": scaled,
        "scale_attn_by_inverse_layer_idx": inverse,
        "reorder_and_upcast_attn": upcast,
    }
    folder = write_checkpoint(tmp_path, flags)
    model, ids = load_model(folder, kernels="torch"), random_ids(2, 9)
    logits, maps = observed(model, ids)
    eager = reference(folder)(ids, use_cache=False, output_attentions=True)
    assert torch.equal(logits, eager.logits)
    assert torch.equal(maps, torch.stack(eager.attentions))
    assert torch.equal(model(ids), reference(folder, "sdpa")(ids, use_cache=False).logits)
    # The default pair would pass unnoticed if a flag were dropped, so the others must differ from
    # it.
    if (scaled, inverse) != (True, False):
        default = load_model(write_checkpoint(tmp_path / "default", {}), kernels="torch")
        assert (default(ids) - logits).abs().max() > 0.1


@pytest.mark.parametrize(
    "name", ["gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh"]
)
def test_d20_every_activation_is_transformers_own(tmp_path, name):
    folder = write_checkpoint(tmp_path, {"activation_function": name})
    ids = random_ids(2, 9)
    expected = reference(folder, "sdpa")(ids, use_cache=False).logits
    assert torch.equal(load_model(folder, kernels="torch")(ids), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_transformers_own(tiny_folder, dtype):
    ids = random_ids(2, 9)
    logits, _ = observed(load_model(tiny_folder, dtype=dtype, kernels="torch"), ids)
    assert torch.equal(logits, reference(tiny_folder, dtype=dtype)(ids, use_cache=False).logits)


def test_float32_is_close_to_float64(tiny_folder, model):
    ids = random_ids(2, 16)
    exact = load_model(tiny_folder, dtype=torch.float64, kernels="torch")(ids)
    # 24-bit rounding over three layers; transformers measures the same distance, about 4e-6.
    torch.testing.assert_close(model(ids).double(), exact, rtol=0, atol=5e-5)


def test_nothing_sees_the_future(model):
    ids = random_ids(2, 16)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % TINY["vocab_size"]
    assert torch.equal(model(ids)[:, :-1], model(changed)[:, :-1])
    _, maps = observed(model, ids)
    assert (maps.triu(1) == 0).all()
    assert torch.equal(maps[..., 0, 0], torch.ones(maps.shape[:3]))


def test_only_the_layers_an_observer_wants_leave_the_fused_kernel(model):
    class Two:
        layers = (2,)
        seen: list = []  # noqa: RUF012 - one instance, one test

        def __call__(self, layer, steps):
            self.seen.append((layer, steps.q.shape))

    observe, ids = Two(), random_ids(1, 6)
    model(ids, observe=observe)
    assert observe.seen == [(2, (1, 4, 6, 8))]


def test_observed_steps_are_slices_of_c_attn(model):
    seen = {}
    inputs = {}
    handle = model.h[1].attn.c_attn.register_forward_hook(
        lambda module, args, output: inputs.update(qkv=output)
    )
    model(random_ids(2, 6), observe=lambda layer, steps: seen.update({layer: steps}))
    handle.remove()
    q, k, v = inputs["qkv"].split(TINY["n_embd"], dim=-1)
    for head in range(4):
        columns = slice(8 * head, 8 * head + 8)
        assert torch.equal(seen[1].q[:, head], q[..., columns])
        assert torch.equal(seen[1].k[:, head], k[..., columns])
        assert torch.equal(seen[1].v[:, head], v[..., columns])


class TestPadding:
    """D01, D02, D06, D18: padded rows give what they give alone."""

    def padded(self, lengths, side, pad_id=0):
        width = max(lengths)
        ids = torch.full((len(lengths), width), pad_id)
        mask = torch.zeros(len(lengths), width, dtype=torch.long)
        rows = [random_ids(1, length, seed=length) for length in lengths]
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            where = slice(width - length, None) if side == "left" else slice(0, length)
            ids[i, where], mask[i, where] = row[0], 1
        return ids, mask, rows

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("pads", range(1, 11))
    def test_real_tokens_are_as_alone(self, model, side, pads):
        ids, mask, rows = self.padded([12, 12 - pads], side)
        logits, maps = observed(model, ids, attention_mask=mask)
        fused = model(ids, attention_mask=mask)
        for i, row in enumerate(rows):
            real = mask[i].bool()
            alone, alone_maps = observed(model, row)
            # Other batch sizes run other kernels: rounding of float32, far below a fault's 0.1 to
            # 5.
            torch.testing.assert_close(logits[i, real], alone[0], rtol=0, atol=1e-4)
            torch.testing.assert_close(fused[i, real], alone[0], rtol=0, atol=1e-4)
            torch.testing.assert_close(
                maps[:, i][..., real, :][..., real], alone_maps[:, 0], rtol=0, atol=1e-5
            )
            assert (maps[:, i][..., ~real, :] == 0).all()
            assert (maps[:, i][..., ~real] == 0).all()
        assert logits.isfinite().all()
        assert fused.isfinite().all()

    def test_the_pad_id_does_not_matter(self, model):
        results = []
        for pad_id in (0, 7, 66):
            ids, mask, _ = self.padded([6, 3], "left", pad_id)
            results.append(model(ids, attention_mask=mask)[mask.bool()])
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_padding_does_not_use_up_the_context(self, model):
        """16 columns of which a row fills 3: its positions are 0 to 2, and more columns than
        n_positions fit.
        """
        ids, mask, rows = self.padded([3], "left")
        ids = torch.cat([torch.zeros(1, 16, dtype=torch.long), ids], dim=1)
        mask = torch.cat([torch.zeros(1, 16, dtype=torch.long), mask], dim=1)
        logits = model(ids, attention_mask=mask)[0, 16:]
        torch.testing.assert_close(logits, model(rows[0])[0], rtol=0, atol=1e-4)

    def test_d03_a_mask_must_cover_cached_and_new_tokens(self, model):
        ids = random_ids(2, 6)
        mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
        cache = KVCache.for_model(model, 2)
        model(ids[:, :4], cache=cache, attention_mask=mask[:, :4])
        for bad in (mask[:, :2], mask[:, :5], torch.ones(2, 7), mask[:1]):
            with pytest.raises(ValueError, match=r"\(2, 6\) \(4 cached \+ 2 new\)"):
                model(ids[:, 4:], cache=cache, attention_mask=bad)
        with pytest.raises(ValueError, match="holds padding"):
            model(ids[:, 4:], cache=cache)
        logits = model(ids[:, 4:], cache=cache, attention_mask=mask)
        whole = model(ids, attention_mask=mask)[:, 4:]
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (torch.tensor([[0, 0, 0]]), "row 0 is all padding"),
            (torch.tensor([[0, 2, 1]]), "must hold 1 for tokens and 0"),
            (torch.ones(1, 4), r"shape \(1, 4\), but \(1, 3\)"),
        ],
    )
    def test_masks_that_make_no_sense_are_refused(self, model, mask, message):
        with pytest.raises(ValueError, match=message):
            model(random_ids(1, 3), attention_mask=mask)


class TestLimits:
    def test_d04_a_text_as_long_as_the_context_fits_and_no_longer(self, model):
        assert model(random_ids(1, 16)).shape == (1, 16, 67)
        with pytest.raises(ValueError, match="17 tokens need 17 positions, but this model has 16"):
            model(random_ids(1, 17))
        cache = KVCache.for_model(model, max_len=20)
        model(random_ids(1, 15), cache=cache)
        with pytest.raises(ValueError, match="2 tokens after 15 cached ones need 17 positions"):
            model(random_ids(1, 2), cache=cache)
        assert model(random_ids(1, 1), cache=cache).shape == (1, 1, 67)  # and still works

    def test_d05_a_context_of_one_position(self, tmp_path):
        model = load_model(write_checkpoint(tmp_path, {"n_positions": 1}), kernels="torch")
        assert model(random_ids(1, 1)).shape == (1, 1, 67)
        with pytest.raises(ValueError, match="2 positions, but this model has 1"):
            model(random_ids(1, 2))

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([[-1, 2]], r"Token id -1 \(row 0, position 0\).*0 to 66"),
            ([[3, 4], [5, 67]], r"Token id 67 \(row 1, position 1\)"),
            ([[2**40]], "Token id 1099511627776"),
            ([[2**70]], "whole numbers"),
            ([[0.5]], "whole numbers, not torch.float32"),
            ([[True]], "whole numbers, not torch.bool"),
            ([["a"]], "whole numbers"),
            ([], "no token ids"),
            ([[]], "no token ids"),
            ([[1, 2], [3]], "rows of equal length"),
            ([[[1]]], r"shape \(batch, tokens\), not \(1, 1, 1\)"),
        ],
    )
    def test_d09_ids_that_are_not_tokens_are_named(self, model, ids, message):
        with pytest.raises(ValueError, match=message):
            model(ids)

    def test_d09_what_counts_as_ids(self, model):
        expected = model(torch.tensor([[5, 6, 7]]))
        for ids in ([5, 6, 7], [[5, 6, 7]], torch.tensor([[5, 6, 7]], dtype=torch.int32)):
            assert torch.equal(model(ids), expected)
        assert as_ids(torch.tensor([1], dtype=torch.uint8), 67).dtype == torch.long


def test_d10_there_is_no_dropout_to_forget(tmp_path):
    rates = {"attn_pdrop": 0.9, "embd_pdrop": 0.9, "resid_pdrop": 0.9}
    model = load_model(write_checkpoint(tmp_path, rates), kernels="torch")
    ids = random_ids(1, 9)
    assert not model.training
    expected = model(ids)
    assert torch.equal(model(ids), expected)
    assert torch.equal(model.train()(ids), expected)
    _, maps = observed(model, ids)
    torch.testing.assert_close(maps.sum(-1), torch.ones(3, 1, 4, 9), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [60.0])
def test_d12_extreme_scores_stay_finite_and_causal(tiny_folder, scale):
    model, theirs = load_model(tiny_folder, kernels="torch"), reference(tiny_folder)
    for block, their_block in zip(model.h, theirs.transformer.h, strict=True):
        for layer in (block.attn.c_attn, their_block.attn.c_attn):
            layer.weight.data[:, : 2 * TINY["n_embd"]] *= scale
    ids = random_ids(2, 16)
    logits, maps = observed(model, ids)
    assert logits.isfinite().all()
    assert (maps.triu(1) == 0).all()
    assert torch.equal(logits, theirs(ids, use_cache=False).logits)


def test_hidden_and_unembed_are_the_two_halves(model):
    ids = random_ids(2, 7)
    assert torch.equal(model.unembed(model.hidden(ids)), model(ids))


def test_the_last_logits_are_those_of_the_whole_pass(model):
    ids, mask = random_ids(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    expected = model.unembed(model.hidden(ids, attention_mask=mask)[:, -1])
    cache, seen = KVCache.for_model(model, 3), []
    model.last_logits(ids[:, :5], cache=cache, attention_mask=mask[:, :5])
    for options in ({}, {"observe": lambda *steps: seen.append(steps)}):
        logits = model.last_logits(ids, attention_mask=mask, **options)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0 if not options else 1e-4)
    logits = model.last_logits(ids[:, 5:], cache=cache, attention_mask=mask)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert (len(seen), cache.length) == (model.config.n_layer, 9)
    assert torch.equal(model.hidden(ids, last_only=True), model.hidden(ids)[:, -1:])


def test_names_are_the_checkpoint_names(tiny_folder, model):
    theirs = {name.removeprefix("transformer.") for name in reference(tiny_folder).state_dict()}
    assert set(model.state_dict()) == theirs - {"lm_head.weight"}


def test_an_untied_head_is_its_own_matrix(tmp_path):
    folder = write_checkpoint(tmp_path, {"tie_word_embeddings": False})
    model, ids = load_model(folder, kernels="torch"), random_ids(1, 6)
    assert not torch.equal(model.lm_head.weight, model.wte.weight)
    assert torch.equal(model(ids), reference(folder, "sdpa")(ids, use_cache=False).logits)


def test_one_model_serves_two_threads(model):
    from concurrent.futures import ThreadPoolExecutor

    inputs = [random_ids(1, 9, seed=seed) for seed in range(8)]
    expected = [model(ids) for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        for result, right in zip(pool.map(model, inputs), expected, strict=True):
            torch.testing.assert_close(result, right, rtol=0, atol=1e-5)


def test_a_new_model_has_the_sizes_of_its_config(model):
    config = replace(model.config, n_inner=37)
    with torch.device("meta"):
        fresh = GPT2(config)
    assert fresh.h[0].mlp.c_fc.weight.shape == (32, 37)
    assert fresh.h[0].mlp.c_proj.weight.shape == (37, 32)


def test_torch_can_compile_and_export_it(tiny_folder):
    model, ids = load_model(tiny_folder), random_ids(2, 9)
    exported = torch.export.export(model, (ids,)).module()
    torch.testing.assert_close(exported(ids), model(ids), rtol=0, atol=1e-5)
    compiled, cache = torch.compile(model, backend="eager"), KVCache.for_model(model, 2)
    logits = [compiled(chunk, cache=cache) for chunk in ids.split([8, 1], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids), rtol=0, atol=1e-4)
