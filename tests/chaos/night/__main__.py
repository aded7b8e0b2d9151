"""Runs under faults without end, over all workloads; what each came to is kept as it ends.

    python -m tests.chaos.night [--hours 10] [--parallel 2] [--faults 18] [--redis-server PATH ...]
    python -m tests.chaos.night --workloads engine_cuda --kinds kill:engine    # a real engine on a GPU
    python -m tests.chaos.night --table [--summarize]

Each run is of the kinds that are furthest from their targets. SIGINT and SIGTERM end the night once the runs on their
way are over. A run in which something was found keeps its folder, and the night goes on. Exits with 1 where any run
that is kept found anything, and was not made again since without.
"""

import argparse
import itertools
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.redis.server import find_binary
from tests.chaos.cluster.redis_conf import version_of
from tests.chaos.cluster.workloads import WORKLOADS
from tests.chaos.nemesis.kinds import KINDS, chosen
from tests.chaos.night import table
from tests.chaos.night.again import cleared_by, name_of, to_make_again
from tests.chaos.night.choice import EVERYWHERE, Run, choose, expected
from tests.chaos.night.ledger import Ledger, Row
from tests.chaos.night.one_run import Made, make
from tests.chaos.night.targets import tried
from tests.chaos.places import RESULTS

#: Between two looks at whether a run may be begun.
LOOK_S = 1.0
KEPT = "where the folders of runs are kept in which something was found"


class Night:
    """Makes runs side by side until its time is over, or it is asked to end.

    Args:
        ledger: what was run, and is.
        servers: binaries of Redis that take turns.
        kept: where folders are kept of runs in which something was found.
        paused: no run is begun while there is such a file.
        first: runs that are made before any others.
        seconds: no fault of a run is begun when they are over since its first could be.
    """

    def __init__(
        self,
        ledger: Ledger,
        servers: list[Path],
        workloads: list[str],
        kinds: Collection[str] = tuple(KINDS),
        *,
        faults: int,
        kept: Path,
        paused: Path | None,
        first: Sequence[Run] = (),
        seconds: float = float("inf"),
    ) -> None:
        self._ledger = ledger
        self._servers = servers
        self._workloads = workloads
        self._kinds = kinds
        self._faults = faults
        self._kept = kept
        self._paused = paused
        self._first = list(first)
        self._seconds = seconds
        self._ended = threading.Event()
        self._lock = threading.Lock()
        rows = ledger.rows()
        self._seeds = itertools.count(1 + max((row["seed"] for row in rows), default=0))
        self._counted = tried(rows)
        self._runs = Counter[str](row["workload"] for row in rows)

    def run(self, parallel: int, hours: float) -> None:
        """Blocks until the end, for ever without one."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._ended.set())
        deadline = time.monotonic() + hours * 3600
        with ThreadPoolExecutor(parallel) as pool:
            list(pool.map(lambda _: self._work(deadline), range(parallel)))

    def _work(self, deadline: float) -> None:
        while not self._ended.is_set() and time.monotonic() < deadline:
            if self._paused is not None and self._paused.exists():
                self._ended.wait(LOOK_S)
                continue
            run = self._next()
            made = make(run, self._kept)
            self._note(run, made)

    def _next(self) -> Run:
        """The next run; its strikes are taken for made until it is over."""
        with self._lock:
            run = self._first.pop(0) if self._first else self._chosen()
            self._counted += expected(run)
            self._runs[run.workload] += 1
            return run

    def _chosen(self) -> Run:
        seed = next(self._seeds)
        workload, kinds = choose(seed, self._counted, self._runs, self._workloads, self._kinds)
        server = self._servers[seed % len(self._servers)]
        return Run(workload, seed, kinds, self._faults, version_of(server), server, seconds=self._seconds)

    def _note(self, run: Run, made: Made) -> None:
        self._ledger.append(run.name, made.row, made.history)
        with self._lock:
            self._counted.subtract(expected(run))
            self._counted.update(tried([made.row]))
        print(said(run, made.row, made.folder), flush=True)


def said(run: Run, row: Row, folder: Path | None) -> str:
    """What came of a run, for whoever watches."""
    found = f"FOUND {row['violations']}" if row["violations"] else "ok"
    counts = f"{sum(row['counted'].values())} of {sum(row['faults'].values())} faults count"
    line = f"{run.workload} seed {run.seed}, Redis {run.redis}: {found}, {counts}, {row['wall_s']:.0f} s"
    again = f"\n    again: python -m tests.chaos.run {' '.join(run.words)}\n    kept: {folder}"
    return line + (again if row["violations"] else "")


def main(arguments: list[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.night", description="Runs under faults, for hours.")
    parser.add_argument("--hours", type=float, default=float("inf"), help="no run is begun after them; else for ever")
    parser.add_argument("--parallel", type=int, default=2, help="runs side by side")
    parser.add_argument("--faults", type=int, default=18, help="of each run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each run: no fault is begun after them")
    parser.add_argument("--workloads", default=",".join(EVERYWHERE), help="with commas")
    parser.add_argument(
        "--kinds", default="", help="kinds of faults, or families, with commas; all where none is given"
    )
    parser.add_argument("--redis-server", type=Path, action="append", help="binaries that take turns")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of what is kept")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir(), "chaos-night"), help=KEPT)
    parser.add_argument("--paused", type=Path, help="no run is begun while there is this file")
    parser.add_argument("--again", action="store_true", help="first make again the runs in which something was found")
    parser.add_argument("--table", action="store_true", help="say what was kept so far, and run nothing")
    parser.add_argument("--summarize", action="store_true", help=f"write {table.SUMMARY.name} as well")
    options = parser.parse_args(arguments)
    workloads = options.workloads.split(",")
    if unknown := set(workloads) - WORKLOADS.keys():
        parser.error(f"there is no workload {', '.join(sorted(unknown))}")
    ledger = Ledger(options.results)
    if not options.table and not options.summarize:
        servers = options.redis_server or [find_binary()]
        kinds = chosen(list(filter(None, options.kinds.split(","))))
        night = Night(
            ledger,
            servers,
            workloads,
            kinds,
            faults=options.faults,
            kept=options.kept,
            paused=options.paused,
            seconds=options.seconds,
            first=to_make_again(ledger.rows(), servers) if options.again else (),
        )
        night.run(options.parallel, options.hours)
    rows = ledger.rows()
    if options.summarize:
        (options.results / table.SUMMARY.name).write_text(table.page(rows), encoding="utf-8")
    print(table.report(rows))
    return 1 if {name_of(row) for row in rows if row["violations"]} - cleared_by(rows).keys() else 0


if __name__ == "__main__":
    sys.exit(main())
