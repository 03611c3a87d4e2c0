"""A decode step in one compiled function: all blocks for a few new tokens, every weight read once.

Decoding reads all weights for each token, so its limit is the bandwidth of memory. This step reads
the checkpoint's own matrices in place, each thread its own part of every one: a share of the heads
with their columns of c_attn and rows of c_proj, and a share of the MLP's inner units. A thread so
keeps what it computes to itself until the two sums of a block, and the team meets twice a block.
Arithmetic is float32. A row's sums are taken in one order whatever the number of rows, so a token
gets the same logits alone and beside others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from .team import Team, barrier

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..model import GPT2, Block

MAX_ROWS = 16  # beyond, a matrix product of the usual kind is the better one
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # one function in three spellings
# Summing in any order lets the compiler use whole vector registers.
FAST = {"reassoc", "contract", "nsz", "arcp"}
EXACT = {"contract"}

f32 = np.float32
NO_MASK = np.empty((0, 0), np.bool_)
LOG2_E, LN_2_HIGH, LN_2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
GELU_SLOPE, GELU_CUBE = f32(-2 * math.sqrt(2 / math.pi)), f32(0.044715)


@intrinsic
def _floats_at(typingctx, address):  # type: ignore[no-untyped-def]
    """An address as a pointer to float32."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def _as_float(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 that has these 32 bits."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(nogil=True, cache=True, fastmath=EXACT, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """exp in float32 to about 1e-7, in steps that vectorise (Cephes' reduction and series)."""
    x = min(max(x, f32(-87.0)), f32(88.0))
    n = np.floor(x * LOG2_E + f32(0.5))
    r = x - n * LN_2_HIGH - n * LN_2_LOW
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    p = p * r * r + r + f32(1.0)
    return p * _as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(nogil=True, cache=True, fastmath=FAST)
def _layer_norm(x, weight, bias, epsilon, out):  # type: ignore[no-untyped-def]
    rows, width = x.shape
    for r in range(rows):
        total = f32(0.0)
        for i in range(width):
            total += x[r, i]
        mean = total / f32(width)
        squares = f32(0.0)
        for i in range(width):
            squares += (x[r, i] - mean) * (x[r, i] - mean)
        inverse = f32(1.0) / np.sqrt(squares / f32(width) + epsilon)
        for i in range(width):
            out[r, i] = (x[r, i] - mean) * inverse * weight[i] + bias[i]


@njit(nogil=True, cache=True, fastmath=FAST)
def _times_columns(x, matrix, low, high, bias, out):  # type: ignore[no-untyped-def]
    """out[:, j] = x @ matrix[:, low + j] + bias[low + j] for the columns low to high."""
    rows, n_in = x.shape
    width = high - low
    for r in range(rows):
        for j in range(width):
            out[r, j] = bias[low + j]
    _accumulate(x, 0, n_in, matrix, 0, low, width, out)


@njit(nogil=True, cache=True, fastmath=FAST)
def _accumulate(x, x_low, n, matrix, row_low, column_low, width, out):  # type: ignore[no-untyped-def]
    """out (rows, width) += n columns of x times a block of the matrix, from the given corners on.

    Eight rows of the matrix at a time, so that sums are loaded and stored an eighth as often.
    """
    rows = x.shape[0]
    whole = n - n % 8
    for i in range(0, whole, 8):
        m = row_low + i
        for r in range(rows):
            a, b = x[r, x_low + i], x[r, x_low + i + 1]
            c, d = x[r, x_low + i + 2], x[r, x_low + i + 3]
            e, f = x[r, x_low + i + 4], x[r, x_low + i + 5]
            g, h = x[r, x_low + i + 6], x[r, x_low + i + 7]
            for j in range(width):
                k = column_low + j
                out[r, j] += (
                    (a * matrix[m, k] + b * matrix[m + 1, k])
                    + (c * matrix[m + 2, k] + d * matrix[m + 3, k])
                ) + (
                    (e * matrix[m + 4, k] + f * matrix[m + 5, k])
                    + (g * matrix[m + 6, k] + h * matrix[m + 7, k])
                )
    for i in range(whole, n):
        for r in range(rows):
            a = x[r, x_low + i]
            for j in range(width):
                out[r, j] += a * matrix[row_low + i, column_low + j]


@njit(nogil=True, cache=True, fastmath=FAST)
def _gelu(x):  # type: ignore[no-untyped-def]
    """GPT-2's GELU in place: 0.5 x (1 + tanh(y)) is x / (1 + exp(-2 y))."""
    rows, width = x.shape
    for r in range(rows):
        for i in range(width):
            v = x[r, i]
            x[r, i] = v / (f32(1.0) + _exp(GELU_SLOPE * (v + GELU_CUBE * v * v * v)))


@njit(nogil=True, cache=True, fastmath=FAST)
def _attend(q, keys, values, n_keys, mask, scale, scores, out):  # type: ignore[no-untyped-def]
    """out = softmax(scale q keys^T) values, over the first n_keys keys `mask` allows."""
    width = q.shape[0]
    best = f32(-3.0e38)
    for s in range(n_keys):
        total = f32(0.0)
        for i in range(width):
            total += q[i] * keys[s, i]
        scores[s] = total * scale
        if mask.shape[0] == 0 or mask[s]:
            best = max(best, scores[s])
    for i in range(width):
        out[i] = f32(0.0)
    total = f32(0.0)
    for s in range(n_keys):
        scores[s] = _exp(scores[s] - best)
    for s in range(n_keys):
        if mask.shape[0] == 0 or mask[s]:
            w = scores[s]
            total += w
            for i in range(width):
                out[i] += w * values[s, i]
    if total > f32(0.0):
        inverse = f32(1.0) / total
        for i in range(width):
            out[i] *= inverse


# What `addresses[layer]` holds, in this order.
LN_1_WEIGHT, LN_1_BIAS, ATTN_WEIGHT, ATTN_BIAS, PROJ_WEIGHT, PROJ_BIAS = range(6)
LN_2_WEIGHT, LN_2_BIAS, FC_WEIGHT, FC_BIAS, DOWN_WEIGHT, DOWN_BIAS = range(6, 12)


@njit(nogil=True, cache=True, fastmath=FAST)
def _blocks(
    thread, n_threads, shared,
    x_in, addresses, scales, keys, values, past, mask, epsilon, inner, parts, x_out,
):  # fmt: skip  # type: ignore[no-untyped-def]
    """All blocks for x_in (B * T, C), its rows ordered by text.

    `keys` and `values` are the cache's (layer, B, H, max_len, D), `mask` (B, keys) or empty.
    `parts` (2, n_threads, B * T, C) is where the threads put their share of the two sums of a
    block: one is written while the other may still be read.
    """
    n_rows, width = x_in.shape
    n_layer, n_text, n_head, _, size = keys.shape
    n_new = n_rows // n_text
    head_low, head_high = n_head * thread // n_threads, n_head * (thread + 1) // n_threads
    unit_low, unit_high = inner * thread // n_threads, inner * (thread + 1) // n_threads
    own = (head_high - head_low) * size
    x, h = x_in.copy(), np.empty((n_rows, width), f32)
    qkv = np.empty((3, n_rows, own), f32)
    mixed, units = np.empty((n_rows, own), f32), np.empty((n_rows, unit_high - unit_low), f32)
    scores = np.empty(past + n_new, f32)
    for layer in range(n_layer):
        at = addresses[layer]
        _layer_norm(x, carray(_floats_at(at[LN_1_WEIGHT]), width),
                    carray(_floats_at(at[LN_1_BIAS]), width), epsilon, h)  # fmt: skip
        matrix = carray(_floats_at(at[ATTN_WEIGHT]), (width, 3 * width))
        bias = carray(_floats_at(at[ATTN_BIAS]), 3 * width)
        for part in range(3):
            low = part * width + head_low * size
            _times_columns(h, matrix, low, low + own, bias, qkv[part])
        for row in range(n_rows):
            text, end = row // n_new, past + row % n_new + 1
            allowed = mask[text] if mask.shape[0] else mask.ravel()
            for head in range(head_low, head_high):
                own_keys, own_values = keys[layer, text, head], values[layer, text, head]
                low = (head - head_low) * size
                for i in range(size):
                    own_keys[end - 1, i] = qkv[1, row, low + i]
                    own_values[end - 1, i] = qkv[2, row, low + i]
                q, out = qkv[0, row, low : low + size], mixed[row, low : low + size]
                _attend(q, own_keys, own_values, end, allowed, scales[layer], scores, out)
        parts[0, thread] = f32(0.0)
        matrix = carray(_floats_at(at[PROJ_WEIGHT]), (width, width))
        _accumulate(mixed, 0, own, matrix, head_low * size, 0, width, parts[0, thread])
        if not barrier(shared, n_threads):
            return
        _add_sum(x, parts[0], carray(_floats_at(at[PROJ_BIAS]), width))
        _layer_norm(x, carray(_floats_at(at[LN_2_WEIGHT]), width),
                    carray(_floats_at(at[LN_2_BIAS]), width), epsilon, h)  # fmt: skip
        matrix = carray(_floats_at(at[FC_WEIGHT]), (width, inner))
        bias = carray(_floats_at(at[FC_BIAS]), inner)
        _times_columns(h, matrix, unit_low, unit_high, bias, units)
        _gelu(units)
        parts[1, thread] = f32(0.0)
        matrix = carray(_floats_at(at[DOWN_WEIGHT]), (inner, width))
        _accumulate(units, 0, unit_high - unit_low, matrix, unit_low, 0, width, parts[1, thread])
        if not barrier(shared, n_threads):
            return
        _add_sum(x, parts[1], carray(_floats_at(at[DOWN_BIAS]), width))
    if thread == 0:
        x_out[:] = x


@njit(nogil=True, cache=True, fastmath=FAST)
def _add_sum(x, parts, bias):  # type: ignore[no-untyped-def]
    """x += bias + the sum of all threads' parts, in the same order in every thread."""
    rows, width = x.shape
    for r in range(rows):
        for i in range(width):
            total = bias[i]
            for thread in range(parts.shape[0]):
                total += parts[thread, r, i]
            x[r, i] += total


@njit(nogil=True, cache=True, fastmath=FAST)
def _unembed(thread, n_threads, shared, x, table, logits):  # type: ignore[no-untyped-def]
    """logits (rows, V) = x (rows, C) table^T, each thread a range of the vocabulary."""
    rows, width = x.shape
    n_tokens = table.shape[0]
    for token in range(n_tokens * thread // n_threads, n_tokens * (thread + 1) // n_threads):
        for r in range(rows):
            total = f32(0.0)
            for i in range(width):
                total += x[r, i] * table[token, i]
            logits[r, token] = total
    barrier(shared, n_threads)


class CompiledStep:
    """The compiled decode step of one model, over the model's own weights and a caller's cache.

    The addresses of the weights are taken once, here: weights may be changed in place later, but
    not be exchanged for others (`GPT2` drops its step when it is moved or cast).
    """

    def __init__(self, model: GPT2) -> None:
        self.n_threads = min(torch.get_num_threads(), model.config.n_head)
        self._team = Team(self.n_threads)
        self._weights = [_block_weights(block) for block in model.h]  # keeps the memory alive
        self._addresses = np.array([[w.data_ptr() for w in block] for block in self._weights])
        self._scales = np.array([block.attn.scale for block in model.h], f32)
        self._epsilon = f32(model.config.layer_norm_epsilon)
        self._inner = model.config.inner_dim

    def takes(self, x: Tensor) -> bool:
        """Whether `x` (B, T, C) is a decoding pass: few rows, and no gradient wanted."""
        few = x.shape[0] * x.shape[1] <= MAX_ROWS
        return few and x.dtype == torch.float32 and not x.requires_grad

    def blocks(self, x: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """All blocks for new tokens `x` (B, T, C); stores their keys and values in `cache`.

        `mask` (B, cached + T) is False at padding. Does not advance the cache, which the model
        does.
        """
        batch, n_new, width = x.shape
        assert cache.keys.dtype == torch.float32
        rows = np.ascontiguousarray(x.numpy().reshape(batch * n_new, width))
        out = np.empty_like(rows)
        self._team.run(
            _blocks,
            rows,
            self._addresses,
            self._scales,
            cache.keys.numpy(),
            cache.values.numpy(),
            cache.length,
            NO_MASK if mask is None else np.ascontiguousarray(mask.numpy()),
            self._epsilon,
            self._inner,
            np.empty((2, self.n_threads, *rows.shape), f32),
            out,
        )
        return torch.from_numpy(out).view(batch, n_new, width)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        """Logits (B, T, V) of `x` (B, T, C) with the embedding table (V, C)."""
        rows = np.ascontiguousarray(x.numpy().reshape(-1, x.shape[-1]))
        logits = np.empty((len(rows), len(table)), f32)
        self._team.run(_unembed, rows, table.numpy(), logits)
        return torch.from_numpy(logits).view(*x.shape[:-1], len(table))


def unfit(model: GPT2) -> str:
    """Why the compiled step cannot run `model`; empty if it can."""
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}"
    weights = [weight for block in model.h for weight in _block_weights(block)]
    if any(w.dtype != torch.float32 for w in [*weights, model.wte.weight]):
        return f"the weights are {str(model.dtype).removeprefix('torch.')}"
    if not all(weight.is_contiguous() for weight in weights):
        return "the weights are not contiguous"
    if model.config.activation_function not in TANH_GELUS:
        return f"the activation is {model.config.activation_function}"
    return ""


def _block_weights(block: Block) -> list[Tensor]:
    """A block's weights in the order that `addresses` has them."""
    layers = (block.ln_1, block.attn.c_attn, block.attn.c_proj)
    layers += (block.ln_2, block.mlp.c_fc, block.mlp.c_proj)
    return [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
