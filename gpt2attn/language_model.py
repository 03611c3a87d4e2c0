"""LanguageModel: a model with its tokenizer, text in and text out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast, overload

import numpy as np
import torch

from .beam import GREEDY, beam_search
from .capture import AttentionMaps, attention_maps, whole_number
from .checkpoint import load_model, weight_files
from .files import sha256
from .generation import DEFAULT_MAX_NEW_TOKENS, left_padded
from .hub import Source, resolve
from .model import GPT2
from .scoring import Continuation, Score, continuation_logprobs, encode_pair, score_texts
from .text_generation import Generation, Prompt, Session, TextStream, start, text_rules
from .tokenizer import Tokenizer
from .trace import HeadTrace, trace_head


class LanguageModel:
    """A GPT-2 that reads and writes text; `load` makes one."""

    def __init__(self, model: GPT2, tokenizer: Tokenizer, source: Source | None = None) -> None:
        # A tokenizer may have a few ids more than the model (a padding token added for training):
        # the model refuses such an id when it is used.
        self.model, self.tokenizer, self.source = model, tokenizer, source

    @overload
    def generate(self, prompt: Prompt, max_new_tokens: int = ..., **options: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], max_new_tokens: int = ..., **options: Any
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        *,
        num_samples: int | None = None,
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Continue one prompt (a Generation) or several (a list of them, computed together).

        A prompt is text or token ids; the options are those of `stream`. Prompt i of several uses
        seed + i and gives what it gives alone. With `num_samples` n, each prompt is continued n
        times, with seeds in a row, and a list comes back, the samples of the first prompt first.
        `progress` is told the number of new tokens after each step.
        """
        prompts = _prompts(prompt)
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {num_samples}.")
        each = [one for one in prompts or [cast(Prompt, prompt)] for _ in range(num_samples or 1)]
        run = start(self, each, max_new_tokens, **options)
        n_before = 0
        for _ in run.steps:
            for row in run.rows:
                row.take()
            if progress is not None:
                n_new = sum(len(row.row.ids) for row in run.rows)
                progress(n_new - n_before)
                n_before = n_new
        generations = [run.generation(number) for number in range(len(run.rows))]
        return generations if prompts or num_samples else generations[0]

    def stream(
        self, prompt: Prompt, max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS, **options: Any
    ) -> TextStream:
        """Continue one prompt, yielding text as soon as it is certain.

        Options:
            seed: None draws one, which the result names.
            stop: text, or several, before which the new text ends.
            banned_words: texts that may not appear, with or without a space before them.
            special: read `<|endoftext|>` in the prompt as that token, not as its characters.
            overflow: past the model's context "stop" (the default), "slide" a window over the text,
                or "error" at once if prompt and new tokens may not fit; see `generation`.
            top_logprobs: how many of the likeliest tokens to report at each step.
            attention: keep the maps of everything fed; `layers`, `heads` (None: all) choose which.
                Where the text slides, those of the last window.
            All others are those of `Sampling`: temperature, top_k, top_p, min_p, typical_p,
            repetition_penalty, no_repeat_ngram_size, min_new_tokens, banned_ids, logit_bias.

        Raises ValueError before any compute if the prompt is empty, or longer than the context and
        does not slide.
        """
        return TextStream(start(self, [prompt], max_new_tokens, **options))

    def session(self, text: Prompt = "", **options: Any) -> Session:
        """A text that grows in turns, yours and the model's, over one cache; see `Session`."""
        return Session(self, text, **options)

    def beam_search(
        self,
        prompt: Prompt,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        *,
        num_beams: int = 5,
        num_return: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        banned_words: Sequence[str] = (),
        special: bool = False,
        overflow: str = "stop",
        **rules: Any,
    ) -> list[Generation]:
        """The best continuations that beam search finds, each with its score; see `beam`.

        `rules` are those of `Sampling` that are no draws: repetition_penalty, no_repeat_ngram_size,
        min_new_tokens, banned_ids, logit_bias. `overflow` is "stop" or "error".
        """
        ids = self.encode(prompt, special=special)
        beams = beam_search(
            self.model,
            ids,
            max_new_tokens,
            n_beams=num_beams,
            n_best=num_return,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            end_ids=self.model.config.end_ids,
            overflow=overflow,
            sampling=replace(GREEDY, **text_rules(self, banned_words, rules)),
        )
        return [
            Generation(
                ids,
                beam.ids,
                self.tokenizer.decode(beam.ids),
                beam.finish_reason,
                None,
                beam.logprobs,
                score=beam.score,
            )
            for beam in beams
        ]

    def attention(
        self,
        text: Prompt | Sequence[Prompt],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        stages: Sequence[str] = ("weights",),
        dtype: torch.dtype | None = None,
        special: bool = False,
    ) -> AttentionMaps:
        """The attention maps of one text or several, with labels and where they came from.

        See `capture.attention_maps` for the selection. Raises ValueError for an empty or too long
        text.
        """
        rows = [self.encode(one, special=special) for one in _prompts(text) or [cast(Prompt, text)]]
        if empty := [number for number, row in enumerate(rows) if not row]:
            raise ValueError(f"Text {empty[0]} is empty: attention needs at least one token.")
        ids, mask = left_padded(rows)
        return attention_maps(
            self.model,
            ids,
            layers,
            heads,
            None if mask.all() else mask,
            stages=stages,
            dtype=dtype,
            labels=[self.tokenizer.labels(row) for row in rows],
            metadata=self.provenance,
        )

    @overload
    def score(self, text: Prompt, **options: Any) -> Score: ...
    @overload
    def score(self, text: Sequence[Prompt], **options: Any) -> list[Score]: ...

    def score(self, text: Prompt | Sequence[Prompt], **options: Any) -> Score | list[Score]:
        """The log-probability and rank of each token of one text or several; see `scoring`.

        Options: context, stride, bos (end-of-text in front), special, full_last, batch_tokens.
        """
        texts = _prompts(text)
        rows = [
            one if isinstance(one, str) else self.encode(one)
            for one in texts or [cast(Prompt, text)]
        ]
        scores = list(score_texts(self.model, self.tokenizer, rows, **options))
        return scores if texts else scores[0]

    def continuation_logprobs(
        self, pairs: Iterable[tuple[str, str]], **options: Any
    ) -> Iterator[Continuation]:
        """The log-likelihood of each (context, continuation), as evaluation harnesses ask."""
        encoded = (encode_pair(self.tokenizer, *pair) for pair in pairs)
        return continuation_logprobs(self.model, encoded, **options)

    def trace(
        self,
        text: Prompt,
        layer: int,
        head: int,
        query: int | None = None,
        *,
        key: int | None = None,
        special: bool = False,
    ) -> HeadTrace:
        """The five steps of one head for one text, with labels; see `trace.trace_head`."""
        ids = self.encode(text, special=special)
        labels = self.tokenizer.labels(ids)
        return trace_head(
            self.model, ids, layer, head, query, key=key, labels=labels, metadata=self.provenance
        )

    def encode(self, prompt: Prompt, *, special: bool = False) -> list[int]:
        """Token ids of a prompt that is text or ids already, in a list, an array or a tensor."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=special)
        _check_kind(prompt)
        ids = [whole_number(id) for id in prompt]
        if None in ids:
            raise ValueError(
                "A prompt is a text or one row of token ids, whole numbers, not of the type "
                f"{type(prompt[ids.index(None)]).__name__}."
            )
        return cast(list[int], ids)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """What a dump says of the model: its name, and its Hub revision or its files' hashes."""
        return {"model": "(in memory)"} if self.source is None else source_provenance(self.source)


