"""The commands heads, neighbours, drift, lens: what `analysis` finds, in tables and as JSON."""

import json

import pytest
from cli_runner import run

from gpt2attn import analysis

SENTENCE = "Apple raised its price target"
ALL_HEADS = [f"{layer}.{head}" for layer in range(3) for head in range(4)]


@pytest.fixture(scope="module")
def lm(torch_lm):
    return torch_lm


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, one_tokenizer):
    monkeypatch.setenv("COLUMNS", "80")


def read_json(*arguments):
    result = run(*arguments, "--json")
    assert result.status == 0, result
    return json.loads(result.stdout)


def read_table(*arguments):
    """Header, rows and the lines below; nothing wider than 80 columns, no colour."""
    result = run(*arguments)
    assert result.status == 0, result
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rule = next(i for i, line in enumerate(lines) if set(line) == {"─"})
    end = lines.index("", rule) if "" in lines else len(lines)
    return " ".join(lines[:rule]), lines[rule + 1 : end], " ".join(lines[end + 1 :])


def refused(*arguments):
    """The one sentence on stderr."""
    result = run(*arguments)
    assert (result.status, result.stdout) == (2, ""), result
    (line,) = result.stderr.strip().splitlines()
    return line.removeprefix("error: ")


class TestHeads:
    def test_overview_has_every_head_and_the_uniform_share(self, folder, lm):
        found = read_json("heads", "-m", folder)
        assert found["text"] == "Apple raised its price target."  # with the full stop
        weights = lm.attention(found["text"]).weights[:, 0]
        expected = {
            "sink_share_last": weights[..., -1, 0],
            "sink_share": weights[..., 1:, 0].mean(-1),
            "entropy": analysis.entropy(weights)[..., 1:].mean(-1),
            "mean_distance": analysis.attention_distance(weights)[..., 1:].mean(-1),
            "previous_token": analysis.diagonal_score(weights, 1),
        }
        assert [f"{row['layer']}.{row['head']}" for row in found["heads"]] == ALL_HEADS
        for name, values in expected.items():
            assert [row[name] for row in found["heads"]] == pytest.approx(
                values.flatten().tolist(), abs=1e-6
            )
            assert found["mean"][name] == pytest.approx(values.mean().item(), abs=1e-6)
        assert found["uniform"]["sink_share_last"] == pytest.approx(1 / 6)
        header, rows, below = read_table("heads", "-m", folder)
        assert "entropy" in header
        assert [row.split()[0] for row in rows] == [*ALL_HEADS, "all", "uniform"]
        assert f"{100 * found['mean']['sink_share_last']:.1f} %" in below
        assert "uniform share is 16.7 %" in below

    @pytest.mark.parametrize(
        ("query", "key"),
        [("its", "Apple"), (" its", "0"), ("2", "#16108"), ("-3", "-5"), ("#663", "Apple")],
    )
    def test_a_named_pair_ranks_all_heads(self, folder, lm, query, key):
        found = read_json("heads", SENTENCE, "--from", query, "--to", key, "-m", folder)
        assert (found["from"], found["to"]) == (2, 0)
        weights = lm.attention(SENTENCE).weights[:, 0, :, 2, 0]
        ranked = [(row["layer"], row["head"], row["weight"]) for row in found["heads"]]
        assert ranked == analysis.rank_heads(weights)
        assert len(ranked) == 12
        assert found["uniform"] == 1 / 3

    def test_pair_table(self, folder):
        header, rows, below = read_table(
            "heads", SENTENCE, "--from", "its", "--to", "Apple", "-n", "5", "-m", folder
        )
        assert "␣its (2) to Apple (0)" in header
        assert [row.split()[0] for row in rows] == ["1", "2", "3", "4", "5"]
        assert "a uniform share 33.3 %" in below

    def test_scores(self, folder, lm):
        found = read_json("heads", "--scores", "--seed", "3", "--sort", "induction", "-m", folder)
        scores = analysis.head_scores(lm.model, seed=3)
        copying = analysis.ov_copying_scores(lm.model)
        assert (found["n_tokens"], found["seed"], len(found["heads"])) == (32, 3, 12)
        for row in found["heads"]:
            at = row["layer"], row["head"]
            assert row["previous_token"] == scores.previous_token[at].item()
            assert row["duplicate_token"] == scores.duplicate_token[at].item()
            assert row["induction"] == scores.induction[at].item()
            assert row["ov_copying"] == copying[at].item()
        inductions = [row["induction"] for row in found["heads"]]
        assert inductions == sorted(inductions, reverse=True)
        _, rows, below = read_table("heads", "--scores", "-m", folder)
        assert [row.split()[0] for row in rows] == ALL_HEADS
        assert "seed 0" in below

    def test_scores_name_the_published_heads_of_gpt2_small(self, folder, monkeypatch):
        assert "published" not in read_json("heads", "--scores", "-m", folder)["heads"][0]
        monkeypatch.setattr(analysis, "is_gpt2_small", lambda model: True)
        header, rows, _ = read_table("heads", "--scores", "-m", folder)
        assert "published" in header
        roles = {row.split()[0]: " ".join(row.split()[5:]) for row in rows}
        assert (roles["0.1"], roles["2.2"], roles["1.1"]) == (
            "duplicate token",
            "previous token",
            "",
        )

    @pytest.mark.parametrize("mean", [False, True])
    def test_ablation_of_several_heads_together(self, folder, lm, mean):
        extra = ["--mean"] if mean else []
        found = read_json(
            "heads", SENTENCE, "--ablate", "0.1", "--ablate", "2.3", *extra, "-n", "4", "-m", folder
        )
        result = analysis.ablate_heads(lm.model, lm.encode(SENTENCE), [(0, 1), (2, 3)], mean=mean)
        assert found["ablated"] == [[0, 1], [2, 3]]
        assert found["kl_nats"] == result.kl > 0
        before, after = (x.double().softmax(-1) for x in (result.before, result.after))
        wanted = {*before.topk(4).indices.tolist(), *after.topk(4).indices.tolist()}
        assert {token["id"] for token in found["tokens"]} == wanted
        for token in found["tokens"]:
            assert token["before"] == before[token["id"]].item()
            assert token["after"] == after[token["id"]].item()
            assert token["rank_after"] == 1 + (after > after[token["id"]]).sum()
        _, rows, below = read_table(
            "heads", SENTENCE, "--ablate", "0.1", "--ablate", "2.3", *extra, "-n", "4", "-m", folder
        )
        assert len(rows) == len(wanted)
        assert f"Without 0.1, 2.3 (output set to {'their mean' if mean else '0'}" in below
        assert f"{result.kl:.4g} nats" in below

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--from", "its"], "--from and --to go together"),
            (
                ["--from", "Apple", "--to", "its"],
                "--to (position 2) comes after --from (position 0)",
            ),
            (
                ["--from", "its", "--to", "Pear"],
                "--to 'Pear' fits no token; give a position: 0 Apple",
            ),
            (["the cat the", "--from", "the", "--to", "0"], None),
            (["the the the", "--from", " the", "--to", "0"], "1 ␣the, 2 ␣the"),
            (["--from", "9", "--to", "0"], "--from 9: the text has the positions 0 to 5."),
            (["--ablate", "3.0"], "layer 3 is not there: this model has the layers 0 to 2."),
            (["--ablate", "1.4"], "head 4 is not there"),
            (["--ablate", "L1H4"], "--ablate takes LAYER.HEAD such as 9.6, not 'L1H4'."),
            (["--mean"], "give --ablate too"),
            (
                ["--scores", "--ablate", "1.1"],
                "Give one of --from with --to, --scores, or --ablate.",
            ),
            (["--scores", "a text"], "leave the text out"),
            (["--sort", "induction"], "--sort induction: this table has no such column."),
            (["Apple"], "two tokens or more"),
            ([""], "The text is empty"),
        ],
    )
    def test_bad_input_is_one_sentence(self, folder, arguments, message):
        if message is None:  # an exact match beats one that lacks its space
            assert read_json("heads", *arguments, "-m", folder)["from"] == 0
        else:
            assert message in refused("heads", *arguments, "-m", folder)


