"""Keys by what they begin with. A SCAN takes about a microsecond for each key of the server, those of others too."""

import re
from collections.abc import Iterator
from itertools import islice

from penstock.redis.commands import Client


def scan_keys(client: Client, prefix: str) -> Iterator[str]:
    """All keys that begin with ``prefix``, each at least once, in no order. Blocks at every step.

    One whose name is not text, which no verb writes, is shown with escapes; no key has that name.
    """
    pattern = re.sub(r"([*?\[\]{}\\])", r"\\\1", prefix) + "*"
    return (key.decode(errors="backslashreplace") for key in client.scan_iter(match=pattern, count=1000))


def holds_keys(client: Client, prefix: str) -> bool:
    """Is there any? Blocks."""
    return next(scan_keys(client, prefix), None) is not None


def delete_keys(client: Client, prefix: str) -> int:
    """Delete all of them; how many. Blocks for as long as a SCAN over the server takes."""
    count, keys = 0, scan_keys(client, prefix)
    while batch := list(islice(keys, 500)):
        count += client.unlink(*batch)
    return count
