"""Retirement: groups whose every use is final and durable are sealed, then swept with their payloads."""

import logging
import time
from collections.abc import Callable

from buffer.group import Group
from buffer.payload_servers import PayloadServers
from buffer.state import State
from penstock import scripts
from penstock.control import Client
from penstock.errors import LeadershipLost
from penstock.keys import Keys
from penstock.messages import iter_maps, stored, unpack
from penstock.scripts import Leadership, run

log = logging.getLogger(__name__)

#: Groups per verb; bounds the time one call takes on the server.
CHUNK = 128
#: Groups swept per look, so that a large retirement does not hold up a cut.
SWEEP = 512
#: Records of processes that have shown no sign of life for so long are removed.
STALE_S = 3600.0


class Retirement:
    """Seals, sweeps and tidies for the leader.

    Args:
        retention_s: ``buffer.retention_s``.
        alive: called between chunks; keeps the leadership, raises LeadershipLost.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        servers: PayloadServers,
        lead: Leadership,
        state: State,
        *,
        retention_s: float | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._servers = servers
        self._lead = lead
        self._state = state
        self._retention_s = retention_s
        self._alive = alive

    def seal(self) -> int:
        """Seal every group that nobody will use or rewind to; the number sealed. Raises LeadershipLost. Blocks.

        With ``retention_s``, what waits for a checkpoint for longer goes too: its trainer cannot rewind to it.
        """
        ckpt = {name: sub.position.ckpt for name, sub in self._state.subs.items()}
        sealed = self._seal_all(self._state.spent.durable(ckpt), evict=False)
        if self._retention_s is not None:
            evicted = self._seal_all(self._state.spent.expired(ckpt, self._retention_s), evict=True)
            if evicted:
                log.warning("%d groups went without a checkpoint past them, after %g s", evicted, self._retention_s)
            sealed += evicted
        return sealed

    def _seal_all(self, groups: list[Group], *, evict: bool) -> int:
        sealed = 0
        for start in range(0, len(groups), CHUNK):
            self._alive()
            sealed += self._seal_chunk(groups[start : start + CHUNK], evict=evict)
        return sealed

    def _seal_chunk(self, groups: list[Group], *, evict: bool) -> int:
        jobs = [group.job for group in groups]
        call = scripts.seal(
            self._keys,
            self._lead,
            revision=self._state.revision,
            subs=sorted(self._state.subs),
            jobs=jobs,
            evict=evict,
        )
        sealed = run(self._client, call)
        if sealed == "leader":
            raise LeadershipLost("Another buffer leads; this one stops changing anything.")
        if isinstance(sealed, str):
            self._state.refresh()
            return 0
        self._state.forget(sealed)
        return len(sealed)

    def sweep(self) -> int:
        """Delete sealed and cancelled groups, payloads first; the number deleted. Raises LeadershipLost. Blocks."""
        jobs = [job.decode() for job in self._client.srandmember(self._keys.retiring, SWEEP)]
        if not jobs:
            return 0
        pipe = self._client.pipeline(transaction=False)
        for job in jobs:
            pipe.hget(self._keys.group(job), "n")
            pipe.get(self._keys.meta(job))
        answers = pipe.execute()
        payloads: list[tuple[str, str]] = []
        sizes: list[tuple[str, int]] = []
        for i, job in enumerate(jobs):
            n, meta = answers[2 * i], answers[2 * i + 1]
            for record in iter_maps(meta or b"", f"metadata of group {job}"):
                payloads.append((record["server"], stored(self._keys, job, record)))
            sizes.append((job, int(n or 0)))
        self._servers.unlink(payloads)
        gone = 0
        for start in range(0, len(sizes), CHUNK):
            swept = run(self._client, scripts.sweep(self._keys, self._lead, sizes[start : start + CHUNK]))
            if swept < 0:
                raise LeadershipLost("Another buffer leads; this one stops changing anything.")
            gone += swept
        self._state.forget(jobs)
        return gone

    def trim(self, last_event: str) -> None:
        """Drop manifests that no rewind can reach and events that are behind us. Blocks for one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for sub in self._state.subs.values():
            if sub.position.floor > 0:
                # the one at the floor stays: a rewind to it reads how much it consumed
                pipe.xtrim(self._keys.batches(sub.name), minid=f"{sub.position.floor}-0", approximate=False)
        pipe.xtrim(self._keys.samples, minid=last_event, approximate=False)
        pipe.execute()
        for sub in self._state.subs.values():
            if sub.position.floor > 0:
                self._free_columns(sub.name, sub.position.floor)

    def _free_columns(self, sub: str, floor: int) -> None:
        """Delete what roles wrote back for batches that no rewind can reach; at most ``SWEEP`` columns a look."""
        listed = self._keys.columns(sub)
        places = self._client.zrangebyscore(listed, "-inf", floor, start=0, num=SWEEP)
        if places:
            self._servers.unlink([_place(place) for place in places])
            self._client.zrem(listed, *places)

    def tidy(self) -> int:
        """Remove what dead processes left: presence and waits an hour old, consumers without a lease. Blocks."""
        now = time.time()
        removed = 0
        for records in (self._keys.workers, self._keys.trainers, self._keys.waits):
            found = [(name.decode(), raw) for name, raw in self._client.hgetall(records).items()]
            stale = [(name, raw) for name, raw in found if now - _told_at(name, raw) > STALE_S]
            consumers = records == self._keys.workers
            removed += run(self._client, scripts.tidy(self._keys, records, stale, consumers=consumers))
        return removed


def _place(place: bytes) -> tuple[str, str]:
    """(payload server, key) of a column."""
    server, _, key = place.decode().partition("|")
    return server, key


def _told_at(name: str, raw: bytes) -> float:
    """When a record of presence or of a wait was last written (Unix time)."""
    record = unpack(raw, f"record of {name}")
    return float(record.get("at", 0.0)) if isinstance(record, dict) else 0.0
