"""What `make chaos` runs: a fixed set of workloads, seeds and faults, within minutes on two cores.

    python -m tests.chaos.minutes [--source DIR] [--jobs 2]

A line for each run, and exit code 1 where one of them found anything; the folders of those stay.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.places import ROOT

#: Longest run.
RUN_S = 900.0


@dataclass(frozen=True)
class Round:
    """One run of the set."""

    workload: str
    seed: int
    faults: int
    kinds: str = "kill,stop"


ROUNDS = (
    Round("async", 1, 12, "kill,stop,net"),
    Round("ranks", 2, 5, "kill:trainer,kill:trainers,stop:trainer,kill:redis"),
    Round("roles", 3, 5, "kill:trainer,kill:leader,kill:worker"),
    Round("pool", 4, 6),
    Round("sends", 10, 5, "kill:trainer,kill:worker,kill:engine,kill:redis"),
    Round("sync", 5, 6),
    Round("one_step", 6, 6),
    Round("lanes", 7, 6),
    Round("history", 9, 5, "kill:recorder,kill:recorders,kill:buffers"),
    Round("agents", 11, 10, "kill:worker,kill:engine,kill:gateway,kill:agent,stop:worker"),
    Round("prefixes", 8, 6, "kill:worker,kill:engine,stop:worker,kill:redis"),
)


def main(arguments: list[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.minutes", description="Runs under faults, for minutes."
    )
    parser.add_argument("--source", type=Path, default=ROOT, help="a checkout whose parts are run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        ends = list(pool.map(lambda one: _run(one, options.source.absolute()), ROUNDS))
    counted = sum(end.counted for end in ends)
    print(f"{len(ends)} runs, {counted} faults that count, {time.monotonic() - began:.0f} s")
    return 1 if any(end.failed for end in ends) else 0


@dataclass(frozen=True)
class End:
    """What came of a round."""

    counted: int
    failed: bool


def _run(one: Round, source: Path) -> End:
    command = [
        sys.executable, "-m", "tests.chaos.run", "--workload", one.workload, "--seed", str(one.seed),
        "--faults", str(one.faults), "--kinds", one.kinds, "--source", str(source),
    ]  # fmt: skip
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as exc:
        code, out, err = -1, "", f"it did not end in {RUN_S:g} s: {exc.stderr!r}"
    result = json.loads(out) if out else {}
    counted = sum(result.get("counted", {}).values())
    print("\n".join(_words(one, result, counted, code, err, time.monotonic() - began)), flush=True)
    return End(counted, code != 0)


def _words(one: Round, result: dict[str, object], counted: int, code: int, err: str, wall_s: float) -> Iterator[str]:
    state = "ok" if code == 0 else "FAILED"
    asked = f"{one.workload} seed {one.seed}"
    yield f"{asked}: {state}, {counted} faults, {result.get('batches', 0)} batches, {wall_s:.0f} s"
    if code:
        yield f"    again: python -m tests.chaos.run --workload {one.workload} --seed {one.seed} --faults {one.faults} "
        yield f"           --kinds '{one.kinds}'; what is left of it: {result.get('folder', 'nothing')}"
        yield from (f"    {line}" for line in err.splitlines()[-30:])


if __name__ == "__main__":
    sys.exit(main())
