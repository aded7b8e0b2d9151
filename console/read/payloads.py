"""Payload servers as rows."""

import contextlib
from typing import Any

from redis.exceptions import RedisError

from penstock.errors import PenstockError
from penstock.payloads.servers import Server, read
from penstock.payloads.store import open_store
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.text import redact


def list_servers(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return the payload servers, by name. Blocks for each of them, at most two seconds per answer."""
    return [_row(server) for _, server in sorted(read(client, keys).servers.items())]


def _row(server: Server) -> dict[str, Any]:
    row = {"name": server.name, "state": server.state, "url": redact(server.url), "answers": "yes"}
    try:
        with contextlib.closing(open_store(server.url, timeout_s=2.0)) as store:
            store.check()
            used, total = store.usage()
        return row | {"used_mb": used // 2**20, "max_mb": total // 2**20}
    except (PenstockError, RedisError) as exc:
        return row | {"answers": redact(str(exc))}
