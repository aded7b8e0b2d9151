"""Runs in which something was found, and their seeds made again after a mend."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.cluster.redis_conf import version_of
from tests.chaos.cluster.workloads import WORKLOADS
from tests.chaos.night.choice import Run

Row = dict[str, Any]


def name_of(row: Row) -> tuple[str, int]:
    """Which run it is, however often it was made."""
    return row["workload"], row["seed"]


def cleared_by(rows: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """Runs in which something was found -> the last time that they were made, if nothing was found then."""
    last = {name_of(row): row for row in rows}
    found = {name_of(row) for row in rows if row["violations"]}
    return {name: last[name] for name in found if not last[name]["violations"]}


def to_make_again(rows: Sequence[Row], servers: Sequence[Path]) -> list[Run]:
    """Runs whose last time found something, each with its seed, kinds, number of faults and release of Redis."""
    last = {name_of(row): row for row in rows}
    again = [row for row in last.values() if row["violations"] and row["workload"] in WORKLOADS]
    return [_again(row, 1 + sum(name_of(one) == name_of(row) for one in rows), servers) for row in again]


def _again(row: Row, time: int, servers: Sequence[Path]) -> Run:
    server = next((one for one in servers if version_of(one) == row["redis"]), servers[0])
    return Run(row["workload"], row["seed"], tuple(row["kinds"]), row["asked"], version_of(server), server, time)
