#!/usr/bin/env bash
# Makes a virtual environment (VENV, .venv by default), installs the package with what its tests need (EXTRAS), runs
# them.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --editable ".[${EXTRAS:-test}]"
"$venv/bin/ruff" check
"$venv/bin/ruff" format --check
"$venv/bin/mypy"
# By two processes, since most tests keep one core busy; threads that wait for work leave the core to the other.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
exec "$venv/bin/python" -m pytest --numprocesses 2 --dist loadscope "$@"
