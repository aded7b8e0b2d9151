"""Verbs that all say, and what must be there before any."""

import redis
from redis.exceptions import ResponseError

from penstock.keys import LANES, Keys
from penstock.scripts.call import Call, script


def server(keys: Keys, name: str, record: bytes, *, only_new: bool = False) -> Call[int]:
    """Make a payload server known, or change its state; the directory's revision, 0 where nothing was changed."""
    return Call(script("server"), [keys.servers], [name, record, int(only_new)], int)


def note(keys: Keys, records: str, field: str, record: bytes) -> Call[int]:
    """Show a small record in one of the hashes workers, trainers or waits; empty takes it away."""
    return Call(script("note"), [records], [keys.prefix, field, record], int)


def ensure_lanes(client: "redis.Redis", keys: Keys) -> None:
    """Create the job streams and their consumer group. Idempotent; blocks for one round trip per lane."""
    for lane in LANES:
        try:
            client.xgroup_create(keys.jobs(lane), "workers", id="0", mkstream=True)
        except ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise
