"""Permanent payloads whose commit Redis has forgotten: nothing that is there would ever free them.

A failover to a replica that is behind, a power loss or a restored dump takes Redis back, and the payloads that lie on
it. Those on other servers and in folders stay. So a leader looks once at all that lies there, and gives a time to live
to what no group has. What a worker commits anew under the same lease is permanent again when its group is complete.
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

#: Payloads of one look, so that a cut never waits for long.
CHUNK = 1000


class ForgottenPayloads:
    """Looks at each payload server in use once, and once more at one that did not answer or was lost meanwhile.

    Such a one may have gone back itself, and have again what was freed.

    Args:
        ttl_s: ``buffer.payload_ttl_s``: how long one that nobody has is still there.
    """

    def __init__(self, client: Client, keys: Keys, servers: PayloadServers, ttl_s: float) -> None:
        self._client = client
        self._keys = keys
        self._servers = servers
        self._ttl_s = ttl_s
        self._looked: set[str] = set()
        #: The server that is looked at, and what lies there and was not looked at yet.
        self._at = ""
        self._listed: Iterator[tuple[str, bool]] = iter(())
        self._found = 0

    def tend(self) -> None:
        """Look at the next payloads. Blocks for a few round trips."""
        there = self._servers.in_use
        _, away = self._servers.standing
        self._looked &= there - away
        if self._at not in there and not self._begin(there - self._looked):
            return
        try:
            names = self._servers.some_of(self._at, self._listed, CHUNK)
        except ConfigError as exc:
            # What lies there cannot be known; whoever needs any of it says so.
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
        """Those of leases that have committed nothing of their group, or of groups that are not there."""
        parts = {name: part for name in names if (part := parts_of(self._keys, name))[0]}
        pipe = self._client.pipeline(transaction=False)
        for job, k, _ in parts.values():
            pipe.hget(self._keys.group(job), f"s:{k}")
        tokens = dict(zip(parts, pipe.execute(), strict=True))
        odd = {name: part for name, part in parts.items() if tokens[name] != part[2].encode()}
        # Samples that were committed together lie under the name of the first, which another lease may have made.
        held = self._held(sorted({job for job, _, _ in odd.values()}))
        return [name for name in odd if name not in held]

    def _held(self, jobs: list[str]) -> set[str]:
        """Keys of what these jobs have committed."""
        records = Records(self._client, self._keys).read(jobs)
        found = zip(jobs, records, strict=True)
        return {key for job, metas in found for meta in metas for _, key in keys_of(self._keys, job, meta)}
