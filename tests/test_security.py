"""What a hostile folder can make this process do: nothing but read the folder.

An audit hook sees every file that Python opens, every process and every socket. It cannot be
removed, so the folders are loaded in a process of their own, after good ones, so that nothing is
imported on the way.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAM = """
import io, json, os, sys, warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from gpt2attn import AttentionMaps, Tokenizer, load, load_model, load_tokenizer
from gpt2attn.cli import main

warnings.simplefilter("ignore")
torch.set_num_threads(1)
good, scratch, *hostile = map(Path, sys.argv[1:])
ENDS = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn")
ENDS += ("socket.", "ctypes.", "os.startfile", "urllib.", "http.", "webbrowser.", "os.remove")
ENDS += ("os.rename", "os.rmdir", "shutil.", "os.truncate", "os.link", "os.symlink", "os.chmod")
LOOKS = ("open", "os.listdir", "os.scandir", "import")
# Where Python keeps its own modules and this package: what is there was not written by a stranger.
own = [Path(place) for place in (sys.prefix, sys.base_prefix, "/dev/null", "/proc/self", "/sys")]
own += [Path(file).parent for file in (os.__file__, torch.__file__, load.__code__.co_filename)]
folder, seen = good, []


def hook(event, arguments):
    if event.startswith(ENDS):
        seen.append(f"{event} {arguments}"[:300])
    elif event in LOOKS[:3] and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = Path(os.path.realpath(os.fsdecode(arguments[0])))
        allowed = [*own, Path(os.path.realpath(folder)), blobs]
        if not any(path.is_relative_to(place) for place in allowed):
            seen.append(f"{event} {path}")


def attempt(*calls):
    outcomes = []
    for call in calls:
        try:
            call()
            outcomes.append("done")
        except (ValueError, OSError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def command(*arguments):
    def call():
        sys.argv = ["gpt2attn", *arguments, "-m", str(folder)]
        streams = [io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2)]
        try:
            with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
                main()
        except SystemExit as stop:
            if stop.code:
                raise ValueError(streams[1].buffer.getvalue().decode()) from None
    return call


def everything():
    return attempt(
        lambda: load(folder),
        lambda: load(folder, allow_pickle=True).generate("the cat", 3),
        lambda: load_model(folder),
        lambda: load_tokenizer(folder).encode("the"),
        lambda: Tokenizer.from_folder(folder),
        lambda: [AttentionMaps.load(path) for path in sorted(folder.glob("maps.*"))],
        command("info"),
        command("score", "the cat"),
        command("generate", "the cat", "-n", "2", "--allow-pickle"),
    )


blobs = good
everything()
sys.addaudithook(hook)
for folder in hostile:
    blobs = folder.resolve().parents[1] / "blobs"
    seen.clear()
    outcomes = everything()
    print(json.dumps([folder.name, outcomes, seen]))
"""


class Bomb:
    """Unpickled, it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def _links(folder: Path, outside: Path) -> None:
    for path in list(folder.iterdir()):
        path.unlink()
        path.symlink_to(outside / path.name)


def _side_links(folder: Path, outside: Path) -> None:
    (outside / "side.json").write_text("{}")
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    for name in names:
        (folder / name).symlink_to(outside / "side.json")


def _index(folder: Path, outside: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("../outside/model.safetensors", str(outside / "model.safetensors")):
        index = {"weight_map": {"wte.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shard_link(folder: Path, outside: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "a.safetensors").symlink_to(outside / "model.safetensors")
    index = {"weight_map": {"wte.weight": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickles(folder: Path, outside: Path) -> None:
    bomb = Bomb(outside / "marker")
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": bomb}, folder / "pytorch_model.bin")
    for name in ("training_args.bin", "optimizer.pt", "maps.npz", "maps.safetensors", "maps.json"):
        (folder / name).write_bytes(pickle.dumps(bomb))


def _pickle_as_safetensors(folder: Path, outside: Path) -> None:
    torch.save({"wte.weight": Bomb(outside / "marker")}, folder / "model.safetensors")


def _code(folder: Path, outside: Path) -> None:
    code = f"open({str(outside / 'marker')!r}, 'w')\n"
    for name in ("modeling_gpt2.py", "__init__.py", "conftest.py", "torch.py", "setup.py"):
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_gpt2.GPT2LMHeadModel"}
    (folder / "config.json").write_text(json.dumps(config))


def _templates(folder: Path, outside: Path) -> None:
    template = (
        "{{ cycler.__init__.__globals__.os.system('touch " + str(outside / "marker") + "') }}"
    )
    settings = {
        "chat_template": template,
        "tokenizer_class": "Evil",
        "auto_map": {"a": ["b", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 10**9}))


def _listing(folder: Path, outside: Path) -> None:
    for path in list(folder.iterdir()):
        path.unlink()
    (folder / "onnx").symlink_to(outside)
    (folder / "config.json").write_text("{}")


def _cache(folder: Path, outside: Path) -> None:
    """It claims to be a snapshot of the Hub's cache, with blobs that lead elsewhere."""
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.unlink()
        (blobs / path.name).symlink_to(outside / path.name)
        path.symlink_to(blobs / path.name)


@pytest.fixture(scope="module")
def findings(
    small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[str], list[str]]]:
    """What each hostile folder came to, by its name: outcomes, and what the hook saw."""
    base = tmp_path_factory.mktemp("hostile")
    outside = shutil.copytree(small_model, base / "outside")
    kinds: list[Callable[[Path, Path], None]] = [
        _links, _side_links, _index, _shard_link, _pickles, _pickle_as_safetensors, _code,
        _templates, _listing, _cache,
    ]  # fmt: skip
    folders = []
    for make in kinds:
        parent = base / make.__name__.strip("_") / "repo" / "snapshots"
        folders.append(shutil.copytree(small_model, parent / make.__name__.strip("_")))
        make(folders[-1], outside)
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(base / "hf"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, small_model, base, *folders],
        capture_output=True, text=True, env=environment, cwd=base,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert not (outside / "marker").exists()
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [name for name, *_ in rows] == [folder.name for folder in folders]
    return {name: (outcomes, seen) for name, outcomes, seen in rows}


Findings = dict[str, tuple[list[str], list[str]]]


def test_nothing_outside_is_opened_and_nothing_is_started(findings: Findings) -> None:
    assert {name: seen for name, (_, seen) in findings.items() if seen} == {}


def test_what_is_hostile_is_refused_and_what_is_beside_it_does_no_harm(findings: Findings) -> None:
    assert set(findings["templates"][0]) == {"done"}
    for name in ("links", "index", "shard_link", "pickles", "pickle_as_safetensors", "code"):
        outcomes = findings[name][0]
        assert "Error: " in outcomes[0], name
        assert "Error: " in outcomes[-1], name


def test_the_hook_would_have_seen_it(tmp_path: Path) -> None:
    """A loader that follows a link or starts a process is caught."""
    program = PROGRAM.replace("lambda: load_model(folder),", "lambda: os.system('true'),")
    program = program.replace(
        "lambda: Tokenizer.from_folder(folder),", "lambda: open('/etc/hostname').close(),"
    )
    assert program.count("os.system('true')") == 1
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-c", program, folder, tmp_path, folder],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert "os.system" in result.stdout
    assert "open /etc/hostname" in result.stdout
