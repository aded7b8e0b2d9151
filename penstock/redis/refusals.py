"""Why a Redis that answers takes no writes: it was demoted, or cannot write to its own disk. Both pass by themselves.

A server whose append-only file finds no room answers every write with MISCONF until it could write again. redis-py has
no error for that; the parsers here give it one. Redis 6.2 says it, as READONLY, in the middle of a script's error.
"""

from typing import Any

from redis.asyncio.connection import DefaultParser as AsyncDefaultParser
from redis.connection import DefaultParser
from redis.exceptions import ReadOnlyError, ResponseError

from penstock.redis.commands import Client


class DiskRefused(ResponseError):
    """The server cannot write its append-only file or its dump, and takes no writes until it can."""


def is_demoted(exc: object) -> bool:
    """True when the server has become a replica."""
    return isinstance(exc, ResponseError) and "READONLY" in str(exc)


def passing(exc: object) -> ResponseError | None:
    """The refusal that an error of redis-py stands for, where it is one that passes."""
    if isinstance(exc, DiskRefused | ReadOnlyError):
        return exc
    if isinstance(exc, ResponseError) and "MISCONF" in str(exc):
        return DiskRefused(str(exc).rpartition("MISCONF ")[2])
    return ReadOnlyError(str(exc)) if is_demoted(exc) else None


def disk_trouble(client: Client) -> str:
    """Why a server takes no writes because of its disk, in words; '' where it does. Blocks for a round trip."""
    info = client.info("persistence")
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        return "room on the disk of its append-only file"
    return ""


def _with_disk(parser: Any) -> Any:
    classes = {**parser.EXCEPTION_CLASSES, "MISCONF": DiskRefused}
    return type(f"Penstock{parser.__name__}", (parser,), {"EXCEPTION_CLASSES": classes})


#: What connections read answers with.
Parser, AsyncParser = _with_disk(DefaultParser), _with_disk(AsyncDefaultParser)
