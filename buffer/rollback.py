"""Detection of lost acknowledged writes in Redis: by a failover to a lagging replica, or a power loss.

Counters only grow. Every buffer process, also on standby, remembers their largest observed values; if it reads less,
the difference is lost for good, and the first process to find it counts and reports it. Losses since the last read,
and counts made again before the next one, are not visible: the figures are lower bounds.
"""

import logging

from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import count_of, name_shown
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Counters that are compared, and their names in reports.
WATCHED = {
    "admitted": "admissions",
    "committed": "committed samples",
    "completed": "completed groups",
    "cut": "cut batches",
    "published": "publications",
}


class Rollback:
    """The counters as this process last read them."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        #: Counter -> its largest observed value, plus by how much it had decreased before.
        self.seen: dict[str, int] = {}

    def look(self) -> dict[str, int]:
        """Return new losses since the last call, by counter; they are counted in Redis and logged.

        Blocks for a round trip, two if anything was lost.
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
        """Read the counters, each plus what was reported of it; invalid ones are skipped, and logged once."""
        fields = [name for counter in WATCHED for name in (counter, f"rolled_back:{counter}")]
        values = self._client.hmget(self._keys.counters, fields)
        found = {name.encode(): b"0" if value is None else value for name, value in zip(fields, values, strict=True)}
        counts = dict(readable(found, _counter))
        told = {name: f"rolled_back:{name}" for name in WATCHED}
        return {name: counts[name] + counts[told[name]] for name in WATCHED if {name, told[name]} <= counts.keys()}


def _counter(field: bytes, value: bytes) -> tuple[str, int]:
    name = name_shown(field)
    return name, count_of(value, f"The counter {name}")