class TestNeighbours:
    def test_nearest_rows(self, folder, lm):
        found = read_json("neighbours", " apple", "-n", "7", "-m", folder)
        assert (found["ids"], found["labels"]) == ([17180], ["␣apple"])
        expected = analysis.neighbours(lm.model.wte.weight, 17180, 7)
        assert [(row["id"], row["cosine"]) for row in found["neighbours"]] == expected
        header, rows, _ = read_table("neighbours", "#17180", "-m", folder)
        assert "cosine to ␣apple (#17180)" in header
        assert rows[0].split() == [
            "1",
            found["neighbours"][0]["label"],
            str(expected[0][0]),
            f"{expected[0][1]:.4f}",
        ]
        assert len(rows) == 10

    def test_a_text_without_its_space_is_found_and_its_twin_is_named(self, folder):
        result = run("neighbours", "apple", "-m", folder)
        assert "cosine to apple (#18040)" in result.stdout
        assert "␣apple is another token, #17180" in result.stderr
        # Only with a space is this one a token.
        assert read_json("neighbours", "banana", "-m", folder)["labels"] == ["␣banana"]

    def test_several_tokens_give_the_cosine_of_each_pair(self, folder, lm):
        found = read_json("neighbours", " king", " queen", "#464", "-m", folder)
        table = lm.model.wte.weight
        assert [pair["labels"] for pair in found["pairs"]] == [
            ["␣king", "␣queen"], ["␣king", "The"], ["␣queen", "The"],
        ]  # fmt: skip
        for pair in found["pairs"]:
            a, b = pair["ids"]
            assert pair["cosine"] == analysis.cosine(table[a], table[b]).item()
        _, rows, _ = read_table("neighbours", " king", " queen", "-m", folder)
        assert rows[0].split() == ["␣king", "␣queen", f"{found['pairs'][0]['cosine']:.4f}"]

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            (["appleorange"], "is not one token but 2: apple (#18040), orange (#43745)"),
            ([""], "cannot be empty"),
            (["#50257"], "Token id 50257 is outside the vocabulary: ids run from 0 to 50256."),
            (["#1", "#50257"], "ids run from 0 to 50256"),
        ],
    )
    def test_bad_input_is_one_sentence(self, folder, tokens, message):
        assert message in refused("neighbours", *tokens, "-m", folder)


