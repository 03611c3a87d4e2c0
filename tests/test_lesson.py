"""The lesson: every number against NumPy, transformers or plain counting, and its three forms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import wide_hf_model, write_checkpoint
from numpy_gpt2 import Layer, NumpyGPT2, softmax
from rich.cells import cell_len
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from gpt2attn import GPT2, AttentionSteps, GPT2Config, LanguageModel, Tokenizer, generate, load
from gpt2attn.lesson import SECTIONS, Lesson, explain, one_head, tokens, whole_model
from gpt2attn.render import lesson_words
from gpt2attn.render.lesson_blocks import Beside, Chapter, Listing, Picture, Prose, Table, spans
from gpt2attn.render.lesson_html import lesson_html
from gpt2attn.render.lesson_markdown import lesson_markdown
from gpt2attn.render.lesson_text import lesson_text
from gpt2attn.render.lesson_words import document

SENTENCE = "Apple raised its price target"
SIZES = {"vocab_size": 50257, "n_positions": 64}
LAYERS, HEADS, WIDTH = 3, 4, 32
EXAMPLES = {
    " apple": ("She ate an apple after lunch.", "The new phone from apple sold well."),
    " bank": ("I deposited money in the bank.", "We sat on the bank of the river."),
}
# Every character that some form could take for markup.
HOSTILE = '<script> "` *b* | ](http://e.ex) & $\n\u202e\t\\'
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 through three layers, numbers up to 100


@pytest.fixture(scope="module")
def lm(torch_lm: LanguageModel) -> LanguageModel:
    return torch_lm


@pytest.fixture(scope="module")
def oracle(folder: Path) -> NumpyGPT2:
    return NumpyGPT2(folder)


@pytest.fixture(scope="module")
def lesson(lm: LanguageModel) -> Lesson:
    return explain(lm)


@pytest.fixture(scope="module")
def layer(lm: LanguageModel, oracle: NumpyGPT2, lesson: Lesson) -> Layer:
    """The layer that the steps follow, by NumPy."""
    return oracle(lm.encode(SENTENCE))[1][lesson.choice.layer]


def ids_of(text: str) -> list[int]:
    return Tokenizer.gpt2().encode(text)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def entropy(row: np.ndarray) -> float:
    return float(-sum(p * np.log(p) for p in row if p > 0))


def jacobian_norm(row: np.ndarray) -> float:
    return float(np.linalg.norm(np.diag(row) - np.outer(row, row)))


def close(found: object, expected: object, **tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, **(tolerance or CLOSE))


class TestChoice:
    def test_it_follows_the_head_that_gives_its_to_apple_most(
        self, lesson: Lesson, lm: LanguageModel, oracle: NumpyGPT2
    ) -> None:
        weights = np.array([layer.weights[:, 2, 0] for layer in oracle(ids_of(SENTENCE))[1]])
        choice = lesson.choice
        assert (choice.query, choice.key) == (2, 0)
        assert (choice.layer, choice.head) == np.unravel_index(weights.argmax(), weights.shape)
        assert choice.weight == pytest.approx(weights.max(), abs=1e-6)
        assert (choice.rank, choice.n_heads, choice.given) == (1, LAYERS * HEADS, ())

    @pytest.mark.parametrize(("layer", "head"), [(1, None), (None, 2), (1, 2), (-1, -1)])
    def test_layer_and_head_can_be_fixed(
        self, lm: LanguageModel, oracle: NumpyGPT2, layer: int | None, head: int | None
    ) -> None:
        weights = np.array([layer.weights[:, 2, 0] for layer in oracle(ids_of(SENTENCE))[1]])
        allowed = np.full_like(weights, -1)
        where = (slice(None) if layer is None else layer, slice(None) if head is None else head)
        allowed[where] = weights[where]
        choice = explain(lm, sections=[7], layer=layer, head=head).choice
        assert (choice.layer, choice.head) == np.unravel_index(allowed.argmax(), weights.shape)
        assert choice.rank == 1 + (weights > allowed.max()).sum()
        assert choice.given == tuple(
            name for name, n in (("layer", layer), ("head", head)) if n is not None
        )

    @pytest.mark.parametrize(
        ("text", "pair"),
        [
            ("Apple raised its price", (2, 0)),
            ("Today Apple raised its price", (3, 1)),
            ("Its price rose", (2, 0)),
            ("its Apple fell", (2, 0)),
            ("One", (0, 0)),
        ],
    )
    def test_the_pair(self, lm: LanguageModel, text: str, pair: tuple[int, int]) -> None:
        choice = explain(lm, text, sections=[12]).choice
        assert (choice.query, choice.key) == pair

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"text": ""}, "empty"),
            ({"layer": 3}, "layer 3 .* 0 to 2"),
            ({"head": 4}, "head 4 .* 0 to 3"),
            ({"sections": [18]}, "Section 18 .* 1 to 17"),
            ({"sections": []}, "Section list"),
            ({"text": "word " * 65}, "64"),
        ],
    )
    def test_what_is_not_there_is_refused(
        self, lm: LanguageModel, arguments: dict, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            explain(lm, **arguments)


class TestNumbers:
    def test_1_rows_are_those_of_the_file(self, lesson: Lesson, oracle: NumpyGPT2) -> None:
        section = lesson.section(tokens.StaticRow)
        wte, wpe = oracle.weights["wte.weight"], oracle.weights["wpe.weight"]
        assert [token.id for token in section.tokens] == ids_of(SENTENCE)
        for token in [*section.tokens, section.example]:
            assert np.array_equal(token.row.numpy(), wte[token.id])
        assert (section.example.id, section.example.label) == (4200, "␣sales")
        assert section.is_lookup
        assert section.shapes == {"wte": (50257, WIDTH), "rows": (5, WIDTH)}
        shared = section.shared
        ids = [ids_of(text) for text in EXAMPLES[" apple"]]
        assert ids_of(" apple") == [shared.id]
        assert shared.texts == EXAMPLES[" apple"]
        assert [row[at] for row, at in zip(ids, shared.positions, strict=True)] == [shared.id] * 2
        assert shared.same_row
        sums = [wte[shared.id] + wpe[at] for at in shared.positions]
        assert shared.cosine_with_position == pytest.approx(cosine(*sums), abs=1e-6)

    def test_2_neighbours(self, lesson: Lesson, oracle: NumpyGPT2) -> None:
        section = lesson.section(tokens.Neighbours)
        wte = oracle.weights["wte.weight"]
        directions = wte / np.linalg.norm(wte, axis=1, keepdims=True)
        words = [" apple", " orange", " banana", " cat", " dog", " king", " queen"]
        assert [[id] for id in section.ids] == [ids_of(word) for word in words]
        close(section.cosines, directions[section.ids] @ directions[section.ids].T)
        assert [[near.id] for near in section.nearest] == [
            ids_of(word) for word in (" apple", " cat", " king")
        ]
        for near in section.nearest:
            cosines = directions @ directions[near.id]
            order = [id for id in np.argsort(-cosines)[:6].tolist() if id != near.id]
            assert [other.id for other in near.neighbours] == order[:5]
            close([other.cosine for other in near.neighbours], cosines[order[:5]])
        n = len(wte)
        close(section.average, (directions @ directions.sum(0) - 1).sum() / (n * (n - 1)))

    def test_2_the_average_cosine_is_that_of_all_pairs(self) -> None:
        table = torch.randn(300, 7, generator=torch.Generator().manual_seed(0)) + 0.3
        rows = table.double().numpy()
        pairs = [cosine(rows[i], rows[j]) for i in range(300) for j in range(300) if i != j]
        assert tokens._average_cosine(table) == pytest.approx(np.mean(pairs), abs=1e-12)

    def test_3_context(self, lesson: Lesson, oracle: NumpyGPT2) -> None:
        section = lesson.section(tokens.Context)
        assert [example.label for example in section.examples] == ["␣apple", "␣bank"]
        for example, (word, texts) in zip(section.examples, EXAMPLES.items(), strict=True):
            ids = [ids_of(text) for text in texts]
            places = [row.index(*ids_of(word)) for row in ids]
            assert (example.texts, example.positions) == (texts, tuple(places))
            first, second = (self.streams(oracle, row) for row in ids)
            assert example.drift.cosines[0] == 1.0
            for stage, (a, b) in enumerate(zip(first, second, strict=True)):
                others = [
                    cosine(a[i], b[j])
                    for i in range(1, len(a))
                    for j in range(1, len(b))
                    if ids[0][i] != ids[1][j]
                ]
                close(example.drift.cosines[stage], cosine(a[places[0]], b[places[1]]))
                close(example.drift.others[stage], np.mean(others))

    def streams(self, oracle: NumpyGPT2, ids: list[int]) -> list[np.ndarray]:
        wte = oracle.weights["wte.weight"][ids]
        layers = oracle(ids)[1]
        return [wte, wte + oracle.weights["wpe.weight"][: len(ids)], *(x.stream for x in layers)]

    def test_4_projection(self, lesson: Lesson, layer: Layer) -> None:
        section, head = lesson.section(one_head.Projection), lesson.choice.head
        close(section.x, layer.x)
        for name in ("w_q", "w_k", "w_v", "q", "k", "v"):
            close(getattr(section, name), getattr(layer, name)[head], rtol=1e-5, atol=1e-4)
        assert section.columns == (8 * head, 8 * head + 7)
        assert section.error < 1e-5
        assert section.shapes["W_q"] == (WIDTH, 8)
        assert section.shapes["X"] == (5, WIDTH)

    def test_5_scores(self, lesson: Lesson, layer: Layer) -> None:
        section, head = lesson.section(one_head.Scores), lesson.choice.head
        scores = layer.scores[head]
        size = np.abs(scores).max()
        close(section.scores / size, scores / size)
        close(
            [section.there / size, section.back / size], [scores[2, 0] / size, scores[0, 2] / size]
        )
        close(section.products / size, layer.q[head, 2] * layer.k[head, 0] / size)
        assert float(section.products.sum()) == pytest.approx(section.there, rel=1e-5)

    def test_6_scaling(self, lesson: Lesson, layer: Layer) -> None:
        section, head = lesson.section(one_head.Scaling), lesson.choice.head
        raw = softmax(np.where(np.tri(5, dtype=bool), layer.scores[head], -np.inf))
        weights = layer.weights[head]
        for spread, inputs in zip(section.examples, ([1, 2, 3], [10, 20, 30]), strict=True):
            shares = softmax(np.array(inputs, dtype=float))
            assert list(spread.inputs) == inputs
            close(spread.shares, shares, rtol=1e-12)
            close(spread.entropy, entropy(shares), rtol=1e-12)
            close(spread.jacobian_norm, jacobian_norm(shares), rtol=1e-9)
        assert section.divisor == pytest.approx(8**0.5)
        assert section.scale == pytest.approx(8**-0.5)
        # A raw score, as large as 40, shifts its softmax by its own absolute error.
        loose = {"rtol": 0, "atol": 1e-4}
        close(section.raw_row, raw[2, :3], **loose)
        close(section.scaled_row, weights[2, :3])
        order = np.argsort(layer.scores[head][2, :3]), np.argsort(weights[2, :3])
        assert section.same_order == np.array_equal(*order)
        for prefix, rows, tolerance in (("raw_", raw, loose), ("", weights, CLOSE)):
            close(getattr(section, f"{prefix}largest"), rows.max(1), **tolerance)
            close(getattr(section, f"{prefix}entropy"), [*map(entropy, rows)], **tolerance)
            close(
                getattr(section, f"{prefix}jacobian_norm"), [*map(jacobian_norm, rows)], **tolerance
            )
        assert (section.raw_entropy <= section.entropy + 1e-12).all()

    def test_7_rows(self, lesson: Lesson, layer: Layer) -> None:
        section, weights = lesson.section(one_head.Rows), layer.weights[lesson.choice.head]
        close(section.weights, weights)
        close(section.row_sums, np.ones(5), rtol=1e-6)
        assert section.smallest == pytest.approx(weights[np.tri(5, dtype=bool)].min(), rel=1e-3)

    def test_8_values(self, lesson: Lesson, layer: Layer) -> None:
        section, head = lesson.section(one_head.Values), lesson.choice.head
        v, w_o, shares = layer.v[head], layer.w_o[head], layer.weights[head, 2]
        contributions = shares[:, None] * v
        close(section.shares, shares)
        close(section.value_norms, np.linalg.norm(v, axis=1))
        close(section.contributions, contributions)
        close(section.contribution_norms, np.linalg.norm(contributions, axis=1))
        close(section.added_norms, np.linalg.norm(contributions @ w_o, axis=1))
        close(section.output, layer.output[head])
        close(section.output_norm, np.linalg.norm(contributions.sum(0)))
        close(section.added_norm, np.linalg.norm(layer.output[head, 2] @ w_o))
        assert section.error < 1e-6

    def test_9_five_steps(self, lesson: Lesson, layer: Layer) -> None:
        section, head = lesson.section(one_head.FiveSteps), lesson.choice.head
        close(section.score, layer.scores[head, 2, 0], rtol=1e-5, atol=1e-4)
        close(section.scaled, layer.scaled[head, 2, 0], rtol=1e-5, atol=1e-4)
        close(section.weight, layer.weights[head, 2, 0])
        close(section.output_norm, np.linalg.norm(layer.output[head, 2]))
        for name, values in section.stages.items():
            close(values, getattr(layer, name)[head], rtol=1e-5, atol=1e-4)
        assert section.error < 1e-5
        # What is shown is what was run.
        names = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
        inputs = [getattr(layer, name) for name in names]
        inputs = [x if name == "x" else x[head] for name, x in zip(names, inputs, strict=True)]
        space = {"torch": torch, "Tensor": torch.Tensor}
        exec(section.source, space)
        output = space["one_head"](*map(torch.from_numpy, inputs), 8**-0.5)
        close(output, layer.output[head], rtol=1e-12, atol=1e-12)

    def test_10_all_heads(self, lesson: Lesson, oracle: NumpyGPT2) -> None:
        section = lesson.section(whole_model.AllHeads)
        assert section.text == f"{SENTENCE}."
        assert section.ids == ids_of(f"{SENTENCE}.")
        weights = np.array([layer.weights for layer in oracle(section.ids)[1]])  # (L, H, T, T)
        pair, sink = weights[..., 2, 0], weights[..., 5, 0]
        order = np.argsort(-pair, axis=None)
        assert [(head.layer, head.head) for head in section.ranking] == [
            tuple(map(int, np.unravel_index(at, pair.shape))) for at in order
        ]
        close([head.weight for head in section.ranking], pair.flatten()[order])
        close(section.mean_weight, pair.mean())
        assert section.uniform_weight == 1 / 3
        close(section.sink, sink)
        close(section.sink_by_layer, sink.mean(1))
        close(section.sink_mean, sink.mean())
        assert section.uniform_sink == 1 / 6
        close(section.maps, weights)
        assert section.published_sink is None

    def test_10_any_other_text_is_taken_as_it_is(self, lm: LanguageModel) -> None:
        lesson = explain(lm, "Prices rose", sections=[10])
        assert lesson.section(whole_model.AllHeads).text == "Prices rose"

    @pytest.mark.parametrize(("text", "known"), [(SENTENCE, True), ("Prices rose", False)])
    def test_10_the_published_figure_stands_beside_gpt2_small_only(
        self, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, text: str, known: bool
    ) -> None:
        monkeypatch.setattr(whole_model, "is_gpt2_small", lambda model: model is lm.model)
        lesson = explain(lm, text, sections=[10])
        section = lesson.section(whole_model.AllHeads)
        assert section.published_sink == (0.61 if known else None)
        claim = (
            "claims 61% for GPT-2 small on this text; these weights gave "
            f"{100 * section.sink_mean:.1f}%"
        )
        assert (claim in " ".join(lesson_text(lesson).split())) is known

    def test_11_mask(self, lesson: Lesson, layer: Layer) -> None:
        section, head = lesson.section(one_head.Mask), lesson.choice.head
        scaled = layer.scaled[head]
        close(section.masked, layer.masked[head], rtol=1e-5, atol=1e-4)
        close(section.weights, layer.weights[head])
        loose = {"rtol": 0, "atol": 1e-4}
        close(section.unmasked, softmax(scaled), **loose)
        zeroed = softmax(np.where(np.tri(5, dtype=bool), scaled, 0.0))
        close(section.zeroed, zeroed, **loose)
        close(section.leaked, 1 - zeroed[0, 0], **loose)
        assert section.seen == [1, 2, 3, 4, 5]

    def test_12_cost(self, lesson: Lesson) -> None:
        section = lesson.section(whole_model.Cost)
        assert [cost.n_tokens for cost in section.lengths] == [5, 8, 16, 32, 1024]
        assert [cost.scores for cost in section.lengths] == [25, 64, 256, 1024, 1_048_576]
        hf = wide_hf_model(SIZES)
        for cost in section.lengths[:4]:
            maps = hf(torch.zeros(1, cost.n_tokens, dtype=torch.long), output_attentions=True)
            assert cost.all_scores == sum(map.numel() for map in maps.attentions)
            assert cost.n_bytes == sum(map.nbytes for map in maps.attentions)
            assert cost.fits
        assert not section.lengths[4].fits
        assert section.doubled == 4

    def test_13_heads(self, lm: LanguageModel, lesson: Lesson, layer: Layer) -> None:
        section = lesson.section(whole_model.Heads)
        for cost, n_head in ((section.many, HEADS), (section.one, 1)):
            config = GPT2Config(
                vocab_size=10, n_positions=64, n_embd=WIDTH, n_head=n_head, n_layer=1,
                bos_token_id=None, eos_token_id=None,
            )  # fmt: skip
            attn = GPT2(config).h[0].attn
            assert (cost.n_head, cost.head_dim) == (n_head, WIDTH // n_head)
            assert cost.parameters == sum(p.numel() for p in attn.parameters())
            seen: list[AttentionSteps] = []
            observe = lambda _, steps, seen=seen: seen.append(steps)  # noqa: E731
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                attn(torch.zeros(1, 5, WIDTH), None, None, observe, None)
            assert cost.multiplications == counter.get_total_flops() / 2  # with as many additions
            assert cost.scores == seen[0].weights.numel()
        parts = [o[2] @ w for o, w in zip(layer.output, layer.w_o, strict=True)]
        close(section.part_norms, np.linalg.norm(parts, axis=1))
        close(section.sum_norm, np.linalg.norm(sum(parts) + layer.b_o))
        assert section.agrees
        assert section.error < 1e-5

    def test_14_block(self, lesson: Lesson, layer: Layer, oracle: NumpyGPT2) -> None:
        section, at = lesson.section(whole_model.Block), lesson.choice.layer
        ids = ids_of(SENTENCE)
        streams = self.streams(oracle, ids)[1:]
        x, name = streams[at], f"h.{at}"
        middle = x + layer.attention_output
        normal = oracle.layer_norm(f"{name}.ln_2", middle)
        inner = oracle.linear(f"{name}.mlp.c_fc", normal)
        inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        mlp = oracle.linear(f"{name}.mlp.c_proj", inner)
        expected = [x, layer.x, layer.attention_output, middle, normal, inner, mlp, layer.stream]
        assert [stage.shape for stage in section.stages] == [values.shape for values in expected]
        close([s.norm for s in section.stages], [np.linalg.norm(v[2]) for v in expected])
        close([norm for _, norm in section.stream], [np.linalg.norm(v[2]) for v in streams])
        assert [stage for stage, _ in section.stream] == [
            "wte + wpe", *(f"block {number}" for number in range(LAYERS)),
        ]  # fmt: skip
        assert section.error == 0
        assert section.shapes == {"enters": (5, WIDTH), "leaves": (5, WIDTH)}
        hf = wide_hf_model(SIZES)
        assert section.block_parameters == sum(p.numel() for p in hf.transformer.h[0].parameters())
        assert section.model_parameters == hf.num_parameters()

    def test_15_logits(self, lesson: Lesson) -> None:
        section = lesson.section(whole_model.Logits)
        logits = wide_hf_model(SIZES)(torch.tensor([ids_of(SENTENCE)])).logits[0, -1].double()
        best = logits.softmax(0).topk(10)
        assert [token.id for token in section.top] == best.indices.tolist()
        assert [token.label for token in section.top] == Tokenizer.gpt2().labels(
            best.indices.tolist()
        )
        close([token.logit for token in section.top], logits[best.indices])
        close([token.probability for token in section.top], best.values)
        close(section.top_sum, best.values.sum())
        close(section.dot, logits.max())
        assert section.tied
        assert section.shapes["logits"] == (5, 50257)

    def test_16_cache(self, lm: LanguageModel, lesson: Lesson) -> None:
        section = lesson.section(whole_model.Cache)
        ids = ids_of(SENTENCE)
        cache = DynamicCache()
        wide_hf_model(SIZES)(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert section.bytes_per_token == kept / 5
        assert section.bytes_per_token == 2 * section.n_layer * section.n_embd * section.itemsize
        assert section.growth == [(n, n * kept // 5) for n in (1, 5, 8, 16, 32, 64)]
        assert section.shapes == {
            "q of one new token": (HEADS, 1, 8), "k of the whole text": (HEADS, 5, 8),
        }  # fmt: skip
        assert section.error < 1e-5
        assert [timing.n_prompt for timing in section.timings] == [5, 56]
        for use_cache, expected in ((True, section.computed), (False, section.recomputed)):
            fed = []
            observe = lambda layer, steps, fed=fed: fed.append(steps.q.shape[2])  # noqa: E731
            steps = generate(
                lm.model, ids, section.n_new, temperature=0, use_cache=use_cache, observe=observe
            )
            assert len(list(steps)) == section.n_new
            assert sum(fed) == LAYERS * expected

    def test_16_times_are_medians_without_the_first_token(
        self, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Clock:
            """Look number k comes k seconds after the one before."""

            looks = now = 0

            def perf_counter(self) -> float:
                self.looks += 1
                self.now += self.looks
                return self.now

        monkeypatch.setattr(whole_model, "time", Clock())
        first, _ = explain(lm, sections=[16]).section(whole_model.Cache).timings
        # The first look of a run starts it, and one more comes with each of 7 tokens.
        assert first.n_timed == 7
        assert first.cached == np.median([2, 3, 4, 5, 6, 7, 8])
        assert first.uncached == np.median([10, 11, 12, 13, 14, 15, 16])

    def test_17_to_try(self, lesson: Lesson, oracle: NumpyGPT2) -> None:
        section = lesson.section(whole_model.TryIt)
        animal = section.animal
        ids = ids_of("The animal was tired because it had been running")
        assert (animal.labels[animal.query], animal.labels[animal.key]) == ("␣it", "␣animal")
        rows = np.array([layer.weights[:, 5, :6] for layer in oracle(ids)[1]])
        close(animal.mean, rows.mean((0, 1)))
        best = np.unravel_index(rows[..., 1].argmax(), rows.shape[:2])
        assert (animal.best.layer, animal.best.head) == best
        close(animal.best.weight, rows[..., 1].max())
        close(animal.best_row, rows[best])
        assert 0 < section.weights_error < 1e-5
        assert 0 < section.output_error < 1e-5

    def test_json_holds_every_number(self, lesson: Lesson, layer: Layer) -> None:
        found = json.loads(json.dumps(lesson.to_dict(), allow_nan=False))
        assert found["format"] == "gpt2attn lesson 1"
        assert found["choice"]["head"] == lesson.choice.head
        assert [section["number"] for section in found["sections"]] == list(SECTIONS)
        for made, section in zip(found["sections"], lesson.sections, strict=True):
            assert made.keys() == {"number", "title", *section.__dataclass_fields__}
        mask = found["sections"][10]["masked"]
        assert mask[0][1:] == [None] * 4
        kept = torch.tensor([row[0] for row in mask])
        assert torch.equal(kept, lesson.section(one_head.Mask).masked[:, 0])


def prose_of(chapter: Chapter) -> str:
    texts = [block.text for block in chapter.blocks if isinstance(block, Prose)]
    return " ".join("".join(piece for _, piece in spans(text)) for text in texts)


def tables_of(chapter: Chapter) -> list[Table]:
    tables: list[Table] = []
    for block in chapter.blocks:
        tables += (
            [block.left, block.right]
            if isinstance(block, Beside)
            else [block] * isinstance(block, Table)
        )
    return tables


def cells_of(lesson: Lesson) -> list[list[list[str]]]:
    """The cells of all tables, headers first, as the document has them."""
    tables = [table for chapter in document(lesson).chapters for table in tables_of(chapter)]
    return [[list(table.headers), *map(list, table.rows)] for table in tables]


@pytest.fixture(scope="module")
def hostile(folder: Path) -> Lesson:
    """A text and a model's name that every form must show as they are."""
    lm = load(folder, device="cpu")
    lm.__dict__["provenance"] = {"model": "<img src=http://e.example/x onerror=alert(1)>`"}
    return explain(lm, HOSTILE, sections=[1, 5, 7, 10, 11, 15])


