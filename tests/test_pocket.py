"""The built-in `pocket`: what a really trained GPT-2 must show, and the script that trained it.

The excerpt is from three of the books that training never saw (see the model card): The Railway
Children, The Outline of Science, and Andersen's fairy tales.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from gpt2attn.attention import AttentionSteps
from gpt2attn.checkpoint import load_model
from gpt2attn.generation import generate
from gpt2attn.hub import BUILT_IN
from gpt2attn.model import GPT2
from gpt2attn.tokenizer import Tokenizer

POCKET = BUILT_IN["pocket"]
TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts" / "train_pocket.py"
EXCERPT = TESTS / "data" / "heldout_excerpt.txt"


@pytest.fixture(scope="module")
def model() -> GPT2:
    return load_model("pocket", dtype=torch.float32, kernels="torch")


@pytest.fixture(scope="module")
def excerpt_ids() -> Tensor:
    return torch.tensor(Tokenizer.gpt2().encode(EXCERPT.read_text("utf-8")))


@torch.no_grad()
def token_losses(model: GPT2, ids: Tensor, context: int) -> Tensor:
    """(windows, context): the loss of each label in as many whole windows as `ids` has."""
    n = (len(ids) - 1) // context
    rows, labels = ids[: n * context].view(n, context), ids[1 : n * context + 1]
    return F.cross_entropy(model(rows).flatten(0, 1), labels, reduction="none").view(n, context)


@torch.no_grad()
def head_weights(model: GPT2, ids: Tensor) -> Tensor:
    """(n_layer, n_head, T, T) attention weights of one row."""
    layers: list[Tensor] = []

    def keep(layer: int, steps: AttentionSteps) -> None:
        layers.append(steps.weights[0])

    model(ids[None], observe=keep)
    return torch.stack(layers)


def test_held_out_perplexity_is_that_of_a_trained_model(model: GPT2, excerpt_ids: Tensor) -> None:
    perplexity = math.exp(token_losses(model, excerpt_ids, context=512).mean())
    assert perplexity < 100  # 94.3 when trained; an even guess has 50,257


def test_all_1024_positions_were_trained(model: GPT2, excerpt_ids: Tensor) -> None:
    untrained = 0.02 * model.config.n_embd**0.5  # the length of a row of N(0, 0.02)
    assert model.wpe.weight.norm(dim=1).min() > 3 * untrained
    # The same tokens, once at positions 768 to 1,023 and once at the thoroughly trained 0 to 255.
    late = token_losses(model, excerpt_ids, context=1024)[:, 768:]
    early = token_losses(model, excerpt_ids, context=256).view(-1, 1024)[:, 768:]
    assert late.mean() < early.mean() + 0.1


def test_transformers_reads_the_folder_and_computes_the_same_logits(
    model: GPT2, excerpt_ids: Tensor
) -> None:
    ids = excerpt_ids[None, :300]
    reference, report = GPT2LMHeadModel.from_pretrained(
        POCKET, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    with torch.no_grad():
        # Fused attention on both sides: the same kernels in the same order, so bit-equal.
        assert torch.equal(model(ids), reference.eval()(ids).logits)


def test_weights_are_float16_and_small() -> None:
    path = POCKET / "model.safetensors"
    assert path.stat().st_size <= 16_000_000
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"F16"}
    assert "lm_head.weight" not in names  # tied: stored once
    assert all(name.startswith("transformer.") for name in names)


def test_vocabulary_is_the_one_of_gpt2() -> None:
    gpt2, pocket = Tokenizer.gpt2(), Tokenizer.from_folder(POCKET)
    text = EXCERPT.read_text("utf-8") + " naïve 東京 🙂<|endoftext|>"
    assert pocket.encode(text) == gpt2.encode(text)


def test_a_head_looks_at_the_previous_token(model: GPT2, excerpt_ids: Tensor) -> None:
    weights = head_weights(model, excerpt_ids[:256])
    shares = torch.stack(  # (distance back, n_layer, n_head)
        [weights.diagonal(-back, dim1=-2, dim2=-1).mean(dim=-1) for back in range(16)]
    )
    layer, head = divmod(int(shares[1].argmax()), model.config.n_head)
    assert shares[:, layer, head].argmax() == 1
    # Uniform attention would give the previous token about 2 % here.
    assert shares[1, layer, head] > 0.2


def test_greedy_text_is_readable(model: GPT2) -> None:
    tokenizer = Tokenizer.gpt2()
    known = set(re.findall(r"[a-z]+", EXCERPT.read_text("utf-8").lower()))
    for prompt in ("Once upon a time", "The little boy"):
        new_ids = generate(model, tokenizer.encode(prompt), 40, temperature=0)
        text = tokenizer.decode(list(new_ids))
        assert text.isascii()
        words = re.findall(r"[a-z]+", text.lower())
        assert len(words) >= 20
        # Greedy text of a small model goes round in circles, so a word counts once.
        assert len(known & set(words)) >= 0.7 * len(set(words)) >= 0.7 * 5, text


@pytest.fixture(scope="module")
def training_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_pocket", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sampled_partition_function_is_unbiased(training_script: ModuleType) -> None:
    torch.manual_seed(0)
    terms = torch.randn(1000, dtype=torch.float64).exp()
    labels, frequent = torch.tensor([[7, 7], [500, 999]]), torch.arange(100)
    estimates = []
    for _ in range(1000):
        ids, log_weights = training_script.sample_candidates(labels, frequent, 400, 1000)
        assert set(ids.tolist()) >= {*range(100), 500, 999}
        assert len(ids) == len(ids.unique()) == 400
        estimates.append((terms[ids] * log_weights.exp()).sum())
    values = torch.stack(estimates)
    standard_error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - terms.sum()) < 4 * standard_error
    assert standard_error < 0.01 * terms.sum()
    everything, log_weights = training_script.sample_candidates(labels, frequent, 1000, 1000)
    assert sorted(everything.tolist()) == list(range(1000))
    assert not log_weights.any()


class Clock:
    """Two seconds pass with each look, whatever the machine does; look `last` ends the program."""

    def __init__(self, last: float = math.inf) -> None:
        self.looks, self.last = 0, last

    def monotonic(self) -> float:
        self.looks += 1
        if self.looks > self.last:
            raise KeyboardInterrupt
        return 2.0 * self.looks


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of small steps mostly wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_training_lowers_the_loss_and_resumes_exactly(
    training_script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.txt").write_text(EXCERPT.read_text("utf-8"), "utf-8")
    (tmp_path / "unseen.txt").write_text(EXCERPT.read_text("utf-8")[:3000], "utf-8")
    (tmp_path / "HELDOUT.txt").write_text("unseen.txt\n", "utf-8")

    def run(out: str, clock: Clock) -> str:
        command = [SCRIPT, tmp_path, tmp_path / out, "--smoke", "--rows", "1", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [str(part) for part in command])
        monkeypatch.setattr(training_script, "time", clock)
        training_script.main()
        return capsys.readouterr().out

    whole = run("whole", Clock())
    first = float(re.search(r"held-out ([\d.]+)$", whole, re.MULTILINE)[1])
    final = float(re.search(r"held-out loss ([\d.]+)", whole)[1])
    assert first < math.log(50257)
    assert final < first - 1.0  # the smoke corpus contains what it is tested on
    with pytest.raises(KeyboardInterrupt):
        run("cut", Clock(last=20))
    resumed = run("cut", Clock())
    assert re.search(r"^resuming at step \d+", resumed, re.MULTILINE)
    one, other = (load_model(tmp_path / out).state_dict() for out in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
