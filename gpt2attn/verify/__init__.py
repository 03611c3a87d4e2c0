"""Parity report: this GPT-2 against Hugging Face transformers, stage by stage, on one checkpoint.

Like is compared with like: the observed path with transformers' eager attention, the fused path
with its sdpa, a run without a cache with `use_cache=False`, one with a cache with `use_cache=True`.
In float32 on a CPU, with transformers 5.24, each of these pairs is claimed to be bit-equal, but for
the kernels "auto", which are judged as what follows.

What is not bit-equal is judged by transformers itself in float64, on the same weights and ids: over
all inputs, ours may be no farther from that run than twice transformers' own distance. (Over one
small input the larger of two roundings is luck.) The least distance that counts is one rounding of
the largest number there.
On CUDA, and where our runs are compared with each other (cached, in chunks or padded, against
plain), shapes and so kernels differ by design; there 1e-4 is enough. Beyond it float64 judges in
the same way, with the plain run in transformers' place: logits of wide random weights reach 30 and
more, where float32 itself is that coarse.
A greedy choice may differ only where the two best logits are closer than such a rounding.

Only this package imports transformers, and only while `verify` runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import load_model
from ..hub import resolve
from ..tokenizer import Tokenizer
from .comparison import Comparison, Notify
from .report import Case, Report, Row
from .sides import Reference, VerifyError

__all__ = ["Case", "Report", "Row", "VerifyError", "verify"]

LENGTHS = (1, 6, 64, 1000)
QUICK_LENGTHS = (1, 6, 64)
BATCH_SIZES = (1, 3)
SENTENCE = "Apple raised its price target"
BIT_EQUAL_VERSION = "5.24."


def verify(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    quick: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    allow_pickle: bool = False,
    notify: Notify | None = None,
) -> Report:
    """Run transformers and this package on one checkpoint and compare every stage.

    The inputs are 1, 6, 64 and 1,000 random ids (`quick`: up to 64; never more than n_positions) in
    batches of 1 and 3, a left-padded batch, and, if the folder has a tokenizer, "Apple raised its
    price target"; `seed` fixes the random ones. `notify` gets a line before a download and before
    each case. Raises VerifyError if transformers is missing or does not load the folder as it
    stands, and what `load_model` raises if this package does not.
    """
    transformers = _import_transformers()
    device = torch.device(device)
    source = resolve(name, revision=revision, notify=notify)
    model, fast = (
        load_model(
            source.folder, device=device, dtype=dtype, allow_pickle=allow_pickle, kernels=kernels
        )
        for kernels in ("torch", "auto")
    )
    cases = make_cases(
        model.config.vocab_size, model.config.n_positions, _sentence(source.folder), quick, seed
    )
    with torch.no_grad(), _quiet(transformers), _without_tf32():
        reference = Reference(transformers, source.folder, device, dtype)
        comparison = Comparison(model, reference, fast if fast.compiled else None)
        comparison.run(cases, notify or (lambda line: None))
    return Report(
        name=os.fspath(name),
        folder=source.folder,
        revision=source.revision,
        stack={
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": str(device),
            "threads": torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
            "kernels": "torch; auto where it says so",
        },
        bit_equality_claimed=(
            transformers.__version__.startswith(BIT_EQUAL_VERSION)
            and device.type == "cpu"
            and dtype == torch.float32
        ),
        cases=cases,
        rows=comparison.rows(),
    )


def make_cases(
    vocab_size: int, n_positions: int, sentence: Sequence[int] | None, quick: bool, seed: int
) -> list[Case]:
    """A prompt, every batch size and length that fits, and a left-padded batch, in this order."""
    generator = torch.Generator().manual_seed(seed)

    def random_ids(batch_size: int, length: int) -> Tensor:
        return torch.randint(vocab_size, (batch_size, length), generator=generator)

    if sentence and len(sentence) < n_positions and max(sentence) < vocab_size:
        cases = [Case(SENTENCE, torch.tensor([sentence]))]
    else:
        cases = [Case("prompt", random_ids(1, max(1, min(6, n_positions // 2))))]
    lengths = sorted({min(length, n_positions) for length in (QUICK_LENGTHS if quick else LENGTHS)})
    cases += [
        Case(f"{batch_size} x {length}", random_ids(batch_size, length))
        for batch_size in BATCH_SIZES
        for length in lengths
    ]
    width = max(1, min(48, n_positions // 2))
    real = torch.tensor([width, (width + 1) // 2, (width + 3) // 4])
    mask = torch.arange(width) >= width - real[:, None]
    return [*cases, Case(f"3 x {width} left-padded", random_ids(3, width), mask)]


def _sentence(folder: Path) -> list[int] | None:
    """The ids of SENTENCE by the folder's own tokenizer, if it has one that can be read."""
    try:
        return Tokenizer.from_folder(folder).encode(SENTENCE)
    except (OSError, ValueError):
        return None


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise VerifyError(
            f"verify compares with transformers, which cannot be imported ({error}): "
            'pip install "gpt2attn[verify]"'
        ) from None
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' progress bars and advice, which say nothing about this comparison."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _without_tf32() -> Iterator[None]:
    """CUDA's TF32 keeps 10 bits of a float32; the caller's setting comes back afterwards."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
