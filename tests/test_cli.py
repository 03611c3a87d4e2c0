"""The command line: results to stdout, notes to stderr, one sentence and exit status 2 for bad
input.
"""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
from checkpoints import write_checkpoint
from cli_runner import refused, run

from gpt2attn import AttentionMaps, Tokenizer, load, load_model
from gpt2attn.cli import app
from gpt2attn.corpus import locate
from gpt2attn.kernels import use_kernels

SENTENCE = "Apple raised its price target"


def whole(result):
    """The object of the whole result, the last line of `generate --json`."""
    return json.loads(result.stdout.splitlines()[-1])


class TestGenerate:
    def test_prompt_and_new_text_concatenate_exactly(self, folder, lm):
        result = run("generate", SENTENCE, "-m", folder, "-n", "9", "--seed", "3")
        expected = lm.generate(SENTENCE, 9, seed=3)
        assert result.status == 0
        assert result.stdout == SENTENCE + expected.text + "\n"
        assert "seed 3, ended by: max new tokens" in result.stderr

    @pytest.mark.parametrize("how", ["argument", "file", "stdin", "dash"])
    @pytest.mark.parametrize("prompt", ["The", " The", "The ", "The\n", "\ufeffa", "día 😀"])
    def test_d50_nothing_is_stripped_wherever_the_prompt_comes_from(
        self, folder, tmp_path, how, prompt
    ):
        file = tmp_path / "prompt.txt"
        file.write_bytes(prompt.encode())
        place = {"argument": [prompt], "file": ["--prompt-file", file], "stdin": [], "dash": ["-"]}
        result = run("generate", *place[how], "-m", folder, "-n", "0", stdin=prompt.encode())
        assert result.stdout == prompt + "\n"

    def test_json_ends_with_the_whole_result(self, folder):
        value = whole(run("generate", "one", "-m", folder, "-n", "4", "-t", "0", "--json"))
        assert value["prompt"] == "one"
        assert value["prompt_ids"] == [505]
        assert len(value["ids"]) == len(value["logprobs"]) == 4
        assert value["finish_reason"] == "max new tokens"
        assert value["text"] == Tokenizer.gpt2().decode(value["ids"])

    def test_the_drawn_seed_is_told_and_repeats_the_text(self, folder):
        first = run("generate", "one", "-m", folder, "--json")
        seed = whole(first)["seed"]
        again = run("generate", "one", "-m", folder, "--json", "--seed", str(seed))
        assert again.stdout == first.stdout

    def test_stop_strings_end_the_text_before_them(self, folder):
        text = whole(run("generate", "one", "-m", folder, "-t", "0", "--json"))["text"]
        stop = text[10:14]
        result = whole(run("generate", "one", "-m", folder, "-t", "0", "--json", "--stop", stop))
        assert result["text"] == text[: text.index(stop)]
        assert (result["finish_reason"], result["stop_string"]) == ("stop string", stop)

    def test_attention_of_prompt_and_new_text(self, folder, tmp_path):
        path = tmp_path / "maps.npz"
        result = run(
            "generate", SENTENCE, "-m", folder, "-n", "6", "--seed", "1", "--attention", path,
            "--layers", "0,2", "--heads", "1-3",
        )  # fmt: skip
        assert result.status == 0
        maps = AttentionMaps.load(path)
        assert maps.weights.shape == (2, 1, 3, 10, 10)
        assert maps.prompt_lengths == [5]
        assert maps.metadata["seed"] == 1

    def test_samples_have_seeds_in_a_row_and_are_as_alone(self, folder):
        options = ("one", "-m", folder, "-n", "5", "--json")
        result = run("generate", *options, "--seed", "7", "--num-samples", "3")
        samples = [json.loads(line) for line in result.stdout.splitlines()]
        assert [sample["seed"] for sample in samples] == [7, 8, 9]
        for sample in samples:
            alone = whole(run("generate", *options, "--seed", str(sample["seed"])))
            assert alone["ids"] == sample["ids"]

    def test_beams_are_printed_best_first_with_their_scores(self, folder):
        options = ("generate", "one", "-m", folder, "-n", "5", "--num-beams", "4")
        result = run(*options, "--num-return-sequences", "3", "--json")
        beams = [json.loads(line) for line in result.stdout.splitlines()]
        scores = [beam["score"] for beam in beams]
        assert len(beams) == 3
        assert scores == sorted(scores, reverse=True)
        text = run(*options).stdout
        assert text == f"--- 1 of 1\none{beams[0]['text']}\n"
        refused(run(*options, "--stop", "x"), "--num-beams goes with neither")

    def test_rules_reach_the_sampler(self, folder):
        options = ("generate", "one", "-m", folder, "-n", "8", "-t", "0", "--json")
        plain = whole(run(*options))
        banned = plain["ids"][0]
        for rule in (
            ["--ban-id", str(banned)],
            ["--logit-bias", f"{banned}=-1000"],
            ["--ban", Tokenizer.gpt2().decode([banned])],
        ):
            result = whole(run(*options, *rule))
            assert banned not in result["ids"], rule
        refused(run(*options, "--logit-bias", "5"), "--logit-bias takes ID=BIAS")
        refused(run(*options, "--repetition-penalty", "0"), "repetition_penalty")
        refused(run(*options, "--min-new-tokens", "9"), "min_new_tokens is 9")

    def test_bad_input_is_one_sentence(self, folder, tmp_path):
        model = ("-m", folder)
        refused(run("generate", "", *model), "The prompt is empty")
        refused(run("generate", "word " * 70, *model), "tokens", "64 positions", "shorten it")
        refused(run("generate", "a", "--prompt-file", tmp_path / "x", *model), "not both")
        refused(run("generate", "--prompt-file", tmp_path / "x", *model), "No such file")
        refused(run("generate", *model, stdin=b"ab\xff"), "stdin is not UTF-8 text: byte 2 is 0xff")
        utf16 = "ab".encode("utf-16")
        refused(run("generate", *model, stdin=utf16), "UTF-16, so save it as UTF-8")
        refused(run("generate", "a", "-t", "-1", *model), "temperature must be")
        refused(run("generate", "a", "--top-p", "1.5", *model), "top_p must be")
        refused(run("generate", "a", "--stop", "", *model), "stop string")
        refused(
            run("generate", "a", "--layers", "9", "--attention", "x.npz", *model), "layers 0 to 2"
        )
        refused(run("generate", "a", "--attention", "x.gif", *model), "must end in what")
        refused(run("generate", "a", "-m", tmp_path / "nowhere"), "nowhere", "--model pocket")
        refused(run("generate", "a", "-m", tmp_path), "config.json")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("text", ["-5 degrees", "-5", "- a list", "--- a title"])
    def test_a_text_that_begins_with_a_dash(self, folder, text):
        model = ("-m", folder, "-n", "1")
        result = run("generate", text, *model)
        assert result.status == 2
        *_, last = result.stderr.splitlines()
        assert last.startswith("error: a text that begins with a dash goes last, after --")
        assert run("generate", *model, "--", text).stdout.startswith(text)
        for others in (["--nonesuch"], ["--nonesuch", "-0.5"]):
            assert "goes last" not in run("generate", "one", *others).stderr

    def test_wrong_usage_is_status_2(self, folder):
        for arguments in (["--seed", "x"], ["--device", "tpu"], ["--bogus"], ["-n", "-1"]):
            assert run("generate", "a", "-m", folder, *arguments).status == 2


