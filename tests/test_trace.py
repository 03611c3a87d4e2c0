"""Trace: every number of a head against NumPy, its identities, its screen and its command."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TINY, write_checkpoint
from cli_runner import run
from numpy_gpt2 import Layer, NumpyGPT2, softmax
from rich.cells import cell_len

from gpt2attn import GPT2, AttentionMaps, LanguageModel, attention_maps, load_model
from gpt2attn.render.trace_text import trace_text
from gpt2attn.trace import COMPARISONS, DERIVED, STEPS, HeadTrace, softmax_jacobian_norm, trace_head

SCRIPT = Path(__file__).parents[1] / "scripts" / "dump_apple_attention.py"
SENTENCE = "Apple raised its price target."
# Ten tokens, several of them too long for a column.
TEN = "The animal was tired because it had been running quickly"
IDS = [5, 66, 0, 31, 5, 12, 40, 7, 23]
HEADS = [(layer, head) for layer in range(TINY["n_layer"]) for head in range(TINY["n_head"])]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> GPT2:
    return load_model(tiny_folder)


@pytest.fixture(scope="module")
def layers(tiny_folder: Path) -> list[Layer]:
    return NumpyGPT2(tiny_folder)(IDS)[1]


@pytest.fixture(scope="module")
def lm(torch_lm: LanguageModel) -> LanguageModel:
    return torch_lm


@pytest.fixture(scope="module")
def full_size() -> Iterator[Path]:
    """GPT-2 small's sizes but for the vocabulary; q, k and v come out at about 1.7."""
    sizes = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 64, "vocab_size": 1000}
    with TemporaryDirectory() as folder:
        yield write_checkpoint(
            Path(folder), {**sizes, "bos_token_id": 0, "eos_token_id": 0}, std=0.06
        )


def traced(lm: LanguageModel, text: str, *place: Any, **options: Any) -> HeadTrace:
    ids = lm.encode(text)
    labels = lm.tokenizer.labels(ids)
    return trace_head(lm.model, ids, *place, labels=labels, metadata=lm.provenance, **options)


def expected_numbers(layer: Layer, head: int, query: int, key: int) -> dict[str, np.ndarray]:
    """All that a trace holds, by NumPy."""
    allowed = np.tri(len(layer.x), dtype=bool)
    raw = softmax(np.where(allowed, layer.scores[head], -np.inf))
    weights, v, w_o = layer.weights[head], layer.v[head], layer.w_o[head]
    contributions = weights[query][:, None] * v
    return {
        "x": layer.x,
        **{
            name: getattr(layer, name)[head]
            for name in STEPS
            if name not in ("x", "attention_output", "heads_sum")
        },
        "attention_output": layer.attention_output,
        "heads_sum": sum(o @ w for o, w in zip(layer.output, layer.w_o, strict=True)) + layer.b_o,
        "entropy": entropy(weights),
        "jacobian_norm": jacobian_norm(weights),
        "products": layer.q[head, query] * layer.k[head, key],
        "contributions": contributions,
        "value_norms": np.linalg.norm(v, axis=1),
        "contribution_norms": np.linalg.norm(contributions @ w_o, axis=1),
        "head_part": layer.output[head] @ w_o,
        "raw_weights": raw,
        "raw_entropy": entropy(raw),
        "raw_jacobian_norm": jacobian_norm(raw),
        "unmasked_weights": softmax(layer.scaled[head]),
    }


def entropy(rows: np.ndarray) -> np.ndarray:
    return np.array([-sum(p * np.log(p) for p in row if p > 0) for row in rows])


def jacobian_norm(rows: np.ndarray) -> np.ndarray:
    return np.array([np.linalg.norm(np.diag(p) - np.outer(p, p)) for p in rows])


