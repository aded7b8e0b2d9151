"""Clients of Redis: explicit timeouts, no automatic retry, errors as sentences without the password.

redis-py repeats a command whose reply was lost (ten times by default), so that a verb would run twice; and it cuts
off blocking reads that outlast its socket timeout. Here a command is sent once, and a lost connection is an error
of the caller, who knows whether the verb may be repeated.
"""

import logging
from functools import cache
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from penstock.config import sentinel
from penstock.errors import ConfigError, PenstockError, QueueFull, QueueLost, QueueRefused, QueueUnavailable
from penstock.records.worker_causes import RedisFull
from penstock.redis.commands import AsyncClient, Client
from penstock.redis.refusals import AsyncParser, DiskRefused, KeysLost, NamingRedis, Parser
from penstock.text import know_url, redact

#: Oldest supported Redis, that of the embedded server.
MIN_VERSION = (6, 2)

#: Longest wait for one answer, besides the time that a command blocks by itself.
TIMEOUT_S = 10.0

#: uvloop's message for a write to a closed transport.
_CLOSED = "the handler is closed"

log = logging.getLogger(__name__)


def connect(url: str, *, timeout_s: float = TIMEOUT_S, check: bool = True) -> Client:
    """Make a client for commands that do not block; ``check`` verifies the server at once (blocks).

    Raises:
        QueueUnavailable: no server answers, or it is still loading.
        QueueRefused: it refuses the password or this user's rights, or is too old; waiting would not help.
        ConfigError: the URL is invalid, or the server evicts keys when it is full.
    """
    client: Client = _client(NamingRedis, url, timeout_s, Retry(NoBackoff(), 0))
    if check:
        try:
            ask(client, url)
        except PenstockError:
            client.close()
            raise
    return client


def ask(client: Client, url: str) -> None:
    """Verify that the server of a client is usable. Blocks. Raises as ``connect``."""
    try:
        _judge(*_ask(client), url)
    except RedisError as exc:
        raise translate(exc, url) from exc


def as_redis(client: Client) -> redis.Redis:
    """Cast a client to redis-py's own type, for libraries that need it."""
    return cast(redis.Redis, client)


def check_durable(client: Client, url: str) -> None:
    """Refuse a control Redis without an append-only file. Blocks for a round trip. Raises ConfigError, RedisError."""
    if not int(client.info("persistence").get("aof_enabled", 1)):
        raise ConfigError(
            f"Redis at {redact(url)} keeps no append-only file, so the run is lost when it dies: set appendonly yes "
            "there, or redis.require_aof: false to do without."
        )


def connect_blocking(url: str, block_s: float) -> Client:
    """Make a client for reads that block for up to ``block_s``; do not share it. Checks nothing."""
    client: Client = _client(NamingRedis, url, block_s + TIMEOUT_S, Retry(NoBackoff(), 0))
    return client


def connect_async(url: str, *, block_s: float = 0.0) -> AsyncClient:
    """Make an asyncio client; it connects when first used. ``block_s``: its longest blocking read."""
    client: AsyncClient = _client(redis.asyncio.Redis, url, block_s + TIMEOUT_S, AsyncRetry(NoBackoff(), 0))
    client.connection_pool.connection_class = _loses(client.connection_pool.connection_class)
    return client


@cache
def _loses(
    kind: type[redis.asyncio.connection.AbstractConnection],
) -> type[redis.asyncio.connection.AbstractConnection]:
    """Return a subclass of ``kind`` that reports a write to a closed transport as a lost connection.

    The other side may reset a connection between connecting and the first write. asyncio's own loop ignores such a
    write and reports the loss at the answer; uvloop raises RuntimeError, which redis-py passes on.
    """

    class Losing(kind):  # type: ignore[misc, valid-type]
        async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            try:
                await super().send_packed_command(*args, **kwargs)
            except RuntimeError as exc:
                if _CLOSED not in str(exc):
                    raise
                raise redis.ConnectionError(f"the connection was lost before it was written to: {exc}") from exc

    return Losing


async def close_async(client: AsyncClient) -> None:
    """Close an asyncio client, and its connections to sentinels."""
    await client.aclose()
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    if manager is not None:
        await manager.aclose()


async def check_async(client: AsyncClient, url: str) -> None:
    """Verify that the server of an asyncio client is usable; raises as ``connect``."""
    try:
        info = await client.info()
        settings = await _settings_async(client)
    except RedisError as exc:
        raise translate(exc, url) from exc
    _judge(info, settings, url)


