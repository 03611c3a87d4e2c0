"""`gpt2attn generate` beyond one text: JSON step by step, many prompts, sessions, long texts."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
import torch
from cli_runner import refused, run

from gpt2attn import AttentionMaps, LanguageModel, cli, text_generation
from gpt2attn.cli.generate_output import Output
from gpt2attn.cli.generate_session import converse
from gpt2attn.kernels.step import CompiledStep

pytestmark = pytest.mark.usefixtures("one_tokenizer")


def objects(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


class TestJson:
    def test_an_object_a_step_and_at_last_the_result(self, folder, lm):
        options = ("one", "-m", folder, "-n", "6", "--seed", "3")
        *steps, result = objects(run("generate", *options, "--json", "--top-logprobs", "2"))
        expected = lm.generate("one", 6, seed=3, top_logprobs=2)
        assert [step["id"] for step in steps] == result["ids"] == expected.ids
        assert [step["label"] for step in steps] == lm.tokenizer.labels(expected.ids)
        assert "".join(step["text"] for step in steps) == result["text"]
        assert [step["logprob"] for step in steps] == result["logprobs"]
        for step, top in zip(steps, expected.top_logprobs, strict=True):
            assert [(one["id"], one["logprob"]) for one in step["top_logprobs"]] == top
            assert step["top_logprobs"][0]["label"] == lm.tokenizer.label(top[0][0])
        assert result["finish_reason"] == "max new tokens"
        assert "finish_reason" not in steps[-1]
        assert result["top_logprobs"] == [step["top_logprobs"] for step in steps]

    def test_without_alternatives_there_is_no_key_for_them(self, folder):
        for value in objects(run("generate", "one", "-m", folder, "-n", "2", "--json")):
            assert "top_logprobs" not in value

    def test_each_line_comes_as_soon_as_its_token_is_chosen(self, folder, monkeypatch, capsys):
        seen = []
        stream = LanguageModel.stream

        def watched(self, *arguments, **options):
            inner = stream(self, *arguments, **options)
            steps = inner.steps()

            def counted():
                for step in steps:
                    yield step
                    seen.append(capsys.readouterr().out.count("\n"))

            inner._steps = counted()
            return inner

        monkeypatch.setattr(LanguageModel, "stream", watched)
        arguments = ["gpt2attn", "generate", "one", "-m", str(folder), "-n", "4", "--json"]
        monkeypatch.setattr(sys, "argv", arguments)
        from gpt2attn.cli import app

        with pytest.raises(SystemExit) as stop:
            app()
        assert not stop.value.code
        assert seen == [1, 1, 1, 1]

    def test_several_samples_and_beams_are_an_object_each(self, folder):
        options = ("one", "-m", folder, "-n", "3", "--json")
        assert len(objects(run("generate", *options, "--num-samples", "3"))) == 3
        beams = ("--num-beams", "3", "--num-return-sequences", "2")
        assert len(objects(run("generate", *options, *beams))) == 2


TEXTS = ["one", "two three four", " five\tsix", "seven", "eight nine ten eleven", "12"]


class TestMany:
    @pytest.fixture
    def source(self, tmp_path):
        source = tmp_path / "texts.jsonl"
        lines = [json.dumps(TEXTS[0]), "", *(json.dumps({"text": t}) for t in TEXTS[1:])]
        source.write_text("\n".join(lines) + "\n")
        return source

    def command(self, folder, source, out, *more):
        return (
            "generate", "--input", source, "--out", out, "-m", folder, "-n", "5", "--seed", "7",
            "--batch-size", "4", *more,
        )  # fmt: skip

    def test_rows_in_order_each_as_its_single_run(self, folder, lm, source, tmp_path):
        out = tmp_path / "out.jsonl"
        result = run(*self.command(folder, source, out, "--top-logprobs", "1"))
        assert (result.status, result.stdout) == (0, "")
        assert "6 rows in" in result.stderr
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["line"] for row in rows] == [1, 3, 4, 5, 6, 7]
        assert [row["prompt"] for row in rows] == TEXTS
        for number, (row, text) in enumerate(zip(rows, TEXTS, strict=True)):
            alone = lm.generate(text, 5, seed=7 + number)
            assert (row["ids"], row["text"], row["seed"]) == (alone.ids, alone.text, alone.seed)
            assert row["finish_reason"] == alone.finish_reason
            # Batched products round otherwise than single ones.
            assert row["logprobs"] == pytest.approx(alone.logprobs, rel=0, abs=1e-4)
            assert len(row["top_logprobs"]) == 5
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "texts.jsonl"]

    def test_samples_of_each_text_follow_each_other(self, folder, lm, source, tmp_path):
        out = tmp_path / "out.jsonl"
        run(*self.command(folder, source, out, "--num-samples", "3"))
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["prompt"] for row in rows] == [text for text in TEXTS for _ in range(3)]
        assert [row["seed"] for row in rows] == list(range(7, 25))
        assert rows[4]["ids"] == lm.generate(TEXTS[1], 5, seed=11).ids

    @pytest.mark.parametrize("seed", [["--seed", "7"], []], ids=["given seed", "drawn seed"])
    def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
        self, folder, source, tmp_path, monkeypatch, seed
    ):
        out = tmp_path / "out.jsonl"
        command = ("generate", "--input", source, "--out", out, "-m", folder, "-n", "5", *seed)
        command += ("--batch-size", "2")
        generate = LanguageModel.generate
        calls = []

        def interrupted(self, *arguments, **options):
            calls.append(options["seed"])
            if len(calls) == 3:
                raise KeyboardInterrupt
            return generate(self, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(LanguageModel, "generate", interrupted)
            result = run(*command)
        assert result.status == 130
        assert "the same command goes on" in result.stderr
        assert not out.exists()
        header, *rows = (tmp_path / "out.jsonl.part").read_bytes().splitlines(keepends=True)
        assert len(rows) == 4
        # A kill may leave any part of a batch, and a torn line.
        first = str(json.loads(header)["job"]["seed"])
        whole = tmp_path / "whole.jsonl"
        assert run(*command[:4], whole, *command[5:], "--seed", first).status == 0
        for n_rows, torn in ((4, b""), (3, rows[3][:40]), (0, b'{"line": 3}')):
            out.unlink(missing_ok=True)
            part = b"".join([header, *rows[:n_rows], torn])
            (tmp_path / "out.jsonl.part").write_bytes(part)
            result = run(*command)
            assert result.status == 0, result.stderr
            assert out.read_bytes() == whole.read_bytes()

    def test_a_started_file_belongs_to_its_job(self, folder, source, tmp_path, monkeypatch):
        out = tmp_path / "out.jsonl"

        def interrupted(self, *arguments, **options):
            raise KeyboardInterrupt

        rows = tmp_path / "out.jsonl.part"
        assert run(*self.command(folder, source, out)).status == 0
        finished = out.read_bytes()
        refused(run(*self.command(folder, source, out)), "already there; --force")
        out.unlink()
        generate = LanguageModel.generate

        def once(self, prompts, *arguments, **options):
            if options["seed"] > 7:
                raise KeyboardInterrupt
            return generate(self, prompts, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(LanguageModel, "generate", once)
            assert run(*self.command(folder, source, out)).status == 130
        part = rows.read_bytes()
        for change in (["-t", "0.5"], ["--batch-size", "3"]):
            refused(run(*self.command(folder, source, out, *change)), "another job", "differs in")
        source.write_text(source.read_text() + '"more"\n')
        refused(run(*self.command(folder, source, out)), "input_sha256")
        assert rows.read_bytes() == part
        source.write_text(source.read_text().removesuffix('"more"\n'))
        assert run(*self.command(folder, source, out)).status == 0
        assert out.read_bytes() == finished
        assert run(*self.command(folder, source, out, "--force")).status == 0
        assert out.read_bytes() == finished

    def test_what_cannot_be_continued_is_refused_before_any_work(self, folder, source, tmp_path):
        out = tmp_path / "out.jsonl"
        for text, words in (
            ('""', "line 8: The prompt is empty"),
            ('"\\ud83d"', "line 8, has \\ud83d without the other half"),
            (json.dumps("word " * 70), "line 8: The prompt has"),
        ):
            changed = tmp_path / "changed.jsonl"
            changed.write_text(source.read_text() + text + "\n")
            refused(run(*self.command(folder, changed, out)), words)
        (tmp_path / "empty.txt").write_text("\n \n")
        refused(run(*self.command(folder, tmp_path / "empty.txt", out)), "has no texts")
        refused(run(*self.command(folder, source, tmp_path / "out.txt")), "must end in .jsonl")
        for more in (["text"], ["-i"], ["--num-beams", "2"], ["--json"], ["--attention", "m.npz"]):
            refused(run(*self.command(folder, source, out, *more)), "--input goes with neither")
        refused(run("generate", "--input", source, "-m", folder), "--out FILE.jsonl go together")
        refused(run("generate", "a", "--out", out, "-m", folder), "--out FILE.jsonl go together")
        refused(run(*self.command(folder, source, out, "--top-p", "2")), "top_p must be")
        assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".jsonl", ".txt"]

    @pytest.mark.slow
    def test_a_killed_process_resumes_with_identical_output(self, folder, tmp_path):
        source, out = tmp_path / "texts.txt", tmp_path / "out.jsonl"
        source.write_text("".join(f"text number {number}\n" for number in range(60)))
        command = self.command(folder, source, out)
        part = tmp_path / "out.jsonl.part"
        process = subprocess.Popen([sys.executable, "-m", "gpt2attn", *map(str, command)])
        while process.poll() is None and (not part.exists() or part.stat().st_size < 5000):
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
        result = run(*command)
        assert "of 60 rows were there; going on after them" in result.stderr
        whole = tmp_path / "whole.jsonl"
        assert run(*self.command(folder, source, whole)).status == 0
        assert out.read_bytes() == whole.read_bytes()


class TestInteractive:
    def test_lines_from_a_pipe_are_turns_over_one_text(self, folder, lm):
        options = ("-m", folder, "-n", "4", "--seed", "2")
        result = run("generate", "-i", "one", *options, stdin=b" two\n\n  three\r\n")
        session = lm.session("one", seed=2)
        expected = "one" + "".join(session.stream(4)) + "\n"
        for line in (" two", "", "  three"):
            session.append(line)
            expected += line + "".join(session.stream(4)) + "\n"
        assert (result.status, result.stdout) == (0, expected)
        assert result.stderr.count("seed ") == 4
        assert result.stderr.splitlines()[-1] == f"{len(session.ids)} tokens in all"

    def test_the_first_line_may_be_the_prompt(self, folder, lm):
        result = run("generate", "-i", "-m", folder, "-n", "4", "-t", "0", stdin=b"one\n")
        assert result.stdout == "one" + lm.generate("one", 4, temperature=0).text + "\n"
        result = run("generate", "-i", "-m", folder, stdin=b"")
        assert (result.status, result.stdout) == (0, "")

    def test_json_has_steps_and_a_result_for_each_turn(self, folder):
        result = run("generate", "-i", "-m", folder, "-n", "3", "--json", stdin=b"one\n two\n")
        values = objects(result)
        assert ["finish_reason" in value for value in values] == [*[False] * 3, True] * 2
        assert values[7]["prompt_ids"][: len(values[3]["prompt_ids"])] == values[3]["prompt_ids"]

    def test_bad_lines_are_one_sentence(self, folder):
        refused(run("generate", "-i", "-m", folder, stdin=b"\n"), "The prompt is empty")
        refused(run("generate", "-i", "-m", folder, stdin=b"\xff\n"), "stdin, line 1")
        refused(run("generate", "-i", "-m", folder, stdin=b"word " * 70), "64 positions")
        refused(run("generate", "-i", "a", "--num-beams", "2"), "--interactive goes with neither")

    def test_on_a_terminal_mistakes_end_a_turn_and_ctrl_d_the_session(self, lm, monkeypatch):
        parent, child = pty.openpty()
        os.write(parent, b"\n" + b"word " * 70 + b"\none\n\x04")
        with os.fdopen(child, "r") as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            notes, shown = self.converse(lm, monkeypatch)
        os.close(parent)
        assert "error: The prompt is empty" in notes
        assert "64 positions" in notes
        assert shown == lm.generate("one", 4, temperature=0).text + "\n"
        assert notes.splitlines()[-1] == "5 tokens in all"

    def test_on_a_terminal_ctrl_c_ends_the_turn_and_keeps_the_text(self, lm, monkeypatch):
        parent, child = pty.openpty()
        os.write(parent, b"one\n two\n\x04")
        n_steps = 0
        step = text_generation.TextRow.take

        def interrupted(row):
            nonlocal n_steps
            n_steps += 1
            if n_steps == 3:
                raise KeyboardInterrupt
            return step(row)

        monkeypatch.setattr(text_generation.TextRow, "take", interrupted)
        with os.fdopen(child, "r") as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            notes, shown = self.converse(lm, monkeypatch)
        os.close(parent)
        assert "interrupted; the text so far stays" in notes
        ids = lm.generate("one", 3, temperature=0).ids  # the third was chosen, but not shown
        assert shown.startswith(lm.tokenizer.decode(ids[:2]))
        again = lm.generate([*lm.encode("one"), *ids, *lm.encode(" two")], 4, temperature=0)
        assert shown.endswith(again.text + "\n")

    def test_on_a_terminal_ctrl_c_ends_every_turn_that_it_comes_in(self, lm, monkeypatch):
        # By real signals, under the program's own handler, which a second one would end at once.
        parent, child = pty.openpty()
        os.write(parent, b" two\n three\n\x04")
        step = text_generation.TextRow.take

        def interrupted(row):
            if len(row.row.ids) == 2:
                signal.raise_signal(signal.SIGINT)
            return step(row)

        monkeypatch.setattr(text_generation.TextRow, "take", interrupted)
        with os.fdopen(child, "r") as terminal, cli._ended_by_signals() as received:
            own = signal.getsignal(signal.SIGINT)
            monkeypatch.setattr(sys, "stdin", terminal)
            notes, _ = self.converse(lm, monkeypatch, "one")
            assert signal.getsignal(signal.SIGINT) == own
        os.close(parent)
        assert notes.count("interrupted; the text so far stays") == 3
        assert notes.splitlines()[-1] == "9 tokens in all"
        assert not received

    def converse(self, lm, monkeypatch, text=""):
        """What goes to stderr and to stdout."""
        streams = {name: io.StringIO() for name in ("stderr", "stdout")}
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, stream)
        session = lm.session(temperature=0)
        converse(session, Output(lm, "tiny", as_json=False), text, 4)
        return (stream.getvalue() for stream in streams.values())


class TestOverflow:
    def test_the_three_ways(self, folder, lm, tmp_path):
        text = "word " * 60  # 61 tokens of 64
        n_tokens = len(lm.encode(text))
        options = (text, "-m", folder, "-n", "9", "-t", "0", "--json")
        stopped = objects(run("generate", *options))[-1]
        assert len(stopped["ids"]) == 64 - n_tokens
        assert stopped["finish_reason"] == "length limit"
        refused(run("generate", *options, "--overflow", "error"), "9 new ones", "64 positions")
        maps = tmp_path / "maps.npz"
        result = run("generate", *options, "--overflow", "slide", "--attention", maps)
        slid = objects(result)[-1]
        assert slid["finish_reason"] == "max new tokens"
        assert slid["ids"][: len(stopped["ids"])] == stopped["ids"]
        assert slid["ids"] == lm.generate(text, 9, temperature=0, overflow="slide").ids
        assert "the last window: it begins after" in result.stderr
        start = AttentionMaps.load(maps).metadata["window_start"]
        assert start > 0
        beams = ("--num-beams", "2", "--overflow", "slide")
        refused(run("generate", *options, *beams), "Beam search keeps to one window")

    def test_a_prompt_longer_than_the_context(self, folder, lm):
        text = "word " * 200
        options = (text, "-m", folder, "-n", "2", "-t", "0", "--json")
        for overflow in ("error", "stop"):
            result = run("generate", *options, "--overflow", overflow)
            refused(result, "64 positions", "shorten it")
        slid = objects(run("generate", *options, "--overflow", "slide"))[-1]
        with torch.no_grad():
            first = int(lm.model([lm.encode(text)[-64:]])[0, -1].argmax())
        assert slid["ids"][0] == first


def test_an_interruption_tells_the_seed(folder, monkeypatch):
    monkeypatch.setattr(
        text_generation.TextRow, "take", lambda row: signal.raise_signal(signal.SIGINT)
    )
    result = run("generate", "one", "-m", folder, "--seed", "7")
    assert (result.status, result.stderr) == (130, "\ninterrupted. The seed was 7.\n")


def test_options_without_effect_are_told(folder):
    model = ("one", "-m", folder, "-n", "2")
    for option, value in (("--length-penalty", "2"), ("--early-stopping", "true")):
        refused(run("generate", *model, option, value), f"{option} goes with --num-beams")
    for option in ("--layers", "--heads"):
        refused(run("generate", *model, option, "0"), f"{option} goes with --attention")
    refused(run("generate", *model, "--num-return-sequences", "2"), "--num-samples draws several")
    beams = ("generate", *model, "--num-beams", "2")
    refused(run(*beams, "--num-return-sequences", "3"), "is 3, more than --num-beams, 2")
    drawn = run(*beams, "-t", "1.5", "--top-p", "0.5")
    assert drawn.status == 0
    assert "without effect: --temperature, --top-p." in drawn.stderr
    assert "without effect" not in run(*beams, "-t", "0").stderr


def test_outputs_are_refused_before_any_work(folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('"one"\n', encoding="utf-8")
    many = ("generate", "--input", path, "-m", folder, "--force", "--out")
    refused(run(*many, path), "is the input too and would be overwritten")
    refused(run(*many, tmp_path / "no" / "b.jsonl"), "does not exist; make it first")
    maps = ("generate", "--prompt-file", path, "-m", folder, "--attention")
    refused(run(*maps, tmp_path / "no" / "b.npz"), "does not exist; make it first")
    assert path.read_text(encoding="utf-8") == '"one"\n'


def test_alternatives_need_a_place(folder):
    refused(run("generate", "a", "-m", folder, "--top-logprobs", "2"), "--json or --input")


def test_what_must_be_compiled_is_so_before_the_text_begins(folder, monkeypatch):
    options = ("generate", "one", "-m", folder, "-n", "3", "--temperature", "0")
    expected = run(*options)
    assert "Compiling" not in expected.stderr
    monkeypatch.setattr(CompiledStep, "compiles_first", True)
    result = run(*options)
    assert result.stdout == expected.stdout
    assert result.stderr.startswith("Compiling the fast kernels for this machine, once")
