"""`gpt2attn score`: how likely a text is, token by token and as a whole."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .common import (
    AllowPickle,
    Debug,
    Device,
    DType,
    Json,
    Model,
    Revision,
    Special,
    Threads,
    load_language_model,
    note,
    print_json,
    read_text,
)

if TYPE_CHECKING:
    from rich.text import Text

    from ..language_model import LanguageModel
    from ..scoring import Score

_VIEW_LIMIT = 2000  # tokens; a longer text is not shown unasked
_CSV_COLUMNS = ("text", "position", "id", "label", "logprob", "rank")
# From this rank on: a colour, and marks where there is no colour. The bounds are GLTR's.
_LEVELS = (
    (1001, "bold magenta reverse", ("««", "»»")),
    (101, "bold red", ("«", "»")),
    (11, "yellow", None),
)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COLOUR_LEGEND = "rank 1 to 10 plain, 11 to 100 yellow, 101 to 1,000 red, above magenta"
_MARK_LEGEND = "rank above 100 in « », above 1,000 in «« »»"


def score(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to score; `-` or nothing reads stdin.", show_default=False),
    ] = None,
    text_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Score a file as one text; may be given several times."),
    ] = None,
    records: Annotated[
        list[Path] | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help='Many texts, one a line: .txt, or .jsonl with a "text"; may be given several '
            "times.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens in a window, at least 2.", show_default="the model's positions"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from one window to the next; each token has at least context - stride "
            "before it.",
            show_default="half the context",
        ),
    ] = None,
    full_last: Annotated[
        bool, typer.Option("--full-last", help="Move the last window back until it is full.")
    ] = False,
    bos: Annotated[
        bool,
        typer.Option(
            "--bos/--no-bos",
            help="Put <|endoftext|> once in front of each text, so that its first token has a "
            "log-probability too.",
        ),
    ] = False,
    protocol: Annotated[
        Literal["wikitext2", "lambada"] | None,
        typer.Option(help="Score the file of --input as published figures were made; see above."),
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE", help="Also write every token: " + ", ".join(_CSV_COLUMNS) + "."
        ),
    ] = None,
    view: Annotated[
        bool | None,
        typer.Option(
            "--view/--no-view",
            help="Show the text with its surprising tokens coloured, or marked where there is no "
            "colour.",
            show_default=f"one text of up to {_VIEW_LIMIT:,} tokens",
        ),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens computed at once, which bounds the memory.")
    ] = 4096,
    special: Special = False,
    model: Model = "gpt2",
    revision: Revision = None,
    device: Device = "auto",
    dtype: DType = "float32",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score a text: log-probability and rank of every token, perplexity, bits per byte.

    A text longer than the context is scored in windows, each token once; these are the windows of
    Hugging Face's guide to perplexity. Without --bos nothing precedes the first token, so it has no
    log-probability and is not counted; the same goes for the first token of each window if stride
    and context are equal. Log-probabilities are natural logarithms; rank 1 is the first choice.

    --protocol wikitext2: --input is wiki.test.raw of WikiText-2, or its rows as .jsonl. Lines keep
    their newline, blank ones become empty, "\\n\\n" joins them, and the whole is one text of
    287,644 tokens. Perplexity is for each token; Hugging Face's guide prints 16.44 with stride 512
    and 19.44 with stride 1024 for gpt2-large. Perplexity for each word divides the same total by
    the 245,569 words and line ends. The paper's 29.41 for gpt2 came after de-tokenizers that were
    not published, so it is not reached to the digit.

    --protocol lambada: --input is OpenAI's lambada_test.jsonl, or one passage a line. Last word, as
    lm-eval's lambada_openai: right if every token is the first choice, perplexity for each word;
    lm-eval has 32.56 % and 40.06 for gpt2. Last token: the same of the last token alone, which is
    what the paper's 45.99 % for gpt2 counts. Nothing is put in front and no stop words are left
    out.

    Example:  gpt2attn score "Apple raised its price target" --bos
    """
    options = {
        "context": context,
        "stride": stride,
        "full_last": full_last,
        "bos": bos,
        "special": special,
        "batch_tokens": batch_tokens,
    }
    loaded = (model, revision, device, dtype, threads, allow_pickle)
    if protocol is not None:
        path = _protocol_file(protocol, text, text_file, records)
    if protocol == "lambada":
        if (
            bos
            or full_last
            or special
            or view
            or any(option is not None for option in (context, stride, csv_file))
        ):
            raise ValueError(
                "--protocol lambada fixes the windows and prints no tokens: of the options, only "
                "--json, --batch-tokens and those of the model go with it."
            )
        _lambada(load_language_model(*loaded), path, batch_tokens, model, as_json)
        return
    n_words = None
    if protocol == "wikitext2":
        from ..scoring import wikitext_text, wikitext_words

        lines = list(_lines(path))
        texts: Iterator[tuple[str, str]] = iter([(str(path), wikitext_text(lines))])
        n_words, several = wikitext_words(lines), False
    else:
        texts, several = _texts(text, text_file, records)
    if several and view:
        raise ValueError("--view shows one text; --csv FILE has the tokens of many.")
    lm = load_language_model(*loaded)
    if several:
        _score_several(lm, texts, options, model, as_json, csv_file)
    else:
        _score_one(lm, texts, options, model, as_json, csv_file, view, n_words)


