"""A decode step in compiled code: all blocks for a few new tokens, and the unembedding.

Decoding reads all weights for each token, once, so its limit is the bandwidth of memory. This step
reads the checkpoint's own matrices in place. Each thread takes its own range of rows of each
matrix, which lies in one piece in memory, and adds up its share of all outputs; after a barrier
each thread sums the shares of the outputs that it goes on with: the queries, keys and values of its
heads, the MLP units that are its rows of the next matrix, and the residual stream, which each keeps
for itself. That makes four barriers a block. Arithmetic is float32. A row's sums are taken in one
order whatever the number of rows, so a token gets the same logits alone and beside others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .compiling import compiled, is_kept
from .formats import GROUP, group_size
from .rows import FLOATS, ZERO, f32, gelu, layer_norm, share, softmax, vector
from .simd import (
    FORMATS,
    LANES,
    add,
    is_scaled,
    load,
    load_eight,
    load_one,
    multiply_add,
    prefetch,
    size_of,
    splat,
    splat_eight,
    stay_apart,
    store,
    store_one,
    total,
    weigh_eight,
)
from .step import ROWS_AT_ONCE
from .team import Kernel, Team, barrier

if TYPE_CHECKING:
    from ..cache import KVCache
    from .step import Weights


LINE = 64  # bytes of a cache line
SUMS_IN_L1 = 4096  # floats
PAGE = 4096  # bytes, at whose end the hardware's own prefetching stops
TOKENS_AT_ONCE = 4  # of the vocabulary
SUMMED = 4 * LANES  # products of a row that are summed at a time, no more than a group


class Matrix(NamedTuple):
    """A matrix in memory: address, shape, and where int8 weights have their scales."""

    at: int
    n_in: int
    width: int
    scales: int
    group: int

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor | None) -> Matrix:
        """A layer's weights (in, out)."""
        n_in, width = weight.shape
        return cls(_address(weight), n_in, width, _address(scale), group_size(n_in))


