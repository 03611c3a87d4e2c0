"""The command score: what `scoring` finds, as text, JSON and CSV."""

import csv
import json
import math
import os
import re
import threading

import pytest
from cli_runner import run

from gpt2attn import Tokenizer
from gpt2attn.scoring import score, score_last_words, score_texts

SENTENCE = "Apple raised its price target, día 😀"
pytestmark = pytest.mark.usefixtures("one_tokenizer")


def done(*arguments, stdin=b""):
    result = run("score", *arguments, stdin=stdin)
    assert result.status == 0, result
    return result


def json_lines(*arguments):
    return [json.loads(line) for line in done(*arguments, "--json").stdout.splitlines()]


def refused(*arguments, stdin=b""):
    """The one sentence on stderr."""
    result = run("score", *arguments, stdin=stdin)
    assert (result.status, result.stdout) == (2, ""), result
    (line,) = result.stderr.strip().splitlines()
    return line.removeprefix("error: ")


def listed(result):
    """Log-probabilities and ranks with None where there is none."""
    scored = [rank > 0 for rank in result.ranks.tolist()]
    return [
        [value if flag else None for value, flag in zip(values.tolist(), scored, strict=True)]
        for values in (result.logprobs, result.ranks)
    ]


class TestOneText:
    @pytest.mark.parametrize("bos", [False, True])
    def test_json(self, folder, lm, bos):
        (found,) = json_lines(SENTENCE, *(["--bos"] if bos else []), "-m", folder)
        (expected,) = score_texts(lm.model, lm.tokenizer, [SENTENCE], bos=bos)
        assert found["ids"] == lm.encode(SENTENCE) == expected.ids
        assert found["labels"] == lm.tokenizer.labels(expected.ids)
        assert [found["logprobs"], found["ranks"]] == listed(expected)
        assert (found["tokens"], found["scored"]) == (len(found["ids"]), expected.n_scored)
        assert found["scored"] == found["tokens"] - (not bos)
        assert found["logprob"] == expected.total
        assert found["perplexity"] == expected.perplexity
        assert found["bytes"] == len(SENTENCE.encode()) - (0 if bos else len("Apple"))
        assert found["bits_per_byte"] == expected.bits_per_byte
        assert (found["context"], found["stride"]) == (64, 32)
        assert found["prefix_id"] == (50256 if bos else None)

    def test_the_totals_and_how_they_were_made(self, folder, lm):
        result = done(SENTENCE, "--context", "6", "--stride", "2", "-m", folder)
        expected = score(lm.model, lm.encode(SENTENCE), context=6, stride=2)
        n = len(expected.ids)
        assert result.stdout.splitlines()[-1].startswith(
            f"{n} tokens, {n - 1} scored: log-probability {expected.total:.4f}, "
            f"perplexity {expected.perplexity:.4f}, "
        )
        assert "context 6, stride 2, nothing in front" in result.stderr
        assert " tokens/s" in result.stderr
        assert "<|endoftext|> in front" in done(SENTENCE, "--bos", "-m", folder).stderr

    @pytest.mark.parametrize("how", ["argument", "file", "stdin", "dash"])
    def test_nothing_is_stripped_wherever_the_text_comes_from(self, folder, lm, tmp_path, how):
        text = " one two\n"
        file = tmp_path / "text.txt"
        file.write_bytes(text.encode())
        place = {"argument": [text], "file": ["--text-file", file], "stdin": [], "dash": ["-"]}
        result = done(*place[how], "--json", "-m", folder, stdin=text.encode())
        assert json.loads(result.stdout)["ids"] == lm.encode(text)

    def test_full_last_and_special(self, folder, lm):
        text = "one<|endoftext|> " + "two three " * 20
        options = ("--context", "10", "--stride", "4", "--special", "--full-last")
        (found,) = json_lines(text, *options, "-m", folder)
        ids = lm.encode(text, special=True)
        expected = score(lm.model, ids, context=10, stride=4, full_last=True)
        assert found["ids"] == ids
        assert found["logprobs"] == listed(expected)[0]

    def test_one_token_alone_has_no_perplexity(self, folder):
        (found,) = json_lines("x", "-m", folder)
        assert (found["scored"], found["perplexity"], found["bits_per_byte"]) == (0, None, None)
        result = done("x", "-m", folder)
        assert "perplexity -, - bits per byte" in result.stdout
        assert "--bos gives it one" in result.stderr


