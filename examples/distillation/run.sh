#!/usr/bin/env bash
# The run, and what it shows: held-out accuracy goes up, at the end of runs/distillation/summary.json.
#
#     examples/distillation/run.sh [--a.b=c ...]       from the folder that has .venv and .engine
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
rm -rf runs/distillation
"$python" -m penstock.cli run examples/distillation/run.yaml "$@"
"$python" examples/distillation/measure.py runs/distillation/summary.json
