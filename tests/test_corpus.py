"""Jobs over many texts: stopped, resumed and on many workers, they give what one process gives."""

import importlib.util
import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from checkpoints import write_checkpoint
from cli_runner import run

from gpt2attn import AttentionMaps, Tokenizer, load
from gpt2attn.corpus import NamedText, chunks
from gpt2attn.jobs import ResultFile
from gpt2attn.scoring import score_texts

N_TEXTS = 1000
# Chunks of 16 * 64 characters, so that there are many of them. Rows are compared byte for byte.
SMALL = ("--batch-tokens", "64", "--context", "24", "--kernels", "torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny, its tokens GPT-2's 256 bytes."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("bytes"),
        {"vocab_size": 257, "n_positions": 64, "bos_token_id": 256, "eos_token_id": 256},
    )
    Tokenizer.gpt2().save(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    own = {token: id for token, id in vocabulary.items() if id < 256} | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(own), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Texts of 0 to 8 words, some of them longer than the context."""
    words = ["she", "went", "to", "the", "old", "house", "by", "the", "sea", "día", "😀", "found"]
    texts = [
        " ".join(words[(number * 7 + place) % len(words)] for place in range(number * 11 % 9))
        for number in range(N_TEXTS)
    ]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def whole(folder, source, tmp_path_factory):
    """What one process prints and writes."""
    out = tmp_path_factory.mktemp("whole") / "rows.jsonl"
    result = score(folder, source, out)
    assert result.status == 0
    return result.stdout, out.read_bytes()


@pytest.fixture
def expected(whole):
    return whole[1]


def score(folder, source, out, *options):
    return run("score", "--input", source, "--out", out, "-m", folder, *SMALL, *options)


def stopping(after):
    """Ctrl-C in the middle of a chunk, after so many whole ones."""
    append, left = ResultFile.append, after

    def stopped(self, *rows):
        nonlocal left
        left -= 1
        if left >= 0:
            append(self, *rows)
            return
        append(self, *rows[: len(rows) // 2])
        raise KeyboardInterrupt

    return mock.patch.object(ResultFile, "append", stopped)


class TestScores:
    def test_a_row_for_each_text_in_order(self, folder, source, expected):
        rows = [json.loads(line) for line in expected.splitlines()]
        texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
        assert [row["name"] for row in rows] == [f"{source}:{n + 1}" for n in range(N_TEXTS)]
        lm = load(folder, device="cpu")
        found = score_texts(lm.model, lm.tokenizer, texts, context=24)
        for row, text, result in zip(rows, texts, found, strict=True):
            assert row["ids"] == lm.encode(text)
            assert row["scored"] == result.n_scored
            # Other batches, other roundings.
            assert row["logprob"] == pytest.approx(result.total, abs=1e-4, rel=1e-5)

    def test_the_totals_are_printed_and_of_all_rows(self, folder, source, expected, tmp_path):
        out = tmp_path / "rows.jsonl"
        rows = [json.loads(line) for line in expected.splitlines()]
        total = json.loads(score(folder, source, out, "--json").stdout)["total"]
        assert out.read_bytes() == expected
        assert total["texts"] == N_TEXTS
        assert total["logprob"] == pytest.approx(sum(row["logprob"] for row in rows), rel=1e-12)

    def test_a_run_that_is_stopped_goes_on(self, folder, source, whole, tmp_path):
        out = tmp_path / "rows.jsonl"
        with stopping(after=7):
            result = score(folder, source, out)
        assert result.status == 130
        assert "interrupted. Records done: " in result.stderr
        assert "the same command goes on after them." in result.stderr
        assert not out.exists()
        with (tmp_path / "rows.jsonl.part").open("ab") as file:
            file.write(b'{"torn')
        again = score(folder, source, out)
        assert "records were there" in again.stderr
        assert (again.stdout, out.read_bytes()) == whole
        assert not (tmp_path / "rows.jsonl.part").exists()

    def test_another_job_is_refused(self, folder, source, tmp_path):
        out = tmp_path / "rows.jsonl"
        with stopping(after=1):
            assert score(folder, source, out).status == 130
        result = score(folder, source, out, "--bos")
        assert result.status == 2
        assert "another job (it differs in: bos)" in result.stderr
        result = score(folder, source, out, "--kernels", "auto", "--dtype", "bfloat16")
        assert result.status == 2
        assert "another job (it differs in: dtype, kernels)" in result.stderr

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--csv", "x.csv"), "--csv goes without --out"),
            (("--protocol", "lambada"), "without --protocol"),
        ],
    )
    def test_refusals(self, folder, source, tmp_path, options, message):
        result = score(folder, source, tmp_path / "rows.jsonl", *options)
        assert result.status == 2
        assert message in result.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "options", [("--workers", "2"), ("--engine", "ray"), ("-o", "x.jsonl")]
    )
    def test_one_text_needs_no_workers(self, folder, options):
        result = run("score", "one two", "-m", folder, *options)
        assert result.status == 2
        assert "go with the texts of --input" in result.stderr

    @pytest.mark.parametrize("command", ["score", "attention"])
    def test_there_is_a_limit_to_workers(self, folder, source, tmp_path, command):
        options = ("--input", source, "-m", folder, "--workers", "257", "-o", tmp_path / "x.jsonl")
        result = run(command, *options)
        assert result.status == 2
        assert "--workers" in result.stderr
        assert "256" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_an_existing_file_is_refused_before_any_work(self, folder, source, tmp_path):
        out = tmp_path / "rows.jsonl"
        out.write_text("mine")
        result = score(folder, source, out)
        assert (result.status, out.read_text()) == (2, "mine")
        assert "already there; --force" in result.stderr


def killing(find):
    """Kill one of the processes whose ids `find()` gives when the second chunk has been written."""
    append, n_appends = ResultFile.append, 0

    def killed(self, *rows):
        nonlocal n_appends
        append(self, *rows)
        n_appends += 1
        assert len(rows) * 10 < N_TEXTS  # there is more to do than what the workers have by now
        if n_appends == 2:
            deadline = time.monotonic() + 60
            while len(pids := find()) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)  # one may be starting yet
            assert len(pids) == 2
            os.kill(pids[0], signal.SIGKILL)

    return mock.patch.object(ResultFile, "append", killed)


@pytest.mark.slow
class TestWorkers:
    def test_one_is_killed_midway(self, folder, source, expected, tmp_path):
        out = tmp_path / "rows.jsonl"
        with killing(lambda: [child.pid for child in multiprocessing.active_children()]):
            result = score(folder, source, out, "--workers", "2", "--threads", "2")
        assert result.status == 0, result.stderr
        assert out.read_bytes() == expected
        assert multiprocessing.active_children() == []

    def test_maps_are_those_of_one_process(self, folder, tmp_path):
        source, out = tmp_path / "texts.txt", tmp_path / "maps"
        texts = ["one", "two three", "four five six"]
        source.write_text("\n".join(texts))
        command = ("attention", "--input", source, "-o", out, "-m", folder, "--workers", "2")
        assert run(*command).status == 0
        lm = load(folder, device="cpu", kernels="torch")
        rows = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
        assert [row["line"] for row in rows] == [1, 2, 3]
        for row, text in zip(rows, texts, strict=True):
            assert AttentionMaps.load(out / row["file"]) == lm.attention(text)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
class TestRay:
    def test_one_is_killed_midway(self, folder, source, expected, tmp_path):
        import ray

        out = tmp_path / "rows.jsonl"
        actors = partial(processes_below, os.getpid(), b"ray::_Actor")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            with killing(actors):
                result = score(folder, source, out, "--workers", "2", "--engine", "ray")
            assert result.status == 0, result.stderr
            assert out.read_bytes() == expected
            deadline = time.monotonic() + 30
            while actors() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert actors() == []  # the cluster goes on, its workers do not
        finally:
            ray.shutdown()


def processes_below(ancestor: int, title: bytes) -> list[int]:
    """Process ids of the descendants of `ancestor` whose command line begins with `title`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(title):
                pid = int(folder.name)
                parent = pid
                while parent not in (0, ancestor):
                    status = Path(f"/proc/{parent}/stat").read_text()
                    parent = int(status.rpartition(")")[2].split()[1])
                found += [pid] if parent == ancestor else []
        except OSError:
            continue  # it ended meanwhile
    return found


def test_chunks_are_cut_by_length_alone():
    items = [NamedText(str(number), "x" * number) for number in range(10)]
    found = list(chunks(iter(items), 8))
    assert [item for chunk in found for item in chunk] == items
    # An empty text counts as one character, so that a chunk of them ends too.
    sizes = [sum(len(item.text) + 1 for item in chunk) for chunk in found]
    assert sizes == [1 + 2 + 3 + 4, 5 + 6, 7 + 8, 9, 10]
    assert list(chunks([], 8)) == []
