"""Kill the program at random moments, and look at what it leaves behind.

    python scripts/kill_harness.py --moments 50 --seed 1

Each job is run once to its end, and then again and again until a signal ends it: SIGKILL, SIGTERM
or SIGINT, at a moment drawn uniformly from its running time. After every signal a file under a
final name must be whole, the old one or the new one; after SIGTERM and SIGINT, which the program
handles, the exit status must be theirs and no temporary file may be left. At last the job is run
to its end, on top of what the signals left, and its files must be those of the first run, byte for
byte.

The jobs are forks of this process, which has loaded torch: the moments fall into the work and not
into the imports. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TEXTS = [f"Text {number} of the prompts, and" for number in range(12)]


@dataclass(frozen=True)
class Job:
    """`run` writes into a folder; `first` puts there what is there before."""

    run: Callable[[Path], None]
    first: Callable[[Path], None] = lambda folder: None
    # Files that an unfinished run may keep under a name of its own.
    kept: tuple[str, ...] = ()
    # A call of the library: nobody handles SIGTERM, and SIGINT is Python's KeyboardInterrupt.
    library: bool = False


@dataclass
class Outcome:
    """What the signals met, and what was wrong."""

    seconds: float
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def _program(*arguments: object) -> None:
    from gpt2attn.cli import main

    sys.argv = ["gpt2attn", *map(str, arguments)]
    main()


def _dump(folder: Path) -> None:
    text = " ".join(TEXTS)
    _program("attention", text, "-m", "pocket", "-o", folder / "maps.safetensors", "--force")


def _dump_many(folder: Path) -> None:
    source = _prompts(folder.parent)
    _program("attention", "--input", source, "-m", "pocket", "-o", folder / "maps")


def _generate(folder: Path) -> None:
    source = _prompts(folder.parent)
    options = ("-n", 12, "--batch-size", 2, "--seed", 1)
    _program(
        "generate", "--input", source, "--out", folder / "texts.jsonl", "-m", "pocket", *options
    )


def _prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    if not path.exists():
        path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


def _save(folder: Path, value: float = 1.0) -> None:
    import torch

    from gpt2attn import GPT2, GPT2Config, save_model

    with torch.device("meta"):
        model = GPT2(GPT2Config(n_layer=2, vocab_size=5000))
    model = model.to_empty(device="cpu").requires_grad_(False)  # 75 MB
    for parameter in model.parameters():
        parameter.fill_(value)
    save_model(model, folder / "saved")


JOBS = {
    "dump": Job(_dump),
    "dump many": Job(_dump_many),
    "generate many": Job(_generate, kept=("texts.jsonl.part",)),
    "save": Job(_save, first=lambda folder: _save(folder, 0.0), library=True),
}


def harass(name: str, moments: int, generator: random.Random) -> Outcome:
    """Run the job `name`, send it `moments` signals, and finish it."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as scratch:
        before, after, folder = (Path(scratch) / part for part in ("before", "after", "work"))
        for place in (before, after):
            place.mkdir()
            job.first(place)
        started = time.perf_counter()
        status, message = _fork(job, after)
        outcome = Outcome(time.perf_counter() - started)
        if status != 0:
            outcome.faults.append(f"the first run ended with {status}: {message}")
            return outcome
        old, new = _contents(before), _contents(after)
        shutil.copytree(before, folder)
        for number in range(moments):
            sent = generator.choice(SIGNALS)
            delay = generator.uniform(0, outcome.seconds)
            left_before = set(_contents(folder))
            status, message = _fork(job, folder, sent, delay)
            what = f"{sent.name} after {delay:.3f} s"
            outcome.statuses[f"{sent.name} {status}"] += 1
            outcome.faults += [
                f"{number}: {what}: {fault}"
                for fault in _look(folder, job, old, new, left_before, sent, status, message)
            ]
            if _contents(folder) == new:  # it was done before the signal came
                shutil.rmtree(folder)
                shutil.copytree(before, folder)
        status, message = _fork(job, folder)
        outcome.statuses[f"to the end {status}"] += 1
        left = {path: raw for path, raw in _contents(folder).items() if not _is_temporary(path)}
        if status != 0 or left != new:
            outcome.faults.append(f"the run after them ended with {status}: {message}{list(left)}")
    return outcome


def _look(
    folder: Path,
    job: Job,
    old: dict[str, bytes],
    new: dict[str, bytes],
    left_before: set[str],
    sent: signal.Signals,
    status: int,
    message: str,
) -> list[str]:
    """What is wrong with the files and the exit status that a signal left."""
    faults = []
    uncaught = {signal.SIGKILL, signal.SIGTERM} if job.library else {signal.SIGKILL}
    for path, raw in _contents(folder).items():
        if _is_temporary(path):
            if sent not in uncaught and path not in left_before:
                faults.append(f"{path} is left over")
        elif Path(path).name not in job.kept and raw not in (old.get(path), new.get(path)):
            faults.append(f"{path} is neither the old file nor the new one")
    expected = -sent if sent in uncaught else 128 + sent
    if status not in (0, expected):
        faults.append(f"exit status {status} instead of {expected}: {message[-300:]!r}")
    if "Traceback" in message:
        faults.append(f"a traceback: {message[-300:]}")
    return faults


def _fork(job: Job, folder: Path, sent: int | None = None, delay: float = 0.0) -> tuple[int, str]:
    """Run `job` in a fork that gets the signal `sent`; its exit status and its messages."""
    with tempfile.TemporaryFile() as messages:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the fork is ready for them
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(messages.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                if not job.library:
                    for number in (signal.SIGTERM, signal.SIGINT):  # what __main__ does
                        signal.signal(number, lambda number, _: os._exit(128 + number))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                job.run(folder)
                status = 0
            except SystemExit as stop:
                status = int(stop.code or 0)
            except KeyboardInterrupt:
                status = 130
            finally:
                os._exit(status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        done, result = 0, 0
        end = time.perf_counter() + delay
        while sent is not None and not done and time.perf_counter() < end:
            done, result = os.waitpid(child, os.WNOHANG)
            time.sleep(0.0005)
        if not done:
            if sent is not None:
                os.kill(child, sent)
            _, result = os.waitpid(child, 0)
        messages.seek(0)
        return os.waitstatus_to_exitcode(result), messages.read().decode(errors="replace")


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _is_temporary(path: str) -> bool:
    """Whether it is a hidden file of ours, or of the library that writes safetensors."""
    name = Path(path).name
    return name.startswith(".tmp") or (name.startswith(".") and name.endswith(".part"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moments", type=int, default=50, help="signals for each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", choices=JOBS, action="append", help="all by default")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    prepare()
    wrong = False
    for name in arguments.job or JOBS:
        outcome = harass(name, arguments.moments, generator)
        statuses = ", ".join(
            f"{status} x {count}" for status, count in sorted(outcome.statuses.items())
        )
        print(f"{name}: {outcome.seconds:.2f} s a run; {statuses}; {len(outcome.faults)} faults")
        for fault in outcome.faults:
            print(f"  {fault}")
        wrong |= bool(outcome.faults)
    sys.exit(wrong)


def prepare() -> None:
    """Import what the jobs need, and keep torch to one thread: its pool does not survive a fork."""
    import torch

    import gpt2attn.cli
    import gpt2attn.language_model  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
