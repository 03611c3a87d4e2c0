"""The script that writes random checkpoints, and the way of its files through both programs."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cli_runner import refused, run
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

import gpt2attn
from gpt2attn.cli import run_script
from gpt2attn.config import GPT2Config

CONFIGS = Path(__file__).parents[1] / "configs"
# What the published models have, by their config.json files.
PUBLISHED = {
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 16, 24),
    "gpt2-large": (1280, 20, 36),
    "gpt2-xl": (1600, 25, 48),
    "distilgpt2": (768, 12, 6),
}
N_PARAMETERS = {"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200, "distilgpt2": 81_912_576}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_have_the_published_sizes(name: str) -> None:
    config = GPT2Config.from_file(CONFIGS / f"{name}.json")
    assert (config.n_embd, config.n_head, config.n_layer) == PUBLISHED[name]
    assert (config.vocab_size, config.n_positions, config.head_dim) == (50257, 1024, 64)
    assert (config.inner_dim, config.activation_function) == (4 * config.n_embd, "gelu_new")
    assert config.end_ids == (50256,)


@pytest.mark.parametrize("name", N_PARAMETERS)
def test_configs_make_models_of_the_published_size(name: str) -> None:
    with torch.device("meta"):
        model = gpt2attn.GPT2(GPT2Config.from_file(CONFIGS / f"{name}.json"))
    assert sum(parameter.numel() for parameter in model.parameters()) == N_PARAMETERS[name]


def _run(make_checkpoint: ModuleType, *arguments: str) -> str:
    import typer

    app = typer.Typer()
    app.command()(make_checkpoint.main)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_checkpoint_loads_here_and_in_transformers_to_the_same_logits(
    make_checkpoint: ModuleType, tmp_path: Path
) -> None:
    output = _run(make_checkpoint, "tiny", str(tmp_path / "new"))
    assert "1,648,448 parameters in float32" in output
    ids = torch.arange(0, 50257, 1000)[None]
    model = gpt2attn.load_model(tmp_path / "new", kernels="torch")
    gpt2attn.save_model(model, tmp_path / "again")
    ours = model(ids)
    for folder in ("new", "again"):
        hf = GPT2LMHeadModel.from_pretrained(tmp_path / folder, attn_implementation="sdpa").eval()
        with torch.no_grad():
            assert torch.equal(hf(ids, use_cache=False).logits, ours)
    assert gpt2attn.load_tokenizer(tmp_path / "new").encode("Apple raised") == [16108, 4376]


def test_options_reach_the_file(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    _run(make_checkpoint, "tiny", str(tmp_path), "--n-layer", "2", "--dtype", "bfloat16")
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["n_layer"], values["torch_dtype"]) == (2, "bfloat16")
    assert len(gpt2attn.load_model(tmp_path).h) == 2


def test_a_mistake_is_one_sentence(make_checkpoint: ModuleType, tmp_path: Path) -> None:
    """In this script as in all that are run by `run_script`."""
    (tmp_path / "file").touch()
    result = run("tiny", tmp_path / "file", program=lambda: run_script(make_checkpoint.main))
    refused(result, "cannot save the model in", "File exists")


def test_weights_are_seeded_and_wide(make_checkpoint: ModuleType) -> None:
    config = GPT2Config(vocab_size=67, n_positions=16, n_embd=64, n_head=4, n_layer=2)
    first, same, other = (make_checkpoint.random_model(config, seed) for seed in (3, 3, 4))
    for (name, a), b, c in zip(
        first.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert 0.1 < float(a.std()) < 0.3, name
        expected_mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        assert abs(float(a.mean()) - expected_mean) < 0.1, name
    narrow = make_checkpoint.random_model(config, std=0.02)
    assert float(narrow.h[0].attn.c_attn.weight.std()) == pytest.approx(0.02, rel=0.1)
