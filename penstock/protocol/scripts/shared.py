"""Verbs that all say, and what must be there before any."""

from functools import partial
from typing import Any

from penstock.errors import ConfigError
from penstock.names import LANES
from penstock.protocol.keys import Keys
from penstock.redis.call import Call, run, script
from penstock.redis.commands import Client
from penstock.system.tokens import new_token


def server(keys: Keys, name: str, record: bytes, *, only_new: bool = False) -> Call[int]:
    """Make a payload server known, or change its state, in a new revision of the directory; 0: nothing was changed."""
    return Call(script("server"), [keys.servers], [keys.prefix, name, record, int(only_new), new_token()], int)


def note(keys: Keys, records: str, field: str, record: bytes) -> Call[int]:
    """Show a small record in one of the hashes workers, trainers or waits; empty takes it away."""
    return Call(script("note"), [records], [keys.prefix, field, record], int)


def check_schema(keys: Keys) -> Call[None]:
    """See that the run's records are of this penstock's schema; a run that is not begun may be. Reads only.

    Raises:
        ConfigError: they are of another one, of one that cannot be read, or were begun before there was one.
    """
    return Call(script("schema"), [keys.schema], [keys.prefix], partial(_refuse_another, keys))


def ensure_lanes(client: Client, keys: Keys) -> None:
    """See that the job streams and their consumer group are there, in a full Redis too. Idempotent; one round trip.

    Raises:
        ConfigError: the run is of another schema, or of one that cannot be read; nothing was changed.
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
