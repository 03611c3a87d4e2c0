"""The benchmark: what it counts and compares, on runs of a few tokens; never how fast it is."""

from __future__ import annotations

import importlib.util
import io
import json
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from cli_runner import run
from test_readme import BENCH, README

from gpt2attn import load_model
from gpt2attn.benchmark import PIPELINE, MeasurementError, decoding, machine
from gpt2attn.benchmark.convert import _gguf_name, converted, with_tokenizer
from gpt2attn.benchmark.decoding import compare_lookup, growth
from gpt2attn.benchmark.machine import MemoryReader
from gpt2attn.benchmark.processes import Child, seconds_to_output
from gpt2attn.benchmark.programs import FORMATS, Program, bytes_per_token, open_engine
from gpt2attn.benchmark.report import Lookup, Report, Result, Step
from gpt2attn.cache import KVCache

OURS, TORCH = Program("gpt2attn", "float32"), Program("torch", "float32")
METRICS = {
    "import_s", "load_s", "tokens_s_batch_1", "tokens_s_batch_8", "prefill_128_s", "prefill_300_s",
    "peak_bytes", "maps_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint of 300 positions."""
    return write_checkpoint(tmp_path_factory.mktemp("longer"), {"n_positions": 300})


@pytest.fixture(scope="module")
def found(longer: Path) -> dict:
    """README's command on a tiny checkpoint."""
    assert BENCH in README.splitlines()
    _, *arguments = shlex.split(BENCH.replace("out/gpt2-random", str(longer)))
    options = ["--quick", "--rounds", "2", "--threads", "1", "--first-run"]
    result = run(*arguments, *options, "--json")
    assert result.status == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_every_program_is_measured_in_every_round(found):
    assert [one["program"] for one in found["programs"]] == [
        "gpt2attn float32",
        "gpt2attn torch float32",
        "transformers float32",
    ]
    for one in found["programs"]:
        assert one["problem"] == ""
        looked = set() if one["name"] == "transformers" else {"one_layer_s", "no_layer_s"}
        assert set(one["runs"]) == METRICS | looked
        for metric, runs in one["runs"].items():
            assert len(runs) == (1 if metric in ("import_s", "load_s", "peak_bytes") else 2)
            assert min(runs) > 0, metric
    assert len(found["read_gb_s"]["runs"]) == found["settings"]["rounds"] == 2
    assert found["settings"]["threads"] == 1
    assert found["settings"]["new_tokens"] == 16
    assert found["settings"]["prefill_tokens"] == [128, 300]
    assert found["machine"]["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_all_compute_the_same(found):
    fast, plain, theirs = found["programs"]
    assert fast["same_ids"] == plain["same_ids"] == theirs["same_ids"] == 32
    assert plain["logits_off"] == theirs["logits_off"] == 0  # bit for bit
    assert fast["logits_off"] < 1e-4
    assert plain["in_use"] == theirs["in_use"] == "torch"


@pytest.mark.slow
def test_a_token_reads_the_weights_and_the_cache_up_to_its_position(found):
    fast, plain, theirs = found["programs"]
    assert theirs["growth"] == []
    for one in (fast, plain):
        assert [step["position"] for step in one["growth"]] == [16, 128, 256]
        for step in one["growth"]:
            held = 2 * 3 * 32 * 4 * step["position"]  # keys and values of 3 layers, 32 floats each
            assert step["bytes"] == one["bytes_per_token"] + held
            assert len(step["runs"]) == found["settings"]["growth_turns"] == 3
            assert step["gb_s"] == pytest.approx(step["bytes"] / step["seconds"] / 1e9)


@pytest.mark.slow
def test_lookup_is_measured_where_there_is_a_compiled_step(found):
    fast, plain, theirs = found["programs"]
    assert plain["lookup"] == theirs["lookup"] == []
    repeating, flat = fast["lookup"]
    assert (repeating["text"], flat["text"]) == ("repeating", "random")
    # Wide random weights repeat nothing of themselves. The prompt, guesses of 4 and 8, and the last
    # of 16 tokens.
    assert "made the likeliest by a bias" in repeating["made_by"]
    assert repeating["runs"]["passes"] == [4, 4]
    assert repeating["same_ids"]
    assert flat["same_ids"]


@pytest.mark.slow
def test_shares_and_ratios_follow_from_the_runs(found):
    first, _, theirs = found["programs"]
    rates, other = (one["runs"]["tokens_s_batch_1"] for one in (first, theirs))
    shares = [
        rate * first["bytes_per_token"] / 1e9 / read
        for rate, read in zip(rates, found["read_gb_s"]["runs"], strict=True)
    ]
    assert first["share_of_read_bandwidth"] == pytest.approx(sum(shares) / 2)
    ratios = [a / b for a, b in zip(rates, other, strict=True)]
    assert theirs["first_is_faster_by"]["tokens_s_batch_1"] == pytest.approx(sum(ratios) / 2)


def test_a_token_reads_all_weights_but_the_positions(tiny_folder):
    model = load_model(tiny_folder)
    n_bytes = sum(p.nbytes for p in model.parameters()) - model.wpe.weight.nbytes
    assert bytes_per_token(model.config, TORCH) == n_bytes
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() == 2) - model.wpe.weight.nbytes
    less = n_bytes - bytes_per_token(model.config, Program("llama-cpp", "f16"))
    assert less == matrices // 2


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("torch", "bfloat16", "torch:bfloat16"),
        ("transformers", "int8", "transformers:float32"),
        ("ctranslate2", "int8", "ctranslate2:int8"),
        ("llama-cpp", "float32", "llama-cpp:f32"),
        ("llama-cpp", "bfloat16", "llama-cpp:f16"),
        ("llama-cpp", "int8", "llama-cpp:q8_0"),
        ("llama-cpp:q8_0", "float32", "llama-cpp:q8_0"),
    ],
)
def test_a_name_alone_takes_the_format_with_as_many_bits(text, dtype, expected):
    assert Program.parse(text, dtype).spec == expected


