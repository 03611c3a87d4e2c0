"""The compiled step of one model on the CPU: which passes it takes, and with which code.

Numba and what it compiled are loaded when the first pass needs them, not with the model: a short
prompt runs on torch's products, so its first token need not wait for that.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .activations import TANH_GELUS

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..config import GPT2Config
    from ..model import GPT2, Block, Observer
    from .decode import DecodeStep
    from .prefill import Prefill

# Beyond so many rows torch's products are the faster ones: those of float32 weights soon, those of
# others late, since they are widened first.
MAX_ROWS, MAX_ROWS_WIDENED = 16, 64
# From so many rows on, and tokens in each text, long passes are worth compiled code.
MIN_PREFILL, MIN_TOKENS = 128, 8
INDEX = "decode._blocks-*.nbi"  # what Numba calls the list of what it keeps of a function
ROWS_AT_ONCE = 8  # of a matrix: as many streams as the hardware follows well


_forks: list[int] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))


def is_forked() -> bool:
    """Whether this process is the child of a fork, where threads that torch had are missing."""
    parent = multiprocessing.parent_process()
    return bool(_forks) or (
        parent is not None and multiprocessing.get_start_method(allow_none=True) == "fork"
    )


class _Parts:
    """The modules and parameters that stand in some places, to see whether others do later."""

    def __init__(self, places: list[dict[str, Any]]) -> None:
        self._places = places
        self._parts = [part for place in places for part in place.values()]  # so that none dies
        self._ids = list(map(id, self._parts))

    def are_others(self) -> bool:
        """Whether something was put in, taken out or put in another's place."""
        return list(map(id, chain.from_iterable(map(dict.values, self._places)))) != self._ids


@dataclass(frozen=True)
class Weights:
    """What the decode step reads of a model.

    `blocks` holds, for each layer, eight vectors and then each matrix with its scales (None unless
    int8), in the order that `decode` names them; `norm` weight and bias of the final LayerNorm.
    """

    config: GPT2Config
    blocks: list[list[Tensor | None]]
    norm: tuple[Tensor, Tensor]
    attention_scales: list[float]
    table: Tensor
    table_scales: Tensor | None