class TestDrift:
    TEXTS = ("She ate an apple.", "He bought an apple computer")

    def test_cosines_of_one_token_in_two_texts(self, folder, lm):
        found = read_json("drift", " apple", *self.TEXTS, "-m", folder)
        ids = [lm.encode(text) for text in self.TEXTS]
        expected = analysis.context_drift(lm.model, ids[0], 3, ids[1], 3)
        assert found["token"] == {"id": 17180, "label": "␣apple"}
        assert found["positions"] == [3, 3]
        assert found["stages"] == ["wte", "wte + wpe", "block 0", "block 1", "block 2"]
        assert (found["cosines"], found["others"]) == (expected.cosines, expected.others)
        assert found["cosines"][0] == 1
        header, rows, _ = read_table("drift", "apple", *self.TEXTS, "-m", folder)
        assert "cosine of ␣apple" in header
        assert rows[0].split()[:2] == ["wte", "1.0000"]
        assert len(rows) == 5

    def test_the_example_needs_no_arguments(self, folder):
        found = read_json("drift", "-m", folder)
        assert (found["token"]["label"], found["positions"]) == ("␣bank", [5, 4])

    def test_at_chooses_among_several(self, folder):
        texts = ("the bank is the bank", "a bank")
        message = refused("drift", "bank", *texts, "-m", folder)
        assert "text 1" in message
        assert "give a position: 1 ␣bank, 4 ␣bank" in message
        assert read_json("drift", "bank", *texts, "--at", "4,1", "-m", folder)["positions"] == [
            4,
            1,
        ]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["bank"], "Give the token and two texts"),
            (["bank", "a bank", "a tree"], "text 2: 'bank' fits no token"),
            (["bank", "a bank", ""], "A text is empty"),
            (["bank", "bank it", "a bank"], "drift compares a token with itself"),
            (["bank", "a bank", "the bank", "--at", "1"], "--at takes a position in each text"),
        ],
    )
    def test_bad_input_is_one_sentence(self, folder, arguments, message):
        assert message in refused("drift", *arguments, "-m", folder)


class TestLens:
    def test_the_last_stage_is_the_models_own_prediction(self, folder, lm):
        found = read_json("lens", "-n", "5", "-m", folder)
        assert (found["text"], found["position"]) == (SENTENCE, 4)
        assert [stage["stage"] for stage in found["stages"]] == [
            "wte + wpe", "block 0", "block 1", "block 2",
        ]  # fmt: skip
        logits = lm.model.unembed(lm.model.hidden([lm.encode(SENTENCE)])[0, -1:])[0]
        top = logits.double().softmax(-1).topk(5)
        last = found["stages"][-1]
        assert [token["id"] for token in last["top"]] == top.indices.tolist()
        assert [token["probability"] for token in last["top"]] == top.values.tolist()
        assert last["rank_of_final"] == 1

    def test_every_stage_is_the_lens(self, folder, lm):
        found = read_json("lens", SENTENCE, "--at", "its", "--after-attention", "-m", folder)
        lens = analysis.logit_lens(
            lm.model, [lm.encode(SENTENCE)], positions=[2], after_attention=True
        )
        final = lens.logits[-1, 0, 0].argmax()
        assert [stage["stage"] for stage in found["stages"]] == lens.stages
        for stage, logits in zip(found["stages"], lens.logits[:, 0, 0], strict=True):
            assert stage["top"][0]["id"] == logits.argmax()
            assert stage["rank_of_final"] == 1 + (logits > logits[final]).sum()

    @pytest.mark.parametrize("columns", ["80", "60"])
    def test_table_breaks_between_tokens_only(self, folder, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", columns)
        found = read_json("lens", "-n", "9", "-m", folder)
        header, rows, below = read_table("lens", "-n", "9", "-m", folder)
        assert max(map(len, rows)) <= int(columns)
        assert "rank" in header
        text = " ".join(" ".join(row.split()) for row in rows)
        for stage in found["stages"]:
            tokens = [f"{top['label']} {100 * top['probability']:.1f} %" for top in stage["top"]]
            assert f"{stage['stage']} {stage['rank_of_final']} {' '.join(tokens)}" in text
        assert all(row.split()[-1] == "%" for row in rows)
        assert "What follows ␣target (position 4)" in below

    def test_bad_input_is_one_sentence(self, folder):
        assert "The text is empty" in refused("lens", "", "-m", folder)
        assert "--at 'Pear' fits no token" in refused("lens", "--at", "Pear", "-m", folder)


@pytest.mark.parametrize("command", ["heads", "neighbours", "drift", "lens"])
def test_help_has_an_example(command):
    result = run(command, "--help")
    assert result.status == 0
    assert f"Example:  gpt2attn {command}" in result.stdout
