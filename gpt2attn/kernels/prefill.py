"""A pass over many tokens in compiled code: products in blocks, and what is between them.

A product is torch's where that is the faster one. Elsewhere it copies some rows of the weights to
panels of 32 columns, as float32 whatever format they are stored in, and goes with each panel over
all rows of x while the first cache holds it; the sums of eight rows stay in registers. Biases,
residuals and LayerNorm, the GELU and a head's attention are one visit to memory each, in memory
that all layers share. Attention looks at the keys up to a query and no further, eight queries at a
time, whose scores stay in the first cache; the weights are written out only where somebody looks at
them.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..attention import AttentionSteps, allowed_keys
from .compiling import compiled
from .decode import Matrix, mask_of
from .formats import widen
from .linear import Linear
from .rows import FLOATS, ZERO, f32, gelu, layer_norm, share, softmax, vector
from .simd import (
    FORMATS,
    LANES,
    add,
    is_scaled,
    load,
    load_one,
    multiply_add,
    multiply_tile,
    splat,
    stay_apart,
    store,
    store_one,
)  # fmt: skip
from .team import Kernel, Team, barrier, take_one

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..model import Block, Observer

ROWS = 8  # of a product, or queries, that are computed together
COLUMNS = 2 * LANES  # of a product, or keys, that are computed together
# Rows of weights that are gone over before the next: a panel of 32 columns has 32 kilobytes, and
# sums in parts of that length round less than in one.
DEPTH = 256
ROWS_AT_HAND = 512  # of x: with so many numbers each, half a megabyte
QUERIES_TAKEN = 64  # at a time by a thread

NO_MORE = np.empty((0, 0), f32)
NO_MAPS = np.empty((0, 0, 0, 0), f32)


@compiled(inner=True)
def _multiply(thread, n_threads, shared, x, matrix, like, panels, out):  # type: ignore[no-untyped-def]
    """out (rows, at least width) = x (rows, at least n_in) times the matrix.

    `panels` (2, 256 * width) is where the threads put weights for all: one is written while the
    other may still be read.
    """
    left, right = share(matrix.width, COLUMNS, thread, n_threads)
    first, last = share(x.shape[0], ROWS, thread, n_threads)
    x_row, out_row = 4 * x.shape[1], 4 * out.shape[1]
    for low in range(0, matrix.n_in, DEPTH):
        n = min(DEPTH, matrix.n_in - low)
        at = panels[low // DEPTH % 2].ctypes.data
        _pack(matrix, like, low, n, left, right, at)
        if not barrier(shared, n_threads):
            return
        for top in range(first, last, ROWS_AT_HAND):
            n_rows = min(ROWS_AT_HAND, last - top)
            numbers, sums = x.ctypes.data + top * x_row + 4 * low, out.ctypes.data + top * out_row
            for column in range(0, matrix.width, COLUMNS):
                _sweep(numbers, x_row, at + 4 * n * column, n, sums + 4 * column, out_row, n_rows,
                       low > 0)  # fmt: skip
    barrier(shared, n_threads)


@compiled(inner=True)
def _pack(matrix, like, low, n, left, right, panels):  # type: ignore[no-untyped-def]
    """Rows low to low + n, columns left to right, as float32 to their place in the panels.

    A panel is (n, 32): 32 columns stand after the 32 before.
    """
    stay_apart()
    size = like.itemsize
    for i in range(n):
        p = matrix.at + size * (low + i) * matrix.width
        scales = matrix.scales + 4 * ((low + i) // matrix.group * matrix.width)
        q = panels + 4 * COLUMNS * i
        for column in range(left, right, COLUMNS):
            for half in range(column, column + COLUMNS, LANES):
                weights = load(p + size * half, like)
                if is_scaled(like):
                    weights = multiply_add(weights, load(scales + 4 * half, FLOATS), splat(ZERO))
                store(q + 4 * (column * n + half - column), weights)


@compiled(inner=True)
def _sweep(x, x_row, panel, n, out, out_row, n_rows, onto):  # type: ignore[no-untyped-def]
    """out (rows, 32) = x (rows, n) times the panel (n, 32), or that `onto` what is there."""
    stay_apart()
    whole, step = n_rows // ROWS * ROWS, 4 * COLUMNS
    for r in range(0, whole, ROWS):
        multiply_tile(ROWS, 2, onto, x + r * x_row, x_row, 4, panel, step, n, out + r * out_row,
                      out_row)  # fmt: skip
    for r in range(whole, n_rows):
        multiply_tile(1, 2, onto, x + r * x_row, x_row, 4, panel, step, n, out + r * out_row,
                      out_row)  # fmt: skip


@compiled(inner=True)
def _add_and_norm(thread, n_threads, shared, x, more, more_bias, weight, bias, epsilon, out):  # type: ignore[no-untyped-def]
    """x (rows, C) += more + more_bias unless `more` is empty; out (rows, at least C) = its norm."""
    low, high = share(x.shape[0], 1, thread, n_threads)
    for r in range(low, high):
        if more.size:
            for i in range(x.shape[1]):
                x[r, i] += more[r, i] + more_bias[i]
        layer_norm(x[r : r + 1], weight, bias, epsilon, out[r : r + 1])
    barrier(shared, n_threads)


@compiled(inner=True)
def _add_and_gelu(thread, n_threads, shared, x, bias):  # type: ignore[no-untyped-def]
    """x (rows, at least inner) = GELU of x + bias (inner)."""
    low, high = share(x.shape[0], 1, thread, n_threads)
    for r in range(low, high):
        row = vector(x[r].ctypes.data, bias.size)
        for i in range(bias.size):
            row[i] += bias[i]
        gelu(row)
    barrier(shared, n_threads)


@compiled(inner=True)
def _attend(
    thread, n_threads, shared,
    qkv, bias, keys, values, past, mask, scale, begin, turned, room, maps, out,
):  # fmt: skip  # type: ignore[no-untyped-def]
    """Attention of all heads for qkv (B * T, 3 C), its rows ordered by text, to out (B * T, C).

    New keys and values are stored in `keys` and `values` (B, H, max_len, D). Only queries from
    `begin` on, counted in each text's new tokens, are computed. `mask` (B, keys or 0);
    `maps` (B, H, T, keys), which gets the weights, or empty. `turned` (B * H, blocks, D, 32) is
    room for the keys, 32 at a time with the axes exchanged, `room` (n_threads, 8, row) for eight
    rows of scores and of two heads' widths after them.
    """
    n_text, n_head, _, _ = keys.shape
    n_units, n_new = n_text * n_head, qkv.shape[0] // n_text
    low, high = share(n_units, 1, thread, n_threads)
    for unit in range(low, high):
        text, head = unit // n_head, unit % n_head
        rows = qkv[text * n_new : (text + 1) * n_new]
        _store(rows, bias, head, keys[text, head, past:], values[text, head, past:])
        _turn(keys[text, head, : past + n_new], turned[unit])
    if not barrier(shared, n_threads):
        return
    # The later queries, which have more keys, are taken first, so that all threads end together.
    n_parts = (n_new + QUERIES_TAKEN - 1) // QUERIES_TAKEN
    while True:
        taken = take_one(shared)
        if taken >= n_units * (n_parts - begin // QUERIES_TAKEN):
            break
        part, unit = n_parts - 1 - taken // n_units, taken % n_units
        text, head = unit // n_head, unit % n_head
        rows, mixed = qkv[text * n_new : (text + 1) * n_new], out[text * n_new : (text + 1) * n_new]
        end = min((part + 1) * QUERIES_TAKEN, n_new)
        for first in range(max(part * QUERIES_TAKEN, begin), end, ROWS):
            last = min(first + ROWS, end)
            _attend_eight(rows, bias, head, first, last, past, mask[text], scale, turned[unit],
                          values[text, head], room[thread], mixed)  # fmt: skip
            if maps.size:
                _keep(room[thread], past + last, maps[text, head, first:last])
    barrier(shared, n_threads)


@compiled(inner=True)
def _store(rows, bias, head, keys, values):  # type: ignore[no-untyped-def]
    """One head's keys and values of rows (T, 3 C), with their bias, to `keys` and `values`."""
    stay_apart()
    n_new, size, step = rows.shape[0], keys.shape[1], 4 * rows.shape[1]
    for part in range(1, 3):
        start = 4 * (part * (rows.shape[1] // 3) + head * size)
        p, b = rows.ctypes.data + start, bias.ctypes.data + start
        q = keys.ctypes.data if part == 1 else values.ctypes.data
        for _ in range(n_new):
            for i in range(0, 4 * size, 4 * LANES):
                store(q + i, add(load(p + i, FLOATS), load(b + i, FLOATS)))
            p, q = p + step, q + 4 * size


@compiled(inner=True)
def _turn(keys, turned):  # type: ignore[no-untyped-def]
    """turned (blocks, D, 32) = keys (S, D), 32 at a time with the axes exchanged; 0 beyond S."""
    stay_apart()
    n_keys, size = keys.shape
    p = keys.ctypes.data
    for key in range(turned.shape[0] * COLUMNS):
        q = turned.ctypes.data + 4 * (key // COLUMNS * COLUMNS * size + key % COLUMNS)
        for i in range(size):
            store_one(q + 4 * COLUMNS * i, load_one(p + 4 * i, FLOATS) if key < n_keys else ZERO)
        p += 4 * size


@compiled(inner=True)
def _attend_eight(
    rows, bias, head, first, last, past, seen, scale, turned, values, room, out
):  # fmt: skip  # type: ignore[no-untyped-def]
    """One head's output for the queries first to last, at most eight, of rows (T, 3 C), to out.

    Their weights are left in the rows of `room` (8, row), then come the queries and the outputs.
    """
    stay_apart()
    size, n_keys, row = values.shape[1], past + last, 4 * room.shape[1]
    mixed = row - 4 * size
    q = mixed - 4 * size
    p, b = rows.ctypes.data + 4 * head * size, bias.ctypes.data + 4 * head * size
    for r in range(ROWS):
        # Too many: the last one again, whose output is not taken.
        at = p + 4 * rows.shape[1] * min(first + r, last - 1)
        for i in range(0, 4 * size, 4 * LANES):
            number = add(load(at + i, FLOATS), load(b + i, FLOATS))
            store(
                room.ctypes.data + r * row + q + i, multiply_add(number, splat(scale), splat(ZERO))
            )
    scores = room.ctypes.data
    for block in range((n_keys + COLUMNS - 1) // COLUMNS):
        multiply_tile(ROWS, 2, False, scores + q, row, 4, turned[block].ctypes.data, 4 * COLUMNS,
                      size, scores + 4 * COLUMNS * block, row)  # fmt: skip
    for r in range(ROWS):
        end = past + min(first + r, last - 1) + 1
        if seen.size and not seen[end - 1]:
            end = 0  # padding
        softmax(room[r], end, seen)
        for s in range(end, n_keys):
            room[r, s] = ZERO
    at, to, step = values.ctypes.data, scores + mixed, 4 * size
    for low in range(0, size // COLUMNS * COLUMNS, COLUMNS):
        multiply_tile(ROWS, 2, False, scores, row, 4, at + 4 * low, step, n_keys, to + 4 * low, row)
    for low in range(size // COLUMNS * COLUMNS, size, LANES):
        multiply_tile(ROWS, 1, False, scores, row, 4, at + 4 * low, step, n_keys, to + 4 * low, row)
    for r in range(last - first):
        q = out.ctypes.data + 4 * ((first + r) * out.shape[1] + head * size)
        for i in range(0, 4 * size, 4 * LANES):
            store(q + i, load(to + r * row + i, FLOATS))


@compiled(inner=True)
def _keep(weights, n_keys, maps):  # type: ignore[no-untyped-def]
    """maps (T, S) = the first `n_keys` of each row of weights, and 0 beyond them."""
    for t in range(maps.shape[0]):
        for s in range(n_keys):
            maps[t, s] = weights[t, s]
        for s in range(n_keys, maps.shape[1]):
            maps[t, s] = ZERO


class _Kernels(NamedTuple):
    multiply: Kernel
    add_and_norm: Kernel
    add_and_gelu: Kernel
    attend: Kernel


class Prefill:
    """Runs the blocks of one model over many tokens at once."""

    def __init__(self, blocks: Sequence[Block], norm: nn.LayerNorm, n_threads: int) -> None:
        self._blocks, self._last_norm = blocks, norm
        self._team = Team(n_threads, in_pool=True)
        functions = (_multiply, _add_and_norm, _add_and_gelu, _attend)
        self._kernels = _Kernels(*map(Kernel, functions))

    def hidden(
        self,
        x: Tensor,
        cache: KVCache | None,
        mask: Tensor | None,
        observe: Observer | None,
        *,
        last_only: bool,
    ) -> Tensor:
        """As `CompiledStep.hidden`; (B, 1, C) if `last_only` and nobody observes."""
        run = _Pass(self._team, self._kernels, x, cache, mask, observe)
        wanted = getattr(observe, "layers", None)
        for layer, block in enumerate(self._blocks):
            last = last_only and observe is None and layer == len(self._blocks) - 1
            looked_at = observe is not None and (wanted is None or layer in wanted)
            run.attention(block, looked_at=looked_at, last_only=last)
            run.mlp(block)
        return run.end(self._last_norm)


class _Pass:
    """One pass: its memory, which all layers share, and its steps.

    `x` (rows, C) is the residual stream, but for `more` (rows, C) and its bias, the outcome of the
    last product, which the next visit adds to it. `h` is what the next product reads.
    """

    def __init__(
        self,
        team: Team,
        kernels: _Kernels,
        x: Tensor,
        cache: KVCache | None,
        mask: Tensor | None,
        observe: Observer | None,
    ) -> None:
        self._team, self._kernels = team, kernels
        self._cache, self._mask, self._observe = cache, mask, observe
        self._shape: tuple[int, ...] = x.shape
        self._past = 0 if cache is None else cache.length
        self._x = x.reshape(-1, x.shape[2]).clone()
        self._h = self._x.new_empty(len(self._x), _apart(x.shape[2]))
        self._more = torch.empty_like(self._x)
        self._more_bias: Tensor | None = None
        self._wide = self._x.new_empty(0)
        self._weights = self._x.new_empty(0)

    def attention(self, block: Block, *, looked_at: bool, last_only: bool) -> None:
        """x += attention of LayerNorm of x; of each text's last token only, if that is enough."""
        attn, (B, T, C) = block.attn, self._shape
        S, size = self._past + T, attn.head_dim
        self._norm(block.ln_1)
        # Whoever looks may keep what there is to see, so that is not memory to be used again.
        qkv = self._x.new_empty(B * T, 3 * C) if looked_at else self._room(3 * C)
        self._multiply(self._h, attn.c_attn, qkv)
        bias: Tensor = attn.c_attn.bias
        if looked_at:
            qkv += bias
            bias = torch.zeros_like(bias)
        mixed = torch.empty_like(self._x) if looked_at else self._h
        keys, values = self._keys_and_values(block.layer, attn.n_head, size)
        maps = self._maps(block.layer, (B, attn.n_head, T, S)) if looked_at else None
        n_blocks = -(-S // COLUMNS)
        turned = self._x.new_empty(B * attn.n_head, n_blocks, size, COLUMNS)
        scores = self._x.new_empty(
            self._team.n_threads, ROWS, _apart(n_blocks * COLUMNS + 2 * size)
        )
        self._team.run(
            self._kernels.attend, _numpy(qkv), _numpy(bias), _numpy(keys), _numpy(values),
            self._past, mask_of(self._mask, B),
            f32(attn.scale), T - 1 if last_only else 0, _numpy(turned), _numpy(scores),
            NO_MAPS if maps is None else _numpy(maps), _numpy(mixed),
        )  # fmt: skip
        if maps is not None:
            self._show(block, qkv, keys[:, :, :S], values[:, :, :S], maps, mixed)
        if last_only:
            last = slice(T - 1, None, T)
            self._shape = (B, 1, C)
            self._x, mixed = self._x[last].clone(), mixed[last].clone()
            self._h, self._more = torch.empty_like(mixed), torch.empty_like(self._x)
        self._multiply(mixed, attn.c_proj, self._more)
        self._more_bias = attn.c_proj.bias

    def mlp(self, block: Block) -> None:
        """x += MLP of LayerNorm of x."""
        self._norm(block.ln_2)
        bias = block.mlp.c_fc.bias
        units = self._room(_apart(len(bias)))
        self._multiply(self._h, block.mlp.c_fc, units)
        self._team.run(self._kernels.add_and_gelu, _numpy(units), _numpy(bias))
        self._multiply(units, block.mlp.c_proj, self._more)
        self._more_bias = block.mlp.c_proj.bias

    def end(self, norm: nn.LayerNorm) -> Tensor:
        """The residual stream (B, T or 1, C) after the last LayerNorm."""
        self._h = torch.empty_like(self._x)
        self._norm(norm)
        return self._h.view(self._shape)

    def _norm(self, layer: nn.LayerNorm) -> None:
        """x += more; h = LayerNorm of x."""
        more, bias = NO_MORE, cast(Tensor, layer.bias)
        if self._more_bias is not None:
            more, bias = _numpy(self._more), self._more_bias
        self._team.run(
            self._kernels.add_and_norm, _numpy(self._x), more, _numpy(bias),
            _numpy(layer.weight), _numpy(layer.bias), f32(layer.eps), _numpy(self._h),
        )  # fmt: skip

    def _multiply(self, x: Tensor, layer: Linear, out: Tensor) -> None:
        """out (rows, at least width) = x (rows, at least n_in) times the layer's matrix."""
        n_in, width = layer.weight.shape
        if width % COLUMNS or torch_multiplies_faster():
            matrix: Tensor = layer.weight
            if layer.is_stored:
                matrix = widen(matrix, layer.scale, 0, self._room_for_weights(n_in, width))
            torch.mm(x[:, :n_in], matrix, out=out[:, :width])
            return
        panels = self._room_for_weights(2, DEPTH * width)
        self._team.run(
            self._kernels.multiply, _numpy(x), Matrix.of(layer.weight, layer.scale),
            FORMATS[layer.weight.dtype], _numpy(panels), _numpy(out),
        )  # fmt: skip

    def _show(
        self, block: Block, qkv: Tensor, keys: Tensor, values: Tensor, maps: Tensor, mixed: Tensor
    ) -> None:
        """Let the observer see what a layer's attention computed."""
        assert self._observe is not None
        (B, T, C), attn, n_keys = self._shape, block.attn, keys.shape[2]
        q, output = (
            rows.view(B, T, attn.n_head, attn.head_dim).transpose(1, 2)
            for rows in (qkv[:, :C], mixed)
        )
        allowed = allowed_keys(T, n_keys, self._mask)
        steps = AttentionSteps(
            q, keys, values, attn.scale, allowed, attn.upcast, maps, output
        )  # fmt: skip
        self._observe(block.layer, steps)

    def _room(self, width: int) -> Tensor:
        """(rows, width): memory that attention and MLP use in turn."""
        rows = len(self._x)
        if self._wide.numel() < rows * width:
            self._wide = self._x.new_empty(rows * width)
        return self._wide[: rows * width].view(rows, width)

    def _room_for_weights(self, *shape: int) -> Tensor:
        """Memory that all products use in turn."""
        n = math.prod(shape)
        if self._weights.numel() < n:
            self._weights = self._x.new_empty(n)
        return self._weights[:n].view(shape)

    def _keys_and_values(self, layer: int, n_head: int, size: int) -> tuple[Tensor, Tensor]:
        """Where the keys and values (B, H, places, D) of a layer are kept."""
        if self._cache is not None:
            return self._cache.keys[layer], self._cache.values[layer]
        B, T, _ = self._shape
        return self._x.new_empty(B, n_head, T, size), self._x.new_empty(B, n_head, T, size)

    def _maps(self, layer: int, shape: tuple[int, int, int, int]) -> Tensor:
        """Memory for the weights of a layer that is looked at."""
        find_room = getattr(self._observe, "room", None)
        room: Tensor | None = None if find_room is None else find_room(layer, shape)
        if room is not None and room.shape == shape and room.dtype == torch.float32:
            return room.contiguous()  # itself, if compiled code can write there
        return self._x.new_empty(shape)


@cache
def torch_multiplies_faster() -> bool:
    """Whether torch's library for products of float32 numbers, MKL, is on a processor it is for.

    It is 6 % faster there, and on others keeps to half the width of AVX-512. The two round
    differently, so that it is no timing that decides, which might come out otherwise next time.
    """
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "Intel" in platform.processor()


def _apart(width: int) -> int:
    """At least `width` floats: rows whole kilobytes apart would compete for places in the cache."""
    return width if width % 256 else width + LANES


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()
