"""Runs under faults for hours, over all workloads and seed after seed; what each came to is kept as it ends.

    python -m tests.chaos.night [--hours 10] [--jobs 2] [--faults 40] [--redis-server PATH ...]
    python -m tests.chaos.night --report

A run that stands in ``benchmarks/results/chaos/runs.jsonl`` is not made again, so a night goes on where it was stopped;
SIGINT and SIGTERM end it once the runs on their way are over. Exits with 1 where any run that is kept found anything.
"""

import argparse
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.redis.server import find_binary
from tests.chaos.cluster.workloads import WORKLOADS
from tests.chaos.places import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "chaos"
#: Longest run, in seconds, and seconds more for each fault.
RUN_S, FAULT_S = 300.0, 30.0
#: Most bytes of the packed history of a run in which nothing was found; of any other all is kept.
KEPT_BYTES = 256 * 1024
#: Lines of what was found that are kept.
KEPT_LINES = 20
#: What a run's line keeps of its result.
OF_RESULT = ("faults", "counted", "recovery_s", "violations", "operations", "batches", "wall_s", "unchecked", "ends")


@dataclass(frozen=True)
class Run:
    """One run of a night."""

    workload: str
    seed: int
    redis: str
    #: The binary.
    redis_server: Path

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.seed}-redis{self.redis}"


class Ledger:
    """Runs that were made: a line each, safe on the disk before the next is begun."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "runs.jsonl"
        self._histories = folder / "histories"
        self._histories.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        if self._path.exists():  # what a kill tore
            data = self._path.read_bytes()
            os.truncate(self._path, data.rfind(b"\n") + 1)

    def rows(self) -> list[dict[str, Any]]:
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        return [json.loads(line) for line in lines]

    def append(self, run: Run, row: dict[str, Any], history: bytes) -> None:
        if row["violations"] or len(history) <= KEPT_BYTES:
            (self._histories / f"{run.name}.tar.xz").write_bytes(history)
        with self._lock, self._path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def make(run: Run, faults: int) -> tuple[dict[str, Any], bytes]:
    """One run: its line, and its packed history. Blocks for minutes."""
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="night-", dir=fast) as name:
        folder = Path(name)
        command = [
            sys.executable, "-m", "tests.chaos.run", "--workload", run.workload, "--seed", str(run.seed),
            "--faults", str(faults), "--redis-server", str(run.redis_server), "--folder", str(folder / "run"),
        ]  # fmt: skip
        began, limit_s = time.time(), RUN_S + FAULT_S * faults
        done = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, err = done.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            out, err = "", done.communicate()[1] + f"\nit did not end in {limit_s:g} s"
        row: dict[str, Any] = {"workload": run.workload, "seed": run.seed, "redis": run.redis, "asked": faults}
        row |= {"commit": _commit(), "began": round(began), "wall_s": round(time.time() - began, 1)}
        if out:
            result = json.loads(out)
            row |= {key: result[key] for key in OF_RESULT} | {"words": result["words"][:KEPT_LINES]}
        else:  # it could not even be judged
            row |= {"faults": {}, "counted": {}, "recovery_s": {}, "violations": {"run": 1}}
            row["words"] = err.splitlines()[-KEPT_LINES:]
        return row, _packed(folder / "run", everything=bool(row["violations"]))


def _packed(folder: Path, *, everything: bool) -> bytes:
    """The history with its account and the faults; with ``everything`` the parts' logs too."""
    packed = io.BytesIO()
    names = ["history", "nemesis.jsonl", *(["logs"] if everything else [])]
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name in names:
            if (folder / name).exists():
                archive.add(folder / name, arcname=name)
    return packed.getvalue()


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def version_of(binary: Path) -> str:
    """Release of a Redis server."""
    said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return said.partition("v=")[2].split()[0]


def plan(
    workloads: Iterable[str], servers: list[Path], first_seed: int, made: set[tuple[str, int, str]]
) -> Iterator[Run]:
    """Runs without an end: for each seed all workloads, each server in its turn."""
    named = [(version_of(server), server) for server in servers]
    chosen = list(workloads)
    for seed in itertools.count(first_seed):
        for at, workload in enumerate(chosen):
            redis, server = named[(seed + at) % len(named)]
            if (workload, seed, redis) not in made:
                yield Run(workload, seed, redis, server)


def night(runs: Iterator[Run], ledger: Ledger, *, faults: int, jobs: int, hours: float) -> None:
    """Make runs until the hours are over, or somebody asks for an end. Blocks."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    deadline = time.monotonic() + hours * 3600
    taking = threading.Lock()

    def work(_: int) -> None:
        while not stopping.is_set() and time.monotonic() < deadline:
            with taking:
                run = next(runs)
            row, history = make(run, faults)
            ledger.append(run, row, history)
            found = f"FOUND {row['violations']}" if row["violations"] else "ok"
            counted = sum(row["counted"].values())
            print(f"{run.name}: {found}, {counted} faults count, {row['wall_s']:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))


def report(rows: list[dict[str, Any]]) -> str:
    """What all runs together came to, as Markdown."""
    done, counted = Counter[str](), Counter[str]()
    recovery: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        done.update(row["faults"])
        counted.update(row["counted"])
        for kind, seconds in row["recovery_s"].items():
            recovery[kind] += seconds
    hours = sum(row["wall_s"] for row in rows) / 3600
    found = [row for row in rows if row["violations"]]
    lines = [f"{len(rows)} runs, {hours:.1f} hours of runs, {sum(counted.values()):,} faults that count."]
    lines += ["", "| fault | done | count | recovery p50 (s) | p99 (s) |", "|---|---|---|---|---|"]
    for kind in sorted(done):
        half, most = _quantiles(recovery.get(kind, []))
        lines.append(f"| `{kind}` | {done[kind]} | {counted[kind]} | {half} | {most} |")
    lines += ["", f"Runs in which something was found: {len(found) or 'none'}."]
    lines += [f"- {row['workload']} seed {row['seed']}, Redis {row['redis']}: {row['violations']}" for row in found]
    return "\n".join(lines)


def _quantiles(seconds: list[float]) -> tuple[str, str]:
    if not seconds:
        return "-", "-"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return f"{cuts[49]:.2f}", f"{cuts[98]:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.night", description="Runs under faults, for hours.")
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--faults", type=int, default=40, help="of each run")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="with commas")
    parser.add_argument("--redis-server", type=Path, action="append", help="binaries that take turns")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of what is kept")
    parser.add_argument("--report", action="store_true", help="say what was kept so far, and run nothing")
    options = parser.parse_args(arguments)
    chosen = options.workloads.split(",")
    if unknown := set(chosen) - WORKLOADS.keys():
        parser.error(f"there is no workload {', '.join(sorted(unknown))}")
    ledger = Ledger(options.results)
    if not options.report:
        made = {(row["workload"], row["seed"], row["redis"]) for row in ledger.rows()}
        runs = plan(chosen, options.redis_server or [find_binary()], options.first_seed, made)
        night(runs, ledger, faults=options.faults, jobs=options.jobs, hours=options.hours)
    rows = ledger.rows()
    print(report(rows))
    return 1 if any(row["violations"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
