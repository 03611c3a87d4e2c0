"""Give the program damaged and senseless input, and see whether it keeps its word.

    python scripts/fuzz.py header --cases 10000 --seed 1
    python scripts/fuzz.py all --cases 200

A case may succeed, or be refused in one sentence: a ValueError, or from the command line the exit
status 1 or 2 with a message. Everything else is a find: another exception, a wrong result, more
than 5 seconds, or 500 MB more memory than before. Each case has its own seed, which is printed with
the find: `--seed SEED --cases 1` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import string
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from unittest import mock

SECONDS = 5.0
MEGABYTES = 500

# Numbers and texts at the edges of what programs expect.
NUMBERS = [
    0, 1, -1, 2, 3, 7, 64, 255, 256, 1023, 10**5, 2**31, 2**53, 2**63 - 1, 2**64, -(2**63), 10**30,
]  # fmt: skip
FLOATS = [0.0, -0.0, 0.5, 1.0, 1e-30, 1e30, -1.5, math.inf, -math.inf, math.nan]
TEXTS = [
    "", " ", "a", "the", "\n", "\0", "\ufeff", "\ud83d", "\ud83d\ude00", "<|endoftext|>", "é漢😀",
    "../x", "/etc/passwd", "C:x", "a" * 5000, "\x1b[31m", "٣", "-1", "nan", "1e400", "\u2028", "'",
]  # fmt: skip


class FaultError(Exception):
    """What a case did is neither success nor a refusal."""


def value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, most of them small."""
    kind = chance.randrange(9 if depth < 4 else 6)
    if kind < 6:
        return [
            None, True, False, chance.choice(NUMBERS), chance.choice(FLOATS), chance.choice(TEXTS)
        ][kind]  # fmt: skip
    if kind == 6:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {
        chance.choice(TEXTS) + str(n): value(chance, depth + 1) for n in range(chance.randrange(4))
    }


def text(chance: random.Random, longest: int = 40) -> str:
    """Any text that UTF-8 can hold, or now and then one that it cannot."""
    pieces = []
    for _ in range(chance.randrange(longest)):
        kind = chance.randrange(8)
        if kind < 4:
            pieces.append(chance.choice(string.printable))
        elif kind < 6:
            code = chance.randrange(0x110000)
            pieces.append(chr(code) if not 0xD800 <= code < 0xE000 else "x")
        elif kind == 6:
            pieces.append(" " * chance.randrange(5))
        else:
            pieces.append(chance.choice(TEXTS[:-1]))
    return "".join(pieces)


def damaged(chance: random.Random, raw: bytes, hits: int = 4) -> bytes:
    """`raw` with some of its bytes changed, cut out, doubled or replaced by a number of digits."""
    content = bytearray(raw)
    for _ in range(chance.randint(1, hits)):
        place = chance.randrange(len(content) + 1)
        kind = chance.randrange(6)
        end = min(len(content), place + chance.randrange(1, 20))
        if kind == 0:
            content[place:end] = b""
        elif kind == 1:
            content[place:place] = content[place:end]
        elif kind == 2:
            content[place:place] = chance.randbytes(chance.randrange(1, 5))
        elif kind == 3:
            content[place : place + 1] = str(chance.choice(NUMBERS)).encode()
        elif kind == 4:
            del content[place:]
        elif place < len(content):
            content[place] = chance.randrange(256)
    return bytes(content)


def altered(chance: random.Random, table: Any, depth: int = 0) -> Any:
    """A JSON value of which a part, somewhere inside, is lost, doubled or replaced."""
    if isinstance(table, dict) and table and (depth == 0 or chance.random() < 0.7):
        table, key = dict(table), chance.choice(list(table))
        kind = chance.randrange(4)
        if kind == 0:
            del table[key]
        elif kind == 1:
            table[key] = value(chance)
        elif kind == 2:
            table[chance.choice(TEXTS) + key] = table[key]
        else:
            table[key] = altered(chance, table[key], depth + 1)
        return table
    if isinstance(table, list) and table and chance.random() < 0.8:
        table, place = list(table), chance.randrange(len(table))
        table[place] = altered(chance, table[place], depth + 1)
        return table
    return value(chance)


