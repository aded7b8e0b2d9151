"""Fetch one object for one worker: from peers what they have, from the trainer what no peer has.

    look    who has what, as Redis says; now and then, where the trainer is by now
    peers   rarest range first, from whoever of those that have it is asked least; one that does not give is left alone,
            one that gave nothing yet has one range under way, and one that takes much longer than others is left for
            another, or for the trainer
    claim   a range that nobody has, or that those who have it do not give: from the trainer, two workers at a time
    alone   who got no range from anybody for a turn, and no claim, fetches from the trainer without one

So the trainer's link carries an object about once, however many workers fetch it; a peer that dies costs the range that
was under way, and whoever says that he has all of it holds nobody up.
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


@dataclass(slots=True)
class Told:
    """Announces what one worker has of one object by ``say``, one announcement at a time."""

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
        """Announce what is here by now, and which claim continues, in order."""
        async with self._lock:
            await self.control.call(
                relay_have(self.keys, self.thing, self.worker, self.url, self.bitmap(), claim=self.claim)
            )


log = logging.getLogger(__name__)

#: Between two looks at who has what: so long, and longer with many peers.
LOOK_S, LOOK_EACH_S = 0.05, 0.005
#: A peer that did not give is left alone for so long, and for twice as long each further time; the longest is for one
#: from which nothing comes at all.
REST_S, LONGEST_REST_S = 0.25, 20.0
#: When no range came for so long, and of none that is under way any byte, it is given up; what is here stays.
GIVE_UP_S = 60.0
#: A turn: so long, and as long as two ranges take on a link of so many bytes a second; some workers wait for up to two,
#: so that the first ones feed the others. No range counts for more than the largest that may be configured.
TURN_S, SLOW_LINK_BYTES_PER_S, LARGEST_RANGE_BYTES = 15.0, 4 * 1024**2, 1024**3
#: Looks in turn that find no offer after which it is taken for withdrawn: a Redis that began anew has none for a while.
GONE_LOOKS = 3
#: Between two tries of a trainer that does not give.
TRY_S = 0.5
#: Most addresses that gave wrong bytes which are remembered.
MAX_LIARS = 1024


@dataclass(slots=True, eq=False)
class _Asked:
    """A range in flight. ``peer``: '' is the trainer."""

    wanted: Range
    peer: str
    task: "asyncio.Task[None]"
    since: float = field(default_factory=time.monotonic)


class Swarm:
    """Fetch the missing ranges of ``partial``.

    Args:
        name: of the object, as servers have it.
        fetches: ranges at once from peers.
        liars: addresses that gave wrong bytes, of this object or another, and are asked for nothing; added to.
    """

    def __init__(
        self,
        name: str,
        offer: Offer,
        partial: Partial,
        told: Told,
        downloads: Downloads,
        progress: Progress,
        *,
        fetches: int,
        liars: dict[str, None],
    ) -> None:
        #: Bytes that came, by whether from the trainer or from peers.
        self.from_trainer = self.from_peers = 0
        self._name = name
        self._offer = offer
        self._partial = partial
        self._told = told
        self._downloads = downloads
        self._progress = progress
        self._fetches = fetches
        self._peers: dict[str, Peer] = {}
        self._liars = liars
        self._pace = Pace(offer.range_bytes)
        #: Ranges that are under way, how much each peer is asked for, and which gave something.
        self._under_way: dict[int, _Asked] = {}
        self._asked: Counter[str] = Counter()
        self._gave: set[str] = set()
        #: Until when a peer is left alone, and how often in turn it did not give.
        self._resting: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._came_at = time.monotonic()
        #: When the last bytes of a range that is under way came: one of a gigabyte may take minutes.
        self._grew_at: dict[int, float] = {}
        longest = max((one.num_bytes for one in partial.ranges), default=0)
        self._slow_s = 2 * min(longest, LARGEST_RANGE_BYTES) / SLOW_LINK_BYTES_PER_S
        self._turn_s = (TURN_S + self._slow_s) * random.uniform(1.0, 2.0)
        self._is_alone = False
        #: Who holds the trainer's slots, and which range, while nothing comes.
        self._holders: list[tuple[str, int]] = []
        self._failed = NotGiven("nobody has them")
        self._gone = 0

    async def run(self) -> None:
        """Fetch until all ranges are here.

        Raises:
            PublishError: nothing came for ``GIVE_UP_S``. OSError: the disk refuses. QueueFull, QueueUnavailable.
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
                        f"{len(self._partial.ranges)} ranges do not come, {self._failed}{self._held()}; "
                        f"{self._failed.remedy}."
                    )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._told.claim = -1
            self._progress.blocked_on()

    async def _look(self) -> None:
        told, looked_at, count = self._told, time.monotonic(), len(self._partial.ranges)
        while self._partial.missing:
            if time.monotonic() - looked_at > OFFER_EVERY_S:
                looked_at = time.monotonic()
                await self._look_at_offer()
            found = await told.control.do(lambda client: read_peers(client, told.keys, told.thing, count))
            found.pop(told.worker, None)
            self._peers = found
            self._wake()
            await asyncio.sleep(LOOK_S + LOOK_EACH_S * len(found))

    async def _look_at_offer(self) -> None:
        """Update the trainer's address: a restarted one serves the same bytes elsewhere, or no longer."""
        told = self._told
        offer = await told.control.do(lambda client: read_offer(client, told.keys, told.thing))
        self._gone = 0 if offer is not None else self._gone + 1
        if offer is not None and replace(offer, url=self._offer.url) == self._offer:
            self._offer = offer
        elif self._gone >= GONE_LOOKS and not self._given_by_peers():
            raise PublishError(
                f"version {self._offer.version} cannot be fetched: its trainer offers it no more, and no worker has "
                f"what is missing; {self._failed}."
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

        Where there is none, one that a peer gives much too slowly, and another who gave some.
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
        there = np.flatnonzero(holders)
        if not len(there):
            return None
        rarest = there[holders[there] == holders[there].min()]
        at = int(random.choice(rarest))
        able = [names[row] for row in np.flatnonzero(has[:, at])]
        random.shuffle(able)
        return self._partial.ranges[wanted[at]], min(able, key=lambda name: self._asked[name])

    def _most(self, peer: str) -> int:
        """Return how many ranges to request from a peer at once: one peer must not hold them all."""
        return max(1, self._fetches // 2) if peer in self._gave else 1

    def _late(self, patience: float = 1.0) -> list[int]:
        """Return the ranges that peers give much more slowly than others."""
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
        told, count = self._told, len(self._partial.ranges)
        while self._partial.missing:
            claim = relay_claim(told.keys, told.thing, told.worker, count, wanted=self._not_given())
            number = await told.control.call(claim)
            if 0 <= number < count:
                self._is_alone, self._holders = False, []
            elif (number := await self._unclaimed()) < 0:
                await self._changed.wait()
                continue
            told.claim = number
            wanted, came = self._partial.ranges[number], False
            if number in self._partial.missing and (number not in self._under_way or number in self._late()):
                going_on = asyncio.create_task(self._renew())
                try:
                    came = await self._fetch(wanted, self._offer.url, "")
                finally:
                    going_on.cancel()
                    await asyncio.gather(going_on, return_exceptions=True)
            told.claim = -1
            await told.say()
            if not came:
                await asyncio.sleep(random.uniform(TRY_S, 2 * TRY_S))

    async def _unclaimed(self) -> int:
        """Return a range to request from the trainer without a claim, because claims help no worker here; -1: none.

        Whoever holds a slot may go on for as long as he likes: that must not hold up who waits.
        """
        idle_s = time.monotonic() - self._came_at
        if idle_s < TRY_S and not self._is_alone:
            self._holders = []
            return -1
        keys, thing = self._told.keys, self._told.thing
        self._holders = await self._told.control.do(lambda client: read_claims(client, keys, thing))
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
        """Return a missing range whose peers do not give it, or give it much too slowly; -1: none."""
        # Where nothing comes, it does not matter what they say that they have.
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
            await self._told.say()

    async def _fetch(self, wanted: Range, url: str, peer: str) -> bool:
        """Whether the range is here now, and said to be. ``peer``: '' is the trainer.

        One that is under way already is taken over.
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
                raise NotGiven(f"{url} gives much less than others do")
            task.result()
        except NotGiven as exc:
            self._left_alone(peer, url, exc)
            return False
        if peer:
            await self._told.say()
        return True

    async def _take(self, wanted: Range, url: str, peer: str, before: "asyncio.Task[None] | None") -> None:
        """Have the range from there, unless who was asked ``before``, and writes no more now, gave it."""
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        if wanted.number not in self._partial.missing:
            return
        began = time.monotonic()
        with self._partial.writing(wanted) as write:
            await self._downloads.fetch(url, self._name, wanted, self._seen(wanted, write))
        # All of it at once: whoever finds the range here finds it counted, and writes it no more.
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

    def _left_alone(self, peer: str, url: str, exc: NotGiven) -> None:
        self._failed = exc
        self._failures[peer] += 1
        if exc.is_wrong and peer:
            self._liars[url] = None  # it would give them again
            while len(self._liars) > MAX_LIARS:
                del self._liars[next(iter(self._liars))]
        else:
            rest = REST_S * 2 ** min(self._failures[peer], 16)
            self._resting[peer] = time.monotonic() + (LONGEST_REST_S if exc.is_silent else min(rest, LONGEST_REST_S))
        who = f"worker {peer}" if peer else "the trainer"
        level = logging.WARNING if exc.is_wrong or not peer else logging.INFO
        log.log(level, "%s does not give a range of version %d: %s", who, self._offer.version, exc)
