#!/usr/bin/env bash
# The run, and what it shows: held-out accuracy goes up, at the end of runs/ranking/summary.json.
#
#     examples/ranking/run.sh [--a.b=c ...]       from the folder that has .venv and .engine
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
rm -rf runs/ranking
"$python" -m penstock.cli run examples/ranking/run.yaml "$@"
"$python" examples/ranking/measure.py runs/ranking/summary.json