@pytest.mark.parametrize(("layer", "head"), HEADS)
def test_every_number_is_numpys(model: GPT2, layers: list[Layer], layer: int, head: int) -> None:
    trace = trace_head(model, IDS, layer, head, 6, key=2)
    expected = expected_numbers(layers[layer], head, 6, 2)
    assert expected.keys() == {*STEPS, *DERIVED, *COMPARISONS}
    for name, values in expected.items():
        found = getattr(trace, name).numpy()
        finite = np.isfinite(values)
        assert np.array_equal(np.isfinite(found), finite), name
        # float32 through three layers is 2e-6 of the largest number. A raw score, unscaled and as
        # large as 40, shifts its softmax by its own absolute error.
        tolerance = 1e-4 if name.startswith("raw") else 1e-5 * np.abs(values[finite]).max()
        np.testing.assert_allclose(found, values, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("ids", [IDS, [3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_the_models_own_pass_to_the_bit(
    tiny_folder: Path, ids: list[int], dtype: torch.dtype
) -> None:
    model = load_model(tiny_folder, dtype=dtype, kernels="torch")
    seen: dict[tuple[int, str], torch.Tensor] = {}
    for number, block in enumerate(model.h):
        for name, module in (("x", block.ln_1), ("attention_output", block.attn)):
            module.register_forward_hook(
                lambda _, __, output, at=(number, name): seen.__setitem__(at, output[0])
            )
    maps = attention_maps(model, ids, stages=("scores", "scaled", "masked", "weights"))
    for layer, head in HEADS:
        trace = trace_head(model, ids, layer, head)
        for stage in ("scores", "scaled", "masked", "weights"):
            assert torch.equal(getattr(trace, stage), maps.head(layer, head, stage=stage))
        for name in ("x", "attention_output"):
            assert torch.equal(getattr(trace, name), seen[layer, name])
        assert trace.heads_sum_agrees


@pytest.mark.parametrize(("layer", "head"), HEADS)
def test_the_parts_add_up(model: GPT2, layer: int, head: int) -> None:
    trace = trace_head(model, IDS, layer, head, 5, key=3)
    # The whole was added in float32, 8 and 9 terms of it.
    score, output = trace.scores[5, 3].double(), trace.output[5].double()
    torch.testing.assert_close(trace.products.sum(), score, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(trace.contributions.sum(0), output, rtol=1e-6, atol=1e-6)
    assert trace.heads_sum_error < 1e-5
    x = trace.x.double()
    for name in "qkv":
        projected = x @ getattr(trace, f"w_{name}").double() + getattr(trace, f"b_{name}")
        torch.testing.assert_close(getattr(trace, name).double(), projected, rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_add_up_are_told(model: GPT2) -> None:
    trace = trace_head(model, IDS, 0, 0)
    wrong = replace(trace, heads_sum=trace.heads_sum * (1 + 1e-4))
    assert wrong.heads_sum_error == pytest.approx(1e-4, rel=0.1)
    assert trace.heads_sum_agrees
    assert not wrong.heads_sum_agrees


@pytest.mark.slow
@pytest.mark.parametrize("length", [6, 64])
def test_full_size_heads_add_up_and_are_numpys(full_size: Path, length: int) -> None:
    model, oracle = load_model(full_size), NumpyGPT2(full_size)
    ids = torch.randint(1000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    layers = oracle(ids)[1]
    for layer, head in ((0, 0), (5, 1), (11, 11)):
        trace = trace_head(model, ids, layer, head)
        assert len(trace.products) == 64
        assert trace.heads_sum_error < 1e-5
        torch.testing.assert_close(
            trace.products.sum(),
            trace.scores[trace.query, trace.key].double(),
            rtol=1e-6,
            atol=1e-5,
        )
        expected = layers[layer].attention_output
        np.testing.assert_allclose(
            trace.heads_sum, expected, rtol=0, atol=2e-5 * np.abs(expected).max()
        )


class TestArguments:
    def test_query_is_the_last_and_key_the_most_attended(self, model: GPT2) -> None:
        trace = trace_head(model, IDS, 1, 2)
        assert trace.query == len(IDS) - 1
        assert trace.key == int(trace.weights[-1].argmax())
        assert trace.labels == [f"#{id}" for id in IDS]

    def test_negative_numbers_count_from_the_end(self, model: GPT2) -> None:
        trace = trace_head(model, torch.tensor([IDS]), -1, -2, -3, key=-9)
        assert (trace.layer, trace.head, trace.query, trace.key) == (2, 2, 6, 0)

    def test_another_row_needs_no_other_pass(self, model: GPT2) -> None:
        moved = replace(trace_head(model, IDS, 1, 2), query=4, key=1)
        again = trace_head(model, IDS, 1, 2, 4, key=1)
        for name in DERIVED:
            assert torch.equal(getattr(moved, name), getattr(again, name))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([1, 2], 3, 0), "layer 3 is not there: this model has the layers 0 to 2"),
            (([1, 2], 0, -5), "head -5 is not there: this model has the heads 0 to 3"),
            (([1, 2], 0, 0, 2), "query 2 is not there: the text has the positions 0 to 1"),
            (([[1, 2], [3, 4]], 0, 0), "not a batch of 2"),
            (([], 0, 0), "give at least one token"),
            (([67], 0, 0), "ids run from 0 to 66"),
            (([1] * 17, 0, 0), "need 17 positions, but this model has 16"),
        ],
    )
    def test_what_is_not_there_is_refused(
        self, model: GPT2, arguments: tuple[Any, ...], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            trace_head(model, *arguments)

    def test_the_key_is_checked_too(self, model: GPT2) -> None:
        with pytest.raises(ValueError, match="key True is not there"):
            trace_head(model, [1, 2], 0, 0, key=True)

    def test_a_trace_shares_nothing_with_the_model(self, tiny_folder: Path) -> None:
        model = load_model(tiny_folder).requires_grad_(True)
        trace = trace_head(model, IDS, 1, 2)
        before = {name: getattr(trace, name).clone() for name in STEPS}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter + 1)
        for name, values in before.items():
            assert torch.equal(getattr(trace, name), values)
            assert not getattr(trace, name).requires_grad


class TestJacobian:
    def test_the_small_example(self) -> None:
        """Softmax of 1, 2, 3 and of 10, 20, 30."""
        rows = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]).double().softmax(-1)
        expected = jacobian_norm(rows.numpy())
        np.testing.assert_allclose(softmax_jacobian_norm(rows), expected, rtol=1e-9)
        assert expected[0] > 1000 * expected[1]

    def test_a_saturated_row_keeps_its_digits(self) -> None:
        # Of two classes J is p (1 - p) times [[1, -1], [-1, 1]], whose norm is 2: here 2 e^-30.
        rows = torch.tensor([[30.0, 0.0], [0.0, 30.0]]).double().softmax(-1)
        expected = torch.full((2,), 2 * float(np.exp(-30.0)), dtype=torch.float64)
        # 1 - p of the float64 nearest to 1 - 9e-14 has three digits.
        torch.testing.assert_close(softmax_jacobian_norm(rows), expected, rtol=1e-3, atol=0)

    def test_one_token_has_none(self) -> None:
        assert softmax_jacobian_norm(torch.ones(1, 1)).item() == 0


@pytest.mark.parametrize("upcast", [False, True])
def test_the_scale_is_the_layers_own(tmp_path: Path, upcast: bool) -> None:
    flags = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": upcast}
    model = load_model(write_checkpoint(tmp_path, flags))
    trace = trace_head(model, IDS, 2, 1)
    assert trace.scale == 8**-0.5 / 3
    torch.testing.assert_close(trace.scaled, trace.scores * trace.scale, rtol=1e-6, atol=1e-6)
    text = trace_text(trace)
    assert "scaled = scores x 0.117851   (9, 9)" in text
    assert "** -0.5" not in text


class TestScreen:
    @pytest.mark.parametrize("text", [TEN, SENTENCE, "A", "東京は日本の首都です", "x" * 300])
    def test_it_fits_100_columns(self, lm: LanguageModel, text: str) -> None:
        screen = trace_text(traced(lm, text, 1, 2))
        assert max(map(cell_len, screen.splitlines())) <= 100
        heads = [line.split()[1] for line in screen.splitlines() if line[:1].isdigit()]
        assert heads == ["PROJECT", "COMPARE", "SCALE", "SOFTMAX", "MIX"]

    def test_numbers_and_shapes_are_the_traces(self, lm: LanguageModel) -> None:
        trace = traced(lm, SENTENCE, 1, 2, 2, key=0)
        screen = trace_text(trace)
        for shape in ("(6, 32)", "(32, 8)", "(6, 8)", "(6, 6)", "(8, 32)"):
            assert shape in screen
        rows = [line.split() for line in screen.splitlines()]
        scaled, raw = (
            [*(f"{100 * share:.1f}%" for share in row[:3].tolist()), "0", "0", "0"]  # masked: 0
            for row in (trace.weights[2], trace.raw_weights[2])
        )
        assert [">", "2", "␣its", *scaled] in rows  # the weights
        assert ["scaled", *scaled] in rows
        assert ["raw", *raw] in rows
        assert any(row[:3] == [">", "2", "␣its"] and row[-3:] == ["-inf"] * 3 for row in rows)
        assert ["0-7", *(f"{value:.3f}" for value in trace.products.tolist())] in rows
        assert f"q_i k_i: {float(trace.scores[2, 0]):.3f}" in screen
        assert screen.count("NOT what GPT-2 computes") == 2
        assert "is the attention output: the largest difference is" in " ".join(screen.split())

    def test_a_long_label_is_cut_where_one_sees_it(self, lm: LanguageModel) -> None:
        screen = trace_text(traced(lm, TEN, 1, 2))
        assert " ␣becau… " in screen
        assert "4 ␣because" in screen

    def test_a_longer_text_shows_what_the_query_attends_to_most(self, lm: LanguageModel) -> None:
        trace = traced(lm, " one two three four" * 8, 1, 2, 20)
        screen = trace_text(trace)
        most = trace.weights[20].argsort(descending=True, stable=True).tolist()
        expected = sorted({20, *[place for place in most if place != 20][:9]})
        block = screen.split("each row of masked")[1].split("Without the mask")[0]
        rows = [line.replace(">", " ").split() for line in block.splitlines()]
        assert [int(row[0]) for row in rows if row and row[0].isdigit()] == expected
        assert "22 others" in screen
        assert "the 9 other tokens it attends to most, of 32" in " ".join(screen.split())

    def test_extreme_scores_stay_in_their_columns(self, model: GPT2) -> None:
        trace = trace_head(model, IDS, 1, 2)
        screen = trace_text(replace(trace, scores=trace.scores * 1e12))
        assert max(map(len, screen.splitlines())) <= 100


def as_tensor(value: Any) -> torch.Tensor:
    """Nested lists of JSON as float64, None as minus infinity."""

    def number(item: Any) -> Any:
        if isinstance(item, list):
            return [number(one) for one in item]
        return -torch.inf if item is None else item

    return torch.tensor(number(value), dtype=torch.float64)


def assert_reloads(value: dict[str, Any], trace: HeadTrace) -> None:
    for name in (*STEPS, *DERIVED, *COMPARISONS):
        expected = getattr(trace, name)
        stored = (value["not_what_gpt2_computes"] if name in COMPARISONS else value)[name]
        assert torch.equal(as_tensor(stored).to(expected.dtype), expected), name
    for name in ("layer", "head", "query", "key", "ids", "labels", "scale", "metadata"):
        assert value[name] == getattr(trace, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_json_gives_every_number_back(tiny_folder: Path, dtype: torch.dtype) -> None:
    model = load_model(tiny_folder, dtype=dtype, kernels="torch")
    trace = trace_head(model, IDS, 1, 2, 4)
    value = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert value["masked"][0][1:] == [None] * 8
    assert_reloads(value, trace)


class TestCommand:
    def test_text(self, folder: Path, lm: LanguageModel) -> None:
        result = run(
            "trace", SENTENCE, "--layer", "1", "--head", "2", "--query", "its", "-m", folder
        )
        assert result.status == 0
        assert result.stdout == trace_text(traced(lm, SENTENCE, 1, 2, 2))

    def test_json(self, folder: Path, lm: LanguageModel) -> None:
        result = run(
            *("trace", "-", "--layer", "-1", "--head", "0", "--query", "#663", "--key", "Apple"),
            *("-m", folder, "--json"),
            stdin=SENTENCE.encode(),
        )
        value = json.loads(result.stdout)
        assert value["text"] == SENTENCE
        assert_reloads(value, traced(lm, SENTENCE, 2, 0, 2, key=0))

    def test_without_a_text_it_is_the_standing_sentence(self, folder: Path) -> None:
        place = ("--layer", "0", "--head", "0", "-m", folder)
        result = run("trace", *place)
        assert result.status == 0
        assert result.stdout == run("trace", SENTENCE, *place).stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--layer", "12", "--head", "0"), "this model has the layers 0 to 2"),
            (("--layer", "0", "--head", "4"), "this model has the heads 0 to 3"),
            (("--layer", "0", "--head", "0", "--query", "its "), "--query 'its ' fits no token"),
            (("--layer", "0", "--head", "0", "--key", "9"), "--key 9: the text has the positions"),
        ],
    )
    def test_a_mistake_is_one_sentence(
        self, folder: Path, arguments: tuple[str, ...], message: str
    ) -> None:
        result = run("trace", SENTENCE, *arguments, "-m", folder)
        assert (result.status, result.stdout) == (2, "")
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert message in line

    def test_an_empty_text_is_one_sentence(self, folder: Path) -> None:
        result = run("trace", "", "--layer", "0", "--head", "0", "--query", "0", "-m", folder)
        assert result.status == 2
        assert result.stderr == "error: The text is empty: give at least one token.\n"

    def test_layer_and_head_must_be_given(self, folder: Path) -> None:
        result = run("trace", SENTENCE, "--layer", "0", "-m", folder)
        assert result.status == 2
        assert "--head" in result.stderr


def test_apple_script_writes_maps_summary_and_trace(
    folder: Path, lm: LanguageModel, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "apple"
    runpy.run_path(str(SCRIPT))["main"](model=str(folder), out=out)
    summaries = json.loads((out / "summary.json").read_text("utf-8"))
    text = (out / "summary.txt").read_text("utf-8")
    for name, sentence in (("five", SENTENCE[:-1]), ("six", SENTENCE)):
        maps = lm.attention(sentence)
        for suffix in (".safetensors", ".json"):
            assert AttentionMaps.load(out / f"{name}{suffix}") == maps
        weights, summary = maps.weights[:, 0], summaries[name]
        best = summary["heads"][0]
        shares = {(h["layer"], h["head"]): h["share"] for h in summary["heads"]}
        assert shares == {place: float(weights[(*place, 2, 0)]) for place in HEADS}
        assert best["share"] == max(shares.values())
        assert summary["sink_share"] == weights[:, :, -1, 0].tolist()
        assert summary["sink_share_mean"] == pytest.approx(float(weights[:, :, -1, 0].mean()))
        assert summary["uniform_sink_share"] == 1 / len(maps.ids[0])
        trace = traced(lm, sentence, best["layer"], best["head"], 2, key=0)
        assert (out / f"{name}_trace.txt").read_text("utf-8") == trace_text(trace)
        assert_reloads(json.loads((out / f"{name}_trace.json").read_text("utf-8")), trace)
    assert "uniform: 1/6 = 16.7%" in text
    assert "uniform: 1/5 = 20.0%" in text