def test_names_and_formats_that_are_not_there_are_refused():
    result = run("bench", "--model", "pocket", "--against", "onnx")
    assert result.status == 2
    assert "gpt2attn, torch, transformers, ctranslate2, llama-cpp, not 'onnx'" in result.stderr
    with pytest.raises(ValueError, match="llama-cpp is measured with f32, f16, q8_0, not with"):
        Program.parse("llama-cpp:q4_0")


def test_what_is_not_installed_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Program("llama-cpp", "f32").missing == (
        "llama_cpp and gguf not installed: pip install llama-cpp-python gguf"
    )
    assert OURS.missing == ""


def test_a_token_is_timed_where_the_text_has_grown_to(longer, monkeypatch):
    model = load_model(longer, kernels="auto")
    passes = []
    hidden = model.hidden

    def record(ids, cache, **options):
        passes.append((cache.length, len(ids[0])))
        return hidden(ids, cache=cache, **options)

    monkeypatch.setattr(model, "hidden", record)
    cache_bytes, seconds = growth(model, list(range(60)), [4, 60, 16], 2)
    assert [len(times) for times in seconds] == [2, 2, 2]
    assert cache_bytes == KVCache.for_model(model, 1, 1).nbytes
    turn = [(3, 1), (4, 1), (59, 1), (60, 1), (15, 1), (16, 1)]
    assert passes == [(0, 60), *turn, *turn]


@pytest.mark.parametrize("plain_first", [True, False])
def test_lookup_is_held_to_plain_decoding(longer, monkeypatch, plain_first):
    model = load_model(longer, kernels="auto")
    prompt, same = [5, 6, 7, 8] * 5, {"temperature": 0, "logit_bias": [[9, 1e9]]}
    answer = compare_lookup(model, prompt, 40, same, 0, plain_first=plain_first)
    # The prompt, three tokens alone, guesses of 4, 8 and 15, and what is left.
    assert (answer.n_passes, answer.n_same) == (8, 40)
    flat = {"temperature": 1000, "top_k": 0}
    answer = compare_lookup(model, list(range(20)), 40, flat, 1, plain_first=plain_first)
    assert answer.n_same == 40

    def damaged(model, rows, n_new, *, lookup, **options):
        (row,) = rows
        for n, _ in enumerate(decode(model, rows, n_new, lookup=lookup, **options)):
            if lookup and n == 17:
                row.ids[-1] += 1
            yield

    decode = decoding.decode
    monkeypatch.setattr(decoding, "decode", damaged)
    answer = compare_lookup(model, prompt, 40, same, 0, plain_first=plain_first)
    assert answer.n_same == 17


