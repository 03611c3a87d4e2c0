"""The notebook is run, cell by cell, and what its cells compute is checked by other means."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from gpt2attn.hub import BUILT_IN

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


class Tour:
    """What is left of a run: the cells' names, what each shows, what each prints, the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.shown: dict[str, Any] = {}
        self.printed: dict[str, str] = {}

    def run(self, cell: dict[str, Any]) -> None:
        name = f"cell {cell['id']}"
        tree = ast.parse("".join(cell["source"]), name)
        # As in a notebook: an expression at the end of a cell is its value.
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        output = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(output):
            exec(compile(tree, name, "exec", dont_inherit=True), self.names)
            if last is not None:
                value = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
                self.shown[cell["id"]] = eval(value, self.names)
        self.printed[cell["id"]] = output.getvalue()

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    tour = Tour(tmp_path_factory.mktemp("tour"))
    for cell in CELLS:
        if cell["cell_type"] == "code":
            tour.run(cell)
    return tour


def test_it_is_stored_without_outputs():
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_streamed_and_generated_text_are_one(tour):
    result = tour["result"]
    assert tour["lm"].tokenizer.decode(result.ids) == result.text == tour.shown["generate"]
    assert "".join(tour["pieces"]) == tour.printed["stream"] == result.text
    assert result.prompt_ids == [7454, 2402, 257, 640]


def test_maps_are_those_of_transformers(tour):
    reference = GPT2LMHeadModel.from_pretrained(
        BUILT_IN["pocket"], attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        output = reference(torch.tensor([tour["ids"]]), output_attentions=True, use_cache=False)
    assert torch.equal(tour["maps"].weights, torch.stack(output.attentions))
    # `ablate_heads` runs the fused path: equal to rounding only.
    torch.testing.assert_close(tour["ablation"].before, output.logits[0, -1], rtol=0, atol=1e-4)


def test_pictures_and_the_page_are_made(tour):
    for cell in ("head", "stages", "sink", "generated"):
        assert tour.shown[cell]._repr_png_().startswith(b"\x89PNG")
    assert "data:image/png;base64" in tour.shown["maps"]._repr_html_()
    page = (tour.folder / "maps.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert tour.shown["page"] == len(page)


def test_the_five_steps_differ_by_rounding_only(tour):
    step = tour["step"]
    assert tour["again"].keys() == {"q", "scores", "scaled", "masked", "weights", "output"}
    for name, expected in tour["again"].items():
        # Relative to the largest number there: a float32 has 24 bits, 6e-8.
        finite = expected.isfinite()
        size = expected[finite].abs().max()
        assert torch.equal(getattr(step, name).isfinite(), finite)
        torch.testing.assert_close(
            getattr(step, name).double(), expected, rtol=0, atol=1e-5 * size.item()
        )
    assert tour["row_error"] < 1e-5 * step.output.abs().max()
    assert (step.query, tour["last"].query) == (2, -1)


def test_heads_are_ranked_by_the_maps_own_numbers(tour):
    weights, ranked = tour["maps"].weights, tour["ranked"]
    assert len(ranked) == weights.shape[0] * weights.shape[2]
    for (layer, head, share), following in zip(ranked, [*ranked[1:], (0, 0, 0.0)], strict=True):
        assert weights[layer, 0, head, 2, 0].item() == share >= following[2]
    assert tour["even"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4)
    assert torch.equal(tour["shares"], weights[:, 0, :, 1:, 0].mean(-1))


def test_taking_the_head_away_changes_the_next_token(tour):
    assert tour["ablation"].kl > 0
    assert torch.equal(tour["by_hand"], tour["ready"])
    assert tour.printed["own-edit"] == "True\n"
    torch.testing.assert_close(tour["ablation"].after, tour["ready"], rtol=0, atol=1e-4)


def test_the_cache_changes_no_id(tour):
    assert tour["cached"] == tour["uncached"]
    assert tour["difference"] < 1e-4
    assert tour["cache"].length == len(tour["story"]) == 34
    told = tour["told"]
    assert told.attention.ids == [told.prompt_ids + told.ids[:-1]]


def test_every_dump_gives_back_the_maps(tour):
    assert tour["loaded"].keys() == {"safetensors", "npz", "json", "csv"}
    assert all(maps == tour["maps"] for maps in tour["loaded"].values())
    assert tour.shown["save"]["model"] == "pocket"
