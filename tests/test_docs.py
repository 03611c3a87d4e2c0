"""What the documentation shows is run: its Python and its commands, page by page; its links lead
somewhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cli_runner import run

import gpt2attn
from gpt2attn.hub import BUILT_IN

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpt2attn"
DOCS = sorted((ROOT / "docs").glob("*.md"))
GUIDE = ROOT / "docs" / "how-it-works.md"
LINKED = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *DOCS,
]
NEEDS_A_NETWORK = {"gpt2attn download gpt2", "gpt2attn verify --published"}
# Seconds of transformers; run once, by a test of its own.
VERIFY = "gpt2attn verify --model pocket --quick"
# README has it too, and test_readme runs it.
BENCH = "gpt2attn bench --model pocket --quick"
# Minutes on checkpoints of GPT-2's size; test_benchmark runs the same options on a tiny one.
BENCH_FULL_SIZE = "gpt2attn bench --model out/"


class Block(NamedTuple):
    language: str
    text: str
    line: int  # of its first line within the page, from 1


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1)
        for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE)
    ]


def commands(block: Block) -> list[str]:
    """The lines of a shell block that call the program."""
    return [line for line in block.text.splitlines() if line.startswith("gpt2attn ")]


def run_python(block: Block, page: Path, namespace: dict[str, object]) -> str:
    """What the block prints; a traceback names the page and the line."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def write_pickled_model(folder: Path) -> None:
    """`folder` as a reader may have it, with weights in pytorch_model.bin only."""
    folder.mkdir()
    for path in BUILT_IN["pocket"].iterdir():
        if path.suffix in (".json", ".txt"):
            shutil.copy(path, folder)
    torch.save(gpt2attn.load_model("pocket").state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_does_what_it_shows(page, tmp_path, monkeypatch):
    """Its blocks, Python and commands, in order in one folder; a text block is what they print."""
    monkeypatch.chdir(tmp_path)
    if "my_model" in page.read_text(encoding="utf-8"):
        write_pickled_model(tmp_path / "my_model")
    namespace: dict[str, object] = {}
    printed = ""
    for block in blocks(page):
        if block.language == "text":
            assert printed == block.text, f"{page.name}, line {block.line}"
        elif block.language == "python" and "import pandas" not in block.text:
            printed = run_python(block, page, namespace)
        elif block.language == "sh":
            for command in commands(block):
                elsewhere = command.startswith(BENCH_FULL_SIZE)
                if command not in NEEDS_A_NETWORK | {VERIFY, BENCH} and not elsewhere:
                    result = run(*shlex.split(command)[1:])
                    assert result.status == 0, f"{command}: {result.stderr}"


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_the_block_for_pandas(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "dump-format.md"
    namespace: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python":
            run_python(block, page, namespace)
    assert "square" in namespace


def test_the_command_for_speed_is_one_that_readme_shows():
    assert BENCH in (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").splitlines()
    assert f"`{BENCH}`" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_for_exactness():
    assert VERIFY in (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8").splitlines()
    result = run(*shlex.split(VERIFY)[1:])
    assert result.status == 0
    assert "stages bit for bit." in result.stdout.splitlines()[-1]
    assert "to rounding" not in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_no_block_goes_unlooked_at(page):
    """Every block has one of three languages, so that none is passed over for its spelling."""
    assert {block.language for block in blocks(page)} <= {"python", "sh", "text"}
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page))


def prose(page: Path) -> str:
    """The page without code, in which brackets mean something else."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    targets += re.findall(r"""(?:src|href|srcset)=["']([^"']+)["']""", prose(page))
    for target in targets:
        if target.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), target
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_the_guide_names_every_file_and_no_other():
    rows = re.findall(r"^\| `([^`]+)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    assert sorted(rows) == sorted({"cli/" if name.startswith("cli/") else name for name in modules})


def test_the_changelog_begins_with_this_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first[1] == gpt2attn.__version__
