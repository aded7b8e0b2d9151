"""Fetch one object for one worker: from peers if any has a range, else from the trainer.

    look    read from Redis which peers have which ranges; periodically, the trainer's address
    peers   fetch the rarest range first, from the least busy peer that has it; one that fails is avoided for a while,
            one that has sent nothing yet gets one request at a time, and one that is much slower than others is
            replaced by another, or by the trainer
    claim   fetch a range that no peer has or sends from the trainer; two workers at a time hold such a claim
    alone   without any range for a turn, and without a claim, fetch from the trainer without one

So the trainer sends an object about once, however many workers fetch it. A peer that dies costs the range in flight,
and a peer that falsely announces ranges blocks no worker.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.errors import PublishError
from penstock.protocol.scripts import (
    CLAIM_MS,
    OFFER_EVERY_S,
    Peer,
    bitmap_bytes,
    read_claims,
    read_offer,
    read_peers,
    relay_claim,
    relay_have,
)
from penstock.records.keys import Keys
from penstock.records.offer import Offer, Range
from penstock.redis.control import AsyncControl
from penstock.text import safe_repr
from penstock.workers.weights.fetch.download import Downloads, NotGiven
from penstock.workers.weights.fetch.partial import Partial
from penstock.workers.weights.fetch.progress import Pace, Progress

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Told:
    """Announce the ranges of one object that one worker has, one announcement at a time."""

    keys: Keys
    control: AsyncControl
    thing: str
    worker: str
    url: str
    bitmap: Callable[[], bytes]
    #: The range that it fetches from the trainer.
    claim: int = -1
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def say(self) -> None:
        """Announce the present ranges, and renew the claim."""
        async with self._lock:
            await self.control.call(
                relay_have(self.keys, self.thing, self.worker, self.url, self.bitmap(), claim=self.claim)
            )


#: Polling interval for the peers' ranges: this, plus this per peer.
LOOK_S, LOOK_EACH_S = 0.05, 0.005
#: A peer that failed is avoided for this long, doubled with each further failure; one that is silent for the longest.
REST_S, LONGEST_REST_S = 0.25, 20.0
#: The fetch fails if no bytes arrive for this long; received ranges are kept.
GIVE_UP_S = 60.0
#: A turn is this time plus that of two ranges on a link of this rate, times a random factor from 1 to 2, so that the
#: first workers can serve the others. Ranges count with at most the largest configurable size.
TURN_S, SLOW_LINK_BYTES_PER_S, LARGEST_RANGE_BYTES = 15.0, 4 * 1024**2, 1024**3
#: Consecutive reads without an offer after which it counts as withdrawn; a restarted Redis has none for a while.
GONE_LOOKS = 3
#: Pause between two requests to a trainer that failed.
TRY_S = 0.5
#: Most remembered addresses that sent wrong bytes.
MAX_LIARS = 1024


@dataclass(slots=True, eq=False)
class _Asked:
    """Describe a range in flight. ``peer``: '' is the trainer."""

    wanted: Range
    peer: str
    task: "asyncio.Task[None]"
    since: float = field(default_factory=time.monotonic)


class Swarm:
    """Fetch the missing ranges of ``partial``.

    Args:
        name: of the object, as servers know it.
        fetches: most ranges in flight from peers.
        liars: addresses that sent wrong bytes of any object, which are not used; updated.
    """

    def __init__(
        self,
        name: str,
        offer: Offer,
        partial: Partial,
        announcer: Told,
        downloads: Downloads,
        progress: Progress,
        *,
        fetches: int,
        liars: dict[str, None],
    ) -> None:
        #: Bytes received from the trainer, and from peers.
        self.from_trainer = self.from_peers = 0
        self._name = name
        self._offer = offer
        self._partial = partial
        self._announcer = announcer
        self._downloads = downloads
        self._progress = progress
        self._fetches = fetches
        self._peers: dict[str, Peer] = {}
        self._liars = liars
        self._pace = Pace(offer.range_bytes)
        #: Ranges in flight, number of requests by peer, and peers that sent a range.
        self._under_way: dict[int, _Asked] = {}
        self._asked: Counter[str] = Counter()
        self._gave: set[str] = set()
        #: Time until which a peer is avoided (monotonic, s), and its consecutive failures.
        self._resting: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._came_at = time.monotonic()
        #: Time of the last bytes of each range in flight (monotonic, s): a large range may take minutes.
        self._grew_at: dict[int, float] = {}
        longest = max((one.num_bytes for one in partial.ranges), default=0)
        self._slow_s = 2 * min(longest, LARGEST_RANGE_BYTES) / SLOW_LINK_BYTES_PER_S
        self._turn_s = (TURN_S + self._slow_s) * random.uniform(1.0, 2.0)
        self._is_alone = False
        #: Worker and range of each of the trainer's slots, while no bytes arrive.
        self._holders: list[tuple[str, int]] = []
        self._failed = NotGiven("no worker has them")
        self._gone = 0

    async def run(self) -> None:
        """Fetch until all ranges are present.

        Raises:
            PublishError: no bytes arrived for ``GIVE_UP_S``. OSError: a disk error. QueueFull, QueueUnavailable.
        """
        loops = [self._look(), self._claims(), *(self._ask_peers() for _ in range(self._fetches))]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            while missing := self._partial.missing:
                holders = tuple(worker for worker, _ in self._holders)
                self._progress.blocked_on(missing=len(missing), ranges=len(self._partial.ranges), holders=holders)
                done, _ = await asyncio.wait(tasks, timeout=TRY_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                last = max(self._came_at, *self._grew_at.values(), 0.0)
                if (left := self._partial.missing) and time.monotonic() - last > GIVE_UP_S + 2 * self._slow_s:
                    raise PublishError(
                        f"version {self._offer.version} cannot be fetched: {len(left)} of its "
                        f"{len(self._partial.ranges)} ranges are not received, {self._failed}{self._held()}; "
                        f"{self._failed.remedy}."
                    )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._announcer.claim = -1
            self._progress.blocked_on()

    async def _look(self) -> None:
        announcer, looked_at, count = self._announcer, time.monotonic(), len(self._partial.ranges)
        while self._partial.missing:
            if time.monotonic() - looked_at > OFFER_EVERY_S:
                looked_at = time.monotonic()
                await self._look_at_offer()
            found = await announcer.control.do(
                lambda client: read_peers(client, announcer.keys, announcer.thing, count)
            )
            found.pop(announcer.worker, None)
            self._peers = found
            self._wake()
            await asyncio.sleep(LOOK_S + LOOK_EACH_S * len(found))

    async def _look_at_offer(self) -> None:
        """Update the trainer's address: a restarted one serves the same bytes elsewhere, or no longer."""
        announcer = self._announcer
        offer = await announcer.control.do(lambda client: read_offer(client, announcer.keys, announcer.thing))
        self._gone = 0 if offer is not None else self._gone + 1
        if offer is not None and replace(offer, url=self._offer.url) == self._offer:
            self._offer = offer
        elif self._gone >= GONE_LOOKS and not self._given_by_peers():
            raise PublishError(
                f"version {self._offer.version} cannot be fetched: its trainer no longer offers it, and no worker has "
                f"the missing ranges; {self._failed}."
            )

    def _given_by_peers(self) -> bool:
        return not self._had_by([*self._peers]).isdisjoint(self._partial.missing)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _ask_peers(self) -> None:
        while self._partial.missing:
            chosen = self._choose()
            if chosen is None:
                await self._changed.wait()
                continue
            wanted, peer = chosen
            await self._fetch(wanted, self._peers[peer].url, peer)

    def _choose(self) -> tuple[Range, str] | None:
        """Return the rarest missing range, and the least busy of the peers that have it.

        If there is none, return a range that is late, and another peer, which has sent ranges before.
        """
        free = [name for name in self._peers if not self._rests(name) and self._asked[name] < self._most(name)]
        chosen = self._rarest([number for number in self._partial.missing if number not in self._under_way], free)
        if chosen is None and self._pace.is_known and (late := self._late(self._pace.patience)):
            slow = {self._under_way[number].peer for number in late}
            chosen = self._rarest(late, [name for name in free if name in self._gave and name not in slow])
        return chosen

    def _rarest(self, wanted: list[int], names: list[str]) -> tuple[Range, str] | None:
        if not wanted or not names:
            return None
        has = self._have(names)[:, wanted]
        holders = has.sum(axis=0)
        available = np.flatnonzero(holders)
        if not len(available):
            return None
        rarest = available[holders[available] == holders[available].min()]
        at = int(random.choice(rarest))
        able = [names[row] for row in np.flatnonzero(has[:, at])]
        random.shuffle(able)
        return self._partial.ranges[wanted[at]], min(able, key=lambda name: self._asked[name])

    def _most(self, peer: str) -> int:
        """Return the most requests in flight to a peer: one peer must not have them all."""
        return max(1, self._fetches // 2) if peer in self._gave else 1

    def _late(self, patience: float = 1.0) -> list[int]:
        """Return the ranges that peers send much more slowly than usual."""
        asked = [one for one in self._under_way.values() if one.peer]
        return [one.wanted.number for one in asked if self._pace.is_late(one.wanted.num_bytes, one.since, patience)]

    def _have(self, names: list[str]) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        """Return [peers, ranges] 1 if a peer has a range."""
        count = len(self._partial.ranges)
        length = bitmap_bytes(count)
        rows = [np.frombuffer(self._peers[name].bitmap[:length].ljust(length, b"\0"), np.uint8) for name in names]
        return np.unpackbits(np.stack(rows), axis=1)[:, :count]

    def _rests(self, peer: str) -> bool:
        return self._peers[peer].url in self._liars or self._resting.get(peer, 0.0) > time.monotonic()

    async def _claims(self) -> None:
        announcer, count = self._announcer, len(self._partial.ranges)
        while self._partial.missing:
            claim = relay_claim(announcer.keys, announcer.thing, announcer.worker, count, wanted=self._not_given())
            number = await announcer.control.call(claim)
            if 0 <= number < count:
                self._is_alone, self._holders = False, []
            elif (number := await self._unclaimed()) < 0:
                await self._changed.wait()
                continue
            announcer.claim = number
            wanted, came = self._partial.ranges[number], False
            if number in self._partial.missing and (number not in self._under_way or number in self._late()):
                renewing = asyncio.create_task(self._renew())
                try:
                    came = await self._fetch(wanted, self._offer.url, "")
                finally:
                    renewing.cancel()
                    await asyncio.gather(renewing, return_exceptions=True)
            announcer.claim = -1
            await announcer.say()
            if not came:
                await asyncio.sleep(random.uniform(TRY_S, 2 * TRY_S))

    async def _unclaimed(self) -> int:
        """Return a range to request from the trainer without a claim, after a turn without any range; -1: none.

        A worker may hold a claim for any time; that must not block the others.
        """
        idle_s = time.monotonic() - self._came_at
        if idle_s < TRY_S and not self._is_alone:
            self._holders = []
            return -1
        keys, thing = self._announcer.keys, self._announcer.thing
        self._holders = await self._announcer.control.do(lambda client: read_claims(client, keys, thing))
        self._is_alone = self._is_alone or idle_s > self._turn_s
        if not self._is_alone:
            return -1
        giving = [name for name in self._peers if not self._rests(name)] if not self._pace.is_idle() else []
        left = set(self._partial.missing) - self._under_way.keys() - self._had_by(giving) or set(self._late())
        return random.choice([*(left - {number for _, number in self._holders} or left)] or [-1])

    def _held(self) -> str:
        names = [f"worker {safe_repr(worker, 100)}" for worker, _ in self._holders]
        return f"; the trainer's slots are held by {' and '.join(names)}" if names else ""

    def _not_given(self) -> int:
        """Return a missing range whose peers do not send it, or send it too slowly; -1: none."""
        # If peers send nothing at all, their announcements do not count.
        giving = [] if self._pace.is_idle() else [name for name in self._peers if not self._rests(name)]
        not_given = self._had_by([*self._peers]) - self._had_by(giving) - self._under_way.keys()
        left = [*not_given.intersection(self._partial.missing)]
        if not left and not self._failures[""]:
            left = self._late()
        return random.choice(left) if left else -1

    def _had_by(self, peers: list[str]) -> set[int]:
        return set(np.flatnonzero(self._have(peers).any(axis=0)).tolist()) if peers else set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_MS / 3000)
            await self._announcer.say()

    async def _fetch(self, wanted: Range, url: str, peer: str) -> bool:
        """Fetch a range and announce it; return False if that failed. ``peer``: '' is the trainer.

        Replaces a request for the range that is in flight.
        """
        before = self._under_way.get(wanted.number)
        task = asyncio.create_task(self._take(wanted, url, peer, before.task if before is not None else None))
        asked = self._under_way[wanted.number] = _Asked(wanted, peer, task)
        self._asked[peer] += 1
        if peer:
            self._pace.asked(is_again=before is not None)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._under_way.get(wanted.number) is asked:
                del self._under_way[wanted.number]
                self._grew_at.pop(wanted.number, None)
            self._asked[peer] -= 1
            self._wake()
        try:
            if task.cancelled():
                raise NotGiven(f"{url} is much slower than others")
            task.result()
        except NotGiven as exc:
            self._avoid(peer, url, exc)
            return False
        if peer:
            await self._announcer.say()
        return True

    async def _take(self, wanted: Range, url: str, peer: str, before: "asyncio.Task[None] | None") -> None:
        """Fetch the range after cancelling the request ``before``, unless that has completed."""
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        if wanted.number not in self._partial.missing:
            return
        began = time.monotonic()
        with self._partial.writing(wanted) as write:
            await self._downloads.fetch(url, self._name, wanted, self._seen(wanted, write))
        # No await from here on: a range that is present is also counted.
        self._partial.is_here(wanted.number)
        self._failures[peer] = 0
        self._came_at = time.monotonic()
        if peer:
            self._gave.add(peer)
            self._pace.came(wanted.num_bytes, self._came_at - began)
            self.from_peers += wanted.num_bytes
        else:
            self.from_trainer += wanted.num_bytes

    def _seen(self, wanted: Range, write: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
        def seen(at: int, data: bytes) -> None:
            self._grew_at[wanted.number] = time.monotonic()
            self._progress.num_bytes += len(data)
            write(at, data)

        return seen

    def _avoid(self, peer: str, url: str, exc: NotGiven) -> None:
        self._failed = exc
        self._failures[peer] += 1
        if exc.is_wrong and peer:
            self._liars[url] = None  # it would send them again
            while len(self._liars) > MAX_LIARS:
                del self._liars[next(iter(self._liars))]
        else:
            rest = REST_S * 2 ** min(self._failures[peer], 16)
            self._resting[peer] = time.monotonic() + (LONGEST_REST_S if exc.is_silent else min(rest, LONGEST_REST_S))
        who = f"worker {peer}" if peer else "the trainer"
        level = logging.WARNING if exc.is_wrong or not peer else logging.INFO
        log.log(level, "%s did not send a range of version %d: %s", who, self._offer.version, exc)
