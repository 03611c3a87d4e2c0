"""docs/field-reports.md names real tests; and the entries on maps and ids that had none yet."""

from __future__ import annotations

import ast
import dataclasses
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import TINY
from transformers import GPT2LMHeadModel

from gpt2attn import GPT2, KVCache, LanguageModel, attention_maps, load, load_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "field-reports.md"


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> GPT2:
    return load_model(tiny_folder, kernels="torch")


def names_in(path: Path) -> Iterator[str]:
    """The names of a file's tests and test classes, as pytest spells them."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield f"{path.name}::{node.name}"
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield f"{path.name}::{node.name}"
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test_"):
                    yield f"{path.name}::{node.name}::{inner.name}"


def test_every_entry_has_tests_that_exist() -> None:
    there = {name for path in (ROOT / "tests").glob("test_*.py") for name in names_in(path)}
    rows = re.findall(r"^\| D(\d\d) \| (.+) \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [number for number, _, _ in rows] == [f"{number:02d}" for number in range(1, 60)]
    for number, _, tests in rows:
        named = re.findall(r"`([^`]+)`", tests)
        assert named, number
        assert set(named) <= there, f"D{number}: {sorted(set(named) - there)}"
    # Whoever puts an entry's number into a test's name finds it in the table.
    listed = PAGE.read_text("utf-8")
    for name in there:
        if match := re.search(r"::test_(d\d\d)_", name):
            owner = name.rpartition("::")[0]
            assert name in listed or f"`{owner}`" in listed, f"{match[1]}: {name}"


def test_d14_one_axis_order_with_and_without_a_cache(tiny_folder: Path, model: GPT2) -> None:
    """(batch, head, query, key), tried with four sizes of which no two are equal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(TINY["vocab_size"], (2, 7), generator=generator)
    cache, seen = KVCache.for_model(model, 2), {}
    model.hidden(ids[:, :4], cache=cache)
    model.hidden(ids[:, 4:], cache=cache, observe=lambda at, steps: seen.update({at: steps}))
    eager = GPT2LMHeadModel.from_pretrained(tiny_folder, attn_implementation="eager")
    expected = eager(ids, output_attentions=True, use_cache=False).attentions
    maps = attention_maps(model, ids)
    for layer, steps in seen.items():
        for values in (steps.weights, steps.scores, steps.scaled, steps.masked):
            assert values.shape == (2, 4, 3, 7)
        torch.testing.assert_close(steps.weights, expected[layer][:, :, 4:], rtol=0, atol=1e-5)
        assert maps.weights[layer].shape == (2, 4, 7, 7)
        for head in range(4):
            assert torch.equal(maps.head(layer, head, text=1), expected[layer][1, head])


def test_d15_means_are_of_the_raw_maps(model: GPT2) -> None:
    from gpt2attn.analysis import sink_share

    maps = attention_maps(model, [5, 60, 3, 66, 0, 17])
    assert torch.equal(sink_share(maps.weights), maps.weights[..., 0])
    ones = torch.ones(maps.weights.shape[:-1])
    torch.testing.assert_close(maps.weights.sum(-1), ones, rtol=0, atol=1e-6)


def test_d16_one_head_of_a_thousand_tokens_costs_one_head(
    random_checkpoint: object, tmp_path: Path
) -> None:
    """All heads of two of these layers would be 96 MB; what is not asked for is never kept."""
    lm_model = load_model(random_checkpoint("gpt2", tmp_path, n_layer=2))
    ids = torch.arange(1000)[None]
    attention_maps(lm_model, ids, layers=[1], heads=[3])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    maps = attention_maps(lm_model, ids, layers=[1], heads=[3])
    assert maps.weights.shape == (1, 1, 1, 1000, 1000)
    assert maps.weights.untyped_storage().nbytes() == 4_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000


def test_d24_ids_that_do_not_fit_never_end_a_text(small_model: Path) -> None:
    lm = load(small_model, device="cpu")
    greedy = lm.generate("the", 8, temperature=0)
    assert len(greedy.ids) == 8
    config = lm.model.config
    for eos, length in (
        (263, 8),  # the vocabulary's size: one past its end
        (50256, 8),
        (None, 8),
        ((5000, greedy.ids[3]), greedy.ids.index(greedy.ids[3])),
        ((greedy.ids[3], greedy.ids[1]), greedy.ids.index(greedy.ids[1])),
    ):
        model = load_model(small_model)
        model.config = dataclasses.replace(config, eos_token_id=eos, bos_token_id=None)
        result = LanguageModel(model, lm.tokenizer).generate("the", 8, temperature=0)
        assert result.ids == greedy.ids[: min(length, 8)]