class CompiledStep:
    """Runs the blocks of one model, and its ends, by compiled code over the model's own weights.

    Weights may be changed in place, and a parameter's `data` be exchanged. Where other parameters,
    modules or forward methods stand in the model than did here, torch computes, until `use_kernels`
    is called again, as `GPT2` does when it is moved, cast, loaded or copied.
    """

    def __init__(self, model: GPT2) -> None:
        self.n_threads = torch.get_num_threads()
        self._config, self._blocks, self._table = model.config, list(model.h), model.table
        self._parameters = list(model.parameters())
        self._norm = model.ln_f
        modules = [module for part in (*model.h, model.ln_f) for module in part.modules()]
        self._outer = _Parts([model._modules, self._table._parameters])
        inner = [part for m in modules for part in (m._modules, m._parameters) if part]
        self._inner = _Parts([cast(nn.Module, model.h)._modules, *inner])
        self._own = [vars(module) for module in modules]  # with a `forward`, if somebody put it
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        # torch would widen all weights for each pass, so that short prompts are compiled, too.
        self._is_narrow = model.table.weight.dtype != torch.float32
        self._max_rows = MAX_ROWS_WIDENED if self._is_narrow else MAX_ROWS

    @property
    def takes_guesses(self) -> bool:
        """Whether a token gets the same logits alone and beside others, as decoding does here."""
        return self._decode is not None

    @property
    def compiles_first(self) -> bool:
        """Whether the first decoding pass will have to compile its code, which takes seconds.

        A guess from the dates of files: Numba itself, which knows, takes a moment to load.
        """
        sources = Path(__file__).parent
        if "NUMBA_CACHE_DIR" in os.environ:
            kept = Path(os.environ["NUMBA_CACHE_DIR"]).rglob(INDEX)
        else:
            kept = (sources / "__pycache__").glob(INDEX)
        newest = max(file.stat().st_mtime for file in sources.glob("*.py"))
        if any(file.stat().st_mtime > newest for file in kept):
            return False
        return self._decode is not None and not self._decode.is_kept

    def takes(self, x: Tensor, cache: KVCache | None, observe: Observer | None) -> bool:
        """Whether a pass over `x` (B, T, C) is one for compiled code.

        That is a few tokens after cached ones that nobody observes, or many tokens, with narrow
        weights any; and no gradient is wanted, and no hook waits.
        """
        if x.dtype != torch.float32 or self._wants_gradient(x) or any(self._hooks):
            return False
        if self._outer.are_others() or self._inner.are_others():
            return False
        if any(map(dict.__contains__, self._own, repeat("forward"))):
            return False
        if self._is_decoding(x, cache) and observe is None:
            if self._decode is not None and self._decode.is_outdated():
                del self._decode  # somebody put other memory in a parameter's place
            return self._decode is not None
        many = x.shape[:-1].numel() >= MIN_PREFILL and x.shape[1] >= MIN_TOKENS
        many = many or self._is_narrow
        return many and self._prefill is not None

    def hidden(
        self,
        x: Tensor,
        cache: KVCache | None,
        mask: Tensor | None,
        observe: Observer | None,
        *,
        last_only: bool,
    ) -> Tensor:
        """All blocks and the final LayerNorm for the embeddings `x` (B, T, C) of new tokens.

        Stores their keys and values in `cache`, and does not advance it, which the model does.
        `mask` (B, cached + T) is False at padding. `last_only` says that the last position of the
        outcome is enough.
        """
        if self._is_decoding(x, cache) and observe is None:
            assert self._decode is not None
            assert cache is not None
            return self._decode.hidden(x, cache, mask)
        assert self._prefill is not None
        return self._prefill.hidden(x, cache, mask, observe, last_only=last_only)

    def unembed(self, x: Tensor, *, decoding: bool) -> Tensor | None:
        """Logits (..., V) of `x` (..., C), or None where torch computes them.

        `decoding` says that a decoding pass gave x.
        """
        few = x.shape[:-1].numel() <= self._max_rows
        if (
            not ((decoding or self._is_narrow) and few)
            or self._wants_gradient(x)
            or self._outer.are_others()
            or self._decode is None
        ):
            return None
        return self._decode.unembed(x)

    def _wants_gradient(self, x: Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(tensor.requires_grad for tensor in (x, *self._parameters))

    def _is_decoding(self, x: Tensor, cache: KVCache | None) -> bool:
        few = x.shape[:-1].numel() <= self._max_rows
        return few and cache is not None and (cache.length > 0 or self._is_narrow)

    @cached_property
    def _decode(self) -> DecodeStep | None:
        try:
            from .decode import DecodeStep
        except ImportError as error:
            warnings.warn(f"Numba cannot be used, so torch decodes: {error}", stacklevel=2)
            return None
        weights = Weights(
            self._config,
            [_block_weights(block) for block in self._blocks],
            (self._norm.weight, self._norm.bias),
            [block.attn.scale for block in self._blocks],
            self._table.weight,
            self._table.scale,
        )
        return DecodeStep(weights, self.n_threads)

    @cached_property
    def _prefill(self) -> Prefill | None:
        if self._decode is None or self._config.head_dim % 16:
            return None
        from .prefill import Prefill

        return Prefill(self._blocks, self._norm, self.n_threads)


def unfit(model: GPT2) -> str:
    """Why the compiled step cannot run `model`; empty if it can."""
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}"
    if model.dtype != torch.float32:
        return f"it computes in {str(model.dtype).removeprefix('torch.')}"
    if os.name == "nt":
        return "it needs a POSIX system"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return "Numba is told not to compile"
    weights = [w for block in model.h for w in _block_weights(block)]
    weights += [model.table.weight, model.table.scale]
    if not all(weight.is_contiguous() for weight in weights if weight is not None):
        return "the weights are not contiguous"
    if model.config.activation_function not in TANH_GELUS:
        return f"the activation is {model.config.activation_function}"
    if model.table.scale is not None and model.config.head_dim % ROWS_AT_ONCE:
        return f"int8 weights need heads of a multiple of {ROWS_AT_ONCE}"
    return ""


def _block_weights(block: Block) -> list[Tensor | None]:
    """A block's weights in the order that compiled code has them."""
    attn, mlp = block.attn, block.mlp
    vectors = [block.ln_1.weight, block.ln_1.bias, attn.c_attn.bias, attn.c_proj.bias]
    vectors += [block.ln_2.weight, block.ln_2.bias, mlp.c_fc.bias, mlp.c_proj.bias]
    matrices = (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj)
    return vectors + [w for layer in matrices for w in (layer.weight, layer.scale)]
