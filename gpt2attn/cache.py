"""KVCache: the keys and values of every layer, computed once and reused for each new token.

The caller owns it and hands it to `GPT2.forward`; the model keeps no state. All layers share one
`length`, which positions, mask and limit checks read. Memory: 2 x n_layer x n_embd x bytes per
token and row (73,728 bytes a token for GPT-2 small in float32).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import GPT2Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .model import GPT2


class KVCache:
    """Room for `max_len` tokens (n_positions if None) of `batch_size` rows, allocated once.

    `keys` and `values` are (n_layer, B, H, max_len, D); what lies beyond `length` is not yet
    written.
    """

    def __init__(
        self,
        config: GPT2Config,
        batch_size: int = 1,
        max_len: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        max_len = config.n_positions if max_len is None else max_len
        if batch_size < 1 or max_len < 1:
            raise ValueError(
                f"A cache needs at least one row and one position, not {batch_size} and {max_len}."
            )
        shape = (config.n_layer, batch_size, config.n_head, max_len, config.head_dim)
        with torch.inference_mode(False):  # whose tensors only it may write into, later too
            self.keys = torch.empty(shape, dtype=dtype, device=device)
            self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.padded = False  # some row holds padding, so every later pass needs the mask again

    @classmethod
    def for_model(cls, model: GPT2, batch_size: int = 1, max_len: int | None = None) -> KVCache:
        """An empty cache with the model's sizes, dtype and device."""
        return cls(model.config, batch_size, max_len, dtype=model.dtype, device=model.device)

    @property
    def batch_size(self) -> int:
        return self.keys.shape[1]

    @property
    def max_len(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def check_fits(self, config: GPT2Config, dtype: torch.dtype) -> None:
        """Raise ValueError if this is no cache for a model of that config and dtype."""
        needed = (config.n_layer, config.n_head, config.head_dim)
        n_layer, _, n_head, _, head_dim = self.keys.shape
        if (n_layer, n_head, head_dim) != needed or self.keys.dtype != dtype:
            raise ValueError(
                f"The cache has {n_layer} layers of {n_head} heads of {head_dim} in "
                f"{str(self.keys.dtype).removeprefix('torch.')}, the model {needed[0]} of "
                f"{needed[1]} of {needed[2]} in {str(dtype).removeprefix('torch.')}; make it with "
                "KVCache.for_model."
            )

    def check_room(self, batch_size: int, n_new: int) -> None:
        """Raise ValueError if `n_new` more tokens of `batch_size` rows do not fit."""
        if batch_size != self.batch_size:
            raise ValueError(f"The cache holds {self.batch_size} rows, the input {batch_size}.")
        if self.length + n_new > self.max_len:
            raise ValueError(
                f"The cache holds {self.length} of {self.max_len} tokens, so {n_new} more do not "
                "fit; make it with a larger max_len or start a new one."
            )

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new `k`, `v` (B, H, T, D); returns views of all (B, H, length + T, D).

        Does not move `length`: the model calls `advance` once, after the last layer, so a pass that
        is interrupted leaves the cache as it was.
        """
        end = self.length + k.shape[2]
        keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        keys[:, :, self.length :] = k
        values[:, :, self.length :] = v
        return keys, values

    def advance(self, n_new: int) -> None:
        """Count `n_new` tokens, which every layer has stored, as held."""
        self.length += n_new

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"Cannot cut a cache of {self.length} tokens to {length}.")
        self.length = operator.index(length)
        self.padded = self.padded and self.length > 0

    def fork(self) -> KVCache:
        """An independent copy, for a second continuation of the same text."""
        return self.select(range(self.batch_size))

    def repeat(self, n: int) -> KVCache:
        """A new cache with every row `n` times in a row: r0, r0, ..., r1, r1, ..."""
        return self.select([row for row in range(self.batch_size) for _ in range(n)])

    def select(self, rows: Sequence[int]) -> KVCache:
        """A new cache whose row i is this one's `rows[i]`: reorders, repeats and drops rows."""
        index = self._row_index(rows)
        new = object.__new__(KVCache)
        for name in ("keys", "values"):
            old = getattr(self, name)
            with torch.inference_mode(False):
                buffer = old.new_empty((old.shape[0], len(rows), *old.shape[2:]))
            buffer[:, :, :, : self.length] = old[:, :, :, : self.length].index_select(1, index)
            setattr(new, name, buffer)
        new.length, new.padded = self.length, self.padded
        return new

    def reorder(self, rows: Sequence[int], start: int = 0) -> None:
        """Make row i what row `rows[i]` was, in place, copying only rows that change.

        `start` says from which position on any two of these rows differ, where that is known: what
        lies before it is left alone.
        """
        index = self._row_index(rows)
        if len(rows) != self.batch_size:
            raise ValueError(
                f"{len(rows)} rows do not fit in place of {self.batch_size}; select makes a cache "
                "of another size."
            )
        (moved,) = (index != torch.arange(len(rows), device=index.device)).nonzero(as_tuple=True)
        for buffer in (self.keys, self.values):
            held = buffer[:, :, :, start : self.length]
            # index_select copies first, so that no row is read after it was overwritten.
            held.index_copy_(1, moved, held.index_select(1, index[moved]))

    def _row_index(self, rows: Sequence[int]) -> Tensor:
        bad = [row for row in rows if not 0 <= row < self.batch_size]
        if bad or not len(rows):
            raise ValueError(
                f"Rows {list(rows)} are not there: the cache has the rows 0 to "
                f"{self.batch_size - 1}."
            )
        return torch.as_tensor(list(rows), device=self.keys.device)
