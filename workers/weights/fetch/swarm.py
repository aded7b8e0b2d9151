"""One object fetched by one worker: from peers what they have, from the trainer what nobody has.

    look    who has what, as Redis says; now and then, where the trainer is by now
    peers   rarest range first, from whoever of those that have it is asked least; one that does not give is left alone
    claim   a range that nobody has, or that those who have it do not give: from the trainer, two workers at a time

So the trainer's link carries an object about once, however many workers fetch it; a peer that dies costs the range that
was under way.
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
from penstock.protocol.keys import Keys
from penstock.protocol.records.offer import Offer, Range
from penstock.protocol.scripts import (
    CLAIM_MS,
    OFFER_EVERY_S,
    Peer,
    read_offer,
    read_peers,
    relay_claim,
    relay_have,
)
from penstock.redis.control import AsyncControl
from workers.weights.fetch.download import Downloads, NotGiven
from workers.weights.fetch.partial import Partial

log = logging.getLogger(__name__)

#: Between two looks at who has what: so long, and longer with many peers.
LOOK_S, LOOK_EACH_S = 0.05, 0.005
#: A peer that did not give is left alone for so long, and for twice as long each further time; the longest is for one
#: from which nothing comes at all.
REST_S, LONGEST_REST_S = 0.25, 20.0
#: When no range came for so long, and of none that is under way any byte, it is given up; what is here stays.
GIVE_UP_S = 60.0
#: Looks in turn that find no offer after which it is taken for withdrawn: a Redis that began anew has none for a while.
GONE_LOOKS = 3
#: Between two tries of a trainer that does not give.
TRY_S = 0.5


@dataclass(slots=True)
class Told:
    """What Redis knows of this worker and one object: said by ``say``, one word at a time."""

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
        """What is here by now, and which claim goes on. An older word must not come behind a newer one."""
        async with self._lock:
            await self.control.call(
                relay_have(self.keys, self.thing, self.worker, self.url, self.bitmap(), claim=self.claim)
            )


class Swarm:
    """Fetches what is missing of ``partial``.

    Args:
        name: of the object, as servers have it.
        fetches: ranges at once from peers.
    """

    def __init__(
        self, name: str, offer: Offer, partial: Partial, told: Told, downloads: Downloads, *, fetches: int
    ) -> None:
        #: Bytes that came, by whether from the trainer or from peers.
        self.from_trainer = self.from_peers = 0
        self._name = name
        self._offer = offer
        self._partial = partial
        self._told = told
        self._downloads = downloads
        self._fetches = fetches
        self._peers: dict[str, Peer] = {}
        #: Ranges that are under way, and how much each peer is asked for.
        self._under_way: set[int] = set()
        self._asked: Counter[str] = Counter()
        #: Until when a peer is left alone, and how often in turn it did not give.
        self._resting: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._came_at = time.monotonic()
        #: When the last bytes of a range that is under way came: one of a gigabyte may take minutes.
        self._grew_at: dict[int, float] = {}
        self._why = "nobody has them"
        self._gone = 0

    async def run(self) -> None:
        """Until all ranges are here.

        Raises:
            PublishError: nothing came for ``GIVE_UP_S``. OSError: the disk refuses. QueueFull, QueueUnavailable.
        """
        loops = [self._look(), self._claims(), *(self._ask_peers() for _ in range(self._fetches))]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            while self._partial.missing:
                done, _ = await asyncio.wait(tasks, timeout=TRY_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                last = max(self._came_at, *self._grew_at.values(), 0.0)
                if (left := self._partial.missing) and time.monotonic() - last > GIVE_UP_S:
                    raise PublishError(
                        f"version {self._offer.version} cannot be fetched: {len(left)} of its "
                        f"{len(self._partial.ranges)} ranges do not come, {self._why}; see that its trainer is there."
                    )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._told.claim = -1

    async def _look(self) -> None:
        told, looked_at = self._told, time.monotonic()
        while self._partial.missing:
            if time.monotonic() - looked_at > OFFER_EVERY_S:
                looked_at = time.monotonic()
                await self._look_at_offer()
            found = await told.control.do(lambda client: read_peers(client, told.keys, told.thing))
            found.pop(told.worker, None)
            self._peers = found
            self._wake()
            await asyncio.sleep(LOOK_S + LOOK_EACH_S * len(found))

    async def _look_at_offer(self) -> None:
        """A trainer that was started again serves the same bytes elsewhere; one that swept them serves them no more."""
        told = self._told
        offer = await told.control.do(lambda client: read_offer(client, told.keys, told.thing))
        self._gone = 0 if offer is not None else self._gone + 1
        if offer is not None and replace(offer, url=self._offer.url) == self._offer:
            self._offer = offer
        elif self._gone >= GONE_LOOKS and not self._given_by_peers():
            raise PublishError(
                f"version {self._offer.version} cannot be fetched: its trainer offers it no more, and no worker has "
                f"what is missing; {self._why}."
            )

    def _given_by_peers(self) -> bool:
        peers = list(self._peers)
        return bool(peers) and bool(self._have(peers)[:, self._partial.missing].any())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- peers ------------------------------------------------------------------------------------------------------

    async def _ask_peers(self) -> None:
        while self._partial.missing:
            chosen = self._choose()
            if chosen is None:
                await self._changed.wait()
                continue
            wanted, peer = chosen
            await self._fetch(wanted, self._peers[peer].url, peer)

    def _choose(self) -> tuple[Range, str] | None:
        """The rarest range that is missing, and the one of those that have it who is asked least."""
        wanted = [number for number in self._partial.missing if number not in self._under_way]
        names = [name for name in self._peers if not self._rests(name)]
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

    def _have(self, names: list[str]) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        """[peers, ranges] 1 where a peer has a range."""
        count = len(self._partial.ranges)
        length = -(-count // 8)
        rows = [np.frombuffer(self._peers[name].bitmap[:length].ljust(length, b"\0"), np.uint8) for name in names]
        return np.unpackbits(np.stack(rows), axis=1)[:, :count]

    def _rests(self, peer: str) -> bool:
        return self._resting.get(peer, 0.0) > time.monotonic()

    # --- the trainer ------------------------------------------------------------------------------------------------

    async def _claims(self) -> None:
        told, count = self._told, len(self._partial.ranges)
        while self._partial.missing:
            claim = relay_claim(told.keys, told.thing, told.worker, count, wanted=self._not_given())
            number = await told.control.call(claim)
            if not 0 <= number < count:
                await self._changed.wait()
                continue
            told.claim = number
            wanted, came = self._partial.ranges[number], False
            if number in self._partial.missing and number not in self._under_way:
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

    def _not_given(self) -> int:
        """A missing range that only peers have which do not give; -1: none."""
        names = [name for name in self._peers if self._rests(name)]
        if not names:
            return -1
        wanted = [number for number in self._partial.missing if number not in self._under_way]
        others = [name for name in self._peers if name not in names]
        given = set(np.flatnonzero(self._have(others).sum(axis=0)).tolist()) if others else set()
        left = [number for number in wanted if number not in given]
        return random.choice(left) if left else -1

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_MS / 3000)
            await self._told.say()

    # --- both -------------------------------------------------------------------------------------------------------

    async def _fetch(self, wanted: Range, url: str, peer: str) -> bool:
        """Whether the range is here now, and said to be. ``peer``: '' is the trainer."""
        self._under_way.add(wanted.number)
        self._asked[peer] += 1
        try:
            with self._partial.writing(wanted) as write:
                await self._downloads.fetch(url, self._name, wanted, self._seen(wanted, write))
        except NotGiven as exc:
            self._left_alone(peer, exc)
            return False
        finally:
            self._under_way.discard(wanted.number)
            self._grew_at.pop(wanted.number, None)
            self._asked[peer] -= 1
            self._wake()
        self._failures[peer] = 0
        self._partial.is_here(wanted.number)
        self._came_at = time.monotonic()
        if peer:
            self.from_peers += wanted.num_bytes
            await self._told.say()
        else:
            self.from_trainer += wanted.num_bytes
        return True

    def _seen(self, wanted: Range, write: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
        def seen(at: int, data: bytes) -> None:
            self._grew_at[wanted.number] = time.monotonic()
            write(at, data)

        return seen

    def _left_alone(self, peer: str, exc: NotGiven) -> None:
        self._why = str(exc)
        self._failures[peer] += 1
        if exc.is_wrong:
            self._resting[peer] = float("inf")  # it would give them again
        else:
            rest = REST_S * 2 ** min(self._failures[peer], 16)
            self._resting[peer] = time.monotonic() + (LONGEST_REST_S if exc.is_silent else min(rest, LONGEST_REST_S))
        who = f"worker {peer}" if peer else "the trainer"
        level = logging.WARNING if exc.is_wrong or not peer else logging.INFO
        log.log(level, "%s does not give a range of version %d: %s", who, self._offer.version, exc)
