#!/usr/bin/env bash
# The run, and what it shows: the judge's score of held-out answers goes up, at the end of runs/judge/summary.json.
#
#     examples/judge/run.sh [--a.b=c ...]       from the folder that has .venv and .engine
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
rm -rf runs/judge
"$python" -m penstock.cli run examples/judge/run.yaml "$@"
"$python" examples/judge/measure.py runs/judge/summary.json
