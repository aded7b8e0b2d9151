"""The final account: what is there when a run has come to rest, as plain JSON, whoever wrote it down.

Written once everything asked for is settled: a lease longer than the longest lease after the last fault.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson


@dataclass(slots=True)
class Reported:
    """What the run says that it lost, of one kind."""

    #: How many; at least the number of those named.
    count: int = 0
    #: Those it named.
    named: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Account:
    """What is there at the end."""

    #: Live job -> state, lane, worker (of a leased one), samples: k -> token of the lease that committed it.
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Jobs whose end is noted: retired, dropped, cancelled.
    done: list[str] = field(default_factory=list)
    #: Subscription -> lanes, bound, reuse, pool ('': none), cut, cursor, checkpoint.
    subscriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Model -> version of the clock.
    clock: dict[str, int] = field(default_factory=dict)
    #: Workers that are alive.
    workers: list[str] = field(default_factory=list)
    #: Key without the run's prefix -> seconds to live, -1: for ever; of the control Redis and of payload servers.
    keys: dict[str, int] = field(default_factory=dict)
    #: Looks at the memory in use while the run went on: done (jobs), live (jobs), bytes.
    memory: list[dict[str, int]] = field(default_factory=list)
    #: From when to when (ns of ``mono``) faults were at work that lose what was acknowledged meanwhile.
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    #: Payload servers that were lost with all that they held.
    lost_servers: list[str] = field(default_factory=list)
    #: jobs, samples (JOB/k), batches (SUB/n), versions (MODEL/v), checkpoints (SUB/n) -> what was reported lost.
    reported: dict[str, Reported] = field(default_factory=dict)


def load(path: Path) -> Account:
    """Read an account. Raises ValueError where it has a field that is not known."""
    return from_json(orjson.loads(path.read_bytes()))


def from_json(value: dict[str, Any]) -> Account:
    """An account of plain values; raises ValueError as ``load``."""
    if unknown := set(value) - {one.name for one in fields(Account)}:
        raise ValueError(f"An account has no field {', '.join(sorted(unknown))}.")
    reported = {kind: Reported(**said) for kind, said in value.get("reported", {}).items()}
    forgotten = [(first, last) for first, last in value.get("forgotten", ())]
    return Account(**value | {"reported": reported, "forgotten": forgotten})
