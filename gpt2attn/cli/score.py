"""`gpt2attn score`: how likely a text is, token by token and as a whole."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .common import (
    AllowNonfinite,
    AllowPickle,
    Debug,
    Device,
    DType,
    Json,
    Kernels,
    Model,
    Revision,
    Special,
    Threads,
    check_output,
    load_language_model,
    note,
    print_json,
    read_text,
)
from .progress import token_progress
from .score_many import score_many
from .score_protocols import lambada, protocol_file, wikitext
from .score_totals import CSV_COLUMNS, Totals, cell, csv_rows, how, sentence
from .score_view import print_view
from .work import Engine, Workers, find_model

if TYPE_CHECKING:
    from ..language_model import LanguageModel

_VIEW_LIMIT = 2000  # tokens; a longer text is not shown unasked


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
            "--csv", metavar="FILE", help="Also write every token: " + ", ".join(CSV_COLUMNS) + "."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write a row for each text to this .jsonl instead of printing it. The same "
            "command goes on where it was stopped.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing --out.")] = False,
    workers: Workers = 1,
    engine: Engine = "local",
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
    kernels: Kernels = "auto",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    allow_nonfinite: AllowNonfinite = False,
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
    loaded = (model, revision, device, dtype, kernels, threads, allow_pickle, allow_nonfinite)
    several = protocol is None and bool(records or (text_file and (len(text_file) > 1 or out)))
    if not several and (out is not None or workers > 1 or engine != "local"):
        raise ValueError(
            "--out, --workers and --engine go with the texts of --input or --text-file, without "
            "--protocol."
        )
    outputs = [file for file in (csv_file, out) if file is not None]
    for output in outputs:
        check_output(output, [*(text_file or ()), *(records or ())])
    if protocol is not None:
        path = protocol_file(protocol, text, text_file, records)
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
        lm = load_language_model(*loaded)
        lambada(lm, path, batch_tokens, model, as_json)
        return
    if sum(map(bool, (text is not None, text_file, records))) > 1:
        raise ValueError("Give one of a text, --text-file and --input.")
    if several:
        if view:
            raise ValueError("--view shows one text; --csv FILE has the tokens of many.")
        if out is not None:
            _check_out(out, csv_file, force)
        loader = find_model(
            model, revision, device, dtype, kernels, allow_pickle, allow_nonfinite, engine=engine
        )
        score_many(
            loader,
            records or (),
            text_file or (),
            options,
            {"n_workers": workers, "threads": threads, "engine": engine},
            as_json=as_json,
            csv_file=csv_file,
            out=out,
            force=force,
        )
        return
    n_words = None
    if protocol == "wikitext2":
        name, (text, n_words) = str(path), wikitext(path)
    else:
        (file,) = text_file or (None,)
        name, text = str(file or "text"), read_text(text, file, what="text")
    if not text:
        raise ValueError("The text is empty: there is nothing to score.")
    lm = load_language_model(*loaded)
    _score_one(lm, name, text, options, as_json, csv_file, view, n_words)


def _check_out(out: Path, csv_file: Path | None, force: bool) -> None:
    from ..jobs import check_result_path

    if csv_file is not None:
        raise ValueError("--csv goes without --out, whose rows have every token.")
    check_result_path(out, force=force)


def _score_one(
    lm: LanguageModel,
    name: str,
    text: str,
    options: dict[str, Any],
    as_json: bool,
    csv_file: Path | None,
    view: bool | None,
    n_words: int | None,
) -> None:
    from ..corpus import score_row

    started = time.perf_counter()
    with token_progress() as progress:
        result = lm.score(text, progress=progress, **options)
    seconds = time.perf_counter() - started
    row, totals = score_row(lm, name, result), Totals()
    totals.add(row)
    with csv_rows(csv_file, lm.provenance) as write_csv:
        write_csv(row)
    cells = totals.cells(n_words)
    if as_json:
        print_json(row | cells)
    else:
        if view or (view is None and len(result.ids) <= _VIEW_LIMIT):
            print_view(lm, result)
        elif view is None:
            note(f"{len(result.ids)} tokens are not shown; --view shows them, --csv FILE has them.")
        print(sentence(cells))
        if n_words is not None:
            print(
                f"perplexity for each of {n_words} words and line ends "
                f"{cell(cells['word_perplexity'], '.4f')}"
            )
        if result.n_scored == 0:
            note(
                "Nothing precedes the only token, so it has no log-probability; --bos gives it one."
            )
    note(f"{how(row)}; {result.n_scored / seconds:,.1f} tokens/s")
    if csv_file is not None:
        note(f"{len(result.ids)} tokens in {csv_file}")
