"""Verbs of all processes, and the checks before any other verb."""

from functools import partial
from typing import Any

from penstock.errors import ConfigError
from penstock.names import LANES
from penstock.protocol.keys import Keys
from penstock.redis.call import Call, run, script
from penstock.redis.commands import Client
from penstock.system.tokens import new_token


def server(keys: Keys, name: str, record: bytes, *, only_new: bool = False) -> Call[int]:
    """Add a payload server, or change its state, in a new revision of the directory; 0: nothing was changed."""
    return Call(script("server"), [keys.servers], [keys.prefix, name, record, int(only_new), new_token()], int)


def note(keys: Keys, records: str, field: str, record: bytes) -> Call[int]:
    """Write a small record in one of the hashes workers, trainers or waits; an empty one deletes it."""
    return Call(script("note"), [records], [keys.prefix, field, record], int)


def check_schema(keys: Keys) -> Call[None]:
    """Check that the run's records are of this penstock's schema, or the run has not begun. Reads only.

    Raises:
        ConfigError: they are of another schema, of an unreadable one, or from before schemas existed.
    """
    return Call(script("schema"), [keys.schema], [keys.prefix], partial(_refuse_another, keys))


def ensure_lanes(client: Client, keys: Keys) -> None:
    """Create the job streams and their consumer group if they are missing, in a full Redis too. One round trip.

    Raises:
        ConfigError: the run is of another schema, or of an unreadable one; nothing was changed.
    """
    names = [keys.jobs(lane) for lane in LANES]
    run(client, Call(script("lanes"), names, [keys.prefix], partial(_refuse_another, keys)))


def _refuse_another(keys: Keys, answer: Any) -> None:
    found, ours = map(int, answer)
    if found < 0:
        raise ConfigError(
            f"The schema of the records of run {keys.run} cannot be read: {keys.schema} in Redis is no number. Go on "
            f"with the release that began the run, or begin anew (--fresh, or another --run)."
        )
    if found != ours:
        noted = f"schema {found}" if found else "no schema"
        raise ConfigError(
            f"The records of run {keys.run} are of {noted}, and this penstock's of schema {ours}: go on with "
            "the release that began the run, or begin anew (--fresh, or another --run)."
        )
