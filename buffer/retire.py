"""Retire groups: seal those whose uses are all final and durable, then sweep them with their payloads."""

import logging
import time
from collections.abc import Callable, Collection

from penstock.buffer.group import Group
from penstock.buffer.payload_servers import PayloadServers, keys_of
from penstock.buffer.state import State
from penstock.errors import ProtocolError
from penstock.names import MAX_ANSWERS
from penstock.protocol import scripts
from penstock.protocol.scripts import Leadership, run
from penstock.records.codec import count_shown, name_shown, number_in, unpack_map
from penstock.records.keys import Keys
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Groups per verb; bounds the time of one call on the server.
CHUNK = 128
#: Groups swept per call, so that a large retirement does not delay a cut.
SWEEP = 512
#: Time without a report after which the records of a process are deleted.
STALE_S = 3600.0


class Retirement:
    """Seal, sweep and tidy for the leader.

    Args:
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
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._servers = servers
        self._lead = lead
        self._state = state
        self._alive = alive

    def seal(self) -> int:
        """Seal groups that are neither needed nor reachable by a rewind; return their number. Blocks.

        Raises LeadershipLost.

        With a retention, groups that waited longer for a checkpoint are sealed too: their trainer cannot rewind to it.
        """
        ckpt = {name: sub.position.ckpt for name, sub in self._state.subs.items()}
        sealed = self._seal_all(self._state.used_up.durable(ckpt), ())
        keep_s = {name: sub.definition.keep_s for name, sub in self._state.subs.items()}
        for limit in sorted({limit for limit in keep_s.values() if limit}):
            may = {name for name, own in keep_s.items() if own and own <= limit}
            evicted = self._seal_all(self._state.used_up.overdue(ckpt, limit, may), may)
            if evicted:
                log.warning("%d groups were deleted before a checkpoint covered them, after %g s", evicted, limit)
            sealed += evicted
        return sealed

    def park(self) -> None:
        """Park subscriptions whose trainer has been absent for longer than their retention. Blocks briefly."""
        for name, sub in list(self._state.subs.items()):
            keep_s = sub.definition.keep_s
            if not keep_s or sub.position.parked:
                continue
            call = scripts.park(
                self._keys, self._lead, name, revision=self._state.revision, absent_ms=int(keep_s * 1000)
            )
            answer = run(self._client, call)
            if answer.outcome == "parked":
                log.warning(
                    "%s: parked after its trainer was absent for %g s; it no longer blocks retirement", name, keep_s
                )
                self._state.refresh()
            if answer.given:
                log.warning("%s: returned %d groups of its uncommitted batches to the pool", name, answer.given)
                self._state.reload()

    def _seal_all(self, groups: list[Group], evict: Collection[str]) -> int:
        sealed = 0
        for start in range(0, len(groups), CHUNK):
            self._alive()
            sealed += self._seal_chunk(groups[start : start + CHUNK], evict)
        return sealed

    def _seal_chunk(self, groups: list[Group], evict: Collection[str]) -> int:
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
        if sealed is None:
            self._state.refresh()
            return 0
        self._state.forget(sealed)
        return len(sealed)

    def sweep(self) -> int:
        """Delete sealed and cancelled groups, payloads first; return their number. Raises LeadershipLost. Blocks."""
        jobs = [name_shown(job) for job in self._client.srandmember(self._keys.retiring, SWEEP)]
        if not jobs:
            return 0
        pipe = self._client.pipeline(transaction=False)
        for job in jobs:
            pipe.hget(self._keys.group(job), "n")
        counts = pipe.execute()
        payloads: list[tuple[str, str]] = []
        sizes: list[tuple[str, int]] = []
        servers: dict[str, set[str]] = {}
        for job, n, records in zip(jobs, counts, self._state.records.read(jobs), strict=True):
            places = [place for record in records for place in keys_of(self._keys, job, record)]
            servers[job] = {server for server, _ in places}
            payloads += places
            sizes.append((job, _num_samples(n)))
        if silent := self._servers.unlink(payloads):
            # Keep groups on a server that does not answer, or their payloads would never be freed.
            sizes = [(job, n) for job, n in sizes if not servers[job] & silent]
            jobs = [job for job, _ in sizes]
        gone = 0
        for start in range(0, len(sizes), CHUNK):
            gone += run(self._client, scripts.sweep(self._keys, self._lead, sizes[start : start + CHUNK]))
        self._state.forget(jobs)
        for job in jobs:
            self._state.records.forget(job)
        return gone

    def trim(self, last_event: str) -> None:
        """Delete manifests that no rewind can reach, and processed events. Blocks for one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for sub in self._state.subs.values():
            if sub.position.floor > 0:
                # Keep the manifest at the floor: a rewind to it reads how much it consumed.
                pipe.xtrim(self._keys.batches(sub.name), minid=f"{sub.position.floor}-0", approximate=False)
        pipe.xtrim(self._keys.samples, minid=last_event, approximate=False)
        pipe.execute()
        for sub in self._state.subs.values():
            if sub.position.floor > 0:
                self._free_columns(sub.name, sub.position.floor)

    def _free_columns(self, sub: str, floor: int) -> None:
        """Delete columns of batches that no rewind can reach; at most ``SWEEP`` columns per call."""
        listed = self._keys.columns(sub)
        places = self._client.zrangebyscore(listed, "-inf", floor, start=0, num=SWEEP)
        if places:
            silent = self._servers.unlink([_place(place) for place in places])
            if freed := [place for place in places if _place(place)[0] not in silent]:
                self._client.zrem(listed, *freed)

    def tidy(self) -> int:
        """Delete the records of dead processes: hour-old presence and waits, consumers without a lease. Blocks."""
        now = time.time()
        removed = 0
        keys = self._keys
        for records in (keys.workers, keys.trainers, keys.waits, keys.verifiers, keys.parts):
            found = self._client.hgetall(records).items()
            stale = [(name, raw) for name, raw in found if now - last_report_s(raw) > STALE_S]
            consumers = records == self._keys.workers
            removed += run(self._client, scripts.tidy(self._keys, records, stale, consumers=consumers))
        return removed


def _num_samples(raw: bytes | None) -> int:
    """Parse the number of samples of a swept group; 0 if it is invalid."""
    n = count_shown(raw) or 0
    return n if n <= MAX_ANSWERS else 0


def _place(place: bytes) -> tuple[str, str]:
    """Return (payload server, key) of a column."""
    server, _, key = place.decode(errors="backslashreplace").partition("|")
    return server, key


def last_report_s(raw: bytes) -> float:
    """Return when a record of presence or of a wait was last written (Unix time); 0 if it is invalid."""
    try:
        return number_in(unpack_map(raw, "a record"), "at", "a record")
    except ProtocolError:
        return 0.0
