"""Train a small GPT-2 of our own on a folder of plain text: how the built-in `pocket` was made.

    python scripts/train_pocket.py CORPUS OUT --minutes 85 --compile

CORPUS holds .txt files, or a .tar.xz of them, and HELDOUT.txt, which names the files kept for
evaluation. OUT receives the model (float16) and training.pt, the state from which the same command
resumes. All schedules follow elapsed time, not steps, so a run ends on time on a busy machine too.

The loss over 50,257 tokens is most of a small GPT-2's cost. Until the last part of the run it is
taken over a sample of the vocabulary: the frequent tokens and the batch's own labels, with weight
one, and others drawn uniformly, weighted so that the partition function's estimate is unbiased.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt2attn.checkpoint import save_model
from gpt2attn.config import GPT2Config
from gpt2attn.model import GPT2
from gpt2attn.tokenizer import Tokenizer

EVAL_CONTEXT = 512
LOSS_ROWS = 1024  # positions whose logits exist at one time: 206 MB over the whole vocabulary
EVAL_WINDOWS = 32  # for the progress line; the last figure is over all held-out text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus", type=Path, help="folder with .txt files or a .tar.xz of them")
    parser.add_argument("out", type=Path, help="folder for the model and the training state")
    parser.add_argument("--heldout", type=Path, help="list of held-out files (CORPUS/HELDOUT.txt)")
    parser.add_argument("--minutes", type=float, default=85.0, help="length of the run")
    parser.add_argument("--smoke", action="store_true", help="one minute at 2 layers of width 64")
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=128)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="rows of 1,024 tokens in one step")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak rate of the blocks")
    parser.add_argument("--embed-lr", type=float, default=8e-3, help="peak rate of wte and wpe")
    parser.add_argument("--frequent", type=int, default=3072, help="tokens in every sampled loss")
    parser.add_argument("--candidates", type=int, default=4608, help="tokens in a sampled loss")
    parser.add_argument("--full-loss", type=float, default=0.05, help="share at the end in full")
    parser.add_argument("--compile", action="store_true", help="twice as fast after a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.smoke:
        args.minutes, args.n_layer, args.n_embd, args.n_head = min(args.minutes, 1.0), 2, 64, 4
    return args


def main() -> None:
    args = parse_args()
    train_ids, heldout_ids = load_corpus(args.corpus, args.heldout)
    print(f"{len(train_ids):,} tokens to train on, {len(heldout_ids):,} held out", flush=True)
    torch.manual_seed(args.seed)
    config = GPT2Config(n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head)
    # The fused form of the same GELU trains faster; the saved config names GPT-2's own.
    model = GPT2(dataclasses.replace(config, activation_function="gelu_pytorch_tanh"))
    initialise(model)
    model.to(args.device)
    train(model, train_ids, heldout_ids, args)
    model = copy.deepcopy(model).half()
    model.config = config
    save_model(model, args.out)
    loss = heldout_loss(model.float(), heldout_ids)
    print(f"saved {args.out}: held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}")


def load_corpus(folder: Path, heldout: Path | None = None) -> tuple[Tensor, Tensor]:
    """Ids of the training files and of the held-out files, <|endoftext|> before each text."""
    names = set((heldout or folder / "HELDOUT.txt").read_text("utf-8").split())
    tokenizer = Tokenizer.gpt2()
    parts: dict[bool, list[int]] = {True: [], False: []}
    found = set()
    for name, text in read_texts(folder):
        found.add(name)
        parts[name in names] += [GPT2Config.eos_token_id, *tokenizer.encode(text)]
    if missing := names - found:
        raise SystemExit(f"Held-out files that are not in {folder}: {', '.join(sorted(missing))}.")
    return torch.tensor(parts[False]), torch.tensor(parts[True])


def read_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(file name, text) of each .txt of the folder, or of the .tar.xz in it, in order of name."""
    files = [path for path in folder.rglob("*.txt") if path.name != "HELDOUT.txt"]
    if files:
        for path in sorted(files, key=lambda path: path.name):
            yield path.name, path.read_text("utf-8")
        return
    archives = list(folder.glob("*.tar.xz"))
    if len(archives) != 1:
        raise SystemExit(f"{folder} has neither .txt files nor one .tar.xz.")
    with tarfile.open(archives[0]) as archive:
        members = [m for m in archive if m.isfile() and m.name.endswith(".txt")]
        for member in sorted(members, key=lambda member: Path(member.name).name):
            if Path(member.name).name != "HELDOUT.txt":
                yield Path(member.name).name, archive.extractfile(member).read().decode("utf-8")


