#!/usr/bin/env bash
# Every part of examples/several as a process of its own on this machine; ends when the trainers have.
#
#     examples/several/run.sh [--a.b=c ...]        from the folder that has .venv and .engine; or: make several
#
# Starts anew each time; logs are in runs/several/logs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-.venv/bin/python}
penstock="$python -m penstock.cli"
config="$here/run.yaml"
logs=runs/several/logs
parts=()

end() {
  # SIGTERM: the worker hands back what it holds; Redis goes last.
  for pid in "${parts[@]:1}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${parts[@]:1}"; do wait "$pid" 2>/dev/null || true; done
  [ ${#parts[@]} -eq 0 ] || { kill "${parts[0]}" 2>/dev/null || true; wait "${parts[0]}" 2>/dev/null || true; }
}
trap end EXIT

start() { # NAME COMMAND...
  local name=$1
  shift
  "$@" >"$logs/$name.log" 2>&1 &
  parts+=($!)
}

$penstock prepare --config "$config" "$@"
rm -rf runs/several
mkdir -p "$logs"
start redis $penstock redis --config "$config" "$@"
until [ -e runs/several/redis.json ]; do
  kill -0 "${parts[0]}" || { cat "$logs/redis.log"; exit 1; }
  sleep 0.1
done
for part in buffer producer worker; do start $part $penstock $part --config "$config" "$@"; done

trainers=()
for who in actor critic judge left right; do
  "$python" "$here/train.py" $who "$@" > >(tee "$logs/$who.log") 2> >(tee -a "$logs/$who.log" >&2) &
  trainers+=($!)
  parts+=($!)
done
failed=0
for pid in "${trainers[@]}"; do wait "$pid" || failed=1; done

$penstock subs ls --run several
$penstock audit --run several
exit $failed