@cache
def scratch() -> Path:
    """A folder for the cases' files, which goes with the program."""
    holder = tempfile.TemporaryDirectory(prefix="gpt2attn-fuzz-")
    scratch.holder = holder  # type: ignore[attr-defined]
    return Path(holder.name)


@cache
def small_vocabulary() -> dict[str, bytes]:
    """The tokenizer files of a vocabulary of the 256 bytes, some merges and <|endoftext|>."""
    from gpt2attn.vocabulary import _byte_symbols

    symbols = _byte_symbols()
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "a"), ("aa", "aa"), ("Ã", "©")]
    names = [*symbols, *("".join(pair) for pair in merges), "<|endoftext|>"]
    vocab = {name: id for id, name in enumerate(names)}
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    return {
        "vocab.json": json.dumps(vocab).encode(),
        "merges.txt": "\n".join(lines).encode() + b"\n",
    }


def one_file_vocabulary() -> dict[str, Any]:
    """The same as tokenizer.json holds it."""
    files = small_vocabulary()
    merges = files["merges.txt"].decode().splitlines()[1:]
    end = {"id": 262, "content": "<|endoftext|>", "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "model": {"type": "BPE", "vocab": json.loads(files["vocab.json"]), "merges": merges},
    }


@cache
def small_model() -> Path:
    """A folder with a tiny model and its tokenizer."""
    import torch

    from gpt2attn.checkpoint import save_model
    from gpt2attn.config import GPT2Config
    from gpt2attn.model import GPT2

    torch.manual_seed(0)
    end = {"bos_token_id": 262, "eos_token_id": 262}
    config = GPT2Config(vocab_size=263, n_positions=32, n_embd=8, n_layer=2, n_head=2, **end)
    model = GPT2(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0, 0.3)
    folder = scratch() / "model"
    save_model(model, folder)
    for name, content in small_vocabulary().items():
        (folder / name).write_bytes(content)
    return folder


def spoilt(name: str, content: bytes, *, without: str = "") -> Path:
    """A copy of the small model with one other file in it."""
    folder = scratch() / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(small_model(), folder)
    if without:
        (folder / without).unlink()
    (folder / name).write_bytes(content)
    return folder


def fuzz_tokenizer(chance: random.Random) -> None:
    """Damaged vocabularies, and texts: what is encoded must decode to itself."""
    from gpt2attn.tokenizer import Tokenizer

    files = dict(small_vocabulary())
    kind = chance.randrange(5)
    if kind == 0:
        files = {"tokenizer.json": json.dumps(altered(chance, one_file_vocabulary())).encode()}
    elif kind == 1:
        side = chance.choice(
            ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
        )
        tokens = {"pad_token": "<pad>", "added_tokens_decoder": {"263": {"content": "<new>"}}}
        files[side] = json.dumps(altered(chance, tokens)).encode()
    elif kind < 4:
        name = chance.choice(list(files))
        files[name] = damaged(chance, files[name])
    tokenizer = Tokenizer(files)
    written = text(chance)
    ids = tokenizer.encode(written, special=chance.random() < 0.5)
    if tokenizer.decode(ids) != written.encode("utf-16", "surrogatepass").decode("utf-16"):
        raise FaultError(f"{written!r} comes back as {tokenizer.decode(ids)!r}")
    if len(set(tokenizer.labels(set(ids)))) != len(set(ids)):
        raise FaultError(f"two tokens of {ids} have one label")


