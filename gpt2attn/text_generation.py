"""Text from a model: one run over several rows, streams of its steps, and sessions in turns.

`generation` deals in ids; here every row has its text too, cut before stop strings and never ending
within a character, and its attention maps if they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .cache import KVCache
from .capture import AttentionMaps, Recorder, provenance
from .generation import (
    DEFAULT_MAX_NEW_TOKENS,
    STOP_STRING,
    Row,
    StopStrings,
    check_prompts,
    decode,
    n_columns,
)
from .sampling import Sampling, new_seed
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .language_model import LanguageModel

Prompt = str | Sequence[int]

INTERRUPTED = "interrupted"


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
    # On request: the likeliest tokens at each of `ids`, with their log-probabilities, best first.
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Step:
    """One new token and what it makes certain.

    `id` and `logprob` are None in one case: text that was held back, as the start of a stop string
    or a part of a character, and that comes out because the model ended the text.
    """

    id: int | None
    text: str  # may be empty; all of them, joined, are the whole text
    logprob: float | None  # by the softmax that no rule has changed
    top_logprobs: list[tuple[int, float]]  # of as many as were asked for, likeliest first


class TextStream(Iterator[str]):
    """Pieces of text as they are generated, never half a character.

    `steps()` gives the same token by token, with ids and log-probabilities. `seed` is known at
    once, `attention` grows with every token, `generation` is the whole at the end.
    """

    def __init__(self, run: Run) -> None:
        self.seed = run.rows[0].row.seed
        self._run = run
        self._steps = self._iterate()
        self.generation: Generation | None = None

    def __next__(self) -> str:
        return next(step.text for step in self._steps if step.text)

    def steps(self) -> Iterator[Step]:
        """The steps that are still to come, one for each token as soon as it is chosen."""
        return self._steps

    @property
    def attention(self) -> AttentionMaps | None:
        """The maps of all tokens fed so far, if attention was asked for; grows with every token."""
        return self._run.attention(0)

    def _iterate(self) -> Iterator[Step]:
        (text_row,) = self._run.rows
        row = text_row.row
        n_ids = 0
        for _ in self._run.steps:
            piece = text_row.take()
            if len(row.ids) > n_ids:
                n_ids = len(row.ids)
                yield Step(row.ids[-1], piece, row.logprobs[-1], row.top[-1] if row.n_top else [])
            elif piece:
                yield Step(None, piece, None, [])
        self.generation = self._run.generation(0)


class Session:
    """A text that grows in turns: `append` adds somebody's words, `stream` the model's.

    One cache is kept between the turns, so nothing is computed twice; turn i draws with seed + i.
    Text is turned into ids piece by piece, as it is added. `options` are those of
    `LanguageModel.stream`, but for attention. A stream that is left before its end counts as far as
    it came.
    """

    def __init__(
        self,
        lm: LanguageModel,
        text: Prompt = "",
        *,
        seed: int | None = None,
        overflow: str = "stop",
        special: bool = False,
        **options: Any,
    ) -> None:
        self.seed = new_seed() if seed is None else seed
        self._lm, self._special = lm, special
        self._options = {"overflow": overflow, **options}
        self._ids: list[int] = []
        self._start = 0  # of the window that the cache holds, but for its end
        self._cache = KVCache.for_model(lm.model)
        self._turn: TextRow | None = None
        self._n_turns = 0
        self.append(text)

    @property
    def ids(self) -> list[int]:
        """The tokens of the text so far, those of stop strings left out."""
        self._settle()
        return list(self._ids)

    @property
    def text(self) -> str:
        return self._lm.tokenizer.decode(self.ids)

    def append(self, text: Prompt) -> None:
        """Add `text` to the end.

        Raises ValueError, and changes nothing, if the context has no room for it and does not
        slide.
        """
        self._settle()
        ids = self._lm.encode(text, special=self._special)
        limit = self._lm.model.config.n_positions
        if len(self._ids) + len(ids) > limit and self._options["overflow"] != "slide":
            raise ValueError(
                f"The text has {len(self._ids)} tokens and would get {len(ids)} more, but this "
                f"model has {limit} positions; add less, or use overflow slide."
            )
        self._ids += ids

    def stream(self, max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS) -> TextStream:
        """Let the model go on; raises ValueError while the text is empty."""
        self._settle()
        # The last token is always fed, for its logits.
        self._cache.truncate(max(min(self._cache.length, len(self._ids) - self._start - 1), 0))
        run = start(
            self._lm,
            [self._ids],
            max_new_tokens,
            seed=self.seed + self._n_turns,
            window_start=self._start,
            cache=self._cache,
            **self._options,
        )
        self._turn = run.rows[0]
        self._n_turns += 1
        return TextStream(run)

    def _settle(self) -> None:
        """Take over what the last turn added, and end that turn."""
        if self._turn is None:
            return
        row, text, self._turn = self._turn.row, self._turn.text, None
        cut = row.finish_reason == STOP_STRING
        row.finish_reason = row.finish_reason or INTERRUPTED
        before = [*row.prompt_ids, *row.ids]
        self._ids, self._start = before, row.start
        if cut:
            self._ids = row.prompt_ids + self._lm.tokenizer.encode(text, special=self._special)
            n_shared = next(
                (i for i, (a, b) in enumerate(zip(before, self._ids, strict=False)) if a != b),
                min(len(before), len(self._ids)),
            )
            if n_shared <= row.start:  # the stop string began before the window
                self._start = max(len(self._ids) - self._lm.model.config.n_positions, 0)
                n_shared = self._start
            self._cache.truncate(min(self._cache.length, n_shared - self._start))


@dataclass
class Run:
    """A generation under way: its rows, what advances them, and what is captured meanwhile."""

    lm: LanguageModel
    rows: list[TextRow]
    steps: Iterator[None]
    recorder: Recorder | None
    slides: bool

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
            top_logprobs=row.top if row.n_top else None,
        )

    def attention(self, number: int) -> AttentionMaps | None:
        """The square maps of row `number` over its window as it was fed; None if nothing was."""
        if self.recorder is None or not self.recorder.done:
            return None
        row = self.rows[number].row
        ids = row.fed_ids
        where = slice(row.column, row.column + len(ids))
        origin = {**provenance(self.lm.model), **self.lm.provenance, "seed": row.seed}
        if self.slides:
            origin["window_start"] = row.start
        return AttentionMaps(
            {
                name: values[:, number : number + 1, :, where, where]
                for name, values in self.recorder.stages.items()
            },
            self.recorder.layers,
            self.recorder.heads,
            [ids],
            [self.lm.tokenizer.labels(ids)],
            [max(len(row.prompt_ids) - row.start, 0)],
            origin,
        )


class TextRow:
    """A row with the text of what was generated."""

    def __init__(self, row: Row, tokenizer: Tokenizer, stops: StopStrings) -> None:
        self.row = row
        self.text = ""
        self._decoder, self._stops = tokenizer.stream(), stops
        self._taken = 0
        self._finished = False

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def take(self) -> str:
        """The text that newly became certain: once the row has ended, all of it.

        Half a character at the end comes out as a full decode gives it.
        """
        piece = ""
        for id in self.row.ids[self._taken :]:
            piece += self._stops.push(self._decoder.push(id))
        self._taken = len(self.row.ids)
        if self.row.finish_reason is not None and not self._finished:
            self._finished = True
            piece += self._stops.push(self._decoder.finish()) + self._stops.finish()
        self.text += piece
        if self._stops.found is not None:
            self.row.finish_reason = STOP_STRING
        return piece


def start(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    seed: int | None = None,
    stop: str | Sequence[str] | None = (),
    banned_words: str | Sequence[str] = (),
    special: bool = False,
    overflow: str = "stop",
    lookup: bool = False,
    top_logprobs: int = 0,
    attention: bool = False,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    window_start: int = 0,
    cache: KVCache | None = None,
    **options: Any,
) -> Run:
    """A run that continues `prompts`; nothing is computed before its first step.

    `window_start` and `cache` are for one prompt whose beginning was fed before.
    """
    if isinstance(top_logprobs, bool) or not isinstance(top_logprobs, int) or top_logprobs < 0:
        raise ValueError(
            f"top_logprobs must be a whole number from 0 up (0 is off), not {top_logprobs!r}."
        )
    sampling = Sampling(**text_rules(lm, banned_words, options))
    seed = new_seed() if seed is None else seed
    rows = [
        Row(
            lm.encode(prompt, special=special),
            sampling,
            seed + number,
            n_top=top_logprobs,
            start=window_start,
        )
        for number, prompt in enumerate(prompts)
    ]
    text_rows = [TextRow(row, lm.tokenizer, StopStrings(stop)) for row in rows]
    recorder = None
    if attention:
        check_prompts(lm.model, rows, max_new_tokens, overflow)
        room = n_columns(lm.model, rows, max_new_tokens, overflow, observed=True)
        recorder = Recorder(lm.model, len(rows), room, layers=layers, heads=heads)
    steps = decode(
        lm.model,
        rows,
        max_new_tokens,
        stop_ids=lm.model.config.end_ids,
        overflow=overflow,
        cache=cache,
        observe=recorder,
        lookup=lookup,
    )
    return Run(lm, text_rows, steps, recorder, overflow == "slide")


def text_rules(
    lm: LanguageModel, banned_words: str | Sequence[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of `Sampling` for text: words as ids, and only tokens that have a text.

    A padded vocabulary has rows beyond the tokenizer's ids, which no training made unlikely.
    """
    rules = {**options, "banned_words": spellings(lm.tokenizer, banned_words)}
    beyond = range(lm.tokenizer.vocab_size, lm.model.config.vocab_size)
    if unnamed := [id for id in beyond if id not in lm.model.config.end_ids]:
        rules["banned_ids"] = (*options.get("banned_ids", ()), *unnamed)
    return rules


def spellings(tokenizer: Tokenizer, words: str | Sequence[str]) -> list[list[int]]:
    """Token ids of words, each with and without a space before it."""
    words = (words,) if isinstance(words, str) else words
    if "" in words:
        raise ValueError("A banned word must be text of at least one character.")
    return [tokenizer.encode(space + word) for word in words for space in ("", " ")]