class TestTokens:
    def test_a_table_of_position_id_and_label(self):
        result = run("tokens", SENTENCE)
        assert [line.split()[:2] for line in result.stdout.splitlines()] == [
            ["0", "16108"], ["1", "4376"], ["2", "663"], ["3", "2756"], ["4", "2496"],
        ]  # fmt: skip

    def test_ids_back_to_text(self):
        assert run("tokens", "--ids", "16108, 4376 663").stdout == "Apple raised its\n"
        refused(run("tokens", "--ids", "1,x"), "--ids takes whole numbers")
        refused(run("tokens", "--ids", "60000"), "60000")

    def test_ids_as_json_prints_them_and_without_a_text(self):
        assert run("tokens", "--ids", "[464, 3290]", "-m", "pocket").stdout == "The dog\n"
        refused(run("tokens", "a text", "--ids", "464", "-m", "pocket"), "--ids goes with neither")

    def test_json_and_the_special_switch(self):
        text = "a<|endoftext|> b"
        assert json.loads(run("tokens", "--json", "--special", text).stdout)["ids"] == [
            64,
            50256,
            275,
        ]
        plain = json.loads(run("tokens", "--json", text).stdout)
        assert plain["ids"] == [64, 27, 91, 437, 1659, 5239, 91, 29, 275]
        assert plain["text"] == text

    def test_gpt2_itself_needs_no_download(self):
        program = (
            "import socket\n"
            "def blocked(*_): raise AssertionError('network')\n"
            "socket.socket.connect = blocked\n"
            "from gpt2attn import load_tokenizer\n"
            "print(load_tokenizer('gpt2').encode('Apple'))"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert result.stdout == "[16108]\n"


class TestAttention:
    @pytest.mark.parametrize("suffix", ["safetensors", "npz", "json", "csv"])
    def test_the_standing_sentence_into_every_format(self, folder, torch_lm, tmp_path, suffix):
        path = tmp_path / f"maps.{suffix}"
        result = run("attention", "-m", folder, "--out", path)
        assert (result.status, result.stdout) == (0, "")
        assert "5 tokens, 3 layers x 4 heads" in result.stderr
        assert AttentionMaps.load(path) == torch_lm.attention(SENTENCE)

    def test_selection_stages_and_number_format(self, folder, tmp_path):
        path = tmp_path / "maps.safetensors"
        run("attention", "one two", "-m", folder, "-o", path, "--layers", "1-2", "--heads", "0",
            "--stage", "masked", "--stage", "weights", "--dtype", "float16")  # fmt: skip
        maps = AttentionMaps.load(path)
        assert list(maps.stages) == ["masked", "weights"]
        assert maps.weights.shape == (2, 1, 1, 2, 2)
        assert str(maps.weights.dtype) == "torch.float16"

    def test_without_a_file_the_terminal_shows_them(self, folder, torch_lm):
        every = run("attention", "-m", folder).stdout
        one = run("attention", "-m", folder, "--layers", "1", "--heads", "2").stdout
        weights = torch_lm.attention(SENTENCE).head(1, 2)
        assert every.startswith("Attention of all 12 heads\n")
        for label in ("Apple", "␣raised", "␣target"):
            assert label in one
        assert f"{100 * float(weights[4, 0]):.1f}" in one
        assert max(map(len, (every + one).splitlines())) <= 80

    @pytest.mark.parametrize(
        ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")]
    )
    def test_pictures_and_the_page(self, folder, tmp_path, suffix, start):
        path = tmp_path / f"maps.{suffix}"
        assert run("attention", "-m", folder, "-o", path).status == 0
        assert path.read_bytes().lower().startswith(start.lower())
        path = tmp_path / f"generated.{suffix}"
        options = ("one", "-m", folder, "-n", "3", "--attention", path)
        assert run("generate", *options).status == 0
        assert path.stat().st_size > 1000
        refused(run("generate", *options), "already there; --force")

    def test_refusals_leave_no_file(self, folder, tmp_path):
        path = tmp_path / "maps.npz"
        refused(run("attention", "-m", folder, "-o", path, "--layers", "3"), "layers 0 to 2")
        refused(run("attention", "-m", folder, "-o", path, "--layers", "2-1"), "runs backwards")
        refused(run("attention", "-m", folder, "-o", path, "--heads", "a"), "--heads takes numbers")
        refused(run("attention", "-m", folder, "-o", tmp_path / "maps.gif"), "must end in what")
        refused(run("attention", "", "-m", folder, "-o", path), "is empty")
        assert not path.exists()
        path.write_bytes(b"mine")
        refused(run("attention", "-m", folder, "-o", path), "already there; --force")
        assert path.read_bytes() == b"mine"
        assert run("attention", "-m", folder, "-o", path, "--force").status == 0

    def test_many_texts_resume_where_they_stopped(self, folder, torch_lm, tmp_path):
        source, out = tmp_path / "texts.jsonl", tmp_path / "maps"
        source.write_text('{"text": "one"}\n\n"two three"\n{"text": ""}\n')
        result = run("attention", "--input", source, "-m", folder, "-o", out)
        refused(result, "line 4", "no token ids")
        first = out / "00000001.safetensors"
        written = first.stat().st_mtime_ns
        source.write_text('{"text": "one"}\n\n"two three"\n')
        refused(run("attention", "--input", source, "-m", folder, "-o", out), "another job")
        other = ("--input", source, "-m", folder, "-o", out, "--kernels", "auto")
        refused(run("attention", *other), "another job", "kernels")
        source.write_text('{"text": "one"}\n\n"two three"\n{"text": ""}\n')
        refused(run("attention", "--input", source, "-m", folder, "-o", out), "line 4")
        assert first.stat().st_mtime_ns == written
        assert AttentionMaps.load(out / "00000003.safetensors") == torch_lm.attention("two three")
        assert not (out / "index.jsonl").exists()

    def test_many_texts_have_an_index(self, folder, tmp_path):
        source, out = tmp_path / "texts.txt", tmp_path / "maps"
        source.write_text("one\ntwo three\n")
        assert (
            run("attention", "--input", source, "-m", folder, "-o", out, "--format", "npz").status
            == 0
        )
        lines = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
        assert [(line["line"], line["tokens"]) for line in lines] == [(1, 1), (2, 2)]
        assert AttentionMaps.load(out / lines[1]["file"]).ids == [[11545, 1115]]


class TestInfo:
    def test_sizes_parameters_and_hash(self, folder, torch_lm):
        facts = json.loads(run("info", "-m", folder, "--json").stdout)
        assert facts["parameters"] == sum(p.numel() for p in torch_lm.model.parameters())
        assert facts["cache_bytes_per_token"] == 2 * 3 * 32 * 4
        assert len(facts["files"][0]["sha256"]) == 64
        text = run("info", "-m", folder).stdout
        assert f"{facts['parameters']:,}" in text
        assert facts["files"][0]["sha256"] in text
        for name, setting in facts["config"].items():
            assert re.search(rf"^{name} +{re.escape(str(setting))}$", text, re.M), name

    def test_which_kernels_would_run(self, folder, lm, tmp_path):
        facts = json.loads(run("info", "-m", folder, "--json").stdout)
        assert facts["kernels"] == use_kernels(lm.model, "auto")
        write_checkpoint(tmp_path, {"activation_function": "relu"})
        facts = json.loads(run("info", "-m", tmp_path, "--json").stdout)
        assert facts["kernels"] == "torch (the activation is relu)"

    def test_files_that_the_config_does_not_describe_are_no_model(self, tmp_path):
        write_checkpoint(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 12}))
        result = run("info", "-m", tmp_path)
        assert result.status == 2
        assert "n_layer is 12, but the number of blocks is: 3" in result.stderr


