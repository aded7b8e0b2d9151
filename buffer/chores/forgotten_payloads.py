"""Permanent payloads whose commit Redis has lost: they would never be freed.

A failover to a lagging replica, a power loss or a restored dump sets Redis back, with the payloads on it. Those on
other servers and in folders stay. So a leader checks all payloads once, and gives a time to live to those that no group
has. If a worker commits one again under the same lease, it becomes permanent again when its group is complete.
"""

import logging
from collections.abc import Iterator

from penstock.buffer.payload_servers import PayloadServers, keys_of
from penstock.buffer.records import Records
from penstock.errors import ConfigError
from penstock.payloads.servers import parts_of
from penstock.protocol.keys import Keys
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Payloads per call, so that a cut never waits for long.
CHUNK = 1000


class ForgottenPayloads:
    """Checks each payload server in use once, and again if it did not answer or was lost meanwhile.

    Such a server may have been set back itself, and have freed payloads again.

    Args:
        ttl_s: ``buffer.payload_ttl_s``: time to live of payloads that no group has.
    """

    def __init__(self, client: Client, keys: Keys, servers: PayloadServers, ttl_s: float) -> None:
        self._client = client
        self._keys = keys
        self._servers = servers
        self._ttl_s = ttl_s
        self._looked: set[str] = set()
        #: The server that is being checked, and its payloads that were not checked yet.
        self._at = ""
        self._listed: Iterator[tuple[str, bool]] = iter(())
        self._found = 0

    def tend(self) -> None:
        """Check the next payloads. Blocks for a few round trips."""
        there = self._servers.in_use
        _, away = self._servers.standing
        self._looked &= there - away
        if self._at not in there and not self._begin(there - self._looked):
            return
        try:
            names = self._servers.some_of(self._at, self._listed, CHUNK)
        except ConfigError as exc:
            # Its payloads cannot be listed; readers that need one report it.
            log.info("payload server %s was not looked through: %s", self._at, exc)
            names = []
        if names is None:
            self._at = ""
        elif names:
            self._unkeep([name for name, is_kept in names if is_kept])
        else:
            self._end()

    def _begin(self, servers: frozenset[str]) -> bool:
        self._at = min(servers, default="")
        if self._at:
            self._listed, self._found = self._servers.names(self._at), 0
        return bool(self._at)

    def _end(self) -> None:
        if self._found:
            log.warning(
                "payload server %s had %d payloads whose commits Redis has forgotten; they are gone in %g s",
                self._at, self._found, self._ttl_s,
            )  # fmt: skip
        self._looked.add(self._at)
        self._at = ""

    def _unkeep(self, names: list[str]) -> None:
        forgotten = self._forgotten(names)
        if forgotten and self._servers.unkeep(self._at, forgotten, self._ttl_s):
            self._found += len(forgotten)

    def _forgotten(self, names: list[str]) -> list[str]:
        """Return payloads of leases that have committed nothing of their group, or of groups that do not exist."""
        parts = {name: part for name in names if (part := parts_of(self._keys, name))[0]}
        pipe = self._client.pipeline(transaction=False)
        for job, k, _ in parts.values():
            pipe.hget(self._keys.group(job), f"s:{k}")
        tokens = dict(zip(parts, pipe.execute(), strict=True))
        odd = {name: part for name, part in parts.items() if tokens[name] != part[2].encode()}
        # Samples that were committed together use the key of the first, which another lease may have made.
        held = self._held(sorted({job for job, _, _ in odd.values()}))
        return [name for name in odd if name not in held]

    def _held(self, jobs: list[str]) -> set[str]:
        """Return the keys that these jobs have committed."""
        records = Records(self._client, self._keys).read(jobs)
        found = zip(jobs, records, strict=True)
        return {key for job, metas in found for meta in metas for _, key in keys_of(self._keys, job, meta)}
