"""LanguageModel: a model with its tokenizer, text in and text out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import torch

from .beam import GREEDY, beam_search
from .capture import AttentionMaps, Recorder, attention_maps, provenance
from .checkpoint import load_model, weight_files
from .files import sha256
from .generation import (
    DEFAULT_MAX_NEW_TOKENS,
    END_OF_TEXT,
    STOP_STRING,
    Row,
    StopStrings,
    decode,
    left_padded,
)
from .hub import Source, resolve
from .model import GPT2
from .sampling import Sampling, new_seed
from .scoring import Continuation, Score, continuation_logprobs, encode_pair, score_texts
from .tokenizer import Tokenizer
from .trace import HeadTrace, trace_head

OPENAI_SIZES = frozenset({"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"})

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """What came of one prompt; `ids` and `text` are the new tokens only.

    `text` ends before a stop string; `ids` holds all that was generated.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: str  # "end of text", "stop string", "max new tokens" or "length limit"
    seed: int | None  # None where nothing is drawn: beam search
    logprobs: list[float]
    stop_string: str | None = None
    attention: AttentionMaps | None = None  # on request: of the prompt and the new tokens fed
    score: float | None = None  # of a beam: its log-probability over length ** length_penalty


class TextStream(Iterator[str]):
    """Pieces of text as they are generated, never half a character.

    `seed` is known at once, `attention` grows with every token, `generation` is the whole at the
    end.
    """

    def __init__(self, run: _Run) -> None:
        self.seed = run.rows[0].row.seed
        self._run = run
        self._pieces = self._iterate()
        self.generation: Generation | None = None

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def attention(self) -> AttentionMaps | None:
        """The maps of all tokens fed so far, if attention was asked for; grows with every token."""
        return self._run.attention(0)

    def _iterate(self) -> Iterator[str]:
        (row,) = self._run.rows
        for _ in self._run.steps:
            if piece := row.take():
                yield piece
        if piece := row.finish():
            yield piece
        self.generation = self._run.generation(0)


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
        **options: Any,
    ) -> Generation | list[Generation]:
        """Continue one prompt (a Generation) or several (a list of them, computed together).

        A prompt is text or token ids; the options are those of `stream`. Prompt i of several uses
        seed + i and gives what it gives alone. With `num_samples` n, each prompt is continued n
        times, with seeds in a row, and a list comes back, the samples of the first prompt first.
        """
        prompts = _prompts(prompt)
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, not {num_samples}.")
        each = [one for one in prompts or [prompt] for _ in range(num_samples or 1)]
        run = self._start(each, max_new_tokens, **options)
        for _ in run.steps:
            for row in run.rows:
                row.take()
        for row in run.rows:
            row.finish()
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
            attention: keep the maps of everything fed; `layers`, `heads` (None: all) choose which.
            All others are those of `Sampling`: temperature, top_k, top_p, min_p, typical_p,
            repetition_penalty, no_repeat_ngram_size, min_new_tokens, banned_ids, logit_bias.

        Raises ValueError before any compute if the prompt is empty or longer than the context.
        """
        return TextStream(self._start([prompt], max_new_tokens, **options))

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
        **rules: Any,
    ) -> list[Generation]:
        """The best continuations that beam search finds, each with its score; see `beam`.

        `rules` are those of `Sampling` that are no draws: repetition_penalty, no_repeat_ngram_size,
        min_new_tokens, banned_ids, logit_bias.
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
            sampling=replace(GREEDY, banned_words=self._spellings(banned_words), **rules),
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
        rows = [self.encode(one, special=special) for one in _prompts(text) or [text]]
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
        scores = list(score_texts(self.model, self.tokenizer, texts or [text], **options))
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
        """Token ids of a prompt that is text or ids already."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=special)
        return list(prompt)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """What a dump says of the model: its name, and its Hub revision or its files' hashes."""
        if self.source is None:
            return {"model": "(in memory)"}
        if self.source.revision is not None:
            return {"model": self.source.name, "revision": self.source.revision}
        files = weight_files(self.source.folder, allow_pickle=True)
        return {"model": self.source.name, "sha256": {path.name: sha256(path) for path in files}}

    def _spellings(self, words: str | Sequence[str]) -> list[list[int]]:
        """Token ids of words, each with and without a space before it."""
        words = (words,) if isinstance(words, str) else words
        return [self.tokenizer.encode(space + word) for word in words for space in ("", " ")]

    def _start(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        *,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        banned_words: Sequence[str] = (),
        special: bool = False,
        attention: bool = False,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        **options: Any,
    ) -> _Run:
        sampling = Sampling(banned_words=self._spellings(banned_words), **options)
        seed = new_seed() if seed is None else seed
        rows = [
            _TextRow(
                Row(self.encode(prompt, special=special), sampling, seed + number),
                self.tokenizer,
                StopStrings(stop),
            )
            for number, prompt in enumerate(prompts)
        ]
        recorder = None
        if attention:
            room = max(len(row.row.prompt_ids) for row in rows) + max_new_tokens
            recorder = Recorder(self.model, len(rows), room, layers=layers, heads=heads)
        steps = decode(
            self.model,
            [row.row for row in rows],
            max_new_tokens,
            stop_ids=self.model.config.end_ids,
            observe=recorder,
        )
        return _Run(self, rows, steps, recorder)


