"""`gpt2attn explain`: the lesson on the screen, as JSON and in files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from cli_runner import Result, run
from rich.cells import cell_len

from gpt2attn import LanguageModel
from gpt2attn.lesson import SECTIONS, explain
from gpt2attn.render.lesson_html import lesson_html
from gpt2attn.render.lesson_markdown import lesson_markdown
from gpt2attn.render.lesson_text import lesson_text

pytestmark = pytest.mark.usefixtures("one_tokenizer")


@pytest.fixture(scope="module")
def lm(torch_lm: LanguageModel) -> LanguageModel:
    return torch_lm


def done(*arguments: object) -> Result:
    result = run("explain", *arguments)
    assert result.status == 0, result
    return result


def refused(*arguments: object) -> str:
    """The one sentence on stderr."""
    result = run("explain", *arguments)
    assert (result.status, result.stdout) == (2, ""), result
    (line,) = result.stderr.strip().splitlines()
    return line.removeprefix("error: ")


def test_the_whole_lesson_is_on_the_screen(folder: Path) -> None:
    result = done("-m", folder)
    lines = result.stdout.splitlines()
    headings = [line for line, rule in itertools.pairwise(lines) if rule == "-" * len(line)]
    assert [int(line.split(".")[0]) for line in headings if line] == list(SECTIONS)
    assert max(map(cell_len, lines)) <= 100
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    assert "Apple raised its price target" in result.stdout


def test_sections_layer_and_head(folder: Path, lm: LanguageModel) -> None:
    result = done("It rained", "-m", folder, "--section", "6,4-5", "--layer", 1, "--head", 2)
    expected = explain(lm, "It rained", sections=[4, 5, 6], layer=1, head=2)
    assert result.stdout == lesson_text(expected)
    assert "You chose its layer and head" in result.stdout


def test_json_has_the_numbers_of_the_lesson(folder: Path, lm: LanguageModel) -> None:
    found = json.loads(done("-m", folder, "--json", "-s", "1-15").stdout)
    # Section 16 measures, and gives other numbers each time.
    expected = explain(lm, sections=range(1, 16))
    assert found == json.loads(json.dumps(expected.to_dict()))


@pytest.mark.parametrize(("name", "render"), [("l.html", lesson_html), ("l.md", lesson_markdown)])
def test_a_file_in_place_of_the_screen(
    folder: Path, lm: LanguageModel, tmp_path: Path, name: str, render: object
) -> None:
    out = tmp_path / name
    result = done("-m", folder, "-s", "5-8", "--out", out)
    assert out.read_text("utf-8") == render(explain(lm, sections=range(5, 9)))
    assert result.stdout == ""
    assert str(out) in result.stderr
    assert "4 sections" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert "already there" in refused("-m", folder, "--out", out)
    done("-m", folder, "-s", "12", "--out", out, "--force")
    assert "12. Cost" in out.read_text("utf-8")


def test_text_from_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Birds sing", "utf-8")
    result = done("--text-file", tmp_path / "text", "-m", folder, "-s", "12")
    assert "Birds sing" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--section", "18"], "Section 18 is not there: the lesson has the sections 1 to 17."),
        (["--section", "six"], "--section takes numbers and ranges"),
        (["--layer", "7"], "layer 7 is not there"),
        ([""], "The text is empty"),
        (["--out", "l.pdf"], "l.pdf must end in .html or .md."),
        (["--out", "no/l.md"], "The folder no does not exist"),
        (["--out", "l.md", "--json"], "Give --out or --json, not both."),
    ],
)
def test_mistakes_get_one_sentence(folder: Path, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments, "-m", folder)


def test_the_built_in_model_covers_every_item():
    lesson = json.loads(run("explain", "-m", "pocket", "--json").stdout)
    assert [section["number"] for section in lesson["sections"]] == list(range(1, 18))
