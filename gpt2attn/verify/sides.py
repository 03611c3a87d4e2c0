"""Both sides of a comparison: the models, and runs that tell of each stage as it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionSteps
from ..cache import KVCache
from ..generation import Row as TextRow
from ..generation import decode
from ..model import GPT2
from ..sampling import Sampling
from ..untrusted import listed
from .report import OBSERVED, Case

See = Callable[[str, Tensor], None]


class VerifyError(ValueError):
    """The comparison cannot be made; the message says why and what to do."""


class Reference:
    """transformers' models over one folder, loaded when first used: eager, sdpa, and the judge.

    Each is loaded by itself: models that share a config object share its attention implementation.
    """

    def __init__(
        self, transformers: Any, folder: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._transformers, self._folder = transformers, folder
        self._device, self._dtype = device, dtype
        self._models: dict[str, Any] = {}

    def for_pair(self, pair: str) -> Any:
        implementation = "eager" if pair == OBSERVED else "sdpa"
        if implementation not in self._models:
            self._models[implementation] = self._load(implementation)
        return self._models[implementation]

    def judge(self) -> Any:
        """The eager model in float64."""
        if "judge" not in self._models:
            judge = self._load("eager").double()
            for block in judge.transformer.h:
                # It would lower the scores to float32; in float64 it is the same function.
                block.attn.reorder_and_upcast_attn = False
            self._models["judge"] = judge
        return self._models["judge"]

    def _load(self, implementation: str) -> Any:
        version = self._transformers.__version__
        try:
            model, info = self._transformers.GPT2LMHeadModel.from_pretrained(
                self._folder,
                attn_implementation=implementation,
                dtype=self._dtype,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # each of its versions fails in ways of its own
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise VerifyError(
                f"transformers {version} cannot load {self._folder}: {reason}"
            ) from error
        invented = info["missing_keys"]
        if invented:
            raise VerifyError(
                f"transformers {version} does not find {listed(invented)} in {self._folder} and "
                "fills in random numbers, so it is no reference; save_model writes a copy with the "
                "names that it reads."
            )
        # Without the folder's end-of-text id a greedy run never ends early.
        model.generation_config = self._transformers.GenerationConfig()
        return model.to(self._device).eval()


@contextmanager
def _watched(transformer: Any, see: See) -> Iterator[None]:
    """Tell `see` of the embeddings and of each block's and the final LayerNorm's output."""

    def embeddings(_: nn.Module, args: tuple[Any, ...]) -> None:
        see("embeddings", args[0])

    def output_of(stage: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            see(stage, output[0] if isinstance(output, tuple) else output)  # older blocks: a tuple

        return hook

    handles = [transformer.h[0].register_forward_pre_hook(embeddings)]
    handles += [
        block.register_forward_hook(output_of(f"block {layer}"))
        for layer, block in enumerate(transformer.h)
    ]
    handles.append(transformer.ln_f.register_forward_hook(output_of("final LayerNorm")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_ours(model: GPT2, case: Case, see: See, *, observed: bool, use_cache: bool) -> None:
    def observe(layer: int, steps: AttentionSteps) -> None:
        see(f"attention map {layer}", steps.weights)

    cache = KVCache.for_model(model, len(case.ids)) if use_cache else None
    with _watched(model, see):
        logits = model(
            case.ids,
            cache=cache,
            attention_mask=case.mask,
            observe=observe if observed else None,
        )
    see("logits", logits)


def run_theirs(hf: Any, case: Case, see: See, *, use_cache: bool = False) -> None:
    def map_of(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            if output[1] is not None:  # sdpa has none
                see(f"attention map {layer}", output[1])

        return hook

    handles = [
        block.attn.register_forward_hook(map_of(layer))
        for layer, block in enumerate(hf.transformer.h)
    ]
    try:
        with _watched(hf.transformer, see):
            logits = their_logits(hf, case, use_cache=use_cache)
    finally:
        for handle in handles:
            handle.remove()
    see("logits", logits)


def our_logits(model: GPT2, case: Case) -> Tensor:
    return model(case.ids, attention_mask=case.mask)


def their_logits(hf: Any, case: Case, *, use_cache: bool = False) -> Tensor:
    inputs = {"input_ids": case.ids}
    if case.mask is not None:
        # Some versions of transformers do not derive the positions from the mask here.
        positions = (case.mask.cumsum(dim=1) - 1).clamp(min=0)
        inputs |= {"attention_mask": case.mask.long(), "position_ids": positions}
    inputs = {name: tensor.to(hf.device) for name, tensor in inputs.items()}
    return hf(**inputs, use_cache=use_cache).logits


def in_parts(model: GPT2, case: Case, sizes: Sequence[int], *, last_only: bool = False) -> Tensor:
    """Logits (B, T, V) of the case fed to one cache in parts, or of each part's last token only."""
    cache = KVCache.for_model(model, len(case.ids), case.ids.shape[1])
    parts = []
    for ids in case.ids.split(list(sizes), dim=1):
        mask = None if case.mask is None else case.mask[:, : cache.length + ids.shape[1]]
        if last_only:
            parts.append(model.last_logits(ids, cache=cache, attention_mask=mask)[:, None])
        else:
            parts.append(model(ids, cache=cache, attention_mask=mask))
    return torch.cat(parts, dim=1)


def greedy_ids(model: GPT2, case: Case, n_steps: int) -> Tensor:
    """(B, n_steps) ids that the library's own loop chooses greedily."""
    mask = torch.ones_like(case.ids, dtype=torch.bool) if case.mask is None else case.mask
    rows = [
        TextRow(ids[real].tolist(), Sampling(temperature=0.0), seed=0)
        for ids, real in zip(case.ids, mask, strict=True)
    ]
    for _ in decode(model, rows, n_steps):
        pass
    return torch.tensor([row.ids for row in rows])


def their_greedy(hf: Any, case: Case, n_steps: int) -> Any:
    mask = torch.ones_like(case.ids) if case.mask is None else case.mask.long()
    return hf.generate(
        case.ids.to(hf.device),
        attention_mask=mask.to(hf.device),
        max_new_tokens=n_steps,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
