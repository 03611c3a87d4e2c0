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
exec "$venv/bin/python" -m pytest "$@"
