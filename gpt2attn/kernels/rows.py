"""What is done row by row, compiled: LayerNorm, GELU, softmax, and how threads share rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import carray

from .compiling import EXACT, FAST, compiled
from .simd import (
    FORMATS,
    LANES,
    add,
    as_float,
    exp_of,
    floats_at,
    larger,
    largest,
    load,
    multiply_add,
    splat,
    stay_apart,
    store,
    total,
    where_larger,
)  # fmt: skip

f32 = np.float32
FLOATS = FORMATS[torch.float32]
ZERO = f32(0.0)
LOWEST, NO_SCORE = f32(-3.0e38), f32(-2.0e38)  # a score that is none, and what is above it
NEAREST = f32(12582912.0)  # 1.5 * 2 ** 23: added and taken away, it rounds to a whole number
LOG2_E, LN_2_HIGH, LN_2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
GELU_SLOPE, GELU_CUBE = f32(-2 * math.sqrt(2 / math.pi)), f32(0.044715)


@compiled(inner=True)
def share(n, unit, thread, n_threads):  # type: ignore[no-untyped-def]
    """A thread's range of `n`, in whole units; the last thread's takes what is over."""
    units = n // unit
    low = units * thread // n_threads * unit
    return low, n if thread == n_threads - 1 else units * (thread + 1) // n_threads * unit


@compiled(inner=True)
def vector(address, n):  # type: ignore[no-untyped-def]
    """The n float32 numbers at an address, as an array."""
    return carray(floats_at(address), n)


@compiled(inner=True, fastmath=EXACT)
def exp(x):  # type: ignore[no-untyped-def]
    """exp in float32 to about 1e-7, in steps that vectorise (Cephes' reduction and series)."""
    x = f32(-87.0) if x < f32(-87.0) else f32(88.0) if x > f32(88.0) else x
    n = (x * LOG2_E + NEAREST) - NEAREST
    r = x - n * LN_2_HIGH - n * LN_2_LOW
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    p = p * r * r + r + f32(1.0)
    return p * as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@compiled(inner=True, fastmath=FAST)
def layer_norm(x, weight, bias, epsilon, out):  # type: ignore[no-untyped-def]
    """out (rows, C) = LayerNorm of x (rows, C)."""
    stay_apart()
    rows, width = x.shape
    for r in range(rows):
        sum_of = ZERO
        for i in range(width):
            sum_of += x[r, i]
        mean = sum_of / f32(width)
        squares = ZERO
        for i in range(width):
            squares += (x[r, i] - mean) * (x[r, i] - mean)
        inverse = f32(1.0) / np.sqrt(squares / f32(width) + epsilon)
        for i in range(width):
            out[r, i] = (x[r, i] - mean) * inverse * weight[i] + bias[i]


@compiled(inner=True, fastmath=FAST)
def gelu(x):  # type: ignore[no-untyped-def]
    """GPT-2's GELU of x (n) in place: 0.5 x (1 + tanh(y)) is x / (1 + exp(-2 y))."""
    stay_apart()
    for i in range(x.size):
        v = x[i]
        x[i] = v / (f32(1.0) + exp(GELU_SLOPE * (v + GELU_CUBE * v * v * v)))


@compiled(inner=True)  # no fastmath: `exp_of` rounds by adding and taking away
def softmax(scores, n_keys, mask):  # type: ignore[no-untyped-def]
    """Softmax in place of the first `n_keys` scores, over those that `mask` (keys, or none) allows.

    The others become 0; all do where nothing is allowed, at a query that is padding itself. There
    must be room up to a multiple of 16, which is overwritten.
    """
    stay_apart()
    if mask.size:
        for s in range(n_keys):
            if not mask[s]:
                scores[s] = LOWEST
    end = (n_keys + LANES - 1) // LANES * LANES
    for s in range(n_keys, end):
        scores[s] = LOWEST
    low, high = scores.ctypes.data, scores.ctypes.data + 4 * end
    most, odd = splat(LOWEST), splat(ZERO)
    for p in range(low, high, 4 * LANES):
        number = load(p, FLOATS)
        most, odd = larger(most, number), multiply_add(number, splat(ZERO), odd)
    best = splat(-largest(most))
    sums = splat(ZERO)
    for p in range(low, high, 4 * LANES):
        number = load(p, FLOATS)
        power = where_larger(number, splat(NO_SCORE), exp_of(add(number, best)))
        sums = add(sums, power)
        store(p, power)
    sum_of = total(sums)
    # Not a number if there was one that is none, or infinity; comparisons would pass them over.
    inverse = splat((f32(1.0) / sum_of if sum_of > ZERO else ZERO) + total(odd))
    for p in range(low, high, 4 * LANES):
        store(p, multiply_add(load(p, FLOATS), inverse, splat(ZERO)))
