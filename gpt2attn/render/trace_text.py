"""A head's trace as plain text: the five steps in 100 columns, readable without colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from torch import Tensor

if TYPE_CHECKING:
    from ..trace import HeadTrace

WIDTH = 100
MAX_TOKENS = 10  # rows and columns of a printed map
LABEL = 16
CELL = 8
NOT_GPT2 = "NOT what GPT-2 computes"


def trace_text(trace: HeadTrace) -> str:
    """The whole trace as lines of at most 100 columns.

    A text of more than ten tokens shows the query and the nine others that it attends to most.
    """
    shown = _shown(trace)
    sections = (_heading, _project, _compare, _scale, _softmax, _mix)
    return "\n\n".join("\n".join(section(trace, shown)) for section in sections) + "\n"


def _shown(trace: HeadTrace) -> list[int]:
    """The positions to print, in order."""
    n_tokens = len(trace.ids)
    if n_tokens <= MAX_TOKENS:
        return list(range(n_tokens))
    order = trace.weights[trace.query].argsort(descending=True, stable=True).tolist()
    order.remove(trace.query)
    return sorted([trace.query, *order[: MAX_TOKENS - 1]])


def _heading(trace: HeadTrace, shown: list[int]) -> list[str]:
    n_tokens, n_embd = trace.x.shape
    lines = [
        f"Layer {trace.layer}, head {trace.head}: attention in five steps",
        *_prose(
            f"Model {_name(trace)} in {str(trace.x.dtype).removeprefix('torch.')}. "
            f"{n_tokens} tokens of {n_embd} numbers; {trace.n_head} heads of {trace.q.shape[1]}. "
            f"The query taken apart, marked >, is {_token(trace, trace.query)}."
        ),
    ]
    if len(shown) < n_tokens:
        lines += _prose(
            f"Shown are the query and the {len(shown) - 1} other tokens it attends to most, of "
            f"{n_tokens}: printed rows need not add up to 100%."
        )
    return lines


def _project(trace: HeadTrace, shown: list[int]) -> list[str]:
    first = trace.head * trace.q.shape[1]
    columns = f"{first} to {first + trace.q.shape[1] - 1}"
    lines = [
        "1  PROJECT   Q = X W_q + b_q    K = X W_k + b_k    V = X W_v + b_v",
        *_prose(
            f"X is what attention is given: the residual stream that enters layer {trace.layer}, "
            "after the LayerNorm ln_1. W_q, W_k and W_v, with their biases, are the columns "
            f"{columns} of the three thirds of c_attn, the same for every token."
        ),
        f"        {'shape':<14}{'length':>9}   first numbers; "
        f"rows of {_token(trace, trace.query)}, W's row 0",
    ]
    for name in ("X", "W_q", "W_k", "W_v", "b_q", "b_k", "b_v", "Q", "K", "V"):
        values = getattr(trace, name.lower())
        row = values if values.dim() == 1 else values[0 if name.startswith("W") else trace.query]
        lines.append(_vector(name, values, row))
    return lines


def _compare(trace: HeadTrace, shown: list[int]) -> list[str]:
    query, key, products = trace.query, trace.key, trace.products.tolist()
    lines = [
        f"2  COMPARE   scores = Q K^T   {_shape(trace.scores)}",
        *_prose(
            "Row: the token that asks. Column: the one that is asked. Every pair, before any mask."
        ),
        *_map(trace, trace.scores, shown),
    ]
    itself = query == key
    lines.append("")
    if not itself:
        there, back = (float(trace.scores[pair]) for pair in ((query, key), (key, query)))
        lines += _prose(
            f"Not symmetric: {_token(trace, query)} scores {there:z.3f} on {_token(trace, key)}, "
            f"which scores {back:z.3f} on it."
        )
    lines += _prose(
        f"The score of {_token(trace, query)} on {'itself' if itself else _token(trace, key)} is "
        f"the sum of these {len(products)} products q_i k_i: {sum(products):z.3f}"
    )
    decimals = _decimals(products, 10)
    for start in range(0, len(products), 8):
        row = products[start : start + 8]
        numbers = "".join(f"{_number(value, decimals):>11}" for value in row)
        lines.append(f"   {f'{start}-{start + len(row) - 1}':>7}{numbers}")
    return lines


def _scale(trace: HeadTrace, shown: list[int]) -> list[str]:
    head_dim = trace.q.shape[1]
    why = f" = {head_dim} ** -0.5" if trace.scale == head_dim**-0.5 else ""
    raw, query = trace.raw_weights, trace.query
    columns = (
        raw.amax(1), trace.raw_entropy, trace.raw_jacobian_norm,
        trace.weights.amax(1), trace.entropy, trace.jacobian_norm,
    )  # fmt: skip
    lines = [
        f"3  SCALE   scaled = scores x {trace.scale:.6g}{why}   {_shape(trace.scaled)}",
        *_map(trace, trace.scaled, shown),
        "",
        *_prose(
            f"raw, {NOT_GPT2}: the softmax of the query's row with the scores as they are. scaled: "
            "with the scaled ones. The order of the tokens is the same."
        ),
        _columns(trace, shown),
        _row("  raw", _shares(raw[query], query, shown)),
        _row("  scaled", _shares(trace.weights[query], query, shown)),
        "",
        *_prose(
            "For each row, the largest share, the entropy in nats, and |J|, the norm of the "
            "softmax's Jacobian diag(p) - p p^T: where it is near 0, training can hardly move the "
            "row."
        ),
        f"   {'':<{LABEL}}{'raw':>9}{'entropy':>10}{'|J|':>11}"
        f"   {'scaled':>9}{'entropy':>10}{'|J|':>11}",
    ]
    for position in shown:
        a, b, c, d, e, f = (float(column[position]) for column in columns)
        lines.append(
            f" {_head(trace, position)}{_percent(a):>9}{b:>z10.3f}{_small(c):>11}   "
            f"{_percent(d):>9}{e:>z10.3f}{_small(f):>11}"
        )
    return lines


def _softmax(trace: HeadTrace, shown: list[int]) -> list[str]:
    return [
        f"4  SOFTMAX   masked = scaled, -inf above the diagonal   {_shape(trace.masked)}",
        *_map(trace, trace.masked, shown),
        "",
        *_prose(
            f"weights = softmax of each row of masked {_shape(trace.weights)}. Each row adds up to "
            "100%; a plain 0 is masked."
        ),
        *_map(
            trace,
            trace.weights,
            shown,
            lambda value, query, key: "0" if key > query else _percent(value),
        ),
        "",
        *_prose(f"Without the mask, {NOT_GPT2}: every token would also see those after it."),
        *_map(trace, trace.unmasked_weights, shown, lambda value, query, key: _percent(value)),
    ]


def _mix(trace: HeadTrace, shown: list[int]) -> list[str]:
    query, error = trace.query, trace.heads_sum_error
    return [
        f"5  MIX   output = weights V   {_shape(trace.output)}   the shape of Q, K and V",
        *_prose(
            f"The output of {_token(trace, query)} is the sum of share x value vector over the "
            "tokens. Lengths: of the value vector, of share x value, and of that after W_o, as it "
            "enters the residual stream. The last line is the length of the sum, not the sum of "
            "the lengths."
        ),
        *_contributions(trace, shown),
        "",
        *_prose(
            "part = output W_o is what this head adds to the residual stream; all is the attention "
            f"output of layer {trace.layer}."
        ),
        _vector("output", trace.output, trace.output[query]),
        _vector("W_o", trace.w_o, trace.w_o[0]),
        _vector("part", trace.head_part, trace.head_part[query]),
        _vector("all", trace.attention_output, trace.attention_output[query]),
        *_prose(
            f"The sum of the {trace.n_head} heads' parts, plus the bias of c_proj, "
            f"{'is' if trace.heads_sum_agrees else 'is NOT'} the attention output: the largest "
            f"difference is {error:.1e} of the largest number."
        ),
    ]


def _contributions(trace: HeadTrace, shown: list[int]) -> list[str]:
    """A line for each token with its share and lengths, and one for their sum."""
    query = trace.query
    shares = trace.weights[query].tolist()
    written = _shares(trace.weights[query], query, range(len(shares)))
    of_values = _aligned(trace.value_norms)
    of_sum = [x[query].double().norm() for x in (trace.output, trace.head_part)]
    shared = _aligned([*trace.contributions.norm(dim=1), of_sum[0]])
    added = _aligned([*trace.contribution_norms, of_sum[1]])

    def line(head: str, share: str, value: str, lengths: tuple[str, str]) -> str:
        start = f" {head}{' ' * (LABEL + 2 - cell_len(head))}{share:>9}"
        return f"{start}{value:>12}{lengths[0]:>12}{lengths[1]:>16}"

    lines = [f"   {'':<{LABEL}}{'share':>9}{'|v|':>12}{'|share v|':>12}{'|share v W_o|':>16}"]
    lines += [line(_head(trace, i), written[i], of_values[i], (shared[i], added[i])) for i in shown]
    if rest := len(shares) - len(shown):
        others = sum(shares) - sum(shares[i] for i in shown)
        lines.append(line(f"  {rest} others", _percent(others), "", ("", "")))
    return [*lines, line("  sum", _percent(sum(shares)), "", (shared[-1], added[-1]))]


def _prose(text: str) -> list[str]:
    """Lines of whole words. textwrap counts characters, of which some take two columns."""
    lines = ["  "]
    for word in text.split():
        if cell_len(f"{lines[-1]} {word}") > WIDTH:
            lines.append("  ")
        lines[-1] += f" {word}"
    return lines


def _map(
    trace: HeadTrace,
    values: Tensor,
    shown: list[int],
    write: Callable[[float, int, int], str] | None = None,
) -> list[str]:
    """A (T, T) map with labelled rows and columns; `write(value, query, key)` fills a cell."""
    if write is None:
        decimals = _decimals(values[shown][:, shown].flatten().tolist(), CELL - 1)

        def write(value: float, query: int, key: int) -> str:
            return _number(value, decimals)

    lines = [_columns(trace, shown)]
    for query in shown:
        row = values[query].tolist()
        cells = [write(row[key], query, key) for key in shown]
        lines.append(_row(_head(trace, query), cells))
    return lines


def _columns(trace: HeadTrace, shown: list[int]) -> str:
    return _row("", [fit(trace.labels[key], CELL - 1, right=True) for key in shown])


def _row(head: str, cells: Sequence[str]) -> str:
    padded = "".join(" " * (CELL - cell_len(cell)) + cell for cell in cells)
    return f" {head}{' ' * (LABEL + 2 - cell_len(head))}{padded}"


def _head(trace: HeadTrace, position: int) -> str:
    """A row's head: a mark for the query, position and label, in `LABEL` + 2 columns."""
    digits = len(str(len(trace.ids) - 1))
    label = fit(trace.labels[position], LABEL - digits - 1)
    return f"{'>' if position == trace.query else ' '} {position:>{digits}} {label}"


