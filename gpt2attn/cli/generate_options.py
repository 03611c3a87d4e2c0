"""The options that say how text is generated, as `generate` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from .maps import SUFFIXES_HELP

MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=0, help="Not counting the prompt.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(min=0, help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass; 1 is off.")]
MinP = Annotated[
    float, typer.Option(help="Keep tokens at least this likely beside the best; 0 is off.")
]
TypicalP = Annotated[
    float, typer.Option(help="Keep the most typical tokens of this mass; 1 is off.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1, make tokens of the text so far less likely.")
]
NoRepeatNgramSize = Annotated[
    int, typer.Option(min=0, help="Let no run of this many tokens appear twice; 0 is off.")
]
MinNewTokens = Annotated[
    int, typer.Option(min=0, help="No end of text before this many new tokens.")
]
Ban = Annotated[
    list[str] | None, typer.Option(help="Text that may not appear; may be given several times.")
]
BanId = Annotated[list[int] | None, typer.Option(help="A token id that may not appear.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Added to a token's logit, such as 464=-2.5."),
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same text.", show_default="drawn")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="End before this text, taken as it stands ($'\\n' is a newline in bash); may be given "
        "several times."
    ),
]
Lookup = Annotated[
    bool,
    typer.Option(
        "--lookup",
        help="Guess tokens where the text repeats itself and check several at once: the same text, "
        "sooner. For one text, and not with --kernels torch.",
    ),
]
Overflow = Annotated[
    Literal["error", "stop", "slide"],
    typer.Option(
        help="Past the model's positions: refuse at once if prompt and new tokens may not fit; "
        "stop there; or slide, that is go on from the last half of them, computed afresh."
    ),
]
NumSamples = Annotated[
    int, typer.Option(min=1, max=10_000, help="Continue this often, with seeds in a row.")
]
NumBeams = Annotated[
    int, typer.Option(min=1, max=256, help="Beam search with this many beams; 1 is off.")
]
NumReturnSequences = Annotated[
    int, typer.Option(min=1, help="How many of the best beams to print.")
]
LengthPenalty = Annotated[
    float, typer.Option(help="Of beam search: above 0 favours long continuations.")
]
EarlyStopping = Annotated[
    Literal["false", "true", "never"], typer.Option(help="Of beam search, as in transformers.")
]
Input = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help='Continue many texts, one a line: .txt, or .jsonl with a "text"; needs --out.',
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="With --input: the results as .jsonl, in the order of the texts. A run that was "
        "stopped goes on when the command is given again.",
    ),
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="With --input: how many texts are computed together.")
]
Interactive = Annotated[
    bool,
    typer.Option(
        "--interactive",
        "-i",
        help="Go on in turns: each line from stdin is added to the text, as it stands and without "
        "its line end, and the model continues; an empty line lets it go on; Ctrl-D ends.",
    ),
]
TopLogprobs = Annotated[
    int, typer.Option(min=0, help="With --json or --out: this many likeliest tokens at each step.")
]
Attention = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"Also write the attention maps of prompt and new text: {SUFFIXES_HELP}.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace an existing file of --attention or --out.")
]


def parse_biases(pairs: Sequence[str]) -> dict[int, float]:
    """The bias for each id of ID=BIAS, ...; raises ValueError for what is none."""
    biases = {}
    for pair in pairs:
        id, _, bias = pair.partition("=")
        try:
            biases[int(id)] = float(bias)
        except ValueError:
            raise ValueError(
                f"--logit-bias takes ID=BIAS, such as 464=-2.5, not {pair!r}."
            ) from None
    return biases
