"""Decoding and prefill speed beside transformers, on one checkpoint and this machine.

Each program runs in a process of its own, since thread pools of several libraries disturb each
other; the programs take turns, and medians are printed, since machines are noisy. Decoding reads
all weights for each token, so the same process also measures how fast it can read memory.

    python scripts/make_checkpoint.py gpt2 out/gpt2-random
    python scripts/compare_speed.py out/gpt2-random
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

N_PREFILL, N_DECODE = 1000, 64
PROGRAMS = ("gpt2attn, kernels torch", "gpt2attn, kernels auto", "transformers")


def main(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each program.")] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    only: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print tokens per second and prefill seconds of this package and of transformers."""
    if only is not None:
        print(json.dumps(measure(only, folder, threads)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name in PROGRAMS:
            command = [sys.executable, __file__, str(folder), "--only", name]
            run = subprocess.run(
                [*command, "--threads", str(threads)], capture_output=True, text=True, check=True
            )
            results[name].append(json.loads(run.stdout.splitlines()[-1]))
    print(f"medians of {rounds} runs, {threads} threads, float32, batch 1")
    print(f"{'':26}{'tokens/s':>10}{'GB/s':>8}{'of read':>9}{'1,000 tokens, s':>17}{'maps, s':>9}")
    for name, runs in results.items():
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        share = median["gigabytes"] / median["read"]
        print(
            f"{name:26}{median['tokens']:>10.1f}{median['gigabytes']:>8.1f}{share:>9.0%}"
            f"{median['prefill']:>17.2f}{median['maps']:>9.2f}"
        )


def measure(name: str, folder: Path, threads: int) -> dict[str, float]:
    """One program in this process: tokens/s, seconds of a prefill and of all its maps, GB/s."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (1, N_PREFILL), generator=generator)
    program = transformers(folder) if name == "transformers" else ours(folder, name)
    prefill, decode, maps, n_bytes = program
    decode(ids[:, :8])  # warm-up, compilation included
    seconds = [timed(lambda: prefill(ids)) for _ in range(3)]
    map_seconds = [timed(lambda: maps(ids)) for _ in range(3)]
    speeds = [N_DECODE / timed(lambda: decode(ids[:, :8])) for _ in range(3)]
    tokens = statistics.median(speeds)
    return {
        "tokens": tokens,
        "gigabytes": tokens * n_bytes / 1e9,
        "read": read_bandwidth(),
        "prefill": statistics.median(seconds),
        "maps": statistics.median(map_seconds),
    }


def ours(folder: Path, name: str) -> tuple[Callable, Callable, Callable, int]:
    from gpt2attn import KVCache, attention_maps, generate, load_model

    model = load_model(folder, kernels=name.split()[-1])

    def prefill(ids):
        x = model.hidden(ids, cache=KVCache.for_model(model))
        return model.unembed(x[:, -1])

    def decode(ids):
        return list(generate(model, ids, N_DECODE, temperature=0))

    def maps(ids):
        return attention_maps(model, ids)

    return prefill, decode, maps, sum(p.nbytes for p in model.parameters())


def transformers(folder: Path) -> tuple[Callable, Callable, Callable, int]:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder)
    eager = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")

    def prefill(ids):
        return model(ids, use_cache=True, logits_to_keep=1).logits

    def decode(ids):
        options = {"max_new_tokens": N_DECODE, "min_new_tokens": N_DECODE, "pad_token_id": 0}
        return model.generate(ids, do_sample=False, **options)

    def maps(ids):
        return eager(ids, use_cache=False, output_attentions=True).attentions

    return prefill, decode, maps, sum(p.nbytes for p in model.parameters())


def read_bandwidth() -> float:
    """GB/s at which this process can read memory: the best of several sums over 400 MB."""
    import torch

    block = torch.ones(100_000_000)
    return block.nbytes / min(timed(block.sum) for _ in range(5)) / 1e9


def timed(work: Callable) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
