"""Every formula of `analysis` against float64 NumPy, and on maps and models built for an answer."""

import math

import numpy as np
import pytest
import torch
from checkpoints import TINY

from gpt2attn import GPT2, GPT2Config, attention_maps, load_model
from gpt2attn import analysis as an
from gpt2attn.edits import head_outputs

L, H, C, D = TINY["n_layer"], TINY["n_head"], TINY["n_embd"], 8
IDS = torch.randint(TINY["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder, kernels="torch").requires_grad_(False)


@pytest.fixture(scope="module")
def weights(model):
    return attention_maps(model, IDS).weights.double()


def shifted(n_tokens, offset):
    """A map whose queries look `offset` tokens back, and at themselves where that is too far."""
    map = torch.zeros(n_tokens, n_tokens)
    for q in range(n_tokens):
        map[q, q - offset if q >= offset else q] = 1
    return map


class TestMaps:
    def test_measures_are_their_formulas(self, weights):
        a = weights.numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(a > 0, a * np.log(a), 0).sum(-1)
        q, k = np.mgrid[:9, :9]
        np.testing.assert_allclose(an.entropy(weights), entropy, atol=1e-14)
        np.testing.assert_allclose(
            an.attention_distance(weights), (a * (q - k)).sum(-1), atol=1e-14
        )
        np.testing.assert_array_equal(an.sink_share(weights), a[..., 0])
        np.testing.assert_allclose(
            an.over_queries(an.entropy(weights)), entropy[..., 1:].mean(-1), atol=1e-14
        )
        for offset in range(9):
            expected = np.mean([a[..., q, q - offset] for q in range(offset, 9)], axis=0)
            np.testing.assert_allclose(an.diagonal_score(weights, offset), expected, atol=1e-15)

    def test_rows_of_a_cached_map_keep_their_positions(self, weights):
        late = weights[..., 4:, :]  # five queries, nine keys
        assert torch.equal(an.attention_distance(late), an.attention_distance(weights)[..., 4:])
        for offset, whole in ((2, range(4, 9)), (6, range(6, 9))):
            expected = torch.stack([weights[..., q, q - offset] for q in whole]).mean(0)
            torch.testing.assert_close(an.diagonal_score(late, offset), expected)

    def test_a_map_that_looks_one_back_is_a_perfect_previous_token_head(self):
        map = shifted(12, 1)
        assert an.diagonal_score(map, 1) == 1
        assert an.diagonal_score(map, 2) == 0
        assert an.over_queries(an.attention_distance(map)) == 1
        assert torch.equal(an.entropy(map), torch.zeros(12))

    def test_duplicate_and_induction_offsets_on_repeated_tokens(self):
        n = 5
        assert an.diagonal_score(shifted(2 * n, n), n) == 1
        assert an.diagonal_score(shifted(2 * n, n - 1), n - 1) == 1
        assert an.diagonal_score(shifted(2 * n, n), n - 1) == 0

    def test_uniform_map(self):
        map = an.uniform_weights(6)
        assert an.sink_share(map)[-1] == pytest.approx(1 / 6)
        assert an.entropy(map).tolist() == pytest.approx(
            [math.log(n) for n in range(1, 7)], abs=1e-6
        )
        assert an.attention_distance(map).tolist() == pytest.approx(
            [n / 2 for n in range(6)], abs=1e-6
        )

    def test_errors_say_what_is_wrong(self):
        with pytest.raises(ValueError, match="two tokens or more"):
            an.over_queries(torch.ones(3, 1))
        with pytest.raises(ValueError, match="No query looks 4 tokens back: the map has 4 keys"):
            an.diagonal_score(torch.eye(4), 4)

    def test_rollout_is_its_formula(self, weights):
        a, rolled = weights.numpy(), None
        for layer in range(L):
            mixed = 0.5 * a[layer].mean(1) + 0.5 * np.eye(9)
            mixed /= mixed.sum(-1, keepdims=True)
            rolled = mixed if rolled is None else mixed @ rolled
            np.testing.assert_allclose(an.rollout(weights)[layer], rolled, atol=1e-14)
        np.testing.assert_allclose(an.rollout(weights).sum(-1), 1, atol=1e-14)

    def test_rollout_of_uniform_maps_leans_to_the_first_token(self):
        rolled = an.rollout(an.uniform_weights(8).expand(12, 4, 8, 8))
        assert (rolled[1:, -1, 0] > rolled[:-1, -1, 0]).all()
        assert rolled[-1, -1, 0] > 0.5

    def test_value_weighted_is_its_formula(self):
        draw = np.random.default_rng(0).normal
        a, v, w_o = np.abs(draw(size=(2, H, 5, 7))), draw(size=(2, H, 7, D)), draw(size=(H, D, C))
        tensors = [torch.from_numpy(x) for x in (a, v, w_o)]
        plain = a * np.sqrt((v**2).sum(-1))[..., None, :]
        moved = a * np.sqrt(((v @ w_o) ** 2).sum(-1))[..., None, :]
        np.testing.assert_allclose(an.value_weighted(*tensors[:2]), plain, atol=1e-12)
        np.testing.assert_allclose(an.value_weighted(*tensors), moved, atol=1e-12)


class TestHeads:
    def test_value_weighted_maps_are_the_norms_of_what_each_token_adds(self, model):
        maps = an.value_weighted_maps(model, IDS)
        seen = []
        model.hidden(IDS, observe=lambda layer, steps: seen.append(steps))
        for layer, steps in enumerate(seen):
            w_o = model.h[layer].attn.c_proj.weight.view(H, D, C)
            added = torch.einsum("bhqk,bhkd,hdc->bhqkc", steps.weights, steps.v, w_o)
            torch.testing.assert_close(maps[layer], added.norm(dim=-1), rtol=1e-5, atol=1e-5)
            plain = an.value_weighted_maps(model, IDS, transformed=False)[layer]
            assert torch.equal(plain, steps.weights * steps.v.norm(dim=-1)[..., None, :])

    def test_heads_are_ranked_by_a_named_pair(self, model):
        weights = attention_maps(model, IDS[:1]).weights[:, 0, :, 5, 2]
        ranked = an.rank_heads(weights)
        expected = sorted(
            ((layer, head) for layer in range(L) for head in range(H)),
            key=lambda pair: -weights[pair],
        )
        assert [pair[:2] for pair in ranked] == expected
        assert all(score == weights[layer, head] for layer, head, score in ranked)
        assert [pair[:2] for pair in an.rank_heads(torch.zeros(2, 2))] == [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 1),
        ]

    def test_random_ids_are_those_of_the_published_protocol(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            half = torch.randint(100, 20000, (2, 100))
        assert torch.equal(an.repeated_random_ids(50257), torch.cat([half, half], dim=1))
        small = an.repeated_random_ids(67, n_tokens=8, batch_size=50)
        assert (small.min(), small.max()) == (0, 66)
        assert torch.equal(small[:, :8], small[:, 8:])

    def test_head_scores_are_means_of_the_diagonals(self, model):
        scores = an.head_scores(model, n_tokens=6, batch_size=3, seed=7)
        ids = an.repeated_random_ids(67, n_tokens=6, batch_size=3, seed=7)
        a = attention_maps(model, ids).weights.numpy()
        for offset, score in (
            (1, scores.previous_token),
            (6, scores.duplicate_token),
            (5, scores.induction),
        ):
            diagonal = np.stack([a[..., q, q - offset] for q in range(offset, 12)])
            np.testing.assert_allclose(score, diagonal.mean((0, 2)), atol=1e-6)
        assert an.head_scores(model).n_tokens == 8  # half of 16 positions
        with pytest.raises(ValueError, match="from 2 to 8, half of this model's context, not 9"):
            an.head_scores(model, n_tokens=9)

    def test_a_head_built_to_look_one_back_scores_1(self):
        """Sines of the position in wpe, and a query turned back by one step."""
        model = positional_model()
        scores = an.head_scores(model, n_tokens=8)
        assert scores.previous_token[0].tolist() == pytest.approx([1, 0], abs=1e-4)
        assert scores.duplicate_token[0].max() < 1e-4
        # Head 1 looks seven back: on eight tokens that is what an induction head does.
        assert scores.induction[0].tolist() == pytest.approx([0, 1], abs=1e-4)

    def test_ov_eigenvalues_are_those_of_the_whole_product(self, model):
        for layer in range(L):
            block, found = model.h[layer], an.ov_eigenvalues(model, layer).numpy()
            w = (
                block.ln_1.weight.double().numpy()[:, None]
                * block.attn.c_attn.weight.double().numpy()
            )
            for head in range(H):
                w_v = w[:, 2 * C + D * head : 2 * C + D * (head + 1)]
                w_o = block.attn.c_proj.weight.double().numpy()[D * head : D * (head + 1)]
                whole = (w_v - w_v.mean(0)) @ (w_o - w_o.mean(1, keepdims=True))  # (C, C)
                expected = sorted(np.linalg.eigvals(whole), key=abs)[-D:]
                np.testing.assert_allclose(
                    np.sort_complex(found[head]), np.sort_complex(expected), atol=1e-9
                )
                score = np.sum(expected).real / np.abs(expected).sum()
                assert an.ov_copying_scores(model)[layer, head] == pytest.approx(score, abs=1e-9)

    def test_a_head_that_copies_scores_1_and_one_that_negates_minus_1(self, tiny_folder):
        model = load_model(tiny_folder, kernels="torch").requires_grad_(False)
        block = model.h[1]
        block.ln_1.weight.fill_(1)
        for head, sign in ((0, 1), (1, -1)):
            w_v = block.attn.c_attn.weight[:, 2 * C + D * head : 2 * C + D * (head + 1)]
            block.attn.c_proj.weight[D * head : D * (head + 1)] = sign * w_v.T
        block.attn.c_proj.weight[2 * D : 3 * D] = 0
        assert an.ov_copying_scores(model)[1, :3].tolist() == pytest.approx([1, -1, 0], abs=1e-12)

    def test_copying_score_of_known_eigenvalues(self):
        turning = torch.tensor([1j, -1j, 3.0, 1.0], dtype=torch.complex128)
        assert an.copying_score(turning) == pytest.approx(4 / 6)

    @pytest.mark.parametrize("mean", [False, True])
    def test_ablation_reports_logits_and_divergence(self, model, mean):
        ids, heads = IDS[0].tolist(), [(0, 1), (2, 3), (2, 0)]
        result = an.ablate_heads(model, ids, heads, mean=mean)

        def edit(layer, site, x):
            if site == "heads":
                for at, head in heads:
                    if at == layer:
                        value = head_outputs(model, ids, layer, head).mean((0, 1)) if mean else 0
                        x = x.clone()
                        x[:, head] = value
            return x

        torch.testing.assert_close(result.before, model([ids])[0, -1])
        torch.testing.assert_close(result.after, model([ids], edit=edit)[0, -1])
        p, q = (x.double().softmax(-1).numpy() for x in (result.before, result.after))
        assert result.kl == pytest.approx((p * np.log(p / q)).sum(), abs=1e-12)
        assert result.kl > 0.01

    def test_no_change_is_a_divergence_of_exactly_0(self, model):
        logits = model(IDS)
        assert torch.equal(an.kl_divergence(logits, logits), torch.zeros(2, 9, dtype=torch.float64))

    def test_gpt2_small_is_known_by_its_weights(self, tiny_folder):
        published = [-0.0188, -0.1974, 0.004, 0.0113, 0.0638, -0.105, 0.0369, -0.168]
        config = GPT2Config(vocab_size=3, n_positions=2, n_embd=768, n_layer=12, n_head=12)
        with torch.device("meta"):
            model = GPT2(config)
        model.wpe.weight = torch.nn.Parameter(torch.zeros(2, 768))
        assert not an.is_gpt2_small(model)
        model.wpe.weight.data[0, :8] = torch.tensor(published)
        assert an.is_gpt2_small(model)
        model.wpe.weight.data = model.wpe.weight.data.bfloat16()
        assert an.is_gpt2_small(model)
        assert not an.is_gpt2_small(load_model(tiny_folder, kernels="torch"))


class TestEmbeddings:
    def test_neighbours_are_a_full_float64_sort(self):
        table = torch.randn(9000, 24, generator=torch.Generator().manual_seed(0))  # two pieces
        t = table.double().numpy()
        cosines = t @ t[8500] / np.linalg.norm(t, axis=1) / np.linalg.norm(t[8500])
        order = [id for id in np.argsort(-cosines) if id != 8500][:12]
        found = an.neighbours(table, 8500, 12)
        assert [id for id, _ in found] == order
        np.testing.assert_allclose([cosine for _, cosine in found], cosines[order], atol=1e-14)

    def test_there_are_no_more_neighbours_than_other_rows(self):
        assert an.neighbours(torch.eye(3), 1, 10) == [(0, 0.0), (2, 0.0)]

    def test_cosine_is_exact_where_it_can_be(self):
        x = torch.randn(500, 768, generator=torch.Generator().manual_seed(1))
        assert (an.cosine(x, x) == 1).all()
        assert (an.cosine(x, -x) == -1).all()
        assert (an.cosine(x, torch.zeros(768)) == 0).all()

    def test_errors_name_the_limit(self):
        with pytest.raises(
            ValueError, match="Token id 3 is outside the vocabulary: ids run from 0 to 2"
        ):
            an.neighbours(torch.eye(3), 3)
        with pytest.raises(ValueError, match="at least 1, not 0"):
            an.neighbours(torch.eye(3), 1, 0)

    def test_unembedding_bias_is_its_formula(self, model):
        bias = model.ln_f.bias.double().numpy() @ model.wte.weight.double().numpy().T
        np.testing.assert_allclose(an.unembedding_bias(model), bias - bias.mean(), atol=1e-5)


class TestStream:
    def test_stream_is_what_the_blocks_receive_and_give(self, model):
        seen = [[], []]
        handles = [
            hook(lambda module, args, *rest, to=to: to.append((rest or args)[0]))
            for block in model.h
            for hook, to in (
                (block.ln_2.register_forward_pre_hook, seen[0]),
                (block.register_forward_hook, seen[1]),
            )
        ]
        model(IDS)
        for handle in handles:
            handle.remove()
        stream = an.residual_stream(model, IDS, after_attention=True)
        assert stream.stages == [
            "wte + wpe",
            *(f"block {n}{part}" for n in range(L) for part in (" attention", "")),
        ]
        assert torch.equal(stream.values[0], model.wte(IDS) + model.wpe(torch.arange(9)))
        for layer in range(L):
            assert torch.equal(stream.values[1 + 2 * layer], seen[0][layer])
            assert torch.equal(stream.values[2 + 2 * layer], seen[1][layer])
        blocks = an.residual_stream(model, IDS)
        assert blocks.stages == ["wte + wpe", "block 0", "block 1", "block 2"]
        assert torch.equal(blocks.values, stream.values[::2])

    def test_last_row_of_the_lens_is_the_logits_to_the_bit(self, model):
        lens = an.logit_lens(model, IDS, positions=None)
        assert torch.equal(lens.logits[-1], model(IDS))
        some = an.logit_lens(model, IDS, positions=[2, -1], after_attention=True)
        assert torch.equal(some.logits[-1], model.unembed(model.hidden(IDS)[:, [2, -1]]))
        assert len(some.stages) == len(some.logits) == 1 + 2 * L
        torch.testing.assert_close(some.logits[::2], lens.logits[:, :, [2, -1]])
        # As generation unembeds a prompt's last token.
        last = an.logit_lens(model, IDS[:1])
        assert torch.equal(last.logits[-1, :, 0], model.unembed(model.hidden(IDS[:1])[:, -1]))

    def test_each_row_of_the_lens_is_normalised_by_itself(self, model):
        lens = an.logit_lens(model, IDS, positions=[4])
        table = model.wte.weight.double().numpy()
        for stage, x in enumerate(an.residual_stream(model, IDS).values[:, :, 4].double().numpy()):
            scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            y = scaled * model.ln_f.weight.numpy() + model.ln_f.bias.numpy()
            np.testing.assert_allclose(lens.logits[stage, :, 0], y @ table.T, rtol=1e-4, atol=1e-4)

    def test_a_position_that_is_not_there_is_refused(self, model):
        with pytest.raises(
            ValueError, match="Position 9 is not there: the text has the positions 0 to 8"
        ):
            an.logit_lens(model, IDS, positions=[9])

    def test_drift_starts_at_exactly_1_and_is_the_cosine_of_the_streams(self, model):
        a, b = [5, 6, 7, 8, 9], [30, 31, 8, 33]
        drift = an.context_drift(model, a, 3, b, 2)
        assert drift.stages == ["wte", "wte + wpe", "block 0", "block 1", "block 2"]
        assert drift.cosines[0] == 1.0
        streams = [an.residual_stream(model, [ids]).values[:, 0].double().numpy() for ids in (a, b)]
        for stage, (x, y) in enumerate(zip(*streams, strict=True), start=1):
            x, y = (s / np.linalg.norm(s, axis=1, keepdims=True) for s in (x, y))
            assert drift.cosines[stage] == pytest.approx(x[3] @ y[2], abs=1e-12)
            others = [x[i] @ y[j] for i in range(1, 5) for j in range(1, 4) if a[i] != b[j]]
            assert drift.others[stage] == pytest.approx(np.mean(others), abs=1e-12)
        assert max(drift.cosines[1:]) < 1

    def test_the_same_context_does_not_move_a_token(self, model):
        ids = IDS[0].tolist()
        assert an.context_drift(model, ids, 6, ids, 6).cosines == [1.0] * (L + 2)

    def test_drift_has_no_baseline_without_other_tokens(self, model):
        assert an.context_drift(model, [4, 9], 1, [5, 9], 1).others is None

    def test_drift_of_two_different_tokens_is_refused(self, model):
        with pytest.raises(
            ValueError, match="Position 0 holds token #4, position 1 of the other text #9"
        ):
            an.context_drift(model, [4, 9], 0, [5, 9], 1)


def positional_model():
    """One layer, two heads: head 0 looks one token back, head 1 seven, for 16 positions."""
    n, d = 16, 32
    config = GPT2Config(vocab_size=5, n_positions=n, n_embd=2 * d, n_layer=1, n_head=2)
    model = GPT2(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    model.h[0].ln_1.weight.fill_(1)
    turns = 2 * math.pi * torch.arange(1, d // 2 + 1) / 37
    angles = torch.arange(n)[:, None] * turns
    # The negative copy keeps the mean at 0 and the length fixed: LayerNorm changes the scale only.
    waves = torch.cat([angles.cos(), angles.sin()], dim=1)
    model.wpe.weight.copy_(torch.cat([waves, -waves], dim=1))
    c_attn = model.h[0].attn.c_attn.weight
    for head, back in enumerate((1, 7)):
        where = slice(d * head, d * (head + 1))
        cos, sin = (back * turns).cos().diag(), (back * turns).sin().diag()
        # (cos, sin) of an angle less back * turns.
        c_attn[:d, where] = 30 * torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
        c_attn[:d, slice(2 * d + d * head, 2 * d + d * (head + 1))] = torch.eye(d)
    return model
