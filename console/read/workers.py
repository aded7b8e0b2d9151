"""Workers: live ones as rows, and one in detail with its leased jobs and its waits."""

from dataclasses import asdict, fields
from typing import Any

from penstock.console.read.jobs import list_jobs
from penstock.protocol.keys import Keys
from penstock.protocol.presence import GONE_S, WorkerPresence, read_workers
from penstock.protocol.waits import read_waits
from penstock.redis.commands import Client

FIELDS = tuple(one.name for one in fields(WorkerPresence))


def list_workers(client: Client, keys: Keys) -> list[WorkerPresence]:
    """Return the live workers, by name. Blocks for a round trip."""
    return [one for one in read_workers(client, keys) if one.age_s < GONE_S]


def read_worker(client: Client, keys: Keys, name: str) -> dict[str, Any] | None:
    """Return a worker by its name or its start name, None if it does not exist. Blocks like ``list_jobs``.

    Returns:
        the fields of its presence; ``jobs``: rows of those that it has leased; ``waits``: what its tasks wait for.
    """
    found = next((one for one in list_workers(client, keys) if name in (one.name, one.started_as)), None)
    if found is None:
        return None
    jobs = [row for row in list_jobs(client, keys) if row["worker"] in (found.name, found.started_as)]
    mine = f"worker:{found.name}"
    waits = [one.to_map() for one in read_waits(client, keys) if one.who == mine or one.who.startswith(f"{mine}:")]
    return {**asdict(found), "jobs": jobs, "waits": waits}