def _name(trace: HeadTrace) -> str:
    return fit(str(trace.metadata.get("model", "(in memory)")), 60).rstrip()


def _token(trace: HeadTrace, position: int) -> str:
    return f"{position} {fit(trace.labels[position], 20).rstrip()}"


def _vector(name: str, values: Tensor, row: Tensor) -> str:
    """A line with a tensor's name and shape, one row's length, and that row's first numbers."""
    (length,) = _aligned([row.double().norm()])
    shown = "".join(f"{number:>10}" for number in _aligned(row[:6]))
    more = " ..." if len(row) > 6 else ""
    return f"   {name:<7}{_shape(values):<12}{length:>9}  {shown}{more}"


def _shape(values: Tensor) -> str:
    return f"({', '.join(map(str, values.shape))})"


def fit(label: str, width: int, *, right: bool = False) -> str:
    """`label` in exactly `width` columns of a terminal: padded, or cut with an ellipsis."""
    if cell_len(label) > width:
        while cell_len(label) > width - 1:
            label = label[:-1]
        label += "…"
    padding = " " * (width - cell_len(label))
    return padding + label if right else label + padding


def _decimals(values: Sequence[float], width: int) -> int | None:
    """How many decimals, at most 3, let all finite values fit in `width`; None if none do."""
    finite = [value for value in values if abs(value) != float("inf")]
    for decimals in (3, 2, 1, 0):
        if all(len(f"{value:z.{decimals}f}") <= width for value in finite):
            return decimals
    return None


def _aligned(values: Sequence[float | Tensor] | Tensor) -> list[str]:
    """Numbers of one column, with as many decimals for each."""
    numbers = [float(value) for value in values]
    decimals = _decimals(numbers, 9)
    return [_number(number, decimals) for number in numbers]


def _number(value: float, decimals: int | None) -> str:
    if abs(value) == float("inf"):
        return f"{value:.0f}"
    return f"{value:.0e}" if decimals is None else f"{value:z.{decimals}f}"


def _shares(row: Tensor, query: int, shown: Iterable[int]) -> list[str]:
    """Some shares of a query's row; a masked one is a plain 0, not one that was rounded."""
    return [_percent(float(row[at])) if at <= query else "0" for at in shown]


def _percent(share: float) -> str:
    return f"{100 * share:z.1f}%"


def _small(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.1e}"
