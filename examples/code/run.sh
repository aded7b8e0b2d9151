#!/usr/bin/env bash
# The run, and what it shows: more held-out programs pass, at the end of runs/code/summary.json.
#
#     examples/code/run.sh [--a.b=c ...]       from the folder that has .venv and .engine
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
rm -rf runs/code
"$python" -m penstock.cli run examples/code/run.yaml "$@"
"$python" examples/code/measure.py runs/code/summary.json
