"""Errors of a Redis that answers but refuses a command.

It takes no writes if it was demoted, or cannot write to its own disk; both pass by themselves. A server whose
append-only file has no room answers every write with MISCONF until it can write again. redis-py has no error for
that; the parsers here add one. Redis 6.2 reports it, as READONLY, inside a script's error.

A command on a key of another type fails with WRONGTYPE, without the name of the key; the client here adds it.
"""

from typing import Any

import redis
from redis.asyncio.connection import DefaultParser as AsyncDefaultParser
from redis.connection import DefaultParser
from redis.exceptions import ReadOnlyError, ResponseError

from penstock.errors import PenstockError, ProtocolError, QueueLost, QueueUnavailable
from penstock.records.worker_causes import RedisKeysLost
from penstock.redis.commands import Client
from penstock.text import safe_repr

#: How to recover a run whose Redis lost keys.
RECOVERY = (
    "Restore Redis from its append-only file or a backup: parts then continue, trainers from a checkpoint that fits; "
    "or stop all parts and begin anew with `penstock run --fresh`"
)


class KeysLost(ResponseError):
    """The server lost keys of the run, as after FLUSHALL, a deletion or an eviction. It passes when they are back.

    Args:
        cause: the cause of the wait, as processes report it.
    """

    def __init__(self, message: str, cause: RedisKeysLost) -> None:
        super().__init__(message)
        self.cause = cause


class DiskRefused(ResponseError):
    """The server cannot write its append-only file or its dump, and takes no writes until it can."""


def is_demoted(exc: object) -> bool:
    """Return whether the server has become a replica."""
    return isinstance(exc, ResponseError) and "READONLY" in str(exc)


def passing(exc: object) -> ResponseError | None:
    """Return the passing refusal that an error of redis-py represents, or None."""
    if isinstance(exc, DiskRefused | ReadOnlyError | KeysLost):
        return exc
    if is_lost(exc):
        what = "Redis lost a stream of the run, or its consumer group"
        return KeysLost(f"{what} ({exc}). {RECOVERY}", RedisKeysLost(error=str(exc)))
    if isinstance(exc, ResponseError) and "MISCONF" in str(exc):
        return DiskRefused(str(exc).rpartition("MISCONF ")[2])
    return ReadOnlyError(str(exc)) if is_demoted(exc) else None


def is_lost(exc: object) -> bool:
    """Return whether a command, or a verb, found no stream or consumer group."""
    return isinstance(exc, ResponseError) and ("NOGROUP" in str(exc) or "no such key" in str(exc))


def is_wrong_type(exc: object) -> bool:
    """Return whether a command, or a verb, found a key of another type."""
    return isinstance(exc, ResponseError) and "WRONGTYPE" in str(exc)


class NamingRedis(redis.Redis):
    """A client whose errors name the key of the wrong type; a pipeline of redis-py does so itself."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except ResponseError as exc:
            if is_wrong_type(exc) and not str(args[0]).startswith("EVAL"):
                key = next((one for one in args[1:] if str(one).startswith("penstock:")), "")
                raise ResponseError(f"{args[0]} {safe_repr(key, 200)}: {exc}") from exc
            raise


def in_words(exc: Exception) -> PenstockError | None:
    """Translate an error of redis-py for the user of a command; None if it means nothing to them."""
    if is_wrong_type(exc):
        return ProtocolError(
            f"A key in Redis is of another type than penstock gives it ({exc}): find out what else writes to this "
            "Redis, and delete the key, or begin the run anew."
        )
    if isinstance(exc, KeysLost) or is_lost(exc):
        return QueueLost(f"{str(passing(exc)).rstrip('.')}.")
    if isinstance(exc, redis.ConnectionError | redis.TimeoutError):
        reason = str(exc).rstrip(".")
        return QueueUnavailable(
            f"What was asked does not answer any more ({reason}): give the command again once it does."
        )
    return None


def disk_trouble(client: Client) -> str:
    """Return why a server takes no writes because of its disk, as text; '' if it does. Blocks for a round trip."""
    info = client.info("persistence")
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        return "room on the disk of its append-only file"
    return ""


def _with_disk(parser: Any) -> Any:
    classes = {**parser.EXCEPTION_CLASSES, "MISCONF": DiskRefused}
    return type(f"Penstock{parser.__name__}", (parser,), {"EXCEPTION_CLASSES": classes})


#: Parsers of the answers.
Parser, AsyncParser = _with_disk(DefaultParser), _with_disk(AsyncDefaultParser)
