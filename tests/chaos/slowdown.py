"""What a run loses in speed under faults: the same workload for the same time, without faults and with one every 10 s.

    python -m tests.chaos.slowdown [--workload async] [--seconds 120] [--every 10] [--rounds 2] [--results FILE]

Rounds of both follow each other, so that a machine that is slow for a while is slow for both. Groups are counted by
how far the trainer has come: what it trains again after a rewind is no gain. Its step is a sleep of ``STEP_S``, engines
have no weights to load and parts no imports to make, so what a real engine or trainer takes to start comes on top.
Prints one line of JSON, and appends it to FILE.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.redis.server import find_binary
from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.redis_conf import version_of
from tests.chaos.cluster.workloads import WORKLOADS
from tests.chaos.nemesis.act import Act, Ground, Kind
from tests.chaos.nemesis.battleground import battleground
from tests.chaos.nemesis.kinds import chosen
from tests.chaos.nemesis.nemesis import Nemesis
from tests.chaos.nemesis.schedule import Log, Schedule
from tests.chaos.night.one_run import commit
from tests.chaos.run import BATCHES

#: What strikes where nothing else is asked for: kill -9 of each part that every workload has.
KILLS = "kill:redis,kill:producer,kill:worker,kill:engine,kill:leader,kill:trainer"


class Paced:
    """The acts of a schedule, one every ``every_s`` seconds, whatever the run has got over, until ``seconds``."""

    def __init__(self, schedule: Schedule, every_s: float, seconds: float) -> None:
        self._schedule = schedule
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._end = time.monotonic() + seconds

    def next(self, possible: Collection[str]) -> Act | None:
        """The next act when it is due; None at the end. Blocks."""
        if self._due >= self._end:
            time.sleep(max(0.0, self._end - time.monotonic()))
            return None
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due += self._every_s
        act = self._schedule.next(possible)
        return act and replace(act, moment="", after_s=0.0, chained=True)

    def facts(self, act: Act, ground: Ground) -> Act | None:
        return self._schedule.facts(act, ground)


@dataclass(frozen=True)
class Measured:
    """One round."""

    groups_per_s: float
    faults: int


def measure(workload: str, kinds: Mapping[str, Kind], *, seconds: float, every_s: float, seed: int) -> Measured:
    """Groups that the driving trainer trains in a second; ``every_s`` 0: without faults. Blocks for ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="slowdown-", ignore_cleanup_errors=True) as name:
        cluster = Cluster(Path(name) / "run", WORKLOADS[workload], seed=seed)
        with battleground(cluster, kinds) as ground:
            cluster.wait("the first batches", lambda: cluster.committed() >= BATCHES)
            before, began = trained(cluster), time.monotonic()
            faults = strike(ground, kinds, seed, every_s, seconds) if every_s else wait(seconds)
            groups, took_s = trained(cluster) - before, time.monotonic() - began
    return Measured(groups / took_s, faults)


def strike(ground: Ground, kinds: Mapping[str, Kind], seed: int, every_s: float, seconds: float) -> int:
    """Strike for so long; how many faults were done."""
    acts = Paced(Schedule(seed, kinds), every_s, seconds)
    nemesis = Nemesis(
        ground, acts, kinds, Log(ground.cluster.folder / "nemesis.jsonl", {"seed": seed}), recovery_s=every_s
    )
    try:
        return sum(not one.strike.error for one in nemesis.run(int(seconds)))
    finally:
        nemesis.close()


def wait(seconds: float) -> int:
    """No fault for so long."""
    time.sleep(seconds)
    return 0


def trained(cluster: Cluster) -> int:
    """Groups up to the cursor of the driving trainer: batches that it trains anew after a rewind are no gain."""
    assert cluster.watch is not None
    name = next(seats.name for seats in cluster.workload.trainers if seats.drives)
    return cluster.watch.cursors.get(name, 0) * int(cluster.workload.resolved()["trainer"]["batch_groups"])


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and what comes of them. Blocks for minutes."""
    kinds = chosen(options.kinds.split(","))
    rounds: dict[float, list[Measured]] = {0.0: [], options.every: []}
    for number in range(options.rounds):
        for every_s, found in rounds.items():
            found.append(
                measure(options.workload, kinds, seconds=options.seconds, every_s=every_s, seed=options.seed + number)
            )
    quiet, struck = ([one.groups_per_s for one in found] for found in rounds.values())
    return {
        "workload": options.workload, "kinds": sorted(kinds), "seconds": options.seconds, "every_s": options.every,
        "seed": options.seed, "faults": sum(one.faults for one in rounds[options.every]),
        "groups_per_s": [round(one, 3) for one in quiet], "groups_per_s_struck": [round(one, 3) for one in struck],
        "ratio": round(statistics.mean(struck) / statistics.mean(quiet), 3), "commit": commit(),
        "redis": version_of(find_binary()), "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.slowdown", description="Speed under faults.")
    parser.add_argument("--workload", default="async", choices=sorted(WORKLOADS))
    parser.add_argument("--kinds", default=KILLS)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each round")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="file that the line is appended to")
    line = json.dumps(compare(options := parser.parse_args(arguments)))
    print(line)
    if options.results:
        with options.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
