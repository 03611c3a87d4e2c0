"""The machinery of `verify --published`: figures that transformers and NumPy make of a stand-in
model pass, the same figures with one number changed fail, and nothing that was not run passes.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import wide_hf_model
from cli_runner import run
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel
from transformers.generation import LogitsProcessor

import gpt2attn
from gpt2attn.hub import BUILT_IN
from gpt2attn.tokenizer import Tokenizer
from gpt2attn.verify.published import (
    FIGURES,
    KINDS,
    Figure,
    figure_rows,
    read_figures,
    verify_published,
)
from gpt2attn.verify.published.report import FAILED, MEASURED, NOT_RUN, PASSED, Row
from gpt2attn.verify.published.subject import Subject

# GPT-2's vocabulary, so that texts mean what they mean to it; the rest is tiny.
SIZES = {
    "vocab_size": 50257,
    "n_positions": 128,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
HEADS = [(layer, head) for layer in range(3) for head in range(4)]
PROMPTS = ["The dog", "Hello, my dog is a little"]
LONG = "When John and Mary went to the shops, John gave the bag to"
END = 50256
LINES = [
    " \n",
    " = Robert Boulter = \n",
    " \n",
    " He had a role in a play . \n",
    " It was his . \n",
]
PASSAGES = ["She opened the door and saw a dog", "He closed the old window", "They ate an apple"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def hf() -> GPT2LMHeadModel:
    return wide_hf_model(SIZES, std=0.25)


@pytest.fixture(scope="module")
def folder(hf: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-in")
    hf.save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(BUILT_IN["pocket"] / name, folder)
    (folder / "wiki.test.raw").write_text("".join(LINES), encoding="utf-8", newline="\n")
    (folder / "lambada.txt").write_text("\n".join(PASSAGES) + "\n", encoding="utf-8")
    return folder


def encode(text: str, *, prefix: bool = False) -> list[int]:
    ids = Tokenizer.gpt2().encode(text)
    return [END, *ids] if prefix else ids


def prompts(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text, "ids": encode(text)} for text in texts]


def logits_of(hf: GPT2LMHeadModel, ids: list[int]) -> Tensor:
    return hf(torch.tensor([ids]), use_cache=False).logits[0]


def loss_of(hf: GPT2LMHeadModel, ids: list[int]) -> float:
    return float(hf(torch.tensor([ids]), labels=torch.tensor([ids]), use_cache=False).loss)


def continuation_of(hf: GPT2LMHeadModel, context: list[int], ids: list[int]) -> Tensor:
    """(T) log-probabilities of `ids` after `context`."""
    logprobs = logits_of(hf, context + ids)[len(context) - 1 : -1].log_softmax(-1)
    return logprobs[range(len(ids)), ids]


def generated(hf: GPT2LMHeadModel, texts: list[str], n_new: int, **options: Any) -> list[list[int]]:
    """New ids by transformers' `generate`, of texts padded on the left to one width."""
    rows = [encode(text) for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[END] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = hf.generate(
        ids, attention_mask=mask, max_new_tokens=n_new, do_sample=False, pad_token_id=END, **options
    )
    return out[:, width:].tolist()


def decode(ids: list[int]) -> str:
    return Tokenizer.gpt2().decode(ids)


def folded(hf: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """The same function with its weights processed as TransformerLens processes them.

    LayerNorm's weights go into c_attn, ln_f's into the unembedding's input, and the value's bias
    into the output's: what is then a head's output is what TransformerLens sets to 0.
    """
    hf = copy.deepcopy(hf)
    C = hf.config.n_embd
    for block in hf.transformer.h:
        c_attn, c_proj, ln = block.attn.c_attn, block.attn.c_proj, block.ln_1
        c_attn.bias += ln.bias @ c_attn.weight
        c_attn.weight *= ln.weight[:, None]
        ln.weight.fill_(1.0)
        ln.bias.fill_(0.0)
        c_proj.bias += c_attn.bias[2 * C :] @ c_proj.weight
        c_attn.bias[2 * C :] = 0.0
    return hf


def silenced(hf: GPT2LMHeadModel, layer: int, head: int, position: int | None) -> GPT2LMHeadModel:
    """`folded`, with one head's output set to 0 everywhere or at one position."""
    hf = folded(hf)
    D = hf.config.n_embd // hf.config.n_head
    where = slice(None) if position is None else position

    def silence(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[:, where, head * D : (head + 1) * D] = 0.0
        return (x,)

    hf.transformer.h[layer].attn.c_proj.register_forward_pre_hook(silence)
    return hf


class Cooled(LogitsProcessor):
    """Divides logits by a temperature before the softmax: beam search hands over log-softmax."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return (scores / self.temperature).log_softmax(-1)


IOI = [
    {"text": LONG, "plus": " Mary", "minus": " John", "prefix": END},
    {"text": LONG.replace("bag", "ball"), "plus": " John", "minus": " Mary", "prefix": END},
]


def difference(hf: GPT2LMHeadModel, prompt: dict[str, Any]) -> float:
    logits = logits_of(hf, encode(prompt["text"], prefix="prefix" in prompt))[-1]
    (plus,), (minus,) = encode(prompt["plus"]), encode(prompt["minus"])
    return float(logits[plus] - logits[minus])


def residual_figures(hf: GPT2LMHeadModel) -> tuple[list[float], np.ndarray]:
    """Each stage's part in the logit difference, and each head's, in NumPy."""
    hf = folded(hf)
    H, C = hf.config.n_head, hf.config.n_embd
    seen: list[np.ndarray] = []
    outputs: list[np.ndarray] = []

    def keep(kept: list[np.ndarray]) -> Callable[..., None]:
        return lambda _, args: kept.append(args[0][0, -1].numpy().astype(np.float64))

    for block in hf.transformer.h:
        for module in (block.ln_1, block.ln_2):
            module.register_forward_pre_hook(keep(seen))
        block.attn.c_proj.register_forward_pre_hook(keep(outputs))
    hf.transformer.ln_f.register_forward_pre_hook(keep(seen))
    stages, heads = [], []
    for prompt in IOI:
        seen.clear()
        outputs.clear()
        logits_of(hf, encode(prompt["text"], prefix=True))
        (plus,), (minus,) = encode(prompt["plus"]), encode(prompt["minus"])
        table = hf.lm_head.weight.numpy().astype(np.float64)
        towards = hf.transformer.ln_f.weight.numpy() * (table[plus] - table[minus])
        final = seen[-1]
        scale = np.sqrt(((final - final.mean()) ** 2).mean() + hf.config.layer_norm_epsilon)

        def part(x: np.ndarray, towards=towards, scale=scale) -> float:
            return float((x - x.mean()) / scale @ towards)

        stages.append([part(x) for x in seen])
        added = []
        for block, z in zip(hf.transformer.h, outputs, strict=True):
            w_o = block.attn.c_proj.weight.numpy().astype(np.float64).reshape(H, C // H, C)
            z = z.reshape(H, C // H)
            added.append([part(z[head] @ w_o[head]) for head in range(H)])
        heads.append(added)
    return np.mean(stages, axis=0).tolist(), np.mean(heads, axis=0)


def maps_of(hf: GPT2LMHeadModel, ids: list[int]) -> np.ndarray:
    """(layer, head, query, key)."""
    out = hf(torch.tensor([ids]), output_attentions=True, use_cache=False)
    return torch.stack(out.attentions)[:, 0].numpy().astype(np.float64)


def repeated(n: int, batch: int, low: int, high: int, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    return [[*row, *row] for row in torch.randint(low, high, (batch, n)).tolist()]


def diagonal_means(hf: GPT2LMHeadModel, rows: list[list[int]], offset: int) -> np.ndarray:
    maps = [maps_of(hf, row) for row in rows]
    T = len(rows[0])
    return np.mean([m[:, :, q, q - offset] for m in maps for q in range(offset, T)], axis=0)


def eigenvalues(hf: GPT2LMHeadModel, layer: int, head: int) -> np.ndarray:
    """Of the whole C x C matrix W_V W_O, the D largest; the others are 0."""
    block, C, D = hf.transformer.h[layer], 32, 8
    start = 2 * C + head * D
    w_v = block.ln_1.weight.numpy()[:, None] * block.attn.c_attn.weight.numpy()
    w_v = w_v[:, start : start + D].astype(np.float64)
    w_v = w_v - w_v.mean(0)
    w_o = block.attn.c_proj.weight.numpy().astype(np.float64)[head * D : (head + 1) * D]
    w_o = w_o - w_o.mean(1, keepdims=True)
    values = np.linalg.eigvals(w_v @ w_o)
    return values[np.argsort(-abs(values))][:D]


Maker = Callable[[GPT2LMHeadModel, Path], Any]
MAKERS: dict[str, Maker] = {}


def maker(kind: str) -> Callable[[Maker], Maker]:
    """Registers a function that gives (given, expected, tolerance) of a made-up figure."""

    def register(function: Maker) -> Maker:
        MAKERS[kind] = function
        return function

    return register


@maker("files")
def make_files(hf, folder):
    files = {}
    for name in ("model.safetensors", "vocab.json"):
        raw = (folder / name).read_bytes()
        files[name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return {}, {"files": files, "parameters": hf.num_parameters(), "revision": "0" * 40}, None


@maker("weight_entries")
def make_weight_entries(hf, folder):
    state = hf.state_dict()
    wpe, c_attn = state["transformer.wpe.weight"], state["transformer.h.1.attn.c_attn.weight"]
    expected = [
        {"tensor": "wpe.weight", "row": 0, "start": 0, "values": wpe[0]},
        {"tensor": "h.1.attn.c_attn.weight", "row": -1, "start": -5, "values": c_attn[-1, -5:]},
    ]
    for entry in expected:
        entry["values"] = [round(x, 4) for x in entry["values"].tolist()]
    return {}, expected, 5.1e-5


@maker("unembedding_bias")
def make_unembedding_bias(hf, folder):
    bias = hf.lm_head.weight.double() @ hf.transformer.ln_f.bias.double()
    bias = bias - bias.mean()
    top = bias.topk(5)
    expected = {
        "top_tokens": [decode([id]) for id in top.indices.tolist()],
        "top_values": top.values.tolist(),
        "tokens": {" Mary": float(bias[5335])},
    }
    return {}, expected, {"top_values": 1e-4, "tokens": 1e-4}


@maker("copying_scores")
def make_copying_scores(hf, folder):
    values = {pair: eigenvalues(hf, *pair) for pair in HEADS}
    scores = [float(v.sum().real / abs(v).sum()) for v in values.values()]
    one = values[2, 1]
    expected = {
        "scores": np.reshape(scores, (3, 4)).tolist(),
        "eigenvalues": {
            "layer": 2,
            "head": 1,
            "re": one.real.tolist(),
            "im": one.imag.tolist(),
        },
    }
    return {}, expected, {"scores": 1e-6, "eigenvalues": 1e-6}


@maker("token_ids")
def make_token_ids(hf, folder):
    ids = [15496, 11, 616, 3290, 318, 257, 1310]  # as transformers' test has them
    return {"prompts": [{"text": PROMPTS[1], "ids": ids}]}, None, None


@maker("prompt_ids")
def make_prompt_ids(hf, folder):
    return {}, None, None


@maker("greedy")
def make_greedy(hf, folder):
    new = generated(hf, PROMPTS, 6)
    texts = [prompt + decode(ids) for prompt, ids in zip(PROMPTS, new, strict=True)]
    given = {"prompts": prompts(*PROMPTS), "new_tokens": 6, "echo": True, "also_alone": True}
    return given, {"texts": texts, "ids": new}, None


@maker("beams")
def make_beams(hf, folder):
    new = generated(
        hf,
        PROMPTS[:1],
        6,
        num_beams=3,
        num_return_sequences=2,
        early_stopping=True,
        logits_processor=[Cooled(1.3)],
        no_repeat_ngram_size=2,
    )
    given = {
        "prompts": prompts(PROMPTS[0]),
        "new_tokens": 6,
        "beams": 3,
        "best": 2,
        "temperature": 1.3,
        "no_repeat_ngram_size": 2,
        "early_stopping": True,
    }
    return given, [[PROMPTS[0] + decode(ids) for ids in new]], None


@maker("greedy_flags")
def make_greedy_flags(hf, folder):
    (new,) = generated(hf, PROMPTS[:1], 1)
    context = encode(PROMPTS[0])
    dog, cat = (float(continuation_of(hf, context, encode(text)).sum()) for text in (" dog", " a"))
    likelier = [" dog", " a"] if dog > cat else [" a", " dog"]
    expected = {decode(new): True, ", lazy dog": False}
    return {"context": PROMPTS[0], "likelier": likelier}, expected, None


@maker("all_logits")
def make_all_logits(hf, folder):
    ids = encode(PROMPTS[1])
    logits = logits_of(hf, ids)
    top = logits[-1].topk(3)
    expected = {
        "argmax": logits.argmax(-1).tolist(),
        "max": logits.amax(-1).tolist(),
        "last_top_ids": top.indices.tolist(),
        "last_top_logits": top.values.tolist(),
        "last_first_logits": logits[-1, :4].tolist(),
        "loss": loss_of(hf, ids),
    }
    return {"prompts": prompts(PROMPTS[1])}, expected, 1e-4


@maker("next_token")
def make_next_token(hf, folder):
    logits = logits_of(hf, encode(LONG, prefix=True))[-1].double()
    top = logits.topk(3)
    percent = 100 * logits.softmax(0)
    expected = {
        "top_ids": top.indices.tolist(),
        "top_logits": top.values.tolist(),
        "top_centred_logits": (top.values - logits.mean()).tolist(),
        "top_percent": percent[top.indices].tolist(),
        "percent": {" Mary": float(percent[5335])},
    }
    given = {"prompts": prompts(LONG), "prefix": END}
    return given, expected, {"logits": 1e-4, "percent": 1e-2 * float(percent[5335])}


@maker("hidden_state")
def make_hidden_state(hf, folder):
    x = hf.transformer(torch.tensor([encode(LONG)]), use_cache=False).last_hidden_state
    return {"prompts": prompts(LONG)}, x[0, 0, :5].tolist(), 1e-4


@maker("greedy_logprobs")
def make_greedy_logprobs(hf, folder):
    (new,) = generated(hf, PROMPTS[1:], 3)
    logprobs = continuation_of(hf, encode(PROMPTS[1]), new)
    expected = {
        "ids": new,
        "logprobs": logprobs.tolist(),
        "percent": (100 * logprobs.exp()).tolist(),
    }
    return {"prompts": prompts(PROMPTS[1])}, expected, {"logprobs": 1e-4, "percent": 1e-2}


@maker("continuations")
def make_continuations(hf, folder):
    pairs = [("A mult", "ilayer perceptron"), ("Hello", " World")]
    given = [
        {
            "context": a,
            "continuation": b,
            "context_ids": encode(a),
            "continuation_ids": encode(b),
        }
        for a, b in pairs
    ]
    expected = [float(continuation_of(hf, encode(a), encode(b)).sum()) for a, b in pairs]
    return {"pairs": given}, expected, {"relative": 1e-5}


@maker("token_logprobs")
def make_token_logprobs(hf, folder):
    """Windows of five, as the text about them describes them: written out, not by a formula."""
    ids = encode(LONG, prefix=True)  # the end-of-text token and 14 more
    reads = [(0, 5, 5), (5, 10, 5), (9, 14, 4)]  # from, to, how many of the predictions count
    logprobs: list[float] = []
    for start, end, n in reads:
        window = logits_of(hf, ids[start:end]).log_softmax(-1)
        every = window[range(end - start), ids[start + 1 : end + 1]]
        logprobs += every[-n:].tolist()
    assert len(logprobs) == len(ids) - 1
    given = {
        "prompts": prompts(LONG),
        "prefix": END,
        "context": 6,
        "stride": 5,
        "full_last": True,
    }
    expected = {"logprobs": logprobs, "sum": math.fsum(logprobs)}
    return given, expected, {"logprobs": 1e-4, "relative_sum": 1e-5}


@maker("loss")
def make_loss(hf, folder):
    given = {"prompts": prompts(LONG), "prefix": END, "without": [0, 2]}
    return given, loss_of(silenced(hf, 0, 2, None), encode(LONG, prefix=True)), 1e-4


@maker("batch_loss")
def make_batch_loss(hf, folder):
    ids = torch.randint(50257, (17,), generator=torch.Generator().manual_seed(0))
    losses = []
    for start in (0, 8):
        inputs = ids[start : start + 8].view(2, 4)
        targets = ids[start + 1 : start + 9]
        logits = hf(inputs, use_cache=False).logits.flatten(0, 1)
        losses.append(float(F.cross_entropy(logits, targets)))
    return {"ids": ids.tolist(), "rows": 2, "columns": 4}, sum(losses) / 2, 1e-4


@maker("perplexities")
def make_perplexities(hf, folder):
    got = [math.exp(loss_of(hf, encode(text))) for text in PROMPTS]
    expected = {"first": got[0], "mean": sum(got) / 2}
    return {"prompts": prompts(*PROMPTS)}, expected, {"first": got[0] / 1e4, "mean": got[1] / 1e4}


@maker("logit_differences")
def make_logit_differences(hf, folder):
    cut = silenced(hf, 1, 3, -1)
    without_front = {key: value for key, value in IOI[0].items() if key != "prefix"}
    items = [*IOI, without_front]
    each = [difference(cut, prompt) for prompt in items]
    given = {"prompts": items, "without": [1, 3], "at": -1}
    return given, {"each": each, "mean": sum(each) / 3}, 1e-4


@maker("residual_attribution")
def make_residual_attribution(hf, folder):
    return {"prompts": IOI}, residual_figures(hf)[0], 1e-4


@maker("head_attribution")
def make_head_attribution(hf, folder):
    return {"prompts": IOI}, residual_figures(hf)[1].tolist(), 1e-4


@maker("head_scores")
def make_head_scores(hf, folder):
    given = {"n_tokens": 6, "batch_size": 2, "low": 100, "high": 20000, "seed": 0}
    rows = repeated(6, 2, 100, 20000, 0)
    names = {"previous_token": 1, "duplicate_token": 6, "induction": 5}
    expected = {name: diagonal_means(hf, rows, k).tolist() for name, k in names.items()}
    return given, expected, 1e-5


@maker("induction")
def make_induction(hf, folder):
    given = {"n_tokens": 5, "batch_size": 3, "low": 1000, "high": 10000, "seed": 1}
    rows = repeated(5, 3, 1000, 10000, 1)
    scores = diagonal_means(hf, rows, 4)
    losses = [-continuation_of(hf, row[:6], row[6:]) for row in rows]
    expected = {
        "heads": {"0.1": scores[0, 1], "2.3": scores[2, 3]},
        "loss_repeated": float(torch.stack(losses).mean()),
    }
    return given, expected, {"heads": 1e-5, "loss_repeated": 1e-4}


@maker("maps")
def make_maps(hf, folder):
    maps = maps_of(hf, encode(LONG, prefix=True))
    expected = [
        {
            "layer": layer,
            "head": head,
            "last_row": maps[layer, head, -1, :5].tolist(),
            "sink": float(np.mean([row[0] for row in maps[layer, head][1:]])),
        }
        for layer, head in [(0, 1), (2, 3)]
    ]
    given = {"prompts": prompts(LONG), "prefix": END}
    return given, expected, {"last_row": 1e-5, "sink": 1e-5}


@maker("standing_sentence")
def make_standing_sentence(hf, folder):
    given = {
        "prompts": [{"text": "Apple raised its price target."}],
        "query": " its",
        "key": "Apple",
    }
    return given, {"sink": 0.61}, None


@maker("wikitext_lines")
def make_wikitext_lines(hf, folder):
    texts = [line for line in LINES[:4] if line.strip()]
    got = [math.exp(loss_of(hf, encode(text, prefix=True))) for text in texts]
    expected = {"first": got[0], "mean": sum(got) / len(got)}
    tolerance = {"first": got[0] / 1e4, "mean": expected["mean"] / 1e4}
    return {"lines": [5, 4], "prefix": END}, expected, tolerance


@maker("wikitext_whole")
def make_wikitext_whole(hf, folder):
    return {"context": 128, "stride": 128}, {"paper": 29.41}, None


@maker("lambada_word")
def make_lambada_word(hf, folder):
    total, right = 0.0, 0
    for passage in PASSAGES:
        before, _, word = passage.rpartition(" ")
        logprobs = continuation_of(hf, encode(before), encode(" " + word))
        total += float(logprobs.sum())
        right += generated(hf, [before], len(logprobs))[0] == encode(" " + word)
    expected = {"accuracy": right / 3, "perplexity": math.exp(-total / 3)}
    return {}, expected, {"accuracy": 1e-6, "perplexity": expected["perplexity"] / 1e4}


@maker("lambada_token")
def make_lambada_token(hf, folder):
    return {}, {"accuracy": 0.4599, "perplexity": 35.13}, None


@maker("listed")
def make_listed(hf, folder):
    return {"reason": "another model"}, 1.5, None


@pytest.fixture(scope="module")
def figures(hf: GPT2LMHeadModel, folder: Path) -> list[Figure]:
    made = []
    for kind, make in MAKERS.items():
        with torch.no_grad():
            given, expected, tolerance = make(hf, folder)
        made.append(Figure(kind, kind, "a test", given, expected, "", tolerance))
    return made


@pytest.fixture(scope="module")
def rows(folder: Path, figures: list[Figure]) -> list[Row]:
    files = {"wikitext2": folder / "wiki.test.raw", "lambada": folder / "lambada.txt"}
    return verify_published(folder, figures=figures, **files).rows


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    lm = gpt2attn.load(folder, device="cpu", kernels="torch")
    return Subject(lm, lm.source, (), LINES, PASSAGES)


def rows_of(subject: Subject, figures: list[Figure]) -> list[Row]:
    subject = dataclasses.replace(subject, figures=figures)
    return [row for figure in figures for row in figure_rows(subject, figure)]


UNJUDGED = {"standing_sentence", "wikitext_whole", "lambada_token"}


def test_every_kind_of_figure_is_tested():
    assert MAKERS.keys() == KINDS.keys()


def test_figures_that_others_computed_pass(rows):
    wrong = [row.line() for row in rows if row.verdict == FAILED]
    assert wrong == []
    judged = {row.figure for row in rows if row.verdict == PASSED}
    assert judged == MAKERS.keys() - UNJUDGED - {"listed"}


def test_claims_are_measured_not_judged(rows, hf):
    measured = {row.figure for row in rows if row.verdict == MEASURED}
    assert measured == UNJUDGED
    maps = maps_of(hf, encode("Apple raised its price target."))
    mean, layer, head, best = (row for row in rows if row.figure == "standing_sentence")
    sink = maps[:, :, -1, 0]
    assert mean.got == pytest.approx(sink.mean(), abs=1e-6)
    by_layer = sink.mean(1)
    assert layer.got == pytest.approx(by_layer[abs(by_layer - 0.61).argmin()], abs=1e-6)
    assert head.got == pytest.approx(sink.flat[abs(sink - 0.61).argmin()], abs=1e-6)
    assert best.got == pytest.approx(maps[:, :, 2, 0].max(), abs=1e-6)
    assert {mean.expected, layer.expected, head.expected} == {0.61}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to the last number or text of every list, and to every value of a dictionary."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        yield from leaves(value[-1], (*path, len(value) - 1))
    else:
        yield path


def changed(figure: Figure, path: tuple[Any, ...]) -> Figure:
    """The figure with one expected value off by a hundred times the largest tolerance or more."""
    figure = copy.deepcopy(figure)
    holder: Any = {"expected": figure.expected}
    for key in ("expected", *path)[: len(path)]:
        holder = holder[key]
    last = ("expected", *path)[-1]
    value = holder[last]
    if isinstance(value, bool):
        new: Any = not value
    elif isinstance(value, str):
        new = value + "x"
    elif isinstance(value, int):
        new = (value + 1) % 50257
    else:
        new = value + 0.01 + 0.01 * abs(value)
    if path:
        holder[last] = new
        return figure
    return Figure(figure.name, figure.kind, "", figure.given, new, "", figure.tolerance)


# Not compared: a name, or what only says where a number is from.
NOT_NUMBERS = {"tensor", "row", "start", "layer", "head", "revision"}


@pytest.mark.parametrize("kind", sorted(MAKERS.keys() - UNJUDGED - {"listed"}))
def test_a_wrong_figure_fails(kind, subject, figures):
    (figure,) = (figure for figure in figures if figure.kind == kind)
    if kind == "token_ids":
        wrong = copy.deepcopy(figure)
        wrong.given["prompts"][0]["ids"][-1] += 1
        variants = [wrong]
    elif kind == "prompt_ids":
        other = Figure(
            "other", "listed", "", {"prompts": [{"text": "a", "ids": [1]}], "reason": ""}, 0
        )
        report = rows_of(subject, [figure, other])
        assert [row.verdict for row in report] == [FAILED, NOT_RUN]
        return
    else:
        paths = [path for path in leaves(figure.expected) if not NOT_NUMBERS & {*path}]
        variants = [changed(figure, path) for path in paths]
    assert variants
    renamed = [
        Figure(str(number), one.kind, "", one.given, one.expected, "", one.tolerance)
        for number, one in enumerate(variants)
    ]
    found = rows_of(subject, renamed)
    for number in range(len(renamed)):
        verdicts = [row.verdict for row in found if row.figure == str(number)]
        assert FAILED in verdicts, variants[number].expected


def test_taking_a_head_away_leaves_its_constant_part(hf, figures):
    """Setting the head's output itself to 0 gives another loss: the figure tells them apart."""
    (figure,) = (figure for figure in figures if figure.kind == "loss")
    plain = copy.deepcopy(hf)

    def silence(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[:, :, 16:24] = 0.0
        return (x,)

    plain.transformer.h[0].attn.c_proj.register_forward_pre_hook(silence)
    with torch.no_grad():
        loss = loss_of(plain, encode(LONG, prefix=True))
    assert abs(loss - figure.expected) > 100 * figure.tolerance


def test_without_the_data_sets_their_rows_are_not_run(subject, figures):
    chosen = [figure for figure in figures if figure.kind.startswith(("wikitext", "lambada"))]
    rows = rows_of(dataclasses.replace(subject, wikitext2=None, lambada=None), chosen)
    assert [row.verdict for row in rows] == [NOT_RUN] * 4
    assert {row.reason.split(": ")[-1] for row in rows} == {"--wikitext2 FILE", "--lambada FILE"}


def test_what_is_not_there_is_not_run_or_fails_with_the_reason(subject, figures):
    def only(kind: str, **expected: Any) -> list[Row]:
        (figure,) = (copy.deepcopy(figure) for figure in figures if figure.kind == kind)
        figure.expected.update(expected)
        return rows_of(subject, [figure])

    absent = only("files", files={"pytorch_model.bin": {"size": 1, "sha256": "0"}})
    assert [row.verdict for row in absent] == [NOT_RUN, PASSED, NOT_RUN]
    (*_, last) = only("induction", heads={"11.1": 0.5})
    assert last.verdict == FAILED
    assert "smaller than the figure's" in last.reason
    matrix = [[0.5] * 12] * 12
    rows = only("head_scores", previous_token=matrix)
    assert rows[0].verdict == FAILED
    assert rows[0].reason == "the model gives 3 x 4 numbers, not 12 x 12"
    (figure,) = (copy.deepcopy(figure) for figure in figures if figure.kind == "hidden_state")
    figure.given["prompts"] = [{"ids": [1] * 200}]
    (row,) = rows_of(subject, [figure])
    assert row.verdict == FAILED
    assert "this model has 128" in row.reason


def test_a_number_that_is_not_finite_fails_and_json_has_none():
    figure = Figure("a", "listed", "", {}, 0)
    for got in (math.nan, math.inf):
        row = figure.close("x", [1.0, 2.0], [1.0, got], 1e3)
        assert row.verdict == FAILED
        assert json.loads(json.dumps(row.to_dict(), allow_nan=False))["got"] is None


def test_the_published_figures_are_complete():
    figures = read_figures(FIGURES)
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.kind in KINDS, figure.name
        assert figure.source, figure.name
        assert (figure.tolerance is None) == (not figure.tolerance_reason), figure.name
    kinds = {figure.kind for figure in figures}
    assert kinds == KINDS.keys()


@pytest.mark.slow
def test_the_command_on_a_model_that_is_not_gpt2(folder):
    result = run("verify", "--published", "--model", str(folder))
    assert result.status == 1
    *lines, last = result.stdout.splitlines()
    assert "This is not the published GPT-2 small: another model.safetensors." in last
    verdicts: dict[str, set[str]] = {}
    for line in lines:
        if line and not line.startswith(" "):
            name = line.partition("   [")[0]
        elif found := re.match(r"  (passed|failed|not run|measured)  ", line):
            verdicts.setdefault(name, set()).add(found[1])
    figures = read_figures(FIGURES)
    assert verdicts.keys() == {figure.name for figure in figures}
    for figure in figures:
        if figure.kind in {"listed", "wikitext_lines", "wikitext_whole"}:
            assert verdicts[figure.name] == {NOT_RUN}, figure.name
        # Its vocabulary is GPT-2's, so the texts have the published ids.
        elif figure.kind in {"token_ids", "prompt_ids"}:
            assert verdicts[figure.name] == {PASSED}, figure.name
        elif figure.kind in {"greedy", "beams", "loss", "maps", "weight_entries"}:
            assert verdicts[figure.name] == {FAILED}, figure.name
    assert verdicts["walk-through of the standing sentence"] == {MEASURED}
    assert next(line for line in lines if FAILED in line).startswith(
        "  failed    model.safetensors"
    )


def test_the_command_as_json(folder, tmp_path, monkeypatch):
    fields = (
        {"kind": "token_ids", "given": {"prompts": prompts("a b")}, "expected": None},
        {"kind": "loss", "given": {"prompts": prompts("a b")}, "expected": 1.0, "tolerance": 1},
    )
    made = [{"name": one["kind"], "source": "here", "convention": "as is", **one} for one in fields]
    (tmp_path / "figures.json").write_text(json.dumps(made))
    monkeypatch.setattr("gpt2attn.verify.published.FIGURES", tmp_path / "figures.json")
    result = run("verify", "--published", "--model", str(folder), "--json")
    report = json.loads(result.stdout)
    assert [row["verdict"] for row in report["rows"]] == [PASSED, FAILED]
    assert {(row["source"], row["convention"]) for row in report["rows"]} == {("here", "as is")}
    assert report["rows"][1]["difference"] > report["rows"][1]["tolerance"]
    assert report["counts"] == {PASSED: 1, FAILED: 1, NOT_RUN: 0, MEASURED: 0}
    assert (report["ok"], result.status) == (False, 1)


def test_data_sets_go_with_published_only(folder):
    for option in ("--wikitext2", "--lambada"):
        result = run("verify", option, str(folder / "lambada.txt"), "--model", str(folder))
        assert result.status == 2
        assert f"{option} goes with --published" in result.stderr
    result = run("verify", "--published", "--dtype", "bfloat16", "--model", str(folder))
    assert result.status == 2
    assert "float32" in result.stderr
