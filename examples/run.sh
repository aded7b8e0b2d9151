#!/usr/bin/env bash
# An example, and what it shows: its measure goes up, at the end of runs/NAME/summary.json.
#
#     examples/run.sh NAME [--a.b=c ...]       from the folder that has .venv and .engine; all of them: make examples
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
name=${1:-}
shift || true
if [ ! -e "examples/$name/run.yaml" ] || [ -z "$name" ]; then
  echo "examples/run.sh: '$name' is no example: name one of $(cd examples && echo */)" >&2
  exit 2
fi
if [ -x "examples/$name/run.sh" ]; then
  exec "examples/$name/run.sh" "$@"
fi
PATH=$PATH:$PWD/.bubblewrap/usr/bin
rm -rf "runs/$name"
"$python" -m penstock.cli run "examples/$name/run.yaml" "$@"
"$python" examples/measure.py "$name" "runs/$name/summary.json"
