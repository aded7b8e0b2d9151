"""Notices that Redis forgot what it had acknowledged: a failover to a replica that lagged, or a power loss.

Counters only grow. Every buffer process, one that stands by too, remembers the most that it has seen of them; when it
finds less, the difference is lost for good, and whoever finds it first counts and reports it. What was lost in the
moment before the last look does not show, nor what was made anew before the next: the figures are at least.
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
        #: Counter -> the most that was seen of it: its value, and by how much it had gone back before.
        self.seen: dict[str, int] = {}

    def look(self) -> dict[str, int]:
        """What was lost since the last look, by counter, and nobody has reported; it is counted in Redis and logged.

        Blocks for a round trip, two where anything was lost.
        """
        now = self._read()
        self.seen = {name: max(count, self.seen.get(name, count)) for name, count in now.items()}
        if self.seen == now:
            return {}
        lost = scripts.run(self._client, scripts.rolled_back(self._keys, self.seen))
        if lost:
            words = ", ".join(f"{count} {WATCHED[name]}" for name, count in lost.items())
            log.error("Redis lost acknowledged writes, as after a failover or a power loss: at least %s", words)
        return lost

    def _read(self) -> dict[str, int]:
        """The counters, each with what was reported of it; without those that no verb wrote so, which is said once."""
        fields = [name for counter in WATCHED for name in (counter, f"rolled_back:{counter}")]
        values = self._client.hmget(self._keys.counters, fields)
        found = {name.encode(): b"0" if value is None else value for name, value in zip(fields, values, strict=True)}
        counts = dict(readable(found, _counter))
        told = {name: f"rolled_back:{name}" for name in WATCHED}
        return {name: counts[name] + counts[told[name]] for name in WATCHED if {name, told[name]} <= counts.keys()}


def _counter(field: bytes, value: bytes) -> tuple[str, int]:
    name = name_shown(field)
    return name, count_of(value, f"The counter {name}")
