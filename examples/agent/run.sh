#!/usr/bin/env bash
# The example of an agent: `penstock run`, and the agent beside it.
#
#     examples/run.sh agent [--a.b=c ...]      from the folder that has .venv and .engine
set -euo pipefail
python=${PYTHON:-.venv/bin/python}
TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(16))')
export TOKEN
rm -rf runs/agent
"$python" examples/agent/agent.py &
agent=$!
trap 'kill $agent' EXIT
PENSTOCK_AGENTS__CLIENTS="{\"agent\": \"$TOKEN\"}" "$python" -m penstock.cli run examples/agent/run.yaml "$@"
"$python" examples/measure.py agent runs/agent/summary.json