def _prompts(prompt: Prompt | Sequence[Prompt]) -> list[Prompt] | None:
    """The prompts if `prompt` is several, None if it is one text or one row of ids."""
    if isinstance(prompt, str):
        return None
    _check_kind(prompt)
    if not len(prompt) or (np.ndim(cast(Any, prompt[0])) == 0 and not isinstance(prompt[0], str)):
        return None
    return list(cast(Sequence[Prompt], prompt))


def _check_kind(prompt: object) -> None:
    # The bytes of a text would pass for ids.
    is_row = isinstance(prompt, Sequence | torch.Tensor | np.ndarray)
    if not is_row or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"A prompt is text or token ids, not {type(prompt).__name__}.")


def load(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    kernels: str = "auto",
    allow_pickle: bool = False,
    allow_nonfinite: bool = False,
    notify: Callable[[str], None] | None = None,
) -> LanguageModel:
    """A model with its tokenizer: `pocket` (built in), a folder, or a Hub name such as `gpt2`.

    `device` is "auto" (CUDA if there is one), "cpu" or "cuda". All that the model does runs on
    `kernels`: "auto" are the fast ones, with which `dtype` is on a CPU only how weights are stored;
    "torch" are bit for bit transformers'. Both, `allow_pickle` and `allow_nonfinite` are those of
    `load_model`. `notify` is given a line before a download starts. Raises ValueError with one
    sentence if there is no such model or its files do not fit.
    """
    source = resolve(name, revision=revision, notify=notify)
    model = load_model(
        source.folder,
        device=chosen_device(device),
        dtype=dtype,
        kernels=kernels,
        allow_pickle=allow_pickle,
        allow_nonfinite=allow_nonfinite,
    )
    return LanguageModel(model, Tokenizer.from_folder(source.folder), source)


def chosen_device(device: str) -> str:
    """`device`, where "auto" is CUDA if there is one, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def source_provenance(source: Source) -> dict[str, Any]:
    """A model's name, and its Hub revision or its files' hashes."""
    if source.revision is not None:
        return {"model": source.name, "revision": source.revision}
    files = weight_files(source.folder, allow_pickle=True)
    return {"model": source.name, "sha256": {path.name: sha256(path) for path in files}}