@dataclass
class _Totals:
    """Sums over texts."""

    n_texts: int = 0
    n_tokens: int = 0
    n_scored: int = 0
    logprob: float = 0.0
    n_bytes: int = 0
    n_perplexities: int = 0  # texts of which a token was scored
    perplexities: float = 0.0

    def add(self, result: Score) -> None:
        self.n_texts += 1
        self.n_tokens += len(result.ids)
        self.n_scored += result.n_scored
        self.logprob += result.total
        self.n_bytes += result.n_bytes or 0
        if result.n_scored:
            self.n_perplexities += 1
            self.perplexities += result.perplexity

    def cells(self, n_words: int | None = None) -> dict[str, Any]:
        """As JSON has them; those of one text unless there are several."""
        from ..scoring import bits_per_byte, perplexity

        cells: dict[str, Any] = {
            "tokens": self.n_tokens,
            "scored": self.n_scored,
            "logprob": _finite(self.logprob),
            "perplexity": _finite(perplexity(self.logprob, self.n_scored)),
            "bytes": self.n_bytes,
            "bits_per_byte": _finite(bits_per_byte(self.logprob, self.n_bytes)),
        }
        if n_words is not None:
            cells |= {
                "words": n_words,
                "word_perplexity": _finite(perplexity(self.logprob, n_words)),
            }
        return cells

    def mean_perplexity(self) -> float | None:
        return _finite(self.perplexities / self.n_perplexities) if self.n_perplexities else None


def _score_several(
    lm: LanguageModel,
    texts: Iterable[tuple[str, str]],
    options: dict[str, Any],
    model: str,
    as_json: bool,
    csv_file: Path | None,
) -> None:
    """A line for each text as soon as it is known, then the totals."""
    if not as_json:
        print(f"{'tokens':>9} {'log-probability':>16} {'perplexity':>12} {'bits/byte':>10}  text")
    totals = _Totals()
    # On a terminal the lines show the progress, and a bar would be written over them.
    silent = sys.stdout.isatty()
    for name, result in _results(lm, texts, options, csv_file, totals, silent=silent):
        if as_json:
            print_json(_json(lm, model, name, result))
            continue
        own = _Totals()
        own.add(result)
        cells = own.cells()
        print(
            f"{cells['scored']:>9} {_cell(cells['logprob'], '16.4f')} "
            f"{_cell(cells['perplexity'], '12.4f')} {_cell(cells['bits_per_byte'], '10.4f')}"
            f"  {name}"
        )
    cells = totals.cells()
    if as_json:
        mean = {"mean_perplexity": totals.mean_perplexity()}
        print_json({"total": {"texts": totals.n_texts, **cells, **mean}})
        return
    print(f"{totals.n_texts} texts, {_sentence(cells)}")
    print(f"mean of the texts' perplexities {_cell(totals.mean_perplexity(), '.4f')}")


