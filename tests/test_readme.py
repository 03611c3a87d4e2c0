"""What README shows is run: its Python, and every command on the built-in model."""

import re
import shlex
from pathlib import Path

import pytest
from cli_runner import run

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
# In the table of commands, and in the blocks that are pasted into a shell.
COMMANDS = re.findall(r"`(gpt2attn \w+ [^`]+)`", README) + re.findall(
    r"^(?:.*&& \.venv/bin/)?(gpt2attn [^&\n]+)$", README, re.M
)
NEEDS_A_NETWORK = {"gpt2attn download gpt2"}
# Run on a small checkpoint by test_benchmark.
BENCH = "gpt2attn bench --model out/gpt2-random --against torch,transformers"


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
    assert "[4, 1, 4, 5, 5]" in capsys.readouterr().out or "maps" not in block


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(COMMANDS) - NEEDS_A_NETWORK - {BENCH}))
def test_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('"one"\n{"text": "two"}\n')
    _, *arguments = shlex.split(command.split("  #")[0])
    result = run(*arguments)
    assert result.status == 0, result.stderr
    assert result.stdout or list(tmp_path.glob("maps*"))


def test_the_main_command_prints_what_readme_shows():
    (text,) = re.findall(r"```text\n(.*?)```", README, re.S)
    result = run("generate", "Once upon a time", "--model", "pocket", "--seed", "1")
    assert result.stdout.strip() == text.strip()


def test_the_line_for_the_real_weights_names_what_there_is():
    """It needs a download, so its parts run elsewhere in the tests, on other models."""
    (line,) = re.findall(r"^gpt2attn download gpt2 && .*$", README, re.M)
    *commands, script = line.split(" && ")
    for command in commands:
        result = run(*shlex.split(command)[1:2], "--help")
        assert result.status == 0
        assert all(option in result.stdout for option in re.findall(r"--\w+", command))
    assert (Path(__file__).parent.parent / script.removeprefix("python ")).is_file()
