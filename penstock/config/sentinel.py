"""Redis behind Sentinel: clients that ask the sentinels for the primary at every new connection.

    redis+sentinel://[USER][:PASSWORD@]HOST:PORT,HOST:PORT,.../NAME[/DB][?sentinel_username=U&sentinel_password=P]

USER and PASSWORD are the primary's. A failover breaks the connections; processes retry until the sentinels name
another primary, as after a restart. What the old primary had not replicated is lost (docs/internals/protocol.md).
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

SCHEME = "redis+sentinel"

#: Longest wait for the answer of one sentinel, before the next is tried.
SENTINEL_TIMEOUT_S = 1.0
DEFAULT_PORT = 26379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """Addresses of the sentinels, and the name of the primary."""

    sentinels: tuple[tuple[str, int], ...]
    name: str
    db: int = 0
    #: username and password of the primary.
    login: dict[str, str] = field(default_factory=dict)
    #: username and password of the sentinels.
    sentinel_login: dict[str, str] = field(default_factory=dict)


def is_sentinel(url: str) -> bool:
    return url.startswith(f"{SCHEME}://")


def parse(url: str) -> SentinelUrl:
    """Parse a URL; raise ValueError that says what is invalid, without the password."""
    parts = urlsplit(url)
    # Not with urlsplit's own properties: they know one host.
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, db = parts.path.strip("/").partition("/")
    if not hosts or not name:
        raise ValueError(f"write {SCHEME}://[:PASSWORD@]HOST:PORT,HOST:PORT/NAME, NAME being what the sentinels watch")
    if db and not db.isdigit():
        raise ValueError(f"{db!r} after the name is not a database number")
    options = dict(parse_qsl(parts.query))
    if unknown := options.keys() - {"sentinel_username", "sentinel_password"}:
        raise ValueError(f"it has the unknown option {sorted(unknown)[0]!r}")
    username, _, password = user.partition(":")
    return SentinelUrl(
        sentinels=tuple(_address(host) for host in hosts.split(",")),
        name=unquote(name),
        db=int(db or 0),
        login=_login(unquote(username), unquote(password)),
        sentinel_login=_login(options.get("sentinel_username", ""), options.get("sentinel_password", "")),
    )


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::(.*))?", text)
    host, port = (match[1].strip("[]"), match[2] or "") if match else ("", "")
    if port and not port.isdigit():
        raise ValueError(f"{port!r} is not a port")
    if not host:
        raise ValueError("one of its sentinels has no host")
    return host, int(port or DEFAULT_PORT)


def _login(username: str, password: str) -> dict[str, str]:
    return {key: value for key, value in (("username", username), ("password", password)) if value}


def client(kind: Any, url: str, options: dict[str, Any]) -> Any:
    """Make a lazily connected client of class ``kind`` (redis.Redis or redis.asyncio.Redis) for the primary."""
    wanted = parse(url)
    asynchronous = issubclass(kind, redis.asyncio.Redis)
    module = redis.asyncio.sentinel if asynchronous else redis.sentinel
    # retry: one attempt per sentinel; the next one is as good.
    asked = {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "retry": options["retry"],
        "protocol": options["protocol"],
    }
    sentinel = module.Sentinel(wanted.sentinels, sentinel_kwargs=asked | wanted.sentinel_login)
    return sentinel.master_for(wanted.name, redis_class=kind, db=wanted.db, **wanted.login, **options)