class TestKernels:
    EXACT = ("attention", "trace", "heads", "neighbours", "drift", "lens", "explain", "verify")

    def test_a_note_says_why_the_fast_ones_do_not_run(self, folder, monkeypatch):
        command = ("generate", "the", "-m", folder, "-n", "1")
        assert "kernels" not in run(*command).stderr
        monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
        assert "kernels: torch (Numba is told not to compile)\n" in run(*command).stderr
        assert "kernels" not in run(*command, "--kernels", "torch").stderr

    def test_every_command_that_loads_a_model_has_them(self):
        defaults = {
            command.callback.__name__: parameter.default
            for command in app.registered_commands
            for name, parameter in inspect.signature(command.callback).parameters.items()
            if name == "kernels"
        }
        assert defaults == {
            **dict.fromkeys(self.EXACT, "torch"),
            **dict.fromkeys(("generate", "score", "bench"), "auto"),
        }
        for function in (load, load_model, locate):
            assert inspect.signature(function).parameters["kernels"].default == "auto"

    @pytest.mark.parametrize("name", [*EXACT[:-1], "generate", "score"])
    def test_the_option_reaches_the_model(self, small_model, monkeypatch, name):
        asked = []

        def noticed(model, kernels):
            asked.append(kernels)
            return use_kernels(model, kernels)

        monkeypatch.setattr("gpt2attn.checkpoint.use_kernels", noticed)
        text = {"neighbours": ["the"], "drift": [" the", "a the", "b the"]}.get(name, ["the cat"])
        more = {"trace": ["--layer", "0", "--head", "1"], "explain": ["-s", "1"]}.get(name, [])
        command = [name, *text, "-m", small_model, *more]
        default = "torch" if name in self.EXACT else "auto"
        for options, kernels in (
            ([], default),
            *((["--kernels", k], k) for k in ("auto", "torch")),
        ):
            assert run(*command, *options).status == 0
            assert asked.pop() == kernels
        assert asked == []