def _score_one(
    lm: LanguageModel,
    texts: Iterable[tuple[str, str]],
    options: dict[str, Any],
    model: str,
    as_json: bool,
    csv_file: Path | None,
    view: bool | None,
    n_words: int | None,
) -> None:
    totals = _Totals()
    ((name, result),) = _results(lm, texts, options, csv_file, totals)
    cells = totals.cells(n_words)
    if as_json:
        print_json(_json(lm, model, name, result, n_words))
        return
    if view or (view is None and len(result.ids) <= _VIEW_LIMIT):
        _print_view(lm, result)
    elif view is None:
        note(f"{len(result.ids)} tokens are not shown; --view shows them, --csv FILE has them.")
    print(_sentence(cells))
    if n_words is not None:
        print(
            f"perplexity for each of {n_words} words and line ends "
            f"{_cell(cells['word_perplexity'], '.4f')}"
        )
    if result.n_scored == 0:
        note("Nothing precedes the only token, so it has no log-probability; --bos gives it one.")


def _results(
    lm: LanguageModel,
    texts: Iterable[tuple[str, str]],
    options: dict[str, Any],
    csv_file: Path | None,
    totals: _Totals,
    *,
    silent: bool = False,
) -> Iterator[tuple[str, Score]]:
    """Names and scores in order, added to `totals` and written to `csv_file`."""
    from ..scoring import score_texts

    names: deque[str] = deque()  # of the texts that were read and whose results are yet to come

    def read() -> Iterator[str]:
        for name, text in texts:
            names.append(name)
            yield text

    started = time.perf_counter()
    with _progress(silent) as progress, _csv_rows(csv_file, lm) as write_csv:
        result = None
        for result in score_texts(lm.model, lm.tokenizer, read(), progress=progress, **options):
            name = names.popleft()
            write_csv(name, result)
            totals.add(result)
            yield name, result
        if result is None:
            raise ValueError("The input has no texts to score.")
    seconds = time.perf_counter() - started
    before = "nothing" if result.prefix_id is None else "<|endoftext|>"
    note(
        f"context {result.context}, stride {result.stride}, {before} in front; "
        f"{totals.n_scored / seconds:,.1f} tokens/s"
    )
    if csv_file is not None:
        note(f"{totals.n_tokens} tokens in {csv_file}")


def _sentence(cells: dict[str, Any]) -> str:
    return (
        f"{cells['tokens']} tokens, {cells['scored']} scored: "
        f"log-probability {_cell(cells['logprob'], '.4f')}, "
        f"perplexity {_cell(cells['perplexity'], '.4f')}, "
        f"{_cell(cells['bits_per_byte'], '.4f')} bits per byte"
    )


def _json(
    lm: LanguageModel, model: str, name: str, result: Score, n_words: int | None = None
) -> dict[str, Any]:
    totals = _Totals()
    totals.add(result)
    return {
        "model": model,
        "name": name,
        **totals.cells(n_words),
        "context": result.context,
        "stride": result.stride,
        "prefix_id": result.prefix_id,
        "ids": result.ids,
        "labels": lm.tokenizer.labels(result.ids),
        "logprobs": [_finite(value) for value in result.logprobs.tolist()],
        "ranks": [rank or None for rank in result.ranks.tolist()],
    }


def _texts(
    text: str | None, text_files: Sequence[Path] | None, records: Sequence[Path] | None
) -> tuple[Iterator[tuple[str, str]], bool]:
    """Names and texts, and whether they can be several."""
    from ..records import read_records

    if sum(map(bool, (text is not None, text_files, records))) > 1:
        raise ValueError("Give one of a text, --text-file and --input.")
    if records:
        read = ((f"{path}:{r.line}", r.text) for path in records for r in read_records(path))
        return read, True
    if text_files:
        read = ((str(path), read_text(None, path, what="text")) for path in text_files)
        return read, len(text_files) > 1
    text = read_text(text, None, what="text")
    if not text:
        raise ValueError("The text is empty: there is nothing to score.")
    return iter([("text", text)]), False


def _protocol_file(
    protocol: str,
    text: str | None,
    text_files: Sequence[Path] | None,
    records: Sequence[Path] | None,
) -> Path:
    if text is not None or text_files or not records or len(records) != 1:
        raise ValueError(f"--protocol {protocol} scores one file, which --input names.")
    return records[0]


def _lines(path: Path) -> Iterable[str]:
    """The lines of a raw file, with their newlines, or the texts of a .jsonl's rows."""
    if path.suffix.lower() == ".jsonl":
        from ..records import read_records

        return (record.text for record in read_records(path))
    return io.StringIO(read_text(None, path, what="text"), newline="\n")


