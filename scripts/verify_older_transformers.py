"""Verify against transformers 4.57 and its older companions, in a virtual environment of its own.

    python scripts/verify_older_transformers.py [--keep FOLDER]

transformers 4.57 divides scores by sqrt(head_dim) where 5.24 multiplies, so its numbers are judged
by float64. The environment holds a torch of its own, which is large to download; pip's settings,
such as PIP_INDEX_URL for CPU-only builds, apply. It is removed afterwards unless it is kept. The
exit status is that of the check.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from gpt2attn.cli import run_script

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ("transformers>=4.57,<4.58", "huggingface_hub>=0.34,<1", "torch>=2.10,<2.14")

CHECK = """
import sys
from rich.console import Console
from gpt2attn.verify import verify

report = verify(sys.argv[1])
print(*report.header(), sep="\\n")
Console(width=160).print(report.table())
print(report.summary())
sys.exit(0 if report.ok else 1)
"""


def main(
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the environment, used again if it is there.")
    ] = None,
) -> None:
    """Verify a small random checkpoint with transformers 4.57."""
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder))
        checkpoint = Path(folder) / "checkpoint"
        script = ROOT / "scripts" / "make_checkpoint.py"
        # Its head_dim is 8: by the root of 64, division and multiplication are equally exact.
        subprocess.run([python, script, "tiny", checkpoint], check=True)
        status = subprocess.run([python, "-c", CHECK, checkpoint]).returncode
    raise typer.Exit(status)


def make_environment(folder: Path) -> Path:
    """The Python of a virtual environment in `folder` that has this package and REQUIREMENTS."""
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--editable", ROOT, *REQUIREMENTS]
        subprocess.run(install, check=True)
    return python


if __name__ == "__main__":
    run_script(main)
