"""GPT-2, from scratch: `GPT2` and its parts, named as the checkpoint names them.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

Shapes: B batch, T new tokens (queries), S cached and new tokens (keys), C n_embd, H heads,
D head_dim, V vocabulary. There is no dropout, so training mode computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import AttentionSteps, allowed_keys, attend, causal_mask
from .cache import KVCache
from .config import GPT2Config
from .kernels import Linear, Table, use_kernels
from .kernels.activations import activation

if TYPE_CHECKING:
    from .kernels.cuda import GraphStep
    from .kernels.step import CompiledStep

# observe(layer, steps) reads what a layer computed. Two attributes are looked at where they are
# there: `layers`, which it wants, and `room(layer, shape)`, memory for the weights of a layer, or
# None.
Observer = Callable[[int, AttentionSteps], object]
# edit(layer, site, x) returns what the pass goes on with in place of x. Sites: "heads", the outputs
# of a layer's heads before c_proj (B, H, T, D), and "block", the residual stream that leaves a
# block (B, T, C).
Edit = Callable[[int, str, Tensor], Tensor]


class Attention(nn.Module):
    """Masked multi-head self-attention of one layer."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head, self.head_dim = config.n_head, config.head_dim
        self.upcast = config.reorder_and_upcast_attn
        self.scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= float(layer + 1)
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None,
        allowed: Tensor | None,
        observe: Observer | None,
        edit: Edit | None,
    ) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, self.head_dim).transpose(1, 2)  # (B, H, T, D)
            for part in self.c_attn(x).split(C, dim=2)
        )
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, H, S, D)
        if observe is None:
            # is_causal aligns its triangle top left, so it is right only where no keys are cached.
            output = F.scaled_dot_product_attention(
                q, k, v, allowed, scale=self.scale, is_causal=allowed is None and T > 1
            )
        else:
            if allowed is None and T > 1:
                allowed = causal_mask(T, T, x.device)
            find_room = getattr(observe, "room", None)
            room = (
                None
                if find_room is None
                else find_room(self.layer, (B, self.n_head, T, k.shape[2]))
            )
            steps = attend(
                q, k, v, scale=self.scale, allowed=allowed, upcast=self.upcast, room=room
            )
            observe(self.layer, steps)
            output = steps.output
        if edit is not None:
            output = edit(self.layer, "heads", output)
        return self.c_proj(output.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two matrices with a non-linearity between them, for each position alone."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, config.inner_dim)
        self.c_proj = Linear(config.inner_dim, config.n_embd)
        self.activation = activation(config.activation_function, "torch")

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """LayerNorm, attention, residual; LayerNorm, MLP, residual. The shape that enters leaves."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None,
        allowed: Tensor | None,
        observe: Observer | None,
        edit: Edit | None,
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, allowed, observe, edit)
        x = x + self.mlp(self.ln_2(x))
        return x if edit is None else edit(self.layer, "block", x)


class GPT2(nn.Module):
    """The whole network. A new one has arbitrary weights: see `checkpoint.load_model`."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = Table(config.vocab_size, config.n_embd)
        self.wpe = Table(config.n_positions, config.n_embd)
        blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.h: Sequence[Block] = blocks  # type: ignore[assignment]
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = Table(config.vocab_size, config.n_embd)
        self.compiled: CompiledStep | GraphStep | None = None  # see kernels.use_kernels
        self.kernels = self.wanted_kernels = "torch"  # likewise: what runs, and was asked for

    def _apply(self, *arguments: Any, **options: Any) -> GPT2:
        super()._apply(*arguments, **options)
        use_kernels(self, self.wanted_kernels)  # for the weights where and as they are now
        return self

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        result = super().load_state_dict(*arguments, **options)
        use_kernels(self, self.wanted_kernels)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: not the compiled step, which knows this model's memory."""
        return {**self.__dict__, "compiled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        use_kernels(self, self.wanted_kernels)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations; the big matrices may be stored in another one (`kernels.formats`)."""
        return self.wpe.weight.dtype

    @property
    def table(self) -> Table:
        """The matrix (V, C) of the unembedding: the embedding's own, unless they are untied."""
        return self.wte if self.config.tie_word_embeddings else self.lm_head

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def _step(self) -> CompiledStep | GraphStep | None:
        # torch.compile and torch.export cannot follow Numba's code, and make their own.
        return None if torch.compiler.is_compiling() else self.compiled

    def forward(
        self,
        ids: Tensor | Sequence[Sequence[int]],
        *,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        observe: Observer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """Logits (B, T, V) for `ids` (B, T).

        `cache` supplies the keys and values of earlier tokens and takes those of `ids`.
        `attention_mask` (B, cached + T) is 1 for a token and 0 for padding; positions count tokens
        only, so padded rows give what they give alone. `observe(layer, steps)` is called with each
        layer's AttentionSteps; if it has an attribute `layers`, only those layers leave the fused
        kernel, or write out their weights where compiled code runs. `edit(layer, site, x)` replaces
        activations; see `edits` for ready ones.

        Raises ValueError, before any compute, for ids outside the vocabulary, a mask that does not
        fit, or more tokens than the context or the cache has room for.
        """
        decoding = cache is not None and cache.length > 0
        x = self.hidden(ids, cache=cache, attention_mask=attention_mask, observe=observe, edit=edit)
        return self.unembed(x, decoding=decoding)

    def last_logits(
        self,
        ids: Tensor | Sequence[Sequence[int]],
        *,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Logits (B, V) after the last of `ids`, which decide on the next token.

        Arguments are those of `forward`, and so are the numbers with kernels "torch". With "auto"
        the last block is spared what only earlier positions need.
        """
        decoding = cache is not None and cache.length > 0
        x = self.hidden(
            ids, cache=cache, attention_mask=attention_mask, observe=observe, last_only=True
        )
        # (B, C), not (B, 1, C): a strided batch of matrices is another product, slower and rounded
        # differently.
        return self.unembed(x[:, -1], decoding=decoding)

    def hidden(
        self,
        ids: Tensor | Sequence[Sequence[int]],
        *,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        observe: Observer | None = None,
        edit: Edit | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """The residual stream (B, T, C) after the final LayerNorm; arguments as in `forward`.

        With `last_only` (B, 1, C), that of the last position.
        """
        ids = as_ids(ids, self.config.vocab_size).to(self.device)
        B, T = ids.shape
        past = 0 if cache is None else cache.length
        if cache is not None:
            cache.check_fits(self.config, self.dtype)
            cache.check_room(B, T)
        mask = self._mask(attention_mask, B, past + T, cache)
        x = (self.wte(ids) + self.wpe(self._positions(mask, T, past))).to(self.dtype)
        step = self._step if edit is None else None
        if step is not None and step.takes(x, cache, observe):
            x = step.hidden(x, cache, mask, observe, last_only=last_only)
        else:
            allowed = self._allowed(mask, T, past)
            wanted = getattr(observe, "layers", None)
            for layer, block in enumerate(self.h):
                looked_at = observe is not None and (wanted is None or layer in wanted)
                x = block(x, cache, allowed, observe if looked_at else None, edit)
            x = self.ln_f(x[:, -1:] if last_only else x)
        if cache is not None:
            cache.advance(T)
        return x[:, -1:] if last_only else x

    def unembed(self, x: Tensor, *, decoding: bool = False) -> Tensor:
        """Logits (..., V) of (..., C): a product with the embedding table, unless untied.

        `decoding` says that x comes from a pass over a few tokens after cached ones, whose logits
        the compiled step computes, too.
        """
        step = self._step
        logits = None if step is None else step.unembed(x, decoding=decoding)
        return self.table.scores(x) if logits is None else logits

    def _mask(
        self, attention_mask: Tensor | None, B: int, S: int, cache: KVCache | None
    ) -> Tensor | None:
        """`attention_mask` checked, as booleans (B, S), True for a token."""
        if attention_mask is not None:
            mask = _as_mask(attention_mask, B, S, 0 if cache is None else cache.length)
            if cache is not None:
                cache.padded = cache.padded or not bool(mask.all())
            return mask.to(self.device)
        if cache is not None and cache.padded:
            raise ValueError(
                f"The cache holds padding: pass attention_mask of shape ({B}, {S}) again."
            )
        return None

    def _positions(self, mask: Tensor | None, T: int, past: int) -> Tensor:
        """Positions (1 or B, T) of the new tokens: how many real tokens stand before each."""
        if mask is None:
            self._check_length(past + T, T, past)
            return torch.arange(past, past + T, device=self.device)[None]
        counts = mask.cumsum(dim=1)
        self._check_length(int(counts[:, -1].max()), T, past)
        return (counts - 1).clamp_(min=0)[:, past:]

    def _allowed(self, mask: Tensor | None, T: int, past: int) -> Tensor | None:
        """Where the new tokens may look, broadcastable to (B, H, T, S), padding nowhere.

        None means causal with nothing cached, which the kernels do by themselves, or one query,
        which may look at everything.
        """
        if mask is None and (T == 1 or past == 0):
            return None
        return allowed_keys(T, past + T, mask, self.device)

    def _check_length(self, n_tokens: int, n_new: int, past: int) -> None:
        limit = self.config.n_positions
        if n_tokens > limit:
            cached = f" after {past} cached ones" if past else ""
            raise ValueError(
                f"{n_new} tokens{cached} need {n_tokens} positions, but this model has {limit}; "
                "shorten the text."
            )


def as_ids(ids: Tensor | Sequence[int] | Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """`ids` as an int64 tensor (B, T); one flat row becomes (1, T).

    Raises ValueError for an empty input, unequal rows, numbers that are not whole, or an id outside
    0 to vocab_size - 1, naming the first one and its place.
    """
    try:
        tensor = torch.as_tensor(ids)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        raise ValueError("Token ids must be whole numbers in rows of equal length.") from None
    if tensor.numel() == 0:
        raise ValueError("There are no token ids: give at least one token.")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"Token ids must be whole numbers, not {tensor.dtype}.")
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2:
        raise ValueError(
            f"Token ids must have the shape (batch, tokens), not {tuple(tensor.shape)}."
        )
    tensor = tensor.long()
    if torch.compiler.is_compiling():  # a graph has no numbers to look at; the embedding looks
        return tensor
    low, high = (int(bound) for bound in tensor.aminmax())
    if low < 0 or high >= vocab_size:
        row, column = ((tensor < 0) | (tensor >= vocab_size)).nonzero()[0].tolist()
        raise ValueError(
            f"Token id {int(tensor[row, column])} (row {row}, position {column}) is outside the "
            f"vocabulary: ids run from 0 to {vocab_size - 1}."
        )
    return tensor


def check_finite(x: Tensor) -> Tensor:
    """`x` as it is; raises ValueError if there is a NaN or an infinity in it."""
    if not bool(x.isfinite().all()):
        dtype = str(x.dtype).removeprefix("torch.")
        raise ValueError(
            f"The model's numbers became NaN or infinite: its weights are damaged, or too large "
            f"for {dtype}; use a whole copy of the model, or a wider dtype."
        )
    return x


def _as_mask(attention_mask: Tensor, B: int, S: int, past: int) -> Tensor:
    mask = torch.as_tensor(attention_mask)
    if tuple(mask.shape) != (B, S):
        cached = f" ({past} cached + {S - past} new)" if past else ""
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}, but {(B, S)}{cached} is needed."
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must hold 1 for tokens and 0 for padding, nothing else.")
    mask = mask.bool()
    empty = (~mask.any(dim=1)).nonzero()
    if len(empty):
        raise ValueError(f"attention_mask row {int(empty[0])} is all padding: it needs one token.")
    return mask