class TestWords:
    """The words carry the numbers; that these are right is what TestNumbers says."""

    def said(self, lesson: Lesson) -> Iterator[tuple[int, list[str]]]:
        """Phrases that a chapter's prose must have."""

        def percent(share: float) -> str:
            return f"{100 * share:.1f}%"

        shared = lesson.section(tokens.StaticRow).shared
        rows = ["50,257 rows of 32 numbers", "is these rows", "Id 4200 is row 4200"]
        yield 1, [*rows, f"one id, {shared.id}", "the same 32 numbers"]
        yield 1, [f"{shared.cosine_with_position:.4f}"]
        yield 2, [f"{lesson.section(tokens.Neighbours).average:z.3f} on average"]
        for example in lesson.section(tokens.Context).examples:
            yield 3, ["cosine 1.0000 in the table", f"{example.drift.cosines[-1]:.4f} after"]
        first, last = lesson.section(one_head.Projection).columns
        yield 4, ["5 tokens of 32 numbers", "32 numbers become 8", f"columns {first} to {last} of"]
        scores = lesson.section(one_head.Scores)
        yield 5, ["5 x 5 = 25 dot products", "these 8 products"]
        yield 5, [f"␣its scores {scores.there:.3f} on Apple"]
        yield 5, [f"Apple scores {scores.back:.3f} on ␣its"]
        yield 6, [f"sqrt(8) = {lesson.section(one_head.Scaling).divisor:.6g}", "stays the same"]
        weights = lesson.section(one_head.Rows).weights
        yield 7, [f"␣its gives {percent(float(weights[2].max()))} to"]
        yield 8, ["A V: (5 x 8)"]
        heads = lesson.section(whole_model.AllHeads)
        yield 10, ["3 x 4 = 12 heads", "6 tokens", f"On average {percent(heads.mean_weight)}"]
        yield 10, ["would give 33.3%", f"gets {percent(heads.sink_mean)} of it"]
        yield 10, ["share would be 16.7%", "not an explanation of the output"]
        leaked = lesson.section(one_head.Mask).leaked
        yield 11, ["first row sees 1 token", "last row all 5", f"give {percent(leaked)} of"]
        yield 11, ["NOT what GPT-2 computes"]
        yield 12, ["3 x 4 = 12 times", "5 x 5 = 25 scores", "4 times the cost"]
        yield 13, ["4 heads of 8 numbers", "4 x 8 = 32", "is the attention output of layer"]
        block = lesson.section(whole_model.Block)
        yield 14, ["(5 x 32) enters and (5 x 32) leaves", "no encoder", "to the last bit"]
        yield 14, [f"{block.block_parameters:,} parameters", f"{block.model_parameters:,} in all"]
        end = lesson.section(whole_model.Logits)
        yield 15, ["50,257 rows of 32", f"{end.top[0].logit:.4f}", f"is {end.dot:.4f}"]
        yield 15, ["same matrix"]
        size = lesson.section(whole_model.Cache).bytes_per_token
        yield 16, ["12 positions with a cache and of 68 without"]
        yield 16, [f"3 layers x 32 numbers x 4 bytes = {size:,} bytes"]
        best = lesson.section(whole_model.TryIt).animal.best
        yield 17, [f"{best.layer}.{best.head}", percent(best.weight)]

    def test_prose(self, lesson: Lesson) -> None:
        chapters = {chapter.number: prose_of(chapter) for chapter in document(lesson).chapters}
        seen = set()
        for number, phrases in self.said(lesson):
            seen.add(number)
            assert [phrase for phrase in phrases if phrase not in chapters[number]] == []
        assert seen == set(SECTIONS) - {9}  # whose numbers are in its table

    def test_tables(self, lesson: Lesson) -> None:
        found = {chapter.number: tables_of(chapter) for chapter in document(lesson).chapters}

        def numbers(number: int, table: int, columns: slice = slice(1, None)) -> np.ndarray:
            cells = [row[columns] for row in found[number][table].rows]
            return np.array([[float(cell.rstrip("%")) for cell in row] for row in cells])

        rounding = {"rtol": 0, "atol": 0.051}
        rows = lesson.section(tokens.StaticRow)
        close(numbers(1, 0)[:5, 2:], [t.row[:4] for t in rows.tokens], rtol=0, atol=6e-5)
        close(numbers(2, 0), lesson.section(tokens.Neighbours).cosines, rtol=0, atol=6e-4)
        drifts = [example.drift for example in lesson.section(tokens.Context).examples]
        curves = [curve for drift in drifts for curve in (drift.cosines, drift.others)]
        close(numbers(3, 0), np.array(curves).T, rtol=0, atol=6e-5)
        x = lesson.section(one_head.Projection)
        vectors = [(float(v[2].norm()), *v[2, :4].tolist()) for v in (x.x, x.q, x.k, x.v)]
        close(numbers(4, 0, slice(2, None)), vectors, rtol=0, atol=6e-5)
        scores = lesson.section(one_head.Scores)
        close(numbers(5, 0), scores.scores, **rounding)
        close(numbers(5, 1)[0], scores.products, rtol=0, atol=6e-4)
        scaling = lesson.section(one_head.Scaling)
        close(numbers(6, 1), 100 * torch.stack([scaling.raw_row, scaling.scaled_row]), **rounding)
        close(numbers(6, 2)[:, 4], scaling.entropy, rtol=0, atol=6e-4)
        close(numbers(6, 2)[:, 2], scaling.raw_jacobian_norm, rtol=0.05, atol=6e-4)
        close(numbers(7, 0), 100 * lesson.section(one_head.Rows).weights, **rounding)
        values = lesson.section(one_head.Values)
        close(float(found[8][0].rows[-1][4]), values.added_norm, rtol=0, atol=6e-5)
        assert found[9][0].rows[1][3] == f"{lesson.section(one_head.FiveSteps).score:.4f}"
        heads = lesson.section(whole_model.AllHeads)
        close(
            numbers(10, 0, slice(3, 4))[:, 0],
            [100 * h.weight for h in heads.ranking[:10]],
            **rounding,
        )
        close(numbers(10, 1, slice(2, None)), 100 * heads.sink, rtol=0, atol=0.51)
        mask = lesson.section(one_head.Mask)
        close(np.tril(numbers(11, 0)), mask.masked.tril().nan_to_num(), **rounding)
        close(numbers(11, 2), 100 * mask.unmasked, **rounding)
        assert "NOT what GPT-2 computes" in found[11][2].title
        cost = [[c.scores, c.all_scores] for c in lesson.section(whole_model.Cost).lengths]
        shown = [[int(cell.replace(",", "")) for cell in row[1:3]] for row in found[12][0].rows]
        assert shown == cost
        many = lesson.section(whole_model.Heads).many
        assert found[13][0].rows[1][1] == f"{many.multiplications:,}"
        norms = [stage.norm for stage in lesson.section(whole_model.Block).stages]
        close(numbers(14, 0, slice(3, 4))[:, 0], norms, rtol=0, atol=6e-4)
        top = lesson.section(whole_model.Logits).top
        assert [row[1:3] for row in found[15][0].rows] == [[t.label, str(t.id)] for t in top]
        cache = lesson.section(whole_model.Cache)
        times = [[1000 * t.cached, 1000 * t.uncached] for t in cache.timings]
        close(numbers(16, 0, slice(1, 3)), times, rtol=0, atol=6e-3)
        assert [row[1] for row in found[16][1].rows] == [f"{size:,}" for _, size in cache.growth]
        animal = lesson.section(whole_model.TryIt).animal
        close(numbers(17, 0), 100 * torch.stack([animal.mean, animal.best_row]), **rounding)

    def test_a_long_text_shows_ten_tokens_with_first_key_and_query(self, lm: LanguageModel) -> None:
        text = "Today Apple said that it had for the second time this year raised its price target"
        lesson = explain(lm, text, sections=[1, 7])
        choice = lesson.choice
        table = tables_of(document(lesson).chapters[1])[0]
        shown = lesson_words._shown(lesson)
        assert len(shown) == len(table.rows) == 10
        assert shown == sorted(shown)
        assert {0, choice.query, choice.key} <= set(shown)
        assert table.rows[table.marked][0] == "␣its"
        weights = lesson.section(one_head.Rows).weights[shown][:, shown]
        cells = [[float(cell.rstrip("%")) for cell in row[1:]] for row in table.rows]
        close(cells, 100 * weights, rtol=0, atol=0.051)
        assert "10 of the 16 tokens" in lesson_text(lesson)

    def test_other_models_get_other_words(self, lm: LanguageModel, tmp_path: Path) -> None:
        settings = {"scale_attn_weights": False, "tie_word_embeddings": False, "n_positions": 4}
        write_checkpoint(tmp_path, {**SIZES, **settings})
        Tokenizer.gpt2().save(tmp_path)
        lesson = explain(load(tmp_path, device="cpu"), "Prices rose")
        text = " ".join(lesson_text(lesson).split())
        assert "multiplies its scores by 1 " in text
        assert "with a matrix of its own, lm_head" in text
        assert "no room for the example texts" in text
        assert "no room for new tokens" in text
        assert "sentence about the animal does not fit" in text
        assert "more than this model's context of 4 tokens" in text

    @pytest.mark.parametrize(("n_embd", "n_head"), [(2, 2), (9, 3), (16, 4)])
    def test_heads_of_few_numbers(self, tmp_path: Path, n_embd: int, n_head: int) -> None:
        """sshleifer/tiny-gpt2, which many try first, has heads of one number."""
        write_checkpoint(tmp_path, {**SIZES, "n_embd": n_embd, "n_head": n_head})
        Tokenizer.gpt2().save(tmp_path)
        lesson = explain(load(tmp_path, device="cpu"), sections=[4, 5])
        for table in cells_of(lesson):
            assert {len(row) for row in table} == {len(table[0])}
        products = tables_of(document(lesson).chapters[1])[1]
        cells = [cell for row in products.rows for cell in row[1:] if cell]
        assert len(cells) == n_embd // n_head
        assert products.headers[-1] in lesson_text(lesson)

    def test_shares_that_the_number_format_has_no_room_for(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, SIZES, std=3.0)
        Tokenizer.gpt2().save(tmp_path)
        lesson = explain(load(tmp_path, device="cpu"), sections=[7])
        assert lesson.section(one_head.Rows).smallest == 0
        assert "so near 0 that float32 holds it as 0" in " ".join(lesson_text(lesson).split())

    def test_a_vocabulary_of_another_size(self, tmp_path: Path) -> None:
        """A padded vocabulary has rows that no token owns."""
        write_checkpoint(tmp_path, {**SIZES, "vocab_size": 50304})
        Tokenizer.gpt2().save(tmp_path)
        lesson = explain(load(tmp_path, device="cpu"), sections=[1, 2, 15])
        assert lesson.section(tokens.StaticRow).example is None
        assert "4200" not in lesson_text(lesson)