def _lambada(lm: LanguageModel, path: Path, batch_tokens: int, model: str, as_json: bool) -> None:
    from ..records import read_records
    from ..scoring import score_last_words

    passages = (record.text for record in read_records(path))
    started = time.perf_counter()
    with _progress() as progress:
        found = score_last_words(
            lm.model, lm.tokenizer, passages, batch_tokens=batch_tokens, progress=progress
        )
    seconds = time.perf_counter() - started
    fields = {name: _finite(value) for name, value in dataclasses.asdict(found).items()}
    if as_json:
        print_json({"model": model, "name": str(path), **fields})
    else:
        print(f"{found.n_passages} passages")
        for what in ("word", "token"):
            print(
                f"last {what:<5}  accuracy {100 * fields[f'{what}_accuracy']:.2f} %, "
                f"perplexity {_cell(fields[f'{what}_perplexity'], '.4f')}"
            )
    note(f"nothing in front; {found.n_passages / seconds:,.1f} passages/s")


@contextlib.contextmanager
def _csv_rows(path: Path | None, lm: LanguageModel) -> Iterator[Callable[[str, Score], None]]:
    """A function that writes one text's tokens; the file is there when all have been written."""
    if path is None:
        yield lambda name, result: None
        return
    from ..files import replacing

    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")

        def write(name: str, result: Score) -> None:
            if not file.tell():
                how = {key: getattr(result, key) for key in ("context", "stride", "prefix_id")}
                file.write("# " + json.dumps({**lm.provenance, **how}) + "\n")
                writer.writerow(_CSV_COLUMNS)
            for position, (id, logprob, rank) in enumerate(
                zip(result.ids, result.logprobs.tolist(), result.ranks.tolist(), strict=True)
            ):
                found = (logprob, rank) if rank else ("", "")
                writer.writerow((name, position, id, lm.tokenizer.label(id), *found))

        yield write


@contextlib.contextmanager
def _progress(silent: bool = False) -> Iterator[Callable[[int], None]]:
    """A count of scored tokens on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:,} tokens, {task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
    )
    started = time.perf_counter()
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=silent or not sys.stderr.isatty(),
        redirect_stdout=False,  # what is printed meanwhile must not go to stderr with the bar
    ) as bar:
        task = bar.add_task("", total=None, rate=0.0)
        n_scored = 0

        def advance(n: int) -> None:
            nonlocal n_scored
            n_scored += n
            bar.update(task, completed=n_scored, rate=n_scored / (time.perf_counter() - started))

        yield advance


def _print_view(lm: LanguageModel, result: Score) -> None:
    """The text, its surprising tokens coloured, or marked where there is no colour."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    coloured = console.color_system is not None and not console.no_color
    console.print(_view(lm, result, coloured), soft_wrap=True)
    print(f"\n{_COLOUR_LEGEND if coloured else _MARK_LEGEND}")


def _view(lm: LanguageModel, result: Score, coloured: bool) -> Text:
    from rich.text import Text

    view = Text()
    for piece, rank in _pieces(lm, result):
        style, marks = next(
            ((style, marks) for lowest, style, marks in _LEVELS if rank >= lowest), ("", None)
        )
        if style and piece.isspace():
            piece = "⏎" * piece.count("\n") + piece  # a newline has no colour of its own
        if coloured:
            view.append(piece, style)
            continue
        bare = piece.strip() or piece
        before, after = piece.split(bare, 1)
        view.append(f"{before}{bare.join(marks)}{after}" if marks else piece)
    return view


def _pieces(lm: LanguageModel, result: Score) -> Iterator[tuple[str, int]]:
    """Text and rank of each token; those that share a character are one, of the worst rank."""
    decoder = lm.tokenizer.stream()
    worst = 0
    for id, rank in zip(result.ids, result.ranks.tolist(), strict=True):
        worst = max(worst, rank)
        if piece := decoder.push(id):
            yield _visible(piece), worst
            worst = 0
    if piece := decoder.finish():
        yield _visible(piece), worst


def _visible(piece: str) -> str:
    """Without control characters, which could rewrite the terminal."""
    return _CONTROLS.sub(lambda match: f"<0x{ord(match[0]):02X}>", piece)


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _cell(value: float | None, spec: str) -> str:
    width = spec.partition(".")[0]
    return f"{'-':>{width or 1}}" if value is None else f"{value:{spec}}"
