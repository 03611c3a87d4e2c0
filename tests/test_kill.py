"""A handful of the moments at which scripts/kill_harness.py ends the program."""

from __future__ import annotations

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
