"""Fixtures that several test files share; what writes their checkpoints is in checkpoints.py."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from checkpoints import wide_hf_model as make_wide_hf_model
from checkpoints import write_checkpoint
from transformers import GPT2LMHeadModel

from gpt2attn import LanguageModel, Tokenizer, load


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with wide weights; its sizes are `checkpoints.TINY`."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, but with GPT-2's vocabulary."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("words"), {"vocab_size": 50257, "n_positions": 64}
    )
    Tokenizer.gpt2().save(folder)
    return folder


@pytest.fixture(scope="session")
def lm(folder: Path) -> LanguageModel:
    """What the commands `generate` and `score` load from `folder`."""
    return load(folder, device="cpu")


@pytest.fixture(scope="session")
def torch_lm(folder: Path) -> LanguageModel:
    """What the other commands load: with PyTorch's kernels, so that equal is to the last bit."""
    return load(folder, device="cpu", kernels="torch")


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's for every folder: to read its files again takes most of a command's time."""
    tokenizer = Tokenizer.gpt2()
    monkeypatch.setattr(Tokenizer, "from_folder", lambda folder: tokenizer)


@pytest.fixture(scope="session")
def wide_hf_model() -> Callable[..., GPT2LMHeadModel]:
    """The function `checkpoints.wide_hf_model(config, seed)`."""
    return make_wide_hf_model


def script(name: str) -> ModuleType:
    """A script of scripts/ as a module."""
    path = Path(__file__).parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_checkpoint() -> ModuleType:
    """The script scripts/make_checkpoint.py as a module."""
    return script("make_checkpoint")


@pytest.fixture(scope="session")
def fuzz() -> ModuleType:
    """The script scripts/fuzz.py as a module."""
    return script("fuzz")


@pytest.fixture(scope="session")
def small_model(fuzz: ModuleType) -> Path:
    """A folder with a model of 263 tokens and its tokenizer, which loads in milliseconds."""
    return fuzz.small_model()


@pytest.fixture(scope="session")
def random_checkpoint(make_checkpoint: ModuleType) -> Callable[..., Path]:
    """A function (size, folder, **changes) that writes random weights of a published size."""
    from gpt2attn.checkpoint import save_model
    from gpt2attn.config import GPT2Config

    def write(size: str, folder: Path, **changes: int) -> Path:
        config = GPT2Config.from_file(make_checkpoint.CONFIGS / f"{size}.json")
        config = dataclasses.replace(config, **changes)
        save_model(make_checkpoint.random_model(config), folder)
        return folder

    return write