class TestProgram:
    def call(self, *arguments, **options):
        return subprocess.run(
            [sys.executable, "-m", "gpt2attn", *map(str, arguments)], capture_output=True, **options
        )

    def test_both_entry_points_are_the_same_program(self):
        script = os.path.join(os.path.dirname(sys.executable), "gpt2attn")
        texts = [
            subprocess.run([*command, "--help"], capture_output=True, text=True).stdout
            for command in ([sys.executable, "-m", "gpt2attn"], [script])
        ]
        assert texts[0].replace("python -m gpt2attn", "gpt2attn") == texts[1]
        assert "generate" in texts[1]

    def test_the_shell_completes_commands_and_options(self):
        script = os.path.join(os.path.dirname(sys.executable), "gpt2attn")
        for words, expected in (
            ("gpt2attn gen", "generate"),
            ("gpt2attn generate --num-b", "--num-beams"),
        ):
            asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
            environment = os.environ | asked | {"_GPT2ATTN_COMPLETE": "complete_bash"}
            result = subprocess.run([script], capture_output=True, text=True, env=environment)
            assert result.stdout == f"{expected}\n"

    def test_help_costs_no_torch(self):
        result = self.call("--version", text=True)
        assert result.stdout.startswith("gpt2attn ")
        program = (
            "import sys, resource\n"
            "sys.argv = ['gpt2attn', 'generate', '--help']\n"
            "from gpt2attn.cli import main\n"
            "try: main()\n"
            "except SystemExit: pass\n"
            "heavy = {'torch', 'transformers', 'numba', 'matplotlib', 'tiktoken'}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert "Example:" in result.stdout
        assert result.stdout.splitlines()[-1] == "[]"

    def test_a_reader_that_goes_away_is_no_error(self, tmp_path):
        (tmp_path / "long.txt").write_text("a b " * 40000)
        file = tmp_path / "long.txt"
        command = f"{sys.executable} -m gpt2attn tokens --text-file {file} | head -n 1"
        result = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert result.stdout.split() == ["0", "64", "a"]
        assert result.stderr == ""

    def test_output_is_utf8_even_in_the_c_locale(self, folder):
        environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        result = self.call("tokens", "--ids", "27332,222", env=environment)
        assert result.status if hasattr(result, "status") else result.returncode == 0
        assert result.stdout.decode("utf-8").endswith("\n")

    def test_debug_shows_the_traceback(self, folder):
        quiet = self.call("tokens", "--ids", "99999999", text=True)
        assert quiet.returncode == 2
        assert "Traceback" not in quiet.stderr
        loud = self.call("tokens", "--ids", "99999999", "--debug", text=True)
        assert "Traceback" in loud.stderr