def translate(exc: Exception, url: str) -> PenstockError:
    """Translate an error of redis-py into one of penstock's, with the fix."""
    at = redact(url)
    match exc:
        case AuthenticationError():
            return QueueRefused(
                f"Redis at {at} refuses the password: set the right one in redis.url (redis://:PASSWORD@HOST:PORT)."
            )
        case NoPermissionError():
            return QueueRefused(f"Redis at {at} forbids this user a command that penstock needs: {exc}.")
        case ResponseError() if str(exc).startswith("DENIED"):
            return QueueRefused(
                f"Redis at {at} runs in protected mode and does not answer this machine: set a password there "
                "(requirepass), and name it in redis.url (redis://:PASSWORD@HOST:PORT)."
            )
        case BusyLoadingError():
            return QueueUnavailable(f"Redis at {at} is still loading its data; try again in a moment.")
        case MasterNotFoundError() | AsyncMasterNotFoundError():
            return QueueUnavailable(
                f"The sentinels at {at} do not answer, or know no primary of this name that is up: a failover may be "
                "under way; else correct redis.url."
            )
        case KeysLost():
            return QueueLost(f"{str(exc).rstrip('.')}.")
        case DiskRefused():
            return QueueUnavailable(
                f"Redis at {at} takes no writes, because its disk does not take them ({redact(str(exc)).rstrip('.')}): "
                "make room there, and everything continues by itself."
            )
        case OutOfMemoryError():
            return QueueFull(f"Redis at {at} is full: raise its maxmemory, or let the trainers catch up.", RedisFull())
        case redis.TimeoutError():
            return QueueUnavailable(f"Redis at {at} does not answer in time; see whether it is overloaded or frozen.")
        case redis.ConnectionError():
            reason = redact(str(exc)).rstrip(".")
            return QueueUnavailable(f"No Redis answers at {at} ({reason}): start it, or correct redis.url.")
    return QueueUnavailable(f"Redis at {at} answers with an error: {redact(str(exc)).rstrip('.')}.")


def _client(kind: Any, url: str, timeout_s: float, retry: Any) -> Any:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(TIMEOUT_S, timeout_s),
        "retry": retry,
        "retry_on_timeout": False,
        "health_check_interval": 0,
        "decode_responses": False,
        "protocol": 2,
        "parser_class": AsyncParser if issubclass(kind, redis.asyncio.Redis) else Parser,
    }
    if not url.startswith("unix://"):  # these have no keepalive
        options["socket_keepalive"] = True
    know_url(url)
    try:
        if sentinel.is_sentinel(url):
            return sentinel.client(kind, url, options)
        return kind.from_url(url, **options)
    except (ValueError, redis.ConnectionError) as exc:
        raise ConfigError(f"redis.url {redact(url)} cannot be read: {redact(str(exc)).rstrip('.')}.") from None


def _ask(client: Client) -> tuple[Any, Any]:
    info = client.info()
    try:
        return info, client.config_get("maxmemory-policy")
    except ResponseError:
        return info, {}


async def _settings_async(client: AsyncClient) -> Any:
    # Managed servers forbid CONFIG.
    try:
        return await client.config_get("maxmemory-policy")
    except ResponseError:
        return {}


def _judge(info: Any, settings: Any, url: str) -> None:
    at = redact(url)
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise QueueRefused(f"Redis at {at} is {version}; penstock needs 6.2 or later: use a newer server.")
    if info.get("loading"):
        raise QueueUnavailable(f"Redis at {at} is still loading its data; try again in a moment.")
    if info.get("role") == "slave" and sentinel.is_sentinel(url):
        raise QueueUnavailable(f"The sentinels at {at} name a replica as the primary: a failover is under way.")
    if info.get("role") == "slave":
        raise ConfigError(f"Redis at {at} is a replica and refuses writes: name its primary in redis.url.")
    settings = {_text(name): _text(value) for name, value in settings.items()}
    policy = settings.get("maxmemory-policy", str(info.get("maxmemory_policy", "noeviction")))
    if policy != "noeviction":
        raise ConfigError(
            f"Redis at {at} evicts keys when it is full ({policy}), so jobs would vanish: "
            "set maxmemory-policy noeviction."
        )
    if not int(info.get("aof_enabled", 1)):
        log.warning("Redis at %s keeps no append-only file: its data is lost if it crashes; set appendonly yes", at)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
