"""Notices that Redis forgot what it had acknowledged: a failover to a replica that lagged, or a power loss.

Counters only grow. The leader remembers them as of its last look; when it takes the lead again and finds smaller
ones, the difference is lost for good, and is counted and reported. What was lost in the moment before the last look
does not show: the figures are at least.
"""

import logging

from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import count_of, name_shown
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Counters that say what was lost, and how people call it.
WATCHED = {
    "admitted": "admissions",
    "committed": "committed samples",
    "completed": "completed groups",
    "cut": "cut batches",
    "published": "publications",
}


class Rollback:
    """The counters as they were last seen by this process."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        #: Counter -> its value at the last look.
        self.seen: dict[str, int] = {}

    def remember(self) -> None:
        """Look at the counters. Blocks for one round trip."""
        self.seen = self._read()

    def look(self) -> dict[str, int]:
        """What was lost since the last look, by counter; it is counted in Redis and logged. Blocks for a round trip."""
        now = self._read()
        lost = {name: self.seen[name] - count for name, count in now.items() if self.seen.get(name, count) > count}
        self.seen = now
        if lost:
            words = ", ".join(f"{count} {WATCHED[name]}" for name, count in lost.items())
            log.error("Redis lost acknowledged writes, as after a failover or a power loss: at least %s", words)
            scripts.run(self._client, scripts.rolled_back(self._keys, lost))
        return lost

    def _read(self) -> dict[str, int]:
        """The counters, but for one that no verb wrote so, which is said once."""
        values = self._client.hmget(self._keys.counters, list(WATCHED))
        found = {name.encode(): b"0" if value is None else value for name, value in zip(WATCHED, values, strict=True)}
        return dict(readable(found, _counter))


def _counter(field: bytes, value: bytes) -> tuple[str, int]:
    name = name_shown(field)
    return name, count_of(value, f"The counter {name}")
