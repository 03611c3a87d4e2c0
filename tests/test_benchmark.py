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
from cli_runner import run
from test_readme import BENCH, README

from gpt2attn import load_model
from gpt2attn.benchmark import PIPELINE, MeasurementError, machine
from gpt2attn.benchmark.convert import _gguf_name, converted, with_tokenizer
from gpt2attn.benchmark.machine import MemoryReader
from gpt2attn.benchmark.processes import Child, seconds_to_output
from gpt2attn.benchmark.programs import FORMATS, Program, bytes_per_token, open_engine
from gpt2attn.benchmark.report import Report, Result

OURS, TORCH = Program("gpt2attn", "float32"), Program("torch", "float32")
METRICS = {
    "import_s", "load_s", "tokens_s_batch_1", "tokens_s_batch_8", "prefill_16_s", "peak_bytes",
    "maps_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tiny_folder: Path) -> dict:
    """README's command on a tiny checkpoint."""
    assert BENCH in README.splitlines()
    _, *arguments = shlex.split(BENCH.replace("out/gpt2-random", str(tiny_folder)))
    result = run(*arguments, "--quick", "--rounds", "2", "--threads", "1", "--json")
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
    # 16 positions, 8 of them the prompt's.
    assert (found["settings"]["new_tokens"], found["settings"]["prefill_tokens"]) == (8, [16])
    assert found["machine"]["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_all_compute_the_same(found):
    fast, plain, theirs = found["programs"]
    assert fast["same_ids"] == plain["same_ids"] == theirs["same_ids"] == 8
    assert plain["logits_off"] == theirs["logits_off"] == 0  # bit for bit
    assert fast["logits_off"] < 1e-4
    assert plain["in_use"] == theirs["in_use"] == "torch"


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
