"""Check and measure GPT-2 on a GPU in one run of a few minutes: one line of JSON, and a table.

    python scripts/gpu_check.py                     # random weights of GPT-2's size, made here
    python scripts/gpu_check.py FOLDER              # or a checkpoint of yours
    python scripts/gpu_check.py FOLDER --device cpu --quick     # the checks alone

The checks: logits, attention maps and greedy ids of the torch kernels against transformers on the
same device, TF32 off, to 1e-4 (`gpt2attn verify`); then the fast kernels against the torch ones,
step by step over one text. The measurements, on a GPU only: decoding in float32 and bfloat16, as
a share of the speed at which the same GPU reads its memory, and a long prompt. Needs the extra
`verify`. The JSON goes to stdout, the table and notes to stderr; exit status 1 if a check fails.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from gpt2attn import GPT2, KVCache, generate, load_model, save_model
from gpt2attn.benchmark.programs import TORCH, Program, bytes_per_token
from gpt2attn.cli import run_script
from gpt2attn.config import GPT2Config
from gpt2attn.verify import verify

N_CHECKED, N_DECODE, N_PREFILL, PROMPT_LENGTH = 256, 256, 1000, 8
LIMIT = 1e-4  # of the largest logit
READ_FLOATS = 2**30  # 4 GB
REPEATS = 5


def main(
    folder: Annotated[
        Path | None, typer.Argument(help="A checkpoint.", show_default="random weights")
    ] = None,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Where to compute.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Texts of at most 64 tokens.")] = False,
) -> None:
    """Print what was checked and measured; exit status 1 if a check failed."""
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA here; --device cpu runs the checks alone.")
    torch.set_float32_matmul_precision("highest")
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            folder = random_checkpoint(Path(scratch))
        found = check(folder, device, quick)
        if device == "cuda":
            found["speed"] = measure(folder, device)
    print(json.dumps(found))
    show(found)
    raise typer.Exit(0 if found["ok"] else 1)


def random_checkpoint(folder: Path) -> Path:
    from make_checkpoint import CONFIGS, random_model

    save_model(random_model(GPT2Config.from_file(CONFIGS / "gpt2.json")), folder)
    return folder


def check(folder: Path, device: str, quick: bool) -> dict[str, Any]:
    """The report of `verify`, and how far the fast kernels are from the torch ones."""
    report = verify(folder, device=device, quick=quick, notify=note)
    note("fast kernels against torch kernels")
    fast = compare_kernels(folder, device, 64 if quick else N_CHECKED)
    return {
        "ok": report.ok and fast["ok"],
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "verify": report.to_dict(),
        "fast_kernels": fast,
    }


@torch.no_grad()
def compare_kernels(folder: Path, device: str, n_new: int) -> dict[str, Any]:
    """Both kernels over the same text, token by token; and the greedy ids that each would choose.

    A choice may differ only where the two best logits are closer than the kernels' rounding.
    """
    models = [load_model(folder, device=device, kernels=kernels) for kernels in ("torch", "auto")]
    config = models[0].config
    n_new = min(n_new, config.n_positions - PROMPT_LENGTH)
    caches = [KVCache.for_model(model, 1, PROMPT_LENGTH + n_new) for model in models]
    ids = torch.arange(PROMPT_LENGTH)[None] % config.vocab_size
    off, largest, same, close = 0.0, 0.0, 0, 0
    for _ in range(n_new):
        exact, fast = (
            model(ids, cache=cache)[0, -1].cpu()
            for model, cache in zip(models, caches, strict=True)
        )
        off = max(off, float((exact - fast).abs().max()))
        largest = max(largest, float(exact.abs().max()))
        best = exact.topk(2)
        if int(fast.argmax()) == int(best.indices[0]):
            same += 1
        elif float(best.values[0] - best.values[1]) <= 2 * float((exact - fast).abs().max()):
            close += 1
        ids = best.indices[None, :1]
    return {
        "kernels": "torch" if models[1].compiled is None else type(models[1].compiled).__name__,
        "tokens": n_new,
        "same_choice": same,
        "tied_choice": close,
        "logits_off": off,
        "limit": LIMIT * largest,
        "ok": same + close == n_new and off <= LIMIT * largest,
    }


def measure(folder: Path, device: str) -> dict[str, Any]:
    """GB/s of reading, and for both formats tokens/s, GPU time of a step, and a long prompt."""
    read = read_bandwidth(device)
    rows = {}
    for name in ("float32", "bfloat16"):
        note(f"measuring {name}")
        model = load_model(folder, device=device, dtype=getattr(torch, name), kernels="auto")
        rows[name] = measure_model(model, name, read)
        del model
    return {"read_gb_s": read, **rows}


@torch.no_grad()
def measure_model(model: GPT2, name: str, read: float) -> dict[str, float]:
    n_bytes = bytes_per_token(model.config, Program(TORCH, name))
    draw = torch.Generator().manual_seed(0)
    n_prefill = min(N_PREFILL, model.config.n_positions)
    text = torch.randint(model.config.vocab_size, (1, n_prefill), generator=draw)
    n_new = min(N_DECODE, model.config.n_positions - PROMPT_LENGTH)

    def decode() -> None:
        list(generate(model, text[0, :PROMPT_LENGTH], n_new, temperature=0))

    def prefill() -> None:
        model.last_logits(text, cache=KVCache.for_model(model, 1, n_prefill))

    cache = KVCache.for_model(model, 1, PROMPT_LENGTH + n_new)
    model.hidden(text[:, :PROMPT_LENGTH], cache=cache)
    x = model.wte.weight[:1][None].clone()  # (1, 1, C)

    def step() -> None:
        """What the GPU does for a token, always the same one, with no waiting for the CPU."""
        y = model.ln_f(x) if model.compiled is None else model.compiled.hidden(x, cache, None)
        model.unembed(y[:, -1])

    rate = n_new / median_seconds(decode)
    step_seconds = median_seconds(lambda: [step() for _ in range(50)]) / 50
    return {
        "tokens_s": rate,
        "share_of_read": rate * n_bytes / 1e9 / read,
        "step_s": step_seconds,
        "step_share_of_read": n_bytes / step_seconds / 1e9 / read,
        "prefill_s": median_seconds(prefill),
    }


def read_bandwidth(device: str) -> float:
    """GB/s at which the device reads its memory: the best of several sums over 4 GB."""
    block = torch.ones(READ_FLOATS, device=device)
    return block.nbytes / min(seconds(block.sum) for _ in range(2 * REPEATS)) / 1e9


def median_seconds(work: Callable[[], object]) -> float:
    seconds(work)  # captures and warms up
    return statistics.median(seconds(work) for _ in range(REPEATS))


def seconds(work: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def show(found: dict[str, Any]) -> None:
    """The table, for a person."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", show_header=False, box=None)
    rows = found["verify"]["rows"]
    equal, wrong = sum(row["bit_equal"] for row in rows), sum(not row["ok"] for row in rows)
    table.add_row("device", f"{found['device']}, torch {found['torch']}, CUDA {found['cuda']}")
    table.add_row(
        "against transformers",
        f"{len(rows)} stages: {equal} bit-equal, {wrong} wrong",
    )
    fast = found["fast_kernels"]
    table.add_row(
        f"{fast['kernels']} against torch",
        f"{fast['same_choice']} of {fast['tokens']} choices equal, {fast['tied_choice']} tied, "
        f"logits off by {fast['logits_off']:.1e} (limit {fast['limit']:.1e})",
    )
    speed = found.get("speed", {})
    if speed:
        table.add_row("memory", f"{speed['read_gb_s']:.0f} GB/s")
        speed = {name: row for name, row in speed.items() if name != "read_gb_s"}
    for name, row in speed.items():
        table.add_row(
            name,
            f"{row['tokens_s']:.0f} tokens/s ({row['share_of_read']:.0%} of memory's), a step on "
            f"the GPU {row['step_s'] * 1e6:.0f} us ({row['step_share_of_read']:.0%}), "
            f"{N_PREFILL:,} tokens {row['prefill_s'] * 1e3:.1f} ms",
        )
    table.add_row("checks", "passed" if found["ok"] else "FAILED")
    Console(stderr=True, highlight=False, width=120).print(table)


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_script(main)
