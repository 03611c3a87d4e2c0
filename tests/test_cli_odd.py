"""Odd input and odd surroundings, for every command: one sentence and an exit status, or success.

Never a traceback, never half a file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import Result, run, run_forked
from safetensors.torch import load_file, save_file

from gpt2attn import Tokenizer

MODEL = "MODEL"
# One call of every command that reads a text from an argument, a file or stdin; the text is added.
ON_TEXT = {
    "generate": ["generate", "-n", "3", "-t", "0"],
    "attention": ["attention"],
    "trace": ["trace", "--layer", "1", "--head", "0"],
    "heads": ["heads"],
    "lens": ["lens"],
    "explain": ["explain", "-s", "1"],
    "score": ["score"],
    "tokens": ["tokens"],
}
# Calls of every command that end well.
GOOD = {name: [*call, "the cat the cat"] for name, call in ON_TEXT.items()} | {
    "neighbours": ["neighbours", "the"],
    "drift": ["drift", " the", "a the", "b the"],
    "ablation": ["heads", "the cat", "--ablate", "1.1"],
    "scores": ["heads", "--scores"],
    "beams": ["generate", "the cat", "-n", "3", "--num-beams", "2"],
    "info": ["info"],
}
FILE_OPTION = {"generate": "--prompt-file"}
FULL = pytest.param(
    "/dev/full", marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="")
)


def call(arguments: list[str], model: Path) -> list[str]:
    return [*arguments, "--model", str(model)]


def _read(master: int) -> bytes:
    """What a terminal was sent; nothing once the program has gone."""
    try:
        return os.read(master, 65536)
    except OSError:  # Linux's way to say so
        return b""


def refused(result: Result, *parts: str, status: int = 2) -> None:
    """Nothing on stdout, one printable sentence on stderr, which has `parts`."""
    assert result.status == status, result
    assert result.stdout == ""
    *_, line = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    for part in parts:
        assert part in line


class TestText:
    @pytest.mark.parametrize("name", ON_TEXT)
    @pytest.mark.parametrize(("raw", "place"), [(b"ab\xf0\x9f", 2), (b"\xed\xa0\xbd", 0)])
    def test_d44_bytes_that_are_no_utf8(
        self, small_model: Path, tmp_path: Path, name: str, raw: bytes, place: int
    ) -> None:
        arguments = call(ON_TEXT[name], small_model)
        stray = f"0x{raw[place]:02X}"
        refused(run(*arguments, raw.decode("utf-8", "surrogateescape")), stray, f"position {place}")
        (tmp_path / "text").write_bytes(raw)
        option = FILE_OPTION.get(name, "--text-file")
        where = f"{tmp_path / 'text'} is not UTF-8 text: byte {place} is"
        refused(run(*arguments, option, tmp_path / "text"), where, stray.lower())
        refused(run(*arguments, "-", stdin=raw), "stdin is not UTF-8 text", stray.lower())

    @pytest.mark.parametrize("name", ON_TEXT)
    @pytest.mark.parametrize(
        "text", ["a\0b\ufeff\x1b[31m\x07c\u2028\x85\x0c[b]d[/b]<i>", " \t\r\n"]
    )
    def test_text_that_programs_stumble_over(
        self, small_model: Path, tmp_path: Path, name: str, text: str
    ) -> None:
        (tmp_path / "text").write_bytes(text.encode())
        option = FILE_OPTION.get(name, "--text-file")
        result = run(*call(ON_TEXT[name], small_model), option, tmp_path / "text")
        assert result.status == 0, result
        again = run(*call(ON_TEXT[name], small_model), "-", stdin=text.encode())
        assert again.stdout.replace("text: ", "") == result.stdout.replace("text: ", "")
        if name == "generate":
            assert result.stdout.startswith(text)
        elif name != "explain":
            assert "\x1b" not in result.stdout
            assert "\0" not in result.stdout

    def test_d44_records_name_file_and_line(self, small_model: Path, tmp_path: Path) -> None:
        source = tmp_path / "in.jsonl"
        for raw in (b'"ok"\n{"text": "\\ud83d"}\n', b'"ok"\n"\xff"\n', b'"ok"\n[1]\n'):
            source.write_bytes(raw)
            model, out = ("-m", small_model), tmp_path / "out"
            for arguments in (
                ("generate", "--input", source, "--out", tmp_path / "out.jsonl", *model),
                ("score", "--input", source, *model),
                ("attention", "--input", source, "--out", out, *model),
            ):
                result = run(*arguments)
                assert result.status == 2
                assert f"{source}, line 2" in result.stderr
        source.write_text('"\\ud83d\\ude00"\n')
        result = run("score", "--input", source, *model)
        assert result.status == 0

    def test_d43_a_megabyte_without_spaces(self, small_model: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_bytes(b"a" * 1_000_000)
        result = run(*call(["tokens", "--json", "--text-file", tmp_path / "text"], small_model))
        found = json.loads(result.stdout)
        assert len(found["ids"]) == 250_000  # aaaa is a token
        assert found["text"] == "a" * 1_000_000

    def test_an_option_may_be_any_length(self, small_model: Path) -> None:
        model = ("-m", small_model)
        for arguments in (
            ("neighbours", "the" * 10_000),
            ("drift", "q", "a" * 10_000, "b" * 10_000),
            ("tokens", "--ids", "x" * 100_000),
            ("heads", "a b", "--layers", "1," * 10_000),
            ("heads", "a b", "--from", "q" * 10_000, "--to", "z"),
        ):
            result = run(*arguments, *model)
            assert result.status == 2
            assert len(result.stderr) < 3000

    def test_names_cannot_write_to_the_terminal(self, small_model: Path, tmp_path: Path) -> None:
        name = "x\n\x1b[2J\u202e"
        refused(run("info", "-m", tmp_path / name), "x\\n\\x1b[2J\\u202e")
        refused(run("tokens", "--text-file", tmp_path / name), "x\\n\\x1b[2J\\u202e")
        folder = shutil.copytree(small_model, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "\x1b[2J\n": 1}))
        result = run("score", "the cat", "-m", folder)
        assert result.status == 0
        assert result.stderr.replace("\n", "").isprintable()


class TestSurroundings:
    @pytest.mark.parametrize("name", GOOD)
    def test_a_reader_that_goes_away(self, small_model: Path, name: str) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        result = run_forked(*call(GOOD[name], small_model), stdout=writer)
        os.close(writer)
        assert result.status == 128 + 13  # as after SIGPIPE
        assert "rror" not in result.stderr

    @pytest.mark.parametrize("name", GOOD)
    def test_a_full_disk(self, small_model: Path, name: str) -> None:
        with open("/dev/full", "wb") as full:
            result = run_forked(*call(GOOD[name], small_model), stdout=full.fileno())
        assert result.status == 1
        assert result.stderr.splitlines()[-1] == "error: the output: No space left on device."

    @pytest.mark.parametrize("columns", [1, 20, 41])
    @pytest.mark.parametrize("name", GOOD)
    def test_a_narrow_terminal(
        self, small_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, columns: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(*call(GOOD[name], small_model)).status == 0

    @pytest.mark.parametrize("name", ["generate", "tokens", "score", "lens", "attention", "trace"])
    def test_a_terminal_is_shown_control_characters_and_does_not_obey_them(
        self, small_model: Path, name: str
    ) -> None:
        arguments = ["tokens", "--ids", "188,189,27,59"] if name == "tokens" else ON_TEXT[name]
        text = [] if name == "tokens" else ["a\x1b]0;x\x07\rb\x9b"]
        master, terminal = os.openpty()
        result = run_forked(*call(arguments, small_model), *text, stdout=terminal)
        os.close(terminal)
        shown = b""
        while piece := _read(master):
            shown += piece
        os.close(master)
        assert result.status == 0, result.stderr
        # Colours are our own; they end in m.
        plain = re.sub(rb"\x1b\[[0-9;]*m", b"", shown).decode().replace("\r\n", "\n")
        assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain) == []

    def test_streams_that_are_closed(self) -> None:
        for closing in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
            command = f"{sys.executable} -m gpt2attn --help {closing}"
            result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
            assert (result.returncode, result.stderr) == (0, "")

    def test_files_are_utf8_in_the_c_locale(self, small_model: Path, tmp_path: Path) -> None:
        out = tmp_path / "maps.json"
        environment = {"LC_ALL": "C", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "gpt2attn", "attention", "día ␣", "-o", out]
        result = subprocess.run(call(command, small_model), env=environment, capture_output=True)
        assert result.returncode == 0, result.stderr
        tokenizer = Tokenizer.from_folder(small_model)
        labels = tokenizer.labels(tokenizer.encode("día ␣"))
        assert json.loads(out.read_text(encoding="utf-8"))["labels"] == [labels]


def scaled(small_model: Path, folder: Path, factors: dict[str, float]) -> Path:
    """A copy of the small model with some tensors multiplied."""
    shutil.copytree(small_model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, factor in factors.items():
        tensors[f"transformer.{name}.weight"] *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class TestNumbers:
    WORDS = ("became NaN or infinite", "they hold NaN or plus infinity")

    @pytest.mark.parametrize("name", [name for name in GOOD if name not in ("tokens", "info")])
    def test_numbers_that_overflow_are_refused(
        self, small_model: Path, tmp_path: Path, name: str
    ) -> None:
        folder = scaled(small_model, tmp_path / "model", {"ln_f": float("inf")})
        result = run(*call(GOOD[name], folder))
        refused(result, "NaN or infinity in ln_f.weight; allow_nonfinite=True (--allow-nonfinite,")
        result = run(*call(GOOD[name], folder), "--allow-nonfinite")
        assert "note: " in result.stderr
        if name == "neighbours":  # it looks at the embeddings alone
            assert result.status == 0
        else:
            assert result.status == 2
            assert any(words in result.stderr for words in self.WORDS)
            assert "nan" not in result.stdout.lower()

    @pytest.mark.parametrize("suffix", ["safetensors", "npz", "json", "csv", "png", "html"])
    def test_no_file_of_nan_is_written(
        self, small_model: Path, tmp_path: Path, suffix: str
    ) -> None:
        folder = scaled(small_model, tmp_path / "model", {"ln_f": float("nan")})
        out = tmp_path / f"maps.{suffix}"
        arguments = call(["attention", "the cat", "-o", str(out)], folder)
        refused(run(*arguments, "--allow-nonfinite"), "became NaN or infinite")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_float16_that_ends_too_early(self, small_model: Path, tmp_path: Path) -> None:
        folder = scaled(small_model, tmp_path / "model", {"wte": 20_000, "ln_f": 100})
        for name in ("score", "generate", "beams", "lens"):
            arguments = call(GOOD[name], folder)
            if name != "lens":
                arguments += ["--kernels", "torch"]  # the others compute in float32
            assert run(*arguments).status == 0
            result = run(*arguments, "--dtype", "float16")
            assert result.status == 2
            assert any(words in result.stderr for words in self.WORDS)
