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

    #: From when to when (ns of ``mono``) it was read; (): not known, and every record counts.
    read_at: tuple[int, ...] = ()
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
    #: Rows of the history: job, k (-1: of a job without a sample), fate; None: the run keeps none.
    rows: list[tuple[str, int, str]] | None = None
    #: Groups that the run says it has given up for the history: they may have no rows.
    unrecorded: int = 0
    #: Counter -> by how much Redis says that it went back, in all.
    rolled_back: dict[str, int] = field(default_factory=dict)
    #: LANE:ACCOUNT -> tokens, as the ledger of tokens has them; LANE:heard all that were told of.
    tokens: dict[str, int] = field(default_factory=dict)
    #: Tokens that engines drew, in all their lives, by their own count; 0: none counts.
    drawn: int = 0
    #: Requests of which nobody heard what they drew, as the run counts them.
    unheard: int = 0
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
    rows = value.get("rows")
    rows = rows if rows is None else [(job, k, fate) for job, k, fate in rows]
    read_at = tuple(value.get("read_at", ()))
    return Account(**value | {"reported": reported, "forgotten": forgotten, "rows": rows, "read_at": read_at})
