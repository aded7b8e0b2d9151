"""Workers: live ones as rows, and one in detail with its leased jobs and its waits."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.console.read.jobs import list_jobs
from penstock.errors import ConfigError
from penstock.protocol.presence import GONE_S, WorkerPresence, read_workers
from penstock.protocol.waits import read_waits
from penstock.records.keys import Keys
from penstock.redis.commands import Client

_DECISION = ("at", "before", "engines", "wanted", "binds", "terms")


def read_fleet(client: Client, keys: Keys) -> dict[str, Any] | None:
    """Return ``fleet_of`` the running fleet; None if no fleet runs. Blocks for a round trip. Raises ProtocolError."""
    from penstock.workers.fleet.state import read_state

    try:
        return fleet_of(read_state(client, keys))
    except ConfigError:
        return None


def fleet_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state published by ``penstock fleet up`` for views.

    ``groups`` and ``processes`` as rows; ``autoscale``: the current limit, {} if nothing is scaled; ``decisions``:
    changes of its size, latest first; unreadable ones are skipped.
    """
    auto = state["autoscale"]
    decisions = auto.get("decisions", [])
    readable = [one for one in decisions if isinstance(one, dict)] if isinstance(decisions, list) else []
    return {
        "host": state["host"],
        "age_s": state["age_s"],
        "groups": [{"group": name, **group} for name, group in state["groups"].items()],
        "processes": state["processes"],
        "endpoints": state["endpoints"],
        "autoscale": {name: value for name, value in auto.items() if name != "decisions"},
        "decisions": [{name: one.get(name) for name in _DECISION} for one in reversed(readable)],
    }


def list_workers(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return the live workers as rows, by name. Blocks for a round trip."""
    return [worker_row(one) for one in read_workers(client, keys) if one.age_s < GONE_S]


def worker_row(one: WorkerPresence) -> dict[str, Any]:
    """Return what a worker reports of itself: ``leased`` jobs; versions are None if it has none."""
    row = asdict(one)
    versions = {name: row[name] if row[name] >= 0 else None for name in ("version", "awaits")}
    # The rate of an idle worker decays without end.
    return {
        **row,
        **versions,
        "started_as": one.started_as,
        "leased": row.pop("held"),
        "tokens_per_s": round(one.tokens_per_s, 1),
    }


def read_worker(client: Client, keys: Keys, name: str) -> dict[str, Any] | None:
    """Return a worker by its name or its start name, None if it does not exist. Blocks like ``list_jobs``.

    Returns:
        the fields of its presence; ``jobs``: rows of those that it has leased; ``waits``: what its tasks wait for.
    """
    live = (one for one in read_workers(client, keys) if one.age_s < GONE_S)
    found = next((one for one in live if name in (one.name, one.started_as)), None)
    if found is None:
        return None
    jobs = [row for row in list_jobs(client, keys) if row["worker"] in (found.name, found.started_as)]
    mine = f"worker:{found.name}"
    waits = [one.to_map() for one in read_waits(client, keys) if one.who == mine or one.who.startswith(f"{mine}:")]
    return {**worker_row(found), "jobs": jobs, "waits": waits}