def test_other_ids_with_lookup_are_a_fault(monkeypatch):
    wrong = Lookup("random", "drawn", 64)
    wrong.add(plain_s=2.0, lookup_s=1.0, n_passes=16, n_same=64)
    wrong.add(plain_s=2.0, lookup_s=4.0, n_passes=16, n_same=17)
    report = report_of(Result(OURS, 10**9, lookups=[wrong]))
    monkeypatch.setattr("gpt2attn.benchmark.benchmark", lambda *a, **k: report)
    line = "gpt2attn float32: wrong: with lookup the random text has another id after 17 of 64"
    result = run("bench", "--model", "pocket")
    assert (result.status, line in result.stdout) == (1, True)
    result = run("bench", "--model", "pocket", "--json")
    assert (result.status, line in result.stderr) == (1, True)
    (found,) = json.loads(result.stdout)["programs"][0]["lookup"]
    assert found["same_ids"] is False
    assert (found["lookup_is_faster_by"], found["tokens_per_pass"]) == (1.25, 4)
    assert (found["tokens_s"], found["tokens_s_lookup"]) == (32, 25.6)


def report_of(*results: Result) -> Report:
    settings = {
        "threads": 2,
        "rounds": 3,
        "prompt_tokens": 8,
        "new_tokens": 128,
        "batch": 8,
        "prefill_tokens": [128, 1000],
        "read_bandwidth": "a sum",
    }
    computer = {"cpu": "a processor", "cores": 2, "versions": {"python": "3"}}
    return Report("m", None, computer, settings, [50.0, 100.0, 80.0], list(results))


def test_ratios_are_medians_of_the_rounds_not_ratios_of_medians():
    ours = Result(OURS, 10**9, runs={"tokens_s_batch_1": [40.0, 90.0, 60.0], "x_s": [1.0, 2.0]})
    theirs = Result(TORCH, 10**9, runs={"tokens_s_batch_1": [20.0, 30.0, 50.0], "x_s": [3.0, 2.0]})
    report = report_of(ours, theirs)
    assert report.share(ours) == 0.8  # 0.8, 0.9, 0.75
    assert report.times(theirs, "tokens_s_batch_1") == 2.0  # 2, 3, 1.2
    assert report.times(theirs, "x_s") == 2.0  # 3, 1: seconds, so fewer are faster
    assert report.times(theirs, "unmeasured_s") is None


def test_tables_hold_what_there_is_and_say_why_the_rest_is_missing():
    from rich.console import Console

    ours = Result(OURS, 10**9, "compiled", same_ids=32, logits_off=2e-6)
    for turn in range(3):
        ours.add("tokens_s_batch_1", 40.0 + turn)
        ours.add("prefill_1000_s", 0.5)
        ours.add("one_layer_s", 0.55)
        ours.add("no_layer_s", 0.5)
        ours.add("first_token_s", 1.5)
    ours.add("first_run_s", 7.25)
    ours.growth = [
        Step(16, 50 * 10**6, [0.010, 0.011, 0.012]),
        Step(1000, 60 * 10**6, [0.013, 0.012, 0.015]),
    ]
    ours.lookups = [Lookup("repeating", "one token", 64)]
    ours.lookups[0].add(plain_s=2.0, lookup_s=0.5, n_passes=8, n_same=64)
    absent = Result(Program("llama-cpp", "f32"), 10**9, problem="not installed: pip install it")
    console = Console(width=140, file=io.StringIO())
    for part in report_of(ours, absent).parts():
        console.print(part)
    text = console.file.getvalue()
    assert "41.0" in text
    assert "0.500" in text
    assert "2.0e-06" in text
    assert "llama-cpp f32: not installed: pip install it" in text
    assert "looking at one layer of 1,000 tokens costs +10%" in text
    assert "80.0 GB/s" in text
    # Ratios of each turn: 1.3, 1.09, 1.25.
    assert "to 1,000 a token's time grows by 25.0%, the bytes it reads by 20.0%" in text
    assert "takes 7.2 s to its first token, 5.8 s more" in text
    assert "13.00      60.0         4.6" in text
    assert "repeating text: one token" in text
    assert "4.00 x" in text


def test_a_child_is_stopped_while_it_is_not_its_turn(tiny_folder):
    with Child(1) as child:
        child.ask("load", program=TORCH.spec, folder=str(tiny_folder), threads=1, n_positions=16)
        if sys.platform == "linux":
            stat = Path(f"/proc/{child._process.pid}/stat")
            for _ in range(100):  # the signal takes effect when the kernel gets to it
                if stat.read_text().split()[2] == "T":
                    break
                time.sleep(0.02)
            assert stat.read_text().split()[2] == "T"
        answer = child.ask("answers", ids=[1, 2, 3], n_new=2)
        assert (len(answer["ids"]), len(answer["logits"])) == (2, 67)
        with pytest.raises(MeasurementError, match="outside the vocabulary"):
            child.ask("prefill", ids=[67])
        assert child.ask("prefill", ids=[66])["seconds"] > 0  # it lives on
        child._process.kill()
        with pytest.raises(MeasurementError, match="ended with status -9"):
            child.ask("memory")
    assert child._process.poll() is not None


