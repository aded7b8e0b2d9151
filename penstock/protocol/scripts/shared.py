"""Verbs that all say, and what must be there before any."""

import redis

from penstock.names import LANES
from penstock.protocol.keys import Keys
from penstock.redis.call import Call, run, script


def server(keys: Keys, name: str, record: bytes, *, only_new: bool = False) -> Call[int]:
    """Make a payload server known, or change its state; the directory's revision, 0 where nothing was changed."""
    return Call(script("server"), [keys.servers], [keys.prefix, name, record, int(only_new)], int)


def note(keys: Keys, records: str, field: str, record: bytes) -> Call[int]:
    """Show a small record in one of the hashes workers, trainers or waits; empty takes it away."""
    return Call(script("note"), [records], [keys.prefix, field, record], int)


def ensure_lanes(client: "redis.Redis", keys: Keys) -> None:
    """See that the job streams and their consumer group are there, and every queued job in line; in a full Redis too.

    Idempotent; one round trip.
    """
    run(client, Call(script("lanes"), [keys.jobs(lane) for lane in LANES], [keys.prefix, *LANES], int))