@compiled(inner=True)
def _multiply(x, x_low, matrix, low, high, like, out):  # type: ignore[no-untyped-def]
    """out (rows, width) = columns of x from x_low on times the rows low to high of the matrix."""
    stay_apart()
    rows, step = x.shape[0], matrix.width * size_of(like)
    _fill(out, matrix.width, ZERO)
    whole = low + (high - low) // ROWS_AT_ONCE * ROWS_AT_ONCE
    vectors = matrix.width // LANES * LANES
    # As many columns at a time as keep the sums in the first cache; a narrow matrix has none.
    tile = max(SUMS_IN_L1 // max(rows, 8) // LINE * LINE, 2 * LINE) if rows > 1 else vectors or 1
    for left in range(0, vectors, tile):
        n = min(tile, vectors - left)
        for i in range(low, whole, ROWS_AT_ONCE):
            numbers = x.ctypes.data + 4 * (x_low + i - low)
            weights = matrix.at + i * step + left * size_of(like)
            scales = matrix.scales + 4 * (i // matrix.group * matrix.width + left)
            sums = out.ctypes.data + 4 * left
            if rows == 1:
                _add_eight(numbers, weights, step, scales, n, like, sums)
            else:
                _add_eight_to_all(numbers, 4 * x.shape[1], rows, weights, step, scales, n, like,
                                  sums, 4 * out.shape[1])  # fmt: skip
    _one_by_one(x, x_low, matrix, low, whole, low, vectors, matrix.width, like, out)
    _one_by_one(x, x_low, matrix, whole, high, low, np.int64(0), matrix.width, like, out)


@compiled(inner=True)
def _add_eight(x, weights, step, scales, n, like, sums):  # type: ignore[no-untyped-def]
    """sums (n) += eight numbers at x times eight rows of n weights, all by address.

    The eight rows after them are asked for meanwhile: the hardware's own prefetching does not keep
    up with narrow weights.
    """
    numbers, in_line = splat_eight(x), LINE // size_of(like)
    p, q, k = weights, sums, scales
    for _ in range(n // in_line):
        for row in range(ROWS_AT_ONCE):
            prefetch(p + (ROWS_AT_ONCE + row) * step)
        for i in range(0, in_line, LANES):
            eight = load_eight(p + i * size_of(like), step, like)
            _add_at(q + 4 * i, weigh_eight(numbers, eight), k + 4 * i, like)
        p, q, k = p + LINE, q + 4 * in_line, k + 4 * in_line
    for i in range(0, n % in_line, LANES):
        eight = load_eight(p + i * size_of(like), step, like)
        _add_at(q + 4 * i, weigh_eight(numbers, eight), k + 4 * i, like)


@compiled(inner=True)
def _add_eight_to_all(x, x_step, rows, weights, step, scales, n, like, sums, sums_step):  # type: ignore[no-untyped-def]
    """What `_add_eight` does, in its order, for several rows of x and of sums.

    Weights are loaded, and widened, once for all rows; two vectors of them, so that a number of x
    is loaded once for both.
    """
    p, wide = weights, LANES * size_of(like)
    for j in range(0, 4 * n, 8 * LANES):
        if j // 4 * size_of(like) % LINE == 0:
            for line in range(ROWS_AT_ONCE):
                prefetch(p + (ROWS_AT_ONCE + line) * step)
                prefetch(p + (ROWS_AT_ONCE + line) * step + wide)
        two = j + 4 * LANES < 4 * n
        first, second = load_eight(p, step, like), load_eight(p + wide if two else p, step, like)
        k, q = x, sums + j
        for _ in range(rows):
            numbers = splat_eight(k)
            s, t = weigh_eight(numbers, first), weigh_eight(numbers, second)
            _add_at(q, s, scales + j, like)
            if two:
                _add_at(q + 4 * LANES, t, scales + j + 4 * LANES, like)
            k, q = k + x_step, q + sums_step
        p += 2 * wide


@compiled(inner=True)
def _add_at(sums, vector, scales, like):  # type: ignore[no-untyped-def]
    if is_scaled(like):
        store(sums, multiply_add(vector, load(scales, FLOATS), load(sums, FLOATS)))
    else:
        store(sums, add(vector, load(sums, FLOATS)))


@compiled(inner=True)
def _one_by_one(x, x_low, matrix, low, high, first, left, right, like, out):  # type: ignore[no-untyped-def]
    """What is left over of a product: the rows low to high, columns left to right of the matrix.

    Row `first` of the matrix goes with column x_low of x.
    """
    size = size_of(like)
    for r in range(x.shape[0]):
        for i in range(low, high):
            number = x[r, x_low + i - first]
            for j in range(left, right):
                weight = load_one(matrix.at + (i * matrix.width + j) * size, like)
                if is_scaled(like):
                    group = i // matrix.group
                    weight *= load_one(matrix.scales + 4 * (group * matrix.width + j), FLOATS)
                out[r, j] += number * weight


# In what follows, loops stand where an assignment of slices would do: those take longer to compile
# than all the rest.


@compiled(inner=True)
def _fill(rows, width, number):  # type: ignore[no-untyped-def]
    """rows (n, at least width) = number, in the first `width` columns."""
    for r in range(rows.shape[0]):
        for i in range(width):
            rows[r, i] = number


@compiled(inner=True)
def _add_to(x, more):  # type: ignore[no-untyped-def]
    """x += more (rows, C)."""
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[r, i] += more[r, i]


@compiled(inner=True)
def _sum_shares(shares, n_threads, low, high, bias, out):  # type: ignore[no-untyped-def]
    """out (rows, high - low) = bias + the sum of all threads' shares, columns low to high."""
    stay_apart()
    for r in range(out.shape[0]):
        for j in range(low, high):
            out[r, j - low] = bias[j]
        for thread in range(n_threads):
            for j in range(low, high):
                out[r, j - low] += shares[thread, r, j]


@compiled(inner=True)
def _dot(a, b, n):  # type: ignore[no-untyped-def]
    """The dot product of n float32 numbers at each of two addresses."""
    whole = n // LANES * LANES
    s = splat(ZERO)
    for i in range(0, 4 * whole, 4 * LANES):
        s = multiply_add(load(a + i, FLOATS), load(b + i, FLOATS), s)
    sum_of = total(s)
    for i in range(4 * whole, 4 * n, 4):
        sum_of += load_one(a + i, FLOATS) * load_one(b + i, FLOATS)
    return sum_of


@compiled(inner=True)
def _mix(weights, values, n_keys, width, out):  # type: ignore[no-untyped-def]
    """out (width) = weights times the first n_keys rows of values (keys, width), all by address."""
    step = 4 * width
    for low in range(0, width - 63, 64):
        s, t, u, v = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        p = values + 4 * low
        for key in range(n_keys):
            for i in range(0, 256, LINE):
                prefetch(p + PAGE + i)
            w = splat(load_one(weights + 4 * key, FLOATS))
            s = multiply_add(load(p, FLOATS), w, s)
            t = multiply_add(load(p + 64, FLOATS), w, t)
            u = multiply_add(load(p + 128, FLOATS), w, u)
            v = multiply_add(load(p + 192, FLOATS), w, v)
            p += step
        q = out + 4 * low
        store(q, s)
        store(q + 64, t)
        store(q + 128, u)
        store(q + 192, v)
    for i in range(width // 64 * 64, width):
        sum_of = ZERO
        for key in range(n_keys):
            p = values + key * step + 4 * i
            sum_of += load_one(weights + 4 * key, FLOATS) * load_one(p, FLOATS)
        store_one(out + 4 * i, sum_of)


# What `addresses[layer]` holds, in this order: addresses of float32 vectors, then of a matrix and
# its scales.
LN_1_WEIGHT, LN_1_BIAS, ATTN_BIAS, PROJ_BIAS, LN_2_WEIGHT, LN_2_BIAS, FC_BIAS, DOWN_BIAS = range(8)
ATTN, PROJ, FC, DOWN = range(8, 16, 2)


@compiled(inner=True)
def _blocks(
    thread, n_threads, shared,
    x_in, addresses, norm, like, scales, keys, values, past, mask, epsilon, inner, wide, narrow,
    x_out,
):  # fmt: skip  # type: ignore[no-untyped-def]
    """All blocks and the final LayerNorm (2, C) for x_in (B * T, C), its rows ordered by text.

    `keys` and `values` are the cache's (layer, B, H, max_len, D), `mask` (B, keys or 0). `wide`
    (n_threads, B * T, at least 3 C and inner) and `narrow` (n_threads, B * T, at least C) are where
    the threads put their shares: one is written while the other may still be read.
    """
    n_rows, width = x_in.shape
    _, n_text, n_head, _, size = keys.shape
    # Plain numbers would be types of their own, and a function more to compile for each.
    zero, one, some = np.int64(0), np.int64(1), np.int64(ROWS_AT_ONCE)
    head_low, head_high = share(n_head, one, thread, n_threads)
    low, high = share(width, some, thread, n_threads)
    unit_low, unit_high = share(inner, some, thread, n_threads)
    own_low, own_high = head_low * size, head_high * size
    x, h = np.empty((n_rows, width), f32), np.empty((n_rows, width), f32)
    _fill(x, width, ZERO)
    _add_to(x, x_in)
    qkv = np.empty((3, n_rows, own_high - own_low), f32)
    mixed = np.empty((n_rows, own_high - own_low), f32)
    units = np.empty((n_rows, unit_high - unit_low), f32)
    weights = np.empty(past + n_rows // n_text + LANES, f32)
    group = GROUP if width % GROUP == 0 else width
    inner_group = GROUP if inner % GROUP == 0 else inner
    for layer in range(addresses.shape[0]):
        at = addresses[layer]
        layer_norm(x, vector(at[LN_1_WEIGHT], width), vector(at[LN_1_BIAS], width), epsilon, h)
        matrix = Matrix(at[ATTN], width, 3 * width, at[ATTN + 1], group)
        _multiply(h, low, matrix, low, high, like, wide[thread])
        if not barrier(shared, n_threads):
            return
        bias = vector(at[ATTN_BIAS], 3 * width)
        for part in range(3):
            start = part * width
            _sum_shares(wide, n_threads, start + own_low, start + own_high, bias, qkv[part])
        _attention(qkv, keys[layer], values[layer], head_low, past, mask, scales[layer], weights,
                   mixed)  # fmt: skip
        matrix = Matrix(at[PROJ], width, width, at[PROJ + 1], group)
        _multiply(mixed, zero, matrix, own_low, own_high, like, narrow[thread])
        if not barrier(shared, n_threads):
            return
        _sum_shares(narrow, n_threads, zero, width, vector(at[PROJ_BIAS], width), h)
        _add_to(x, h)
        layer_norm(x, vector(at[LN_2_WEIGHT], width), vector(at[LN_2_BIAS], width), epsilon, h)
        matrix = Matrix(at[FC], width, inner, at[FC + 1], group)
        _multiply(h, low, matrix, low, high, like, wide[thread])
        if not barrier(shared, n_threads):
            return
        _sum_shares(wide, n_threads, unit_low, unit_high, vector(at[FC_BIAS], inner), units)
        gelu(vector(units.ctypes.data, units.size))
        matrix = Matrix(at[DOWN], inner, width, at[DOWN + 1], inner_group)
        _multiply(units, zero, matrix, unit_low, unit_high, like, narrow[thread])
        if not barrier(shared, n_threads):
            return
        _sum_shares(narrow, n_threads, zero, width, vector(at[DOWN_BIAS], width), h)
        _add_to(x, h)
    if thread == 0:
        layer_norm(x, vector(norm[0], width), vector(norm[1], width), epsilon, x_out)
    # Nobody reads weights after the caller may have dropped the model.
    barrier(shared, n_threads)


@compiled(inner=True)
def _attention(qkv, keys, values, head_low, past, mask, scale, weights, mixed):  # type: ignore[no-untyped-def]
    """Store the new keys and values (B, H, max_len, D) of one thread's heads and mix their outputs.

    `qkv` (3, rows, D x heads) and `mixed` (rows, D x heads) hold the heads from `head_low` on.
    """
    stay_apart()
    # By address: slices of arrays take long to compile.
    n_text, n_head, max_len, size = keys.shape
    _, n_rows, own = qkv.shape
    n_new, part = n_rows // n_text, 4 * n_rows * own
    for row in range(n_rows):
        text, end = row // n_new, past + row % n_new + 1
        for low in range(0, own, size):
            start = 4 * size * max_len * (text * n_head + head_low + low // size)
            k, v = keys.ctypes.data + start, values.ctypes.data + start
            new, q = 4 * size * (end - 1), qkv.ctypes.data + 4 * (row * own + low)
            for i in range(0, 4 * size, 4):
                store_one(k + new + i, load_one(q + part + i, FLOATS))
                store_one(v + new + i, load_one(q + 2 * part + i, FLOATS))
            for s in range(end):
                for i in range(0, 4 * size, LINE):
                    prefetch(k + 4 * size * s + PAGE + i)
                weights[s] = _dot(q, k + 4 * size * s, size) * scale
            softmax(weights, end, mask[text])
            _mix(weights.ctypes.data, v, end, size, mixed.ctypes.data + 4 * (row * own + low))


@compiled(inner=True)
def _unembed(thread, n_threads, shared, x, table_at, table_scales, like, logits):  # type: ignore[no-untyped-def]
    """logits (1, V) = x (1, C) table^T, each thread a range of the vocabulary."""
    width, size = x.shape[1], size_of(like)
    group = GROUP if width % GROUP == 0 else width
    low, high = share(logits.shape[1], np.int64(1), thread, n_threads)
    first = low
    while first < high:
        # The last few one by one: four times the same one.
        n_tokens = TOKENS_AT_ONCE if high - first >= TOKENS_AT_ONCE else 1
        step = width * size if n_tokens == TOKENS_AT_ONCE else 0
        scales_step = 4 * (width // group) if n_tokens == TOKENS_AT_ONCE else 0
        scores = _four_scores(x.ctypes.data, table_at + first * width * size, step,
                              table_scales + 4 * first * (width // group), scales_step, group,
                              width, like)  # fmt: skip
        for token in range(n_tokens):
            logits[0, first + token] = scores[token]
        first += n_tokens
    barrier(shared, n_threads)


@compiled(inner=True)
def _unembed_rows(thread, n_threads, shared, x, table_at, table_scales, like, widened, logits):  # type: ignore[no-untyped-def]
    """What `_unembed` does, in its order, for several rows of x and of logits.

    `widened` (n_threads, 4 C) is room for four rows of the table. It comes from the caller, who
    keeps it: an array made here would be freed after its last use by name, which its address
    outlives.
    """
    rows, width = x.shape
    size = size_of(like)
    group = GROUP if width % GROUP == 0 else width
    low, high = share(logits.shape[1], np.int64(1), thread, n_threads)
    copy = widened.ctypes.data + thread * 4 * TOKENS_AT_ONCE * width
    first = low
    while first < high:
        n_tokens = TOKENS_AT_ONCE if high - first >= TOKENS_AT_ONCE else 1
        step = width * size if n_tokens == TOKENS_AT_ONCE else 0
        scales = table_scales + 4 * first * (width // group)
        scales_step = 4 * (width // group) if n_tokens == TOKENS_AT_ONCE else 0
        _widen(table_at + first * width * size, step, width, like, copy)
        for r in range(0, rows, 2):
            other = min(r + 1, rows - 1)
            scores = _eight_scores(x.ctypes.data + 4 * r * width, x.ctypes.data + 4 * other * width,
                                   copy, scales, scales_step, group, width, like)  # fmt: skip
            for token in range(n_tokens):
                logits[r, first + token] = scores[token]
                logits[other, first + token] = scores[TOKENS_AT_ONCE + token]
        first += n_tokens
    barrier(shared, n_threads)


@compiled(inner=True)
def _widen(weights, step, n, like, copy):  # type: ignore[no-untyped-def]
    """Four rows of n weights as float32, each vector in one cache line, once for several rows of x.

    A file's weights do not begin at a cache line, so that every vector of theirs costs two reads.
    """
    for row in range(TOKENS_AT_ONCE):
        p, q = weights + row * step, copy + 4 * n * row
        for i in range(0, n // LANES * LANES, LANES):
            if i * size_of(like) % LINE == 0:
                prefetch(p + i * size_of(like) + TOKENS_AT_ONCE * step)
            store(q + 4 * i, load(p + i * size_of(like), like))
        for i in range(n // LANES * LANES, n):
            store_one(q + 4 * i, load_one(p + i * size_of(like), like))


@compiled(inner=True)
def _four_scores(x, rows, step, scales, scales_step, group, n, like):  # type: ignore[no-untyped-def]
    """The dot products of n numbers at x with four rows of n weights, all by address.

    The rows after them are asked for meanwhile.
    """
    size = size_of(like)
    whole = n // SUMMED * SUMMED
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    for low in range(0, whole, SUMMED):
        s, t, u, v = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(low, low + SUMMED, LANES):
            p = rows + i * size
            if i * size % LINE == 0:
                for row in range(TOKENS_AT_ONCE):
                    prefetch(p + (TOKENS_AT_ONCE + row) * step)
            number = load(x + 4 * i, FLOATS)
            s = multiply_add(number, load(p, like), s)
            t = multiply_add(number, load(p + step, like), t)
            u = multiply_add(number, load(p + 2 * step, like), u)
            v = multiply_add(number, load(p + 3 * step, like), v)
        if is_scaled(like):
            q = scales + 4 * (low // group)
            a = multiply_add(s, splat(load_one(q, FLOATS)), a)
            b = multiply_add(t, splat(load_one(q + scales_step, FLOATS)), b)
            c = multiply_add(u, splat(load_one(q + 2 * scales_step, FLOATS)), c)
            d = multiply_add(v, splat(load_one(q + 3 * scales_step, FLOATS)), d)
        else:
            a, b, c, d = add(a, s), add(b, t), add(c, u), add(d, v)
    sums = (total(a), total(b), total(c), total(d))
    if n == whole:
        return sums
    return (
        sums[0] + _rest(x, rows, scales, group, n, like, like),
        sums[1] + _rest(x, rows + step, scales + scales_step, group, n, like, like),
        sums[2] + _rest(x, rows + 2 * step, scales + 2 * scales_step, group, n, like, like),
        sums[3] + _rest(x, rows + 3 * step, scales + 3 * scales_step, group, n, like, like),
    )


@compiled(inner=True)
def _eight_scores(x, y, rows, scales, scales_step, group, n, like):  # type: ignore[no-untyped-def]
    """What `_four_scores` gives for x, and then for y, of four rows that have been widened.

    A vector of weights is loaded once for both.
    """
    step, whole = 4 * n, n // SUMMED * SUMMED
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    e, f, g, h = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    for low in range(0, whole, SUMMED):
        s, t, u, v = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        k, m, o, w = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(4 * low, 4 * (low + SUMMED), 4 * LANES):
            number, other = load(x + i, FLOATS), load(y + i, FLOATS)
            p = rows + i
            weights = load(p, FLOATS)
            s, k = multiply_add(number, weights, s), multiply_add(other, weights, k)
            weights = load(p + step, FLOATS)
            t, m = multiply_add(number, weights, t), multiply_add(other, weights, m)
            weights = load(p + 2 * step, FLOATS)
            u, o = multiply_add(number, weights, u), multiply_add(other, weights, o)
            weights = load(p + 3 * step, FLOATS)
            v, w = multiply_add(number, weights, v), multiply_add(other, weights, w)
        if is_scaled(like):
            q = scales + 4 * (low // group)
            scale = splat(load_one(q, FLOATS))
            a, e = multiply_add(s, scale, a), multiply_add(k, scale, e)
            scale = splat(load_one(q + scales_step, FLOATS))
            b, f = multiply_add(t, scale, b), multiply_add(m, scale, f)
            scale = splat(load_one(q + 2 * scales_step, FLOATS))
            c, g = multiply_add(u, scale, c), multiply_add(o, scale, g)
            scale = splat(load_one(q + 3 * scales_step, FLOATS))
            d, h = multiply_add(v, scale, d), multiply_add(w, scale, h)
        else:
            a, b, c, d = add(a, s), add(b, t), add(c, u), add(d, v)
            e, f, g, h = add(e, k), add(f, m), add(g, o), add(h, w)
    sums = (total(a), total(b), total(c), total(d), total(e), total(f), total(g), total(h))
    if n == whole:
        return sums
    two, three = scales + 2 * scales_step, scales + 3 * scales_step
    return (
        sums[0] + _rest(x, rows, scales, group, n, FLOATS, like),
        sums[1] + _rest(x, rows + step, scales + scales_step, group, n, FLOATS, like),
        sums[2] + _rest(x, rows + 2 * step, two, group, n, FLOATS, like),
        sums[3] + _rest(x, rows + 3 * step, three, group, n, FLOATS, like),
        sums[4] + _rest(y, rows, scales, group, n, FLOATS, like),
        sums[5] + _rest(y, rows + step, scales + scales_step, group, n, FLOATS, like),
        sums[6] + _rest(y, rows + 2 * step, two, group, n, FLOATS, like),
        sums[7] + _rest(y, rows + 3 * step, three, group, n, FLOATS, like),
    )


@compiled(inner=True)
def _rest(x, row, scales, group, n, numbers, like):  # type: ignore[no-untyped-def]
    """The part of a dot product that is left over beyond the last whole block.

    `like` is the format of the table, `numbers` that of this row, which may have been widened.
    """
    sum_of = ZERO
    for i in range(n // SUMMED * SUMMED, n):
        weight = load_one(row + i * size_of(numbers), numbers)
        if is_scaled(like):
            weight *= load_one(scales + 4 * (i // group), FLOATS)
        sum_of += load_one(x + 4 * i, FLOATS) * weight
    return sum_of


class DecodeStep:
    """The compiled decode step of one model, over the model's own weights and a caller's cache."""

    def __init__(self, weights: Weights, n_threads: int) -> None:
        self.team = Team(min(n_threads, weights.config.n_head), in_pool=False)
        self._weights = weights
        self._run_blocks = Kernel(_blocks)
        self._run_unembed, self._run_unembed_rows = Kernel(_unembed), Kernel(_unembed_rows)
        tensors = [w for block in weights.blocks for w in block]
        self._addresses = np.array([_address(w) for w in tensors]).reshape(len(weights.blocks), -1)
        self._norm = np.array([_address(w) for w in weights.norm])
        self._tensors = [w for w in (*tensors, *weights.norm) if w is not None]
        self._memory = [w.detach() for w in self._tensors]  # stays alive
        self._places = [w.data_ptr() for w in self._tensors]
        self._like = FORMATS[weights.table.dtype]
        self._scales = np.array(weights.attention_scales, f32)

    def is_outdated(self) -> bool:
        """Whether a weight's memory is not where it was."""
        return list(map(Tensor.data_ptr, self._tensors)) != self._places

    @property
    def is_kept(self) -> bool:
        """Whether code of an earlier process lies on disk."""
        return is_kept(_blocks)

    def hidden(self, x: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """As `CompiledStep.hidden`, of all positions."""
        batch, n_new, width = x.shape
        config = self._weights.config
        rows = np.ascontiguousarray(x.numpy().reshape(batch * n_new, width))
        out = np.empty_like(rows)
        n_threads, inner = self.team.n_threads, config.inner_dim
        self.team.run(
            self._run_blocks,
            rows,
            self._addresses,
            self._norm,
            self._like,
            self._scales,
            cache.keys.numpy(),
            cache.values.numpy(),
            cache.length,
            mask_of(mask, batch),
            f32(config.layer_norm_epsilon),
            inner,
            _shares(n_threads, len(rows), max(3 * width, inner)),
            _shares(n_threads, len(rows), width),
            out,
        )
        return torch.from_numpy(out).view(batch, n_new, width)

    def unembed(self, x: Tensor) -> Tensor:
        """Logits (..., V) of `x` (..., C)."""
        rows = np.ascontiguousarray(x.numpy().reshape(-1, x.shape[-1]))
        table, scales = self._weights.table, self._weights.table_scales
        logits = np.empty((len(rows), len(table)), f32)
        arguments = (rows, _address(table), _address(scales), self._like)
        if len(rows) == 1:
            self.team.run(self._run_unembed, *arguments, logits)
        else:
            widened = _room(self.team.n_threads, TOKENS_AT_ONCE * rows.shape[1])
            self.team.run(self._run_unembed_rows, *arguments, widened, logits)
        return torch.from_numpy(logits).view(*x.shape[:-1], -1)


def mask_of(mask: Tensor | None, batch: int) -> np.ndarray:
    """`mask` (B, keys), or (B, 0) where there is none."""
    return np.empty((batch, 0), np.bool_) if mask is None else np.ascontiguousarray(mask.numpy())


def _shares(n_threads: int, n_rows: int, width: int) -> np.ndarray:
    """Room for the threads' shares of a product, rows of at least `width`.

    Rows are 896 bytes more than a multiple of 4,096 apart. Processors compare the last 12 bits of
    addresses to see whether a read must wait for a write before it; so it never does here.
    """
    width += (896 - 4 * width) % 4096 // 4
    return _room(n_threads, n_rows, width)


def _room(*shape: int) -> np.ndarray:
    """Memory for float32 numbers that begins at a cache line, as NumPy's need not."""
    return torch.empty(shape, dtype=torch.float32, device="cpu").numpy()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
