"""A few cases of each target of scripts/fuzz.py, drawn by hypothesis, which shrinks its finds."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = {"tokenizer": 150, "config": 80, "header": 80, "index": 60, "sampler": 150, "cli": 30}


@pytest.mark.parametrize("target", CASES)
def test_any_input_succeeds_or_is_refused_in_one_sentence(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fuzz.small_model()
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

    @settings(max_examples=CASES[target], deadline=None, suppress_health_check=health)
    @given(chance=st.randoms(use_true_random=False))
    def cases(chance: random.Random) -> None:
        assert fuzz.run_case(target, chance) in ("success", "refused")

    cases()


def test_the_long_run_tells_what_it_found(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_of_three(chance: random.Random) -> None:
        if chance.random() < 1 / 3:
            raise TypeError("found")

    monkeypatch.setitem(fuzz.TARGETS, "config", one_of_three)
    expected = [seed for seed in range(20) if random.Random(seed).random() < 1 / 3]
    assert fuzz.fuzz("config", 20, 0) == len(expected) > 0
    printed = capsys.readouterr().out
    for seed in expected:
        assert f"config, seed {seed}: TypeError: found" in printed
    assert f"20 cases from seed 0: {len(expected)} find, {20 - len(expected)} success" in printed
