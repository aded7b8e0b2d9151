"""Fetch the index of a version first and check the offer against it.

An offer comes from Redis and says how much disk space to allocate. The index also has these sizes, and is verified by
the announced digest.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from penstock.errors import PublishError
from penstock.protocol.scripts import OFFER_EVERY_S, Peer
from penstock.records.offer import Offer, Range
from penstock.system.disk import open_plain
from penstock.text import safe_repr
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, digest, index_in
from penstock.workers.weights.fetch import swarm
from penstock.workers.weights.fetch.download import Downloads, NotGiven
from penstock.workers.weights.fetch.progress import GRACE_S


class Came(NamedTuple):
    """A verified index."""

    data: bytes
    #: Server it was fetched from; '': it was on this machine.
    url: str
    #: Offer of its version, which matches the index.
    offer: Offer


class IndexFirst:
    """Fetch the index of object ``name``.

    Args:
        offer: of the object; read again with ``look`` if no server sends the index.
        peers: returns workers that have some of the object.
        liars: addresses that are not used.
    """

    def __init__(
        self,
        name: str,
        offer: Offer,
        downloads: Downloads,
        *,
        look: Callable[[], Awaitable[Offer | None]],
        peers: Callable[[int], Awaitable[list[Peer]]],
        liars: dict[str, None],
    ) -> None:
        self._name, self._digest = name, name.rpartition("-")[2]
        self._offer, self._downloads = offer, downloads
        self._look, self._peers, self._liars = look, peers, liars
        self._failed = NotGiven("no server has it")

    async def get(self, here: Path) -> Came:
        """Return the index that an earlier attempt left in ``here``, else fetch it.

        An offer that differs from the index is rejected; the trainer renews its own periodically.

        Raises:
            PublishError: no index within ``swarm.GIVE_UP_S``, no offer any more, or an offer that differs from it.
            ProtocolError: malformed offer.
        """
        began = offered_at = time.monotonic()
        found = await asyncio.to_thread(_read, here / INDEX_FILE)
        left = found if found is not None and digest(found) == self._digest else None
        while True:
            try:
                came = await self._first() if left is None else Came(left, "", self._offer)
                if came is not None:
                    _check(came.offer, came.data)
                    return came
                refused = PublishError(
                    f"version {self._offer.version} cannot be fetched: its index is not received, {self._failed}; "
                    f"{self._failed.remedy}."
                )
            except _Differs as exc:
                refused = PublishError(
                    f"version {self._offer.version} is offered {exc}: it is fetched when its trainer offers what it "
                    "published."
                )
            await asyncio.sleep(swarm.TRY_S)
            if (offer := await self._look()) is not None:
                self._offer, offered_at = offer, time.monotonic()
            now = time.monotonic()
            if now - began > swarm.GIVE_UP_S or now - offered_at > swarm.GONE_LOOKS * OFFER_EVERY_S:
                raise refused

    async def _first(self) -> Came | None:
        """Return the index from the first server that sends it; try the next one in parallel after ``GRACE_S``."""
        offer = self._offer
        ranges, count = _ranges(offer), len(offer.ranges())
        # One peer before the trainer, to spare its link; only one, as peers may not have the index.
        urls = [one.url for one in await self._peers(count) if one.url not in self._liars and _has(one, ranges)]
        random.shuffle(urls)
        urls.insert(1, offer.url)
        asked: set[asyncio.Task[Came | None]] = set()
        try:
            while urls or asked:
                if urls:
                    asked.add(asyncio.create_task(self._from(urls.pop(0), offer, ranges)))
                done, asked = await asyncio.wait(
                    asked, timeout=GRACE_S if urls else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if (came := task.result()) is not None:
                        return came
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _from(self, url: str, offer: Offer, ranges: list[Range]) -> Came | None:
        """Return the index from one server; None if that fails."""
        data = bytearray(sum(one.num_bytes for one in ranges))
        try:
            for one in ranges:
                await self._downloads.fetch(url, self._name, one, _writes(data, one.start))
        except NotGiven as exc:
            self._failed = exc
            return None
        if digest(bytes(data)) != self._digest:
            raise _Differs("with another index than was announced")
        return Came(bytes(data), url, offer)


class _Differs(Exception):
    """An offer differs from the trainer's; the message says how."""


def _ranges(offer: Offer) -> list[Range]:
    ranges = [one for one in offer.ranges() if one.file == INDEX_FILE]
    if not 0 < sum(one.num_bytes for one in ranges) <= MAX_INDEX_BYTES:
        raise _Differs("without an index that can be read")
    return ranges


def _check(offer: Offer, data: bytes) -> None:
    """Check the offered files and sizes against the index. Raises _Differs, or PublishError."""
    sizes = index_in(data, f"the index of version {offer.version}").sizes
    if not sizes:
        raise PublishError(
            f"the index of version {offer.version} does not say how large its files are, as an earlier penstock wrote "
            "it: publish again."
        )
    offered, named = offer.sizes(), {**sizes, INDEX_FILE: len(data)}
    if other := [name for name in offered | named if offered.get(name) != named.get(name)]:
        raise _Differs(f"with other files than its index names, or of other sizes, such as {safe_repr(other[0], 100)}")


def _has(peer: Peer, ranges: list[Range]) -> bool:
    bits = peer.bitmap.ljust(ranges[-1].number // 8 + 1, b"\0")
    return all(bits[one.number // 8] & 0x80 >> one.number % 8 for one in ranges)


def _writes(data: bytearray, start: int) -> Callable[[int, bytes], None]:
    def write(at: int, part: bytes) -> None:
        data[start + at : start + at + len(part)] = part

    return write


def _read(path: Path) -> bytes | None:
    try:
        with open_plain(path) as file:
            return file.read(MAX_INDEX_BYTES + 1)
    except OSError:
        return None
