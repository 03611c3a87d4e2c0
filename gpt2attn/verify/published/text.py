"""Published token ids and texts."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

from torch import nn

from ...beam import GREEDY, beam_search
from ...model import GPT2
from ...scoring import continuation_logprobs
from ...text_generation import Generation
from .report import Figure, Row
from .subject import Subject


def token_ids(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The ids of each text."""
    for prompt in figure.given["prompts"]:
        ids = subject.tokenizer.encode(prompt["text"])
        yield figure.exact(f"ids of {prompt['text']!r}", prompt["ids"], ids)


def prompt_ids(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The ids of all other figures' prompts and continuations that are published with ids."""
    pairs = []
    for other in subject.figures:
        if other.kind == "token_ids" or "prompts_of" in other.given:
            continue
        pairs += [
            (prompt["text"], prompt["ids"])
            for prompt in other.given.get("prompts", ())
            if prompt.keys() >= {"text", "ids"}
        ]
        for pair in other.given.get("pairs", ()):
            pairs += [(pair[part], pair[f"{part}_ids"]) for part in ("context", "continuation")]
    wrong = [text for text, ids in pairs if subject.tokenizer.encode(text) != ids]
    yield figure.exact(f"of {len(pairs)} texts, those whose ids differ", [], wrong)


def greedy(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Greedy continuations of prompts in one batch, and alone where that was published too."""
    prompts, expected = figure.given["prompts"], figure.expected
    rows = [subject.ids(prompt) for prompt in prompts]
    together = _continued(subject, figure, rows)
    for number, (prompt, result) in enumerate(zip(prompts, together, strict=True)):
        name = repr(prompt["text"])
        text = _text(figure, prompt, result)
        yield figure.exact(f"text after {name}", expected["texts"][number], text)
        if "ids" in expected:
            yield figure.exact(f"ids after {name}", expected["ids"][number], result.ids)
        if figure.given.get("also_alone"):
            (result,) = _continued(subject, figure, [rows[number]])
            text = _text(figure, prompt, result)
            yield figure.exact(f"text after {name} alone", expected["texts"][number], text)


def _continued(subject: Subject, figure: Figure, rows: list[list[int]]) -> list[Generation]:
    stop = figure.given.get("stop", ())
    results: list[Generation] = subject.lm.generate(
        rows, figure.given["new_tokens"], temperature=0, seed=0, stop=stop
    )
    return results


def _text(figure: Figure, prompt: dict[str, Any], result: Generation) -> str:
    text = result.text.rstrip() if figure.given.get("strip_end") else result.text
    return prompt["text"] + text if figure.given.get("echo") else text


def beams(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The best texts of beam search, the prompt in front of each."""
    given = figure.given
    model = _cooler(subject.model, given.get("temperature", 1.0))
    ngram = given.get("no_repeat_ngram_size", 0)
    for prompt, texts in zip(given["prompts"], figure.expected, strict=True):
        found = beam_search(
            model,
            subject.ids(prompt),
            given["new_tokens"],
            n_beams=given["beams"],
            n_best=given.get("best", 1),
            early_stopping=given.get("early_stopping", False),
            end_ids=model.config.end_ids,
            sampling=replace(GREEDY, no_repeat_ngram_size=ngram),
        )
        got = [prompt["text"] + subject.tokenizer.decode(beam.ids) for beam in found]
        for number, text in enumerate(texts):
            what = f"best text {number + 1} of {given['beams']} beams after {prompt['text']!r}"
            yield figure.exact(what, text, got[number] if number < len(got) else None)


def _cooler(model: GPT2, temperature: float) -> GPT2:
    """A model that shares all weights but ln_f's, whose logits are divided by `temperature`."""
    if temperature == 1.0:
        return model
    ln_f = nn.LayerNorm(model.config.n_embd, eps=model.config.layer_norm_epsilon)
    ln_f.weight = nn.Parameter(model.ln_f.weight / temperature)
    ln_f.bias = nn.Parameter(model.ln_f.bias / temperature)
    cooler = copy(model)
    cooler._modules = dict(model._modules)  # which the copy would share
    cooler.ln_f = ln_f
    cooler.compiled = None
    return cooler


def greedy_flags(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Whether continuations are the greedy ones, and which of two is likelier."""
    encode = subject.tokenizer.encode
    context = encode(figure.given["context"])
    likelier, other = figure.given["likelier"]
    texts = [*figure.expected, likelier, other]
    results = continuation_logprobs(subject.model, [(context, encode(text)) for text in texts])
    found = dict(zip(texts, results, strict=True))
    for text, flag in figure.expected.items():
        yield figure.exact(f"{text!r} is greedy", flag, found[text].is_greedy)
    is_likelier = found[likelier].total > found[other].total
    yield figure.exact(f"{likelier!r} is likelier than {other!r}", True, is_likelier)