class Page(HTMLParser):
    """A page's cells and text; every tag must be closed, every id be one of a kind."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.attributes.append((name, value))
            if name == "id":
                self.ids.append(value)
            self.references += re.findall(r"url\(#(.*?)\)", value)
            if name == "href" and value.startswith("#"):
                self.references.append(value[1:])
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def page(lesson: Lesson) -> str:
    return lesson_html(lesson)


@pytest.fixture(scope="module")
def markdown(lesson: Lesson) -> str:
    return lesson_markdown(lesson)


class TestForms:
    def test_all_items_are_in_all_forms(self, lesson: Lesson, page: str, markdown: str) -> None:
        forms = [lesson_text(lesson), " ".join(Page(page).text), markdown]
        for section in lesson.sections:
            heading = f"{section.number}. {section.title}"
            assert [heading in form for form in forms] == [True] * 3

    def test_html_and_markdown_have_the_tables_of_the_document(
        self, lesson: Lesson, page: str, markdown: str
    ) -> None:
        assert Page(page).tables == self.markdown_tables(markdown) == cells_of(lesson)

    def markdown_tables(self, markdown: str) -> list[list[list[str]]]:
        tables: list[list[list[str]]] = []
        for part in re.findall(r"(?:^\|.*\n?)+", markdown, re.MULTILINE):
            lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines()]
            cells = [[re.sub(r"\\(.)", r"\1", cell[1:-1]) for cell in row] for row in lines]
            del cells[1]
            for row in cells:
                row[0] = re.sub(r"^\*\*(.*)\*\*$", r"\1", row[0])
            tables.append(cells)
        return tables

    def test_text_has_all_the_cells_and_no_colour(self, lesson: Lesson) -> None:
        text = lesson_text(lesson)
        assert "\x1b" not in text
        for chapter in document(lesson).chapters:
            for table in tables_of(chapter):
                numeric = [
                    cell
                    for row in table.rows
                    for at, cell in enumerate(row)
                    if at not in table.text_columns
                ]
                assert [cell for cell in numeric if cell not in text] == []
            for block in chapter.blocks:
                if isinstance(block, Listing):
                    assert all(line in text for line in block.text.splitlines())

    def test_the_masked_and_the_unmasked_map_stand_side_by_side(self, lesson: Lesson) -> None:
        line = next(line for line in lesson_text(lesson).splitlines() if "Without the mask" in line)
        assert "what GPT-2 computes" in line.split("Without")[0]

    @pytest.mark.parametrize(
        "text",
        [
            "One",
            HOSTILE,
            "東京は日本の首都です 🙂🙂🙂 naïve",
            "word " * 40,
            "x" * 60,
            " ".join(str(10**n) for n in range(7)),
        ],
    )
    def test_text_fits_100_columns(self, lm: LanguageModel, text: str) -> None:
        lines = lesson_text(explain(lm, text)).splitlines()
        assert max(map(cell_len, lines)) <= 100
        assert all(line == line.rstrip() for line in lines)
        assert all(line.isprintable() for line in lines)

    def test_huge_numbers_fit_too(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, SIZES, std=30.0)
        Tokenizer.gpt2().save(tmp_path)
        text = lesson_text(explain(load(tmp_path, device="cpu"), "word " * 12))
        assert max(map(cell_len, text.splitlines())) <= 100

    def test_bfloat16(self, folder: Path) -> None:
        lesson = explain(load(folder, device="cpu", dtype=torch.bfloat16, kernels="torch"))
        assert lesson.section(whole_model.Heads).agrees
        assert lesson.section(whole_model.Cache).itemsize == 2
        json.dumps(lesson.to_dict(), allow_nan=False)
        assert "in bfloat16" in lesson_text(lesson)

    def test_the_page_is_whole_and_loads_nothing(self, page: str) -> None:
        parsed = Page(page)
        assert len(parsed.ids) == len(set(parsed.ids))
        assert set(parsed.references) <= set(parsed.ids)
        assert not parsed.tags & {"script", "link", "iframe", "object", "embed", "base", "metadata"}
        for name, value in parsed.attributes:
            assert not name.startswith("on")
            assert name != "src"
            if name == "href":
                assert value.startswith(("#", "data:image/png;base64,"))
        assert any(name == "content" and "default-src 'none'" in v for name, v in parsed.attributes)
        assert not re.search(r"https?:|@import|url\((?!#)", page)
        assert "light dark" in page

    def test_pictures_stand_where_they_should(
        self, lesson: Lesson, page: str, markdown: str
    ) -> None:
        pictures = [
            (chapter.number, block)
            for chapter in document(lesson).chapters
            for block in chapter.blocks
            if isinstance(block, Picture)
        ]
        assert [number for number, _ in pictures] == [3, 3, 5, 7, 9, 10]
        assert page.count("<svg ") == page.count("</svg>") == len(pictures)
        labels = [value for name, value in Page(page).attributes if name == "aria-label"]
        assert labels[1:] == [block.alt for _, block in pictures]
        assert markdown.count("](data:image/png;base64,iVBOR") == len(pictures)

    def test_hostile_text_is_text(self, hostile: Lesson) -> None:
        page, markdown = lesson_html(hostile), lesson_markdown(hostile)
        parsed = Page(page)
        assert not parsed.tags & {"script", "img"}
        text = "".join(parsed.text)
        shown = HOSTILE.replace("\n", "<U+000A>").replace("\u202e", "<U+202E>")
        shown = shown.replace("\t", "<U+0009>")
        assert shown in text
        assert "<img src=http://e.example/x onerror=alert(1)>`" in text
        assert f"`` {shown} ``" in markdown
        # Out of code spans and pictures, nothing of the text is markup.
        plain = re.sub(r"`` .*? ``|`[^`\n]*`|\(data:[^)]*\)", "", markdown)
        assert not re.search(r"(?<!\\)<", plain)
        assert parsed.tables == self.markdown_tables(markdown) == cells_of(hostile)

    @pytest.mark.parametrize("render", [lesson_html, lesson_markdown])
    def test_one_token_is_enough(self, lm: LanguageModel, render: Callable[[Lesson], str]) -> None:
        lesson = explain(lm, "One", sections=[3, 5, 7, 9, 10, 11, 13, 16])
        written = render(lesson)
        assert all(f"{section.number}. {section.title}" in written for section in lesson.sections)

    def test_the_same_lesson_gives_the_same_bytes(self, lm: LanguageModel) -> None:
        pages = [lesson_html(explain(lm, "Two words", sections=[7, 12])) for _ in range(2)]
        assert pages[0] == pages[1]

    def test_some_sections(self, lm: LanguageModel) -> None:
        told: list[str] = []
        some = explain(lm, sections=[6, 4], notify=told.append)
        assert [section.number for section in some.sections] == [4, 6]
        assert told == ["section 4 (1 of 2)", "section 6 (2 of 2)"]
        with pytest.raises(ValueError, match="Section 16, The KV cache"):
            some.section(whole_model.Cache)
        assert "5. Scores" not in lesson_text(some)
        assert Page(lesson_html(some)).tables