class TestView:
    def marked(self, lm, text, levels):
        """The text with each token in its marks; the first has none."""
        result = score(lm.model, lm.encode(text))
        pieces = []
        for id, rank in zip(result.ids, result.ranks.tolist(), strict=True):
            piece = lm.tokenizer.decode([id])
            before, after = next(marks for bound, marks in levels if rank > bound)
            space = " " if piece.startswith(" ") else ""
            pieces.append(space + before + piece[len(space) :] + after)
        return "".join(pieces)

    def test_without_colour_surprising_tokens_are_marked(self, folder, lm):
        text = "Apple raised its price target, and then the the the [b]bank[/b] :smile:"
        levels = [(1000, ("««", "»»")), (100, ("«", "»")), (-1, ("", ""))]
        lines = done(text, "-m", folder).stdout.splitlines()
        assert lines[0] == self.marked(lm, text, levels)
        assert "rank above 100 in « »" in lines[2]
        assert "»" in lines[0]

    def test_colour_adds_nothing_but_colour(self, folder, monkeypatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        text = "Apple raised its price target"
        first = done(text, "-m", folder).stdout.splitlines()[0]
        assert "\x1b[" in first
        assert "«" not in first
        assert re.sub(r"\x1b\[[0-9;]*m", "", first) == text

    def test_characters_of_several_tokens_newlines_and_controls(self, folder):
        shown = done("a 😀\n\nb\x1b[2J", "-m", folder).stdout.split("\n\nrank above")[0]
        bare = shown.replace("«", "").replace("»", "")
        assert bare.replace("⏎", "") == "a 😀\n\nb<0x1B>[2J"

    def test_a_long_text_is_shown_on_demand_only(self, folder, monkeypatch):
        monkeypatch.setattr("gpt2attn.cli.score._VIEW_LIMIT", 20)
        text = "word " * 21
        result = done(text, "-m", folder)
        assert len(result.stdout.splitlines()) == 1
        assert "tokens are not shown" in result.stderr
        assert "word" in done(text, "--view", "-m", folder).stdout
        short = done("one two", "--no-view", "-m", folder)
        assert len(short.stdout.splitlines()) == 1
        assert "not shown" not in short.stderr


class TestSeveral:
    @pytest.fixture
    def files(self, tmp_path):
        (tmp_path / "a.txt").write_text("one two three\n\nx\n", encoding="utf-8")
        (tmp_path / "b.jsonl").write_text('{"text": "día 😀"}\n""\n', encoding="utf-8")
        return [tmp_path / "a.txt", tmp_path / "b.jsonl"]

    TEXTS = ("one two three", "x", "día 😀", "")

    def test_json_lines_and_the_total(self, folder, lm, files):
        *found, last = json_lines("--input", files[0], "--input", files[1], "-m", folder)
        expected = list(score_texts(lm.model, lm.tokenizer, self.TEXTS))
        assert [row["name"] for row in found] == [
            f"{files[0]}:1", f"{files[0]}:3", f"{files[1]}:1", f"{files[1]}:2",
        ]  # fmt: skip
        assert [row["ids"] for row in found] == [result.ids for result in expected]
        total = last["total"]
        n_scored = sum(result.n_scored for result in expected)
        logprob = sum(result.total for result in expected)
        assert (total["texts"], total["scored"]) == (4, n_scored)
        assert total["logprob"] == pytest.approx(logprob, rel=1e-6)
        assert total["perplexity"] == pytest.approx(math.exp(-logprob / n_scored), rel=1e-6)
        assert total["bytes"] == sum(result.n_bytes for result in expected)
        # Two of the texts have a perplexity.
        mean = (expected[0].perplexity + expected[2].perplexity) / 2
        assert total["mean_perplexity"] == pytest.approx(mean, rel=1e-6)

    def test_lines_and_the_total(self, folder, files):
        result = done("--input", files[0], "--input", files[1], "-m", folder)
        header, *rows, total, mean = result.stdout.splitlines()
        assert header.split() == ["scored", "log-probability", "perplexity", "bits/byte", "text"]
        assert [row.split()[0] for row in rows] == ["2", "0", "3", "0"]
        assert rows[1].split()[2:] == ["-", "-", f"{files[0]}:3"]
        assert total.startswith("4 texts, 8 tokens, 5 scored: log-probability -")
        assert mean.startswith("mean of the texts' perplexities ")

    def test_text_files_are_texts(self, folder, files):
        *found, last = json_lines("--text-file", files[0], "--text-file", files[0], "-m", folder)
        assert [row["name"] for row in found] == [str(files[0])] * 2
        assert found[0]["ids"] == Tokenizer.gpt2().encode("one two three\n\nx\n")
        assert last["total"]["logprob"] == pytest.approx(2 * found[0]["logprob"])

    def test_csv_has_every_token(self, folder, lm, files, tmp_path):
        path = tmp_path / "tokens.csv"
        result = done("--input", files[0], "--csv", path, "--stride", "9", "-m", folder)
        assert f"4 tokens in {path}" in result.stderr
        with path.open(encoding="utf-8", newline="") as file:
            metadata = json.loads(file.readline().removeprefix("# "))
            rows = list(csv.DictReader(file))
        assert (metadata["context"], metadata["stride"], metadata["prefix_id"]) == (64, 9, None)
        assert list(metadata["sha256"]) == ["model.safetensors"]
        names = [f"{files[0]}:1"] * 3 + [f"{files[0]}:3"]
        assert [row["text"] for row in rows] == names
        assert [int(row["position"]) for row in rows] == [0, 1, 2, 0]
        assert [row["label"] for row in rows] == ["one", "␣two", "␣three", "x"]
        expected = score(lm.model, lm.encode("one two three"))
        assert [row["rank"] for row in rows] == ["", *map(str, expected.ranks[1:].tolist()), ""]
        assert float(rows[1]["logprob"]) == pytest.approx(float(expected.logprobs[1]), abs=1e-5)

    def test_a_failure_leaves_no_csv(self, folder, tmp_path):
        (tmp_path / "a.jsonl").write_text('"one two"\n3\n', encoding="utf-8")
        result = run(
            "score", "--input", tmp_path / "a.jsonl", "--csv", tmp_path / "a.csv", "-m", folder
        )
        assert result.status == 2
        assert "line 2, needs a string" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


class TestProtocols:
    def test_wikitext2(self, folder, lm, tmp_path):
        raw = tmp_path / "wiki.test.raw"
        raw.write_text(" \n = A title = \n \n Some words , \u2028 here . \n", encoding="utf-8")
        windows = tmp_path / "windows.raw"
        windows.write_bytes(raw.read_bytes().replace(b"\n", b"\r\n"))
        rows = ["", " = A title = \n", "", " Some words , \u2028 here . \n"]
        jsonl = tmp_path / "rows.jsonl"
        jsonl.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        text = "\n\n".join(rows)
        expected = score(lm.model, lm.encode(text), context=8, stride=4)
        n_words = 4 + 5 + 4  # each line's end is a word
        for path in (raw, windows, jsonl):
            options = ("--protocol", "wikitext2", "--context", "8", "--stride", "4")
            (found,) = json_lines("--input", path, *options, "-m", folder)
            assert found["ids"] == expected.ids
            assert found["perplexity"] == expected.perplexity
            assert found["words"] == n_words
            assert found["word_perplexity"] == pytest.approx(math.exp(-expected.total / n_words))
            printed = done("--input", path, *options, "-m", folder).stdout
            assert f"perplexity for each of {n_words} words and line ends" in printed

    def test_lambada(self, folder, lm, tmp_path):
        passages = ["He met Diana", "one two three"]
        path = tmp_path / "lambada_test.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
        options = ("--input", path, "--protocol", "lambada", "-m", folder)
        (found,) = json_lines(*options)
        expected = score_last_words(lm.model, lm.tokenizer, passages)
        assert found["n_passages"] == 2
        assert found["word_perplexity"] == expected.word_perplexity
        assert found["token_accuracy"] == expected.token_accuracy
        lines = done(*options).stdout.splitlines()
        assert lines[0] == "2 passages"
        assert lines[1] == (
            f"last word   accuracy {100 * expected.word_accuracy:.2f} %, "
            f"perplexity {expected.word_perplexity:.4f}"
        )
        assert lines[2].startswith("last token  accuracy ")

    def test_help_says_what_is_done(self):
        result = run("score", "--help")
        assert result.status == 0
        for part in ("287,644", "245,569", "32.56 %", "45.99", "not published", "Example:"):
            assert part in result.stdout


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["one", "--context", "1"], "context must be a whole number of tokens from 2 to 65"),
            (["one", "--context", "9", "--stride", "10"], "stride must be a whole number"),
            (["one", "--input", "x.txt"], "Give one of a text, --text-file and --input."),
            (["--text-file", "x.txt", "--input", "x.txt"], "Give one of a text"),
            ([""], "The text is empty"),
            (["--text-file", os.devnull], "The text is empty"),
            (["one", "--csv", "no/such/folder/a.csv"], "The folder no/such/folder does not exist"),
            (["--text-file", __file__, "--text-file", "nowhere"], "nowhere: No such file"),
            (["--input", "nowhere.txt", "--view"], "--view shows one text"),
            (["one", "--protocol", "wikitext2"], "scores one file, which --input names"),
            (["--protocol", "lambada"], "scores one file, which --input names"),
            (
                ["--input", "x.jsonl", "--protocol", "lambada", "--bos"],
                "--protocol lambada fixes the windows",
            ),
            (["--text-file", "nowhere.txt"], "No such file"),
        ],
    )
    def test_one_sentence(self, folder, arguments, message):
        assert message in refused(*arguments, "-m", folder)

    @pytest.mark.parametrize("option", ["--csv", "--out"])
    @pytest.mark.parametrize("source", ["--text-file", "--input"])
    def test_an_input_is_not_overwritten(self, folder, tmp_path, source, option):
        path = tmp_path / "a.jsonl"
        path.write_text('"one two"\n', encoding="utf-8")
        (tmp_path / "link.jsonl").symlink_to(path)
        for output in (path, tmp_path / "link.jsonl"):
            sentence = refused(source, path, option, output, "--force", "-m", folder)
            assert "is the input too and would be overwritten" in sentence
        assert path.read_text(encoding="utf-8") == '"one two"\n'

    def test_a_pipe_among_several_files_is_read_once(self, folder, tmp_path):
        (tmp_path / "a.txt").write_text("one two", encoding="utf-8")
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_text, args=("one two three",))
        writer.start()
        files = ("--text-file", tmp_path / "a.txt", "--text-file", pipe)
        *rows, _ = json_lines(*files, "-m", folder)
        writer.join()
        assert [row["tokens"] for row in rows] == [2, 3]

    def test_an_input_without_texts(self, folder, tmp_path):
        (tmp_path / "a.txt").write_text("\n \n")
        result = run("score", "--input", tmp_path / "a.txt", "-m", folder)
        assert result.status == 2
        assert "The input has no texts to score." in result.stderr
