"""Maps in the shapes of BertViz, TransformerLens, pandas and xarray; each in the tool itself, if it
is installed (CI installs all but TransformerLens).
"""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

import gpt2attn
from gpt2attn import AttentionMaps, interop

TEXT = "Apple raised its price target"
TEXTS = [TEXT, "She ate an apple"]


@pytest.fixture(scope="module")
def lm() -> gpt2attn.LanguageModel:
    return gpt2attn.load("pocket", device="cpu")


@pytest.fixture(scope="module")
def maps(lm: gpt2attn.LanguageModel) -> AttentionMaps:
    return lm.attention(TEXTS, stages=["weights", "masked"])


def test_bertviz_gets_what_it_gets_from_transformers(lm, maps):
    hf = GPT2LMHeadModel.from_pretrained(
        lm.source.folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = hf(torch.tensor([maps.ids[1]]), output_attentions=True).attentions
    attention, tokens = maps.to_bertviz(text=1)
    assert isinstance(attention, tuple)
    assert tokens == ["She", "␣ate", "␣an", "␣apple"]
    assert [layer.shape for layer in attention] == [layer.shape for layer in expected]
    for ours, theirs in zip(attention, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5  # here the text is the padded row of a batch
    assert torch.equal(attention[2], maps[1].weights[2])


def test_bertviz_draws_them(maps):
    bertviz = pytest.importorskip("bertviz")
    attention, tokens = maps.to_bertviz()
    for view in (bertviz.head_view, bertviz.model_view):
        page = view(attention, tokens, html_action="return").data
        # It rounds to 2 decimals, and shows blanks in place of its own mark for them.
        params = json.loads(re.search(r"const params = (\{.*?\});|params = (\{.*\});?", page)[1])
        (shown,) = params["attention"]
        drawn = np.array(shown["attn"])
        assert drawn.shape == (4, 4, 5, 5)
        assert np.abs(drawn - maps[0].weights[:, 0].numpy()).max() < 0.006
        assert shown["left_text"] == tokens


def test_transformer_lens_names(maps):
    named = maps.to_transformer_lens()
    assert len(named) == 8
    for layer in range(4):
        assert torch.equal(named[f"blocks.{layer}.attn.hook_pattern"], maps.weights[layer])
        scores = named[f"blocks.{layer}.attn.hook_attn_scores"]
        assert torch.equal(scores, maps.stage("masked")[layer])
    one_layer = dataclasses.replace(
        maps, layers=[2], stages={"weights": maps.weights[2:3], "scores": maps.weights[2:3]}
    )
    assert list(one_layer.to_transformer_lens()) == ["blocks.2.attn.hook_pattern"]
    with pytest.raises(ValueError, match="stages weights and masked, not scores"):
        dataclasses.replace(maps, stages={"scores": maps.weights}).to_transformer_lens()


def test_what_was_left_out_is_not_renumbered(lm):
    some_heads = lm.attention(TEXT, heads=[1, 3])
    some_layers = lm.attention(TEXT, layers=[1])
    for call, kind in (
        (some_heads.to_bertviz, "heads from 0, but only 1, 3"),
        (some_heads.to_transformer_lens, "heads from 0, but only 1, 3"),
        (some_layers.to_bertviz, "layers from 0, but only 1"),
    ):
        with pytest.raises(ValueError, match=kind):
            call()
    assert set(some_layers.to_transformer_lens()) == {"blocks.1.attn.hook_pattern"}


def test_the_long_table_is_that_of_a_csv_file(maps, tmp_path):
    pandas = pytest.importorskip("pandas")
    maps.save(tmp_path / "maps.csv")
    expected = pandas.read_csv(tmp_path / "maps.csv", skiprows=1, keep_default_na=False)
    frame = maps.to_frame()
    assert list(frame.columns) == list(expected.columns)
    assert len(frame) == 16 * (25 + 16)
    numbers = ["weights", "masked"]
    places = expected.columns.difference(numbers)
    pandas.testing.assert_frame_equal(frame[places], expected[places], check_dtype=False)
    assert np.array_equal(frame["weights"], expected["weights"].astype("float32"))
    assert np.array_equal(frame["masked"], expected["masked"].astype("float32"))
    seen = frame[(frame.text == 1) & (frame.layer == 3) & (frame["head"] == 2)]
    square = seen.pivot(index="query", columns="key", values="weights").to_numpy()
    assert np.array_equal(square, maps.head(3, 2, text=1).numpy())


def test_a_table_that_is_too_long_is_refused(maps, monkeypatch):
    monkeypatch.setattr(interop, "MOST_FRAME_ROWS", 655)
    with pytest.raises(ValueError, match="656 rows are too many for a table"):
        maps.to_frame()


def test_xarray_knows_layers_heads_and_tokens(lm, maps):
    pytest.importorskip("xarray")
    data = maps.to_xarray(text=1)
    assert data["weights"].dims == ("layer", "head", "query", "key")
    assert np.array_equal(data["weights"], maps[1].weights[:, 0])
    head = data["masked"].sel(layer=2, head=3)
    assert np.array_equal(head, maps.head(2, 3, text=1, stage="masked"))
    assert data["query_label"].values.tolist() == maps.labels[1]
    assert data.attrs["model"] == "pocket"
    row = data["weights"].sel(layer=0, head=1, query=3)
    assert float(row.sum()) == pytest.approx(1, abs=1e-5)
    some = lm.attention(TEXT, layers=[1, 3], heads=[2]).to_xarray()
    assert some["layer"].values.tolist() == [1, 3]
    assert some["head"].values.tolist() == [2]


def test_bfloat16_becomes_float32_where_numpy_has_none(lm):
    pytest.importorskip("xarray")
    maps = lm.attention(TEXT, layers=[0], dtype=torch.bfloat16)
    for values in (maps.to_xarray()["weights"], maps.to_frame()["weights"]):
        assert values.dtype == np.float32