def test_a_model_that_cannot_be_measured_is_one_sentence(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    result = run("bench", "--model", tmp_path, "--quick", "--threads", "1")
    assert result.status == 2
    assert "gpt2attn float32 cannot be measured" in result.stderr
    assert "model.safetensors" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_first_token_of_transformers_comes_from_its_pipeline():
    from gpt2attn.hub import BUILT_IN

    command = [sys.executable, "-c", PIPELINE, str(BUILT_IN["pocket"]), "Once upon", "1"]
    assert seconds_to_output(command, "Once upon", 1) > 0


def test_a_run_that_fails_says_why():
    with pytest.raises(MeasurementError, match="no such thing"):
        seconds_to_output([sys.executable, "-c", "raise SystemExit('no such thing')"], "", 1)
    line = "import os; raise SystemExit(os.environ['NUMBA_CACHE_DIR'])"
    variables = {"NUMBA_CACHE_DIR": "an empty folder"}
    with pytest.raises(MeasurementError, match="an empty folder"):
        seconds_to_output([sys.executable, "-c", line], "", 1, variables)


@pytest.mark.parametrize("has_numba", [True, False])
def test_the_memory_is_read_with_numba_or_without(has_numba, monkeypatch):
    monkeypatch.setattr(machine, "BLOCK_FLOATS", 2**16)
    if not has_numba:
        monkeypatch.setitem(sys.modules, "numba", None)
    reader = MemoryReader(2 if has_numba else torch.get_num_threads())
    assert reader.gigabytes_per_second() > 0
    assert reader.method.startswith("a compiled sum" if has_numba else "torch's sum")


def test_a_folder_without_a_tokenizer_gets_gpt2s_where_that_fits(tiny_folder, tmp_path):
    import gpt2attn

    with pytest.raises(ValueError, match="has no tokenizer"):
        with_tokenizer(tiny_folder, tmp_path)
    folder, work = tmp_path / "large", tmp_path / "work"
    model = load_model("pocket")
    gpt2attn.save_model(model, folder)
    work.mkdir()
    linked = with_tokenizer(folder, work)
    assert gpt2attn.load_tokenizer(linked).encode("Apple raised") == [16108, 4376]
    assert (linked / "model.safetensors").samefile(folder / "model.safetensors")
    assert with_tokenizer(linked, work) == linked


def test_every_tensor_has_a_name_in_gguf(tiny_folder):
    names = [_gguf_name(name) for name in load_model(tiny_folder).state_dict()]
    block = ["attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"]
    expected = ["token_embd.weight", "position_embd.weight"]
    kinds = ("weight", "bias")
    expected += [f"blk.{n}.{part}.{kind}" for n in range(3) for part in block for kind in kinds]
    expected += ["output_norm.weight", "output_norm.bias"]
    assert sorted(names) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [Program(name, form) for name in ("ctranslate2", "llama-cpp") for form in FORMATS[name]],
    ids=str,
)
def test_a_peer_computes_the_same_from_its_converted_checkpoint(program, tmp_path):
    if program.missing:
        pytest.skip(program.missing)
    from gpt2attn.hub import BUILT_IN

    rows = [list(range(100 + row, 108 + row)) for row in range(3)]
    folder = converted(program, BUILT_IN["pocket"], tmp_path)
    theirs = open_engine(program, folder, 1, 1024)
    ours = open_engine(TORCH, BUILT_IN["pocket"], 1, 1024)
    off = abs(theirs.last_logits(rows[0]) - ours.last_logits(rows[0])).max()
    if program.format in ("float32", "f32"):
        assert theirs.decode(rows, 6) == ours.decode(rows, 6)
        assert theirs.decode(rows[:1], 6) == ours.decode(rows[:1], 6)
        assert off < 5e-3  # ggml looks GELU up in a table of float16
    else:
        assert off < 2  # of logits that reach 20: fewer bits, not another model
    assert converted(program, BUILT_IN["pocket"], tmp_path) == folder
