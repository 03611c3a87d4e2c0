"""A decode step on CUDA as one graph, whose launches are recorded once and replayed for each token.

A token of GPT-2 small is some 200 kernels of a few microseconds, and launching them one by one
takes longer than they do. A graph needs fixed shapes and addresses: so there is one for each cache,
and attention looks at all places that the cache has, the ones not yet written masked off. The
blocks are the model's own, with PyTorch's fused attention.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..cache import KVCache
    from ..model import GPT2, Block, Observer

# Steps over one cache before its graph is captured: a short text is over before a capture, of some
# 20 ms, has paid for itself, and what a library sets up at its first call must not be captured.
EAGER_STEPS = 3


class GraphStep:
    """The decode step of one model; captures a graph for each cache and drops it with the cache.

    Weights may be changed in place, but not be exchanged for others (`GPT2` drops its step when it
    is moved or cast). Several threads may use it, each with a cache of its own.
    """

    def __init__(self, model: GPT2) -> None:
        self._blocks, self._norm = list(model.h), model.ln_f
        self._steps: WeakKeyDictionary[KVCache, _CacheStep] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def takes(self, x: Tensor, cache: KVCache | None, observe: Observer | None) -> bool:
        """Whether `x` (B, T, C) is one new token a row that nobody observes, without a gradient."""
        unobserved = cache is not None and observe is None
        return unobserved and x.shape[1] == 1 and not x.requires_grad

    @torch.no_grad()
    def hidden(
        self,
        x: Tensor,
        cache: KVCache | None,
        mask: Tensor | None,
        observe: Observer | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """All blocks and the final LayerNorm for one new token `x` (B, 1, C).

        Stores its keys and values in `cache`, and does not advance it, which the model does.
        `mask` (B, cached + 1) is False at padding.
        """
        assert cache is not None
        with self._lock:  # a capture in one thread must not meet one in another
            if cache not in self._steps:
                self._steps[cache] = _CacheStep(self._blocks, self._norm, cache, x)
            return self._steps[cache].run(x, cache.length, mask)

    def unembed(self, x: Tensor, *, decoding: bool) -> None:
        """Left to torch: it is one product, which a graph would not make faster."""


class _CacheStep:
    """The step over one cache: its inputs, which a graph reads where they stand, and the graph.

    To the blocks it is the cache: `update` stores at a place that is read on the device, and
    returns all places. Holds the cache's tensors, not the cache, which would never be dropped.
    """

    def __init__(
        self, blocks: Sequence[Block], norm: nn.LayerNorm, cache: KVCache, x: Tensor
    ) -> None:
        self._blocks, self._norm = blocks, norm
        self._keys, self._values = cache.keys, cache.values
        # Memory as it was found may hold NaN, which no weight of zero takes away.
        self._keys[:, :, :, cache.length :].zero_()
        self._values[:, :, :, cache.length :].zero_()
        self._x = torch.empty_like(x)
        self._place = torch.zeros(1, dtype=torch.long, device=x.device)
        self._allowed = torch.zeros(
            len(x), 1, 1, cache.max_len, dtype=torch.bool, device=x.device
        )  # as attention broadcasts it to (B, H, T, S)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output = self._x
        self._n_runs = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `KVCache.update`, but at `_place` and with all places: (B, H, max_len, D)."""
        self._keys[layer].index_copy_(2, self._place, k)
        self._values[layer].index_copy_(2, self._place, v)
        return self._keys[layer], self._values[layer]

    def run(self, x: Tensor, length: int, mask: Tensor | None) -> Tensor:
        self._x.copy_(x)
        self._place.fill_(length)
        self._allowed[..., : length + 1] = True if mask is None else mask[:, None, None]
        self._allowed[..., length + 1 :] = False
        self._n_runs += 1
        # Only CUDA has graphs; on a CPU, where tests run, every step is an eager one.
        if self._graph is None and x.is_cuda and self._n_runs > EAGER_STEPS:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._output = self._compute()
            self._graph = graph
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        return self._output.clone()  # the next replay writes there

    def _compute(self) -> Tensor:
        x = self._x
        for block in self._blocks:
            x = block(x, self, self._allowed, None, None)
        return self._norm(x)