@dataclass
class _Run:
    """A generation under way: its rows, what advances them, and what is captured meanwhile."""

    lm: LanguageModel
    rows: list[_TextRow]
    steps: Iterator[None]
    recorder: Recorder | None

    def generation(self, number: int) -> Generation:
        text_row = self.rows[number]
        row = text_row.row
        assert row.finish_reason is not None
        return Generation(
            row.prompt_ids,
            row.ids,
            text_row.text,
            row.finish_reason,
            row.seed,
            row.logprobs,
            text_row.stop_string,
            self.attention(number),
        )

    def attention(self, number: int) -> AttentionMaps | None:
        """The square maps of row `number` over the tokens it was fed; None if nothing was."""
        if self.recorder is None or not self.recorder.done:
            return None
        row = self.rows[number].row
        # The token chosen last is fed only where the next choice was to end the text.
        n_new = len(row.ids) if row.finish_reason == END_OF_TEXT else max(len(row.ids) - 1, 0)
        ids = row.prompt_ids + row.ids[:n_new]
        start = max(len(other.row.prompt_ids) for other in self.rows) - len(row.prompt_ids)
        where = slice(start, start + len(ids))
        return AttentionMaps(
            {
                name: values[:, number : number + 1, :, where, where]
                for name, values in self.recorder.stages.items()
            },
            self.recorder.layers,
            self.recorder.heads,
            [ids],
            [self.lm.tokenizer.labels(ids)],
            [len(row.prompt_ids)],
            {**provenance(self.lm.model), **self.lm.provenance, "seed": row.seed},
        )


class _TextRow:
    """A row with the text of what was generated."""

    def __init__(self, row: Row, tokenizer: Tokenizer, stops: StopStrings) -> None:
        self.row = row
        self.text = ""
        self._decoder, self._stops = tokenizer.stream(), stops
        self._taken = 0

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def take(self) -> str:
        """The text that newly became certain."""
        piece = ""
        for id in self.row.ids[self._taken :]:
            piece += self._stops.push(self._decoder.push(id))
        self._taken = len(self.row.ids)
        return self._keep(piece)

    def finish(self) -> str:
        """The rest, once the row has ended, half characters as a full decode gives them."""
        return self._keep(self._stops.push(self._decoder.finish()) + self._stops.finish())

    def _keep(self, piece: str) -> str:
        self.text += piece
        if self._stops.found is not None:
            self.row.finish_reason = STOP_STRING
        return piece


def _prompts(prompt: Prompt | Sequence[Prompt]) -> list[Prompt] | None:
    """The prompts if `prompt` is several, None if it is one text or one row of ids."""
    if isinstance(prompt, str) or not len(prompt) or isinstance(prompt[0], int):
        return None
    return list(prompt)


def load(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    kernels: str = "torch",
    allow_pickle: bool = False,
    notify: Callable[[str], None] | None = None,
) -> LanguageModel:
    """A model with its tokenizer: `pocket` (built in), a folder, or a Hub name such as `gpt2`.

    `device` is "auto" (CUDA if there is one), "cpu" or "cuda"; `kernels` as in `load_model`;
    `notify` is given a line before a download starts. Raises ValueError with one sentence if there
    is no such model or its files do not fit.
    """
    source = resolve(name, revision=revision, notify=notify)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(
        source.folder, device=device, dtype=dtype, kernels=kernels, allow_pickle=allow_pickle
    )
    return LanguageModel(model, Tokenizer.from_folder(source.folder), source)


def load_tokenizer(name: str | os.PathLike[str], *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a model's folder, found as `load` finds it.

    The vocabulary of OpenAI's four sizes ships with the package, so their names need no download.
    """
    if str(name).removeprefix("openai-community/") in OPENAI_SIZES and not os.path.exists(name):
        return Tokenizer.gpt2()
    return Tokenizer.from_folder(resolve(name, revision=revision).folder)