def fuzz_config(chance: random.Random) -> None:
    """Damaged and senseless config.json files."""
    from gpt2attn.config import GPT2Config

    config = json.loads((small_model() / "config.json").read_bytes())
    config |= {"n_inner": None, "attn_pdrop": 0.1, "architectures": ["GPT2LMHeadModel"]}
    if chance.random() < 0.5:
        raw = damaged(chance, json.dumps(config).encode())
    else:
        for _ in range(chance.randint(1, 3)):
            config = altered(chance, config)
            if not isinstance(config, dict):
                break
        raw = json.dumps(config).encode()
    path = scratch() / "config.json"
    path.write_bytes(raw)
    found = GPT2Config.from_file(path)
    if GPT2Config.from_dict(found.to_dict()) != found:
        raise FaultError(f"{found} is not what its own dictionary gives")


def fuzz_header(chance: random.Random) -> None:
    """Damaged headers of a .safetensors file: what loads must compute."""
    raw = (small_model() / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    if chance.random() < 0.5:
        header = json.dumps(altered(chance, json.loads(header))).encode()
    else:
        header = damaged(chance, header)
    if chance.random() < 0.8:
        length = len(header)
    elif chance.random() < 0.5:
        length = chance.choice(NUMBERS) % 2**64
    if chance.random() < 0.1:
        data = damaged(chance, data)
    _load(spoilt("model.safetensors", length.to_bytes(8, "little") + header + data))


def fuzz_index(chance: random.Random) -> None:
    """Damaged shard indices."""
    from safetensors.torch import load_file, save_file

    folder = spoilt("x", b"")
    tensors = load_file(folder / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        part = {key: tensors[key] for key in list(tensors)[number::2]}
        save_file(part, folder / name, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    placed = {key: names[number % 2] for number, key in enumerate(tensors)}
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    if chance.random() < 0.5:
        raw = json.dumps(altered(chance, index)).encode()
    else:
        raw = damaged(chance, json.dumps(index).encode(), hits=2)
    (folder / "model.safetensors.index.json").write_bytes(raw)
    _load(folder)


def _load(folder: Path) -> None:
    from gpt2attn.checkpoint import load_model

    logits = load_model(folder)([[1, 2, 3]])
    if not logits.isfinite().all():
        raise FaultError("the logits are not finite")


def fuzz_sampler(chance: random.Random) -> None:
    """Senseless rules over adversarial rows: a token that a rule excludes must never come."""
    import torch

    from gpt2attn.sampling import Sampling, choose, generator_for, probabilities

    size = chance.choice([1, 2, 3, 10, 64])
    kinds = [[0.0, 1.0], [chance.gauss(0, 3) for _ in range(size)], FLOATS[:7], FLOATS]
    pool = chance.choice(kinds)
    row = torch.tensor([float(chance.choice(pool)) for _ in range(size)], dtype=torch.float64)
    ids = [*range(size), *chance.choices(range(size), k=2)]
    options: dict[str, Any] = {}
    offers: dict[str, list[Any]] = {
        "temperature": [0, 0.0, 1e-300, 1e-4, 0.7, 1, 1e30, -1, math.nan, math.inf, "1", None],
        "top_k": [None, 0, 1, 2, size - 1, size, size + 1, 10**30, -1, 1.5, True],
        "top_p": [None, 1e-300, 1e-6, 0.5, 1 - 1e-16, 1, 1.0, 0, 1.1, math.nan, "0.9"],
        "min_p": [None, 0, 1e-300, 0.3, 1, -0.1, 1.1, math.nan],
        "typical_p": [None, 1e-300, 0.3, 1, 0, math.nan],
        "repetition_penalty": [1, 1.3, 1e-300, 1e300, 0, -1, math.inf, math.nan],
        "no_repeat_ngram_size": [0, 1, 2, 5, 10**30, -1],
        "min_new_tokens": [0, 1, 5, 10**30, -1],
        "banned_ids": [(), chance.choices(ids, k=2), list(range(size)), [-1], [10**30], [1.5]],
        "banned_words": [(), [chance.choices(ids, k=chance.randint(1, 3))], [[]], "ab"],
        "logit_bias": [(), {chance.choice(ids): chance.choice(FLOATS)}, {-1: 1.0}, {0: "x"}],
    }
    for name in chance.sample(list(offers), chance.randrange(5)):
        options[name] = chance.choice(offers[name])
    sampling = Sampling(**options)
    context: dict[str, Any] = {
        "history": chance.choices(ids, k=chance.randrange(6)),
        "n_new": chance.randrange(3),
        "end_ids": chance.choices(ids, k=chance.randrange(2)),
    }
    chances = probabilities(row, sampling, **context)
    if not bool((chances >= 0).all()) or abs(float(chances.sum()) - 1) > 1e-9:
        raise FaultError(f"{options} on {row.tolist()} gives {chances.tolist()}")
    chosen = choose(row, sampling, generator_for(chance.getrandbits(64)), **context)
    excluded = {*sampling.banned_ids} | (
        {*context["end_ids"]} if context["n_new"] < sampling.min_new_tokens else set()
    )
    if chances[chosen] <= 0 or row[chosen] == -math.inf or chosen in excluded:
        raise FaultError(f"{options} on {row.tolist()} chose {chosen}")


# Commands that need a network, transformers, or minutes.
LEFT_OUT = {"bench", "download", "verify"}
# Options that start processes.
STARTS_PROCESSES = {"workers", "engine"}


@cache
def commands() -> dict[str, Callable[..., None]]:
    """The functions of the command line by the names of their commands."""
    from gpt2attn.cli import app

    functions = [info.callback for info in app.registered_commands]
    return {each.__name__: each for each in functions if each.__name__ not in LEFT_OUT}


def fuzz_cli(chance: random.Random) -> None:
    """Senseless options: one sentence on stderr and status 1 or 2, or status 0."""
    import torch

    from gpt2attn.cli import main
    from gpt2attn.untrusted import one_line

    torch.set_num_threads(1)
    folder = scratch() / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "there.txt").write_bytes(text(chance).encode("utf-8", "replace"))
    (folder / "there.jsonl").write_bytes(damaged(chance, b'{"text": "the cat"}\n"a"\n'))
    arguments = _arguments(chance, folder)
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    stdin = io.TextIOWrapper(io.BytesIO(text(chance).encode("utf-8", "replace")), encoding="utf-8")
    status: Any = 0
    with (
        mock.patch.object(sys, "argv", ["gpt2attn", *arguments]),
        mock.patch.object(sys, "stdin", stdin),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
    for stream in streams:
        stream.flush()
    message = streams[1].buffer.getvalue().decode()  # type: ignore[attr-defined]
    if status not in (0, 1, 2) or (status and not message.strip()):
        raise FaultError(f"{arguments} ended with {status}: {message[-300:]}")
    *_, last = message.strip().splitlines() or [""]
    if status and not last.lower().startswith("error:"):
        raise FaultError(f"{arguments} ended with {status} and no error: {message[-300:]}")
    if left := [path for path in folder.rglob(".*") if path.name.endswith(".part")]:
        raise FaultError(f"{arguments} left {left}")
    if status:
        raise ValueError(one_line(last))


def _arguments(chance: random.Random, folder: Path) -> list[str]:
    name = chance.choice(list(commands()))
    hints = typing.get_type_hints(commands()[name], include_extras=True)
    parameters = inspect.signature(commands()[name]).parameters
    arguments = [name]
    for parameter, hint in hints.items():
        if parameter in STARTS_PROCESSES | {"return", "debug"}:
            continue
        kind, (info, *_) = hint.__origin__, hint.__metadata__
        if type(info).__name__ == "ArgumentInfo":
            if chance.random() < 0.7:
                given = text(chance) if chance.random() < 0.7 else str(chance.choice(NUMBERS))
                # An operating system passes no NUL in an argument.
                arguments.append(given.replace("\0", "") or "x")
        elif parameter == "model":
            good = chance.random() < 0.9
            bad = chance.choice(["nowhere", "", "x/y", "é"])
            arguments += ["--model", str(small_model()) if good else bad]
        elif chance.random() < (0.9 if parameters[parameter].default is inspect._empty else 0.15):
            spellings = info.param_decls or ["--" + parameter.replace("_", "-")]
            arguments.append(chance.choice(spellings).partition("/")[0])
            if parameter == "threads":  # no more than this machine can bear a thousand times
                arguments.append(chance.choice(["1", "2", "0", "-1", "1025", "x"]))
            elif kind is not bool and kind != bool | None:
                arguments.append(_option_value(chance, kind, folder))
    return arguments


def _option_value(chance: random.Random, kind: Any, folder: Path) -> str:
    kinds = [kind, *typing.get_args(kind)]
    if Path in kinds or list[Path] in kinds:
        names = ["there.txt", "there.jsonl", "new.txt", "new.json", "new.csv", "new.png", "no/x"]
        names += ["new.safetensors", "new.npz", "new.html", "new.md", "new.svg", "new.jsonl"]
        odd = ["/dev/null", "", ".", str(folder), "x" * 300, "\udcff.json"]
        odd_wanted = chance.random() < 0.2
        return chance.choice(odd) if odd_wanted else str(folder / chance.choice(names))
    for each in kinds:
        if typing.get_origin(each) is Literal and chance.random() < 0.9:
            return chance.choice(typing.get_args(each))
    pool = [chance.choice(NUMBERS), chance.choice(FLOATS), chance.randrange(5), text(chance, 5)]
    pool += ["0-1", "0,1", "1-0", "0-99999999999", "1.1", "1=2", "1=nan", "#3", "the"]
    return str(chance.choice(pool)).replace("\0", "")


TARGETS: dict[str, Callable[[random.Random], None]] = {
    "tokenizer": fuzz_tokenizer,
    "config": fuzz_config,
    "header": fuzz_header,
    "index": fuzz_index,
    "sampler": fuzz_sampler,
    "cli": fuzz_cli,
}


def prepare() -> None:
    """Load what the cases share, so that none of them pays for it."""
    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    small_model()
    commands()


def run_case(target: str, chance: random.Random) -> str:
    """ "success" or "refused"; raises what is neither."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            TARGETS[target](chance)
        except ValueError as error:
            if "\n" in str(error) or not str(error):
                raise FaultError(f"not one sentence: {str(error)[:500]!r}") from error
            return "refused"
    return "success"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise FaultError in a case that computes, or waits, for too long."""

    def late(number: int, frame: FrameType | None) -> None:
        raise FaultError(f"still running after {SECONDS} s")

    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),  # of this process's own time
        (signal.SIGALRM, signal.ITIMER_REAL, 12 * SECONDS),  # the machine may have other work
    )
    before = [signal.signal(number, late) for number, _, _ in limits]
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def fuzz(target: str, cases: int, seed: int) -> int:
    """Run the cases, print what they did, and return the number of finds."""
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    with contextlib.suppress(Exception):
        run_case(target, random.Random(-1))  # the first one pays for what is loaded late
    for number in range(seed, seed + cases):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with _limited():
                outcome = run_case(target, random.Random(number))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            if grown > MEGABYTES:
                raise FaultError(f"{grown:.0f} MB more memory")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "find"
            print(f"{target}, seed {number}: {type(error).__name__}: {str(error)[:1000]}")
            print("".join(traceback.format_tb(error.__traceback__)[-3:]), flush=True)
        outcomes[outcome] += 1
    seconds = time.perf_counter() - started
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{target}: {cases} cases from seed {seed}: {counts}; {seconds:.0f} s", flush=True)
    return outcomes["find"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--cases", type=int, default=10_000, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    arguments = parser.parse_args()
    prepare()
    targets = TARGETS if arguments.target == "all" else [arguments.target]
    sys.exit(sum(fuzz(target, arguments.cases, arguments.seed) for target in targets) > 0)


if __name__ == "__main__":
    main()
