"""Scans for keys by prefix. A SCAN takes about a microsecond for each key of the server, of any prefix."""

import re
from collections.abc import Iterator
from itertools import islice

from penstock.redis.commands import Client


def scan_keys(client: Client, prefix: str) -> Iterator[str]:
    """Yield all keys that begin with ``prefix``, each at least once, in any order. Blocks at every step.

    Names that are not text, which no verb writes, are escaped; no key has such a name.
    """
    pattern = re.sub(r"([*?\[\]{}\\])", r"\\\1", prefix) + "*"
    return (key.decode(errors="backslashreplace") for key in client.scan_iter(match=pattern, count=1000))


def holds_keys(client: Client, prefix: str) -> bool:
    """Return whether any key begins with ``prefix``. Blocks."""
    return next(scan_keys(client, prefix), None) is not None


def delete_keys(client: Client, prefix: str) -> int:
    """Delete all keys that begin with ``prefix``; return their number. Blocks for a SCAN over the server."""
    count, keys = 0, scan_keys(client, prefix)
    while batch := list(islice(keys, 500)):
        count += client.unlink(*batch)
    return count
