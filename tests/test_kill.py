"""Killed processes, a handful of the moments of scripts/kill_harness.py; and two at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "kill_harness.py"


@pytest.mark.slow
def test_signals_leave_whole_files_and_a_job_that_can_be_finished() -> None:
    command = [sys.executable, SCRIPT, "--moments", "3", "--seed", "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "dump", "dump many", "generate many", "save",
    ]  # fmt: skip
    assert all(line.endswith("; 0 faults") for line in lines)


@pytest.mark.slow
def test_two_processes_fill_one_cache_of_kernels(small_model: Path, tmp_path: Path) -> None:
    arguments = ["generate", "the", "-n", "8", "-t", "0", "--kernels", "auto", "-m", small_model]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "gpt2attn", *arguments], env=environment, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    texts = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert texts[0] == texts[1]
    assert list(tmp_path.rglob("*.nbc"))