def initialise(model: GPT2) -> None:
    """GPT-2's own start: N(0, 0.02), divided by sqrt(2 n_layer) where it adds to the stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = (2 * model.config.n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)
        else:
            nn.init.constant_(parameter, float("ln_" in name and name.endswith("weight")))


class Batches:
    """Rows of `context` tokens and their labels; the seed fixes each epoch's own cut and order."""

    def __init__(self, ids: Tensor, rows: int, context: int, seed: int) -> None:
        self.ids, self.rows, self.context, self.seed = ids, rows, context, seed
        self.steps_per_epoch = (len(ids) // context - 1) // rows
        if self.steps_per_epoch < 1:
            raise SystemExit(f"{len(ids)} tokens are too few for one step of {rows} x {context}.")

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        shift = int(torch.randint(self.context, (), generator=generator))
        order = torch.randperm(len(self.ids) // self.context - 1, generator=generator)
        starts = order[place * self.rows : (place + 1) * self.rows] * self.context + shift
        rows = torch.stack([self.ids[start : start + self.context + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]


def sample_candidates(
    labels: Tensor, frequent: Tensor, size: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """`size` ids to take the loss over, and the log of each one's weight in the partition function.

    `frequent` and `labels` are certain (weight 1); a drawn id stands for its share of the others.
    """
    keys = torch.rand(vocab_size)
    keys[labels.flatten()] = -1.0
    keys[frequent] = -1.0
    n_certain = int((keys < 0).sum())
    size = min(max(size, n_certain + 256), vocab_size)
    candidates = keys.topk(size, largest=False).indices
    weight = (vocab_size - n_certain) / max(size - n_certain, 1)
    return candidates, torch.where(keys[candidates] < 0, 0.0, math.log(weight))


def summed_loss(x: Tensor, table: Tensor, log_weights: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((x @ table.t()).float() + log_weights, labels, reduction="sum")


def backward(
    model: GPT2,
    ids: Tensor,
    labels: Tensor,
    sample: tuple[Tensor, Tensor] | None,
    loss_fn: Callable[..., Tensor],
) -> float:
    """Add the gradients of the mean loss over `sample` (ids, log weights) or, if None, all tokens.

    Returns that loss. Logits are made, and used up by the backward pass, a few rows at a time.
    """
    weight, labels = model.wte.weight, labels.to(model.device).flatten()
    if sample is None:
        table, log_weights = weight, torch.zeros(len(weight), device=model.device)
    else:
        candidates, log_weights = (part.to(model.device) for part in sample)
        slots = torch.zeros(len(weight), dtype=torch.long, device=model.device)
        slots[candidates] = torch.arange(len(candidates), device=model.device)
        table, labels = weight[candidates], slots[labels]
    # On a CPU with AVX-512 bfloat16 the same step took twice as long as in float32.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        x = model.hidden(ids).flatten(0, 1)
        x_leaf, table_leaf = x.detach().requires_grad_(), table.detach().requires_grad_()
        total = 0.0
        chunks = zip(x_leaf.split(LOSS_ROWS), labels.split(LOSS_ROWS), strict=True)
        for x_rows, label_rows in chunks:
            loss = loss_fn(x_rows, table_leaf, log_weights, label_rows) / len(labels)
            loss.backward()
            total += loss.item()
    torch.autograd.backward([x, table], [x_leaf.grad, table_leaf.grad])
    return total


@torch.no_grad()
def heldout_loss(
    model: GPT2,
    ids: Tensor,
    n_windows: int | None = None,
    loss_fn: Callable[..., Tensor] = summed_loss,
) -> float:
    """Mean loss per label over windows of EVAL_CONTEXT tokens: all, or `n_windows` of them."""
    starts = range(0, len(ids) - EVAL_CONTEXT, EVAL_CONTEXT)
    if n_windows is not None:
        starts = starts[:: max(len(starts) // n_windows, 1)][:n_windows]
    table, no_weights = model.wte.weight, torch.zeros(model.config.vocab_size, device=model.device)
    total = 0.0
    for start in starts:
        window = ids[start : start + EVAL_CONTEXT + 1].to(model.device)
        x = model.hidden(window[None, :-1]).flatten(0, 1)
        total += loss_fn(x, table, no_weights, window[1:]).item()
    return total / (len(starts) * EVAL_CONTEXT)


def make_optimizers(model: GPT2, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices and AdamW for the rest, or AdamW for all."""
    embeddings = [model.wte.weight, model.wpe.weight]
    matrices = [p for p in model.h.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": embeddings, "lr": args.embed_lr, "weight_decay": 0.0},
        {"params": vectors, "lr": args.lr, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if args.optimizer == "muon":
        # match_rms_adamw: the size of an update is AdamW's, so one rate serves both.
        optimizers.append(
            torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        )
    else:
        groups.append({"params": matrices, "lr": args.lr, "weight_decay": 0.1})
    optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def update(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """One step at `factor` times the peak rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()


def lr_factor(progress: float) -> float:
    """Share of the peak rate: up in the first hundredth, down to zero over the last two thirds."""
    return max(0.0, min(1.0, progress / 0.01, (1.0 - progress) / 0.67))


def context_of_step(step: int, progress: float, longest: int) -> int:
    """Short rows first, which are cheaper; but every position is trained from the start.

    With 256 up to the end, positions past 255 stayed 0.2 nats worse than the others.
    """
    shorter, long_every = (256, 8) if progress < 0.4 else (512, 4)
    return longest if step % long_every == 0 else shorter


def train(model: GPT2, train_ids: Tensor, heldout_ids: Tensor, args: argparse.Namespace) -> None:
    """Train until `args.minutes` have passed, resuming from OUT/training.pt."""
    batches = Batches(train_ids, args.rows, model.config.n_positions, args.seed)
    counts = train_ids.bincount(minlength=model.config.vocab_size)
    frequent = counts.topk(args.frequent).indices
    optimizers = make_optimizers(model, args)
    step, elapsed = load_state(args.out, model, optimizers)
    if step:
        print(f"resuming at step {step:,}, {elapsed / 60:.1f} minutes", flush=True)
    loss_fn: Callable[..., Tensor] = summed_loss
    if args.compile:
        loss_fn = torch.compile(summed_loss, dynamic=False)
        for block in model.h:
            block.compile(dynamic=False)
    started = time.monotonic() - elapsed
    tokens_per_step = args.rows * batches.context
    reported_step, reported_at, losses = step, elapsed, []
    while (progress := (time.monotonic() - started) / (60 * args.minutes)) < 1.0:
        ids, labels = batches[step]
        context = context_of_step(step, progress, batches.context)
        ids, labels = ids.reshape(-1, context), labels.reshape(-1, context)
        torch.manual_seed(args.seed + step)  # what is drawn depends on the step alone
        sample = None
        if progress < 1.0 - args.full_loss:
            sample = sample_candidates(labels, frequent, args.candidates, model.config.vocab_size)
        losses.append(backward(model, ids, labels, sample, loss_fn))
        update(optimizers, lr_factor(progress))
        step += 1
        elapsed = time.monotonic() - started
        if elapsed - reported_at >= min(120.0, 6.0 * args.minutes):
            speed = (step - reported_step) * tokens_per_step / (elapsed - reported_at)
            loss = heldout_loss(model, heldout_ids, EVAL_WINDOWS, loss_fn)
            print(
                f"{elapsed / 60:6.1f} min  step {step:6,}"
                f"  {step * tokens_per_step / 1e6:6.2f} M tokens  {speed:7,.0f} tokens/s"
                f"  train {sum(losses) / len(losses):.4f}  held-out {loss:.4f}",
                flush=True,
            )
            elapsed = time.monotonic() - started
            save_state(args.out, model, optimizers, step, elapsed)
            reported_step, reported_at, losses = step, elapsed, []
    print(f"trained {step:,} steps, {step * tokens_per_step:,} tokens", flush=True)
    save_state(args.out, model, optimizers, step, time.monotonic() - started)


def save_state(
    out: Path, model: GPT2, optimizers: list[torch.optim.Optimizer], step: int, elapsed: float
) -> None:
    """Write OUT/training.pt beside its name, then rename: a killed run leaves the old one whole."""
    out.mkdir(parents=True, exist_ok=True)
    state = {
        "config": dataclasses.asdict(model.config),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "elapsed": elapsed,
    }
    part = out / "training.pt.part"
    torch.save(state, part)
    os.replace(part, out / "training.pt")


def load_state(
    out: Path, model: GPT2, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, float]:
    """(step, elapsed seconds) of OUT/training.pt, whose tensors are loaded; zeros without one."""
    path = out / "training.pt"
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location=model.device, weights_only=True)
    if state["config"] != dataclasses.asdict(model.config):
        raise SystemExit(f"{path} is of a model of another size: give its options or another OUT.")
    model.load_state_dict(state["model"])
    for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return state["step"], state["elapsed"]


if __name__ == "__main__":
    main()
