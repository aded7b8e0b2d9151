"""Fetch versions whose folder a worker cannot access over HTTP, keep them, and serve them to other workers.

Runs in a thread of its own, so that generation is not delayed.
"""

import asyncio
import concurrent.futures
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial as bound
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.config import Config
from penstock.errors import PenstockError, ProtocolError, PublishError
from penstock.protocol.scripts import HAVE_EVERY_S, Peer, bitmap_bytes, read_names, read_offer, read_peers
from penstock.records.causes import VersionNotServed
from penstock.records.keys import Keys
from penstock.records.offer import Offer
from penstock.records.publication import Publication
from penstock.redis.control import AsyncControl
from penstock.system.disk import is_full
from penstock.text import format_exc
from penstock.weights.http.blobs import files_of, is_object, is_version, object_name
from penstock.weights.http.server import LoopThread, WeightsServer
from penstock.weights.http.token import token_of
from penstock.workers.weights.fetch.download import Downloads
from penstock.workers.weights.fetch.index_first import Came, IndexFirst
from penstock.workers.weights.fetch.partial import Partial, holds
from penstock.workers.weights.fetch.progress import Progress
from penstock.workers.weights.fetch.store import FETCHING, Hold, Store
from penstock.workers.weights.fetch.swarm import Swarm, Told
from penstock.workers.weights.file_hashes import is_whole, prove
from penstock.workers.weights.local_copies import HELD

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run as ``asyncio.to_thread``, but raise a cancellation only when the work has ended, so that locks stay held."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        working.exception()  # marks it as retrieved
        raise cancelled
    return working.result()


#: Longest wait for the offer of a published version: its trainer reads all of it first.
OFFER_WAIT_S = 120.0
LOOK_S = 0.2


class Fetcher:
    """Fetch versions for one worker, and serve them until ``close``.

    Args:
        config: with ``redis.url`` set and ``serving.enabled``.
        worker: name of this worker process, never used twice.

    Raises:
        ConfigError: the address cannot be bound, there is no token, or the TLS settings are invalid.
    """

    def __init__(self, config: Config, keys: Keys, worker: str) -> None:
        assert config.redis.url is not None
        self._config = config
        self._keys = keys
        self._worker = worker
        self._token = token_of(config)
        self._store = Store(config.serving.folder or config.run_dir / "fetched", config.serving.max_bytes)
        self._url = config.redis.url
        self._control: AsyncControl | None = None
        self._holds: list[Hold] = []
        self._announced: dict[str, Told] = {}
        #: Objects in folders of callers of ``bring``, served while the folder exists.
        self._brought: dict[str, Path] = {}
        #: Addresses of peers that sent wrong bytes.
        self._liars: dict[str, None] = {}
        #: Bytes received from trainers, and from other workers.
        self.from_trainer = self.from_peers = 0
        self.server = WeightsServer(config.serving, self._token)
        self._thread = LoopThread("weights-fetcher")
        self._thread.submit(self._announce_forever())

    async def fetch(self, version: int, index: str, *, waits: bool = True, progress: Progress | None = None) -> Path:
        """Return the folder of a version on this machine; fetch it if missing. May be awaited in any event loop.

        A version that exists here is returned without waiting for other workers' fetches. Received ranges are kept if
        this is cancelled or killed, and a later fetch resumes.

        Args:
            index: digest of its index, from the publication.
            waits: whether to wait for an offer.
            progress: updated during the fetch.

        Raises:
            PublishError: the index is no digest, or the version is not offered, cannot be fetched in time, is not the
                announced one, or does not fit on the disk.
        """
        return await asyncio.wrap_future(
            self._thread.submit(self._fetch(version, index, waits, progress or Progress()))
        )

    def names(self) -> "concurrent.futures.Future[list[str]]":
        """Return names of objects that are offered, or were in the last half minute."""
        return self._thread.submit(self._names())

    def is_superseded(self, version: int) -> "concurrent.futures.Future[bool]":
        """Return whether a newer version was announced, so that this one is not needed."""
        return self._thread.submit(self._is_superseded(version))

    def bring(self, name: str, into: Path, room: Callable[[int], None]) -> "concurrent.futures.Future[Path]":
        """Fetch an object into the folder ``into``, which only the caller uses, and serve it while it exists.

        Received ranges are kept if this is cancelled or killed, and a later call resumes. The future raises
        PublishError if the object is no longer offered or cannot be fetched in time, errors of ``room``, and OSError.

        Args:
            room: called with the bytes about to be fetched.
        """
        return self._thread.submit(self._bring_into(name, into, room))

    async def serve(self, version: int, index: str, path: Path) -> None:
        """Serve a complete version from a verified folder. Failures are logged."""
        try:
            await asyncio.wrap_future(self._thread.submit(self._serve_held(object_name(version, index), path)))
        except (PenstockError, OSError) as exc:
            log.warning("version %d is not served to other workers: %s", version, format_exc(exc))

    def close(self) -> None:
        """Stop fetching and serving. Blocks briefly."""
        self._thread.close()
        self.server.close()
        for hold in self._holds:
            hold.close()

    async def _fetch(self, version: int, index: str, waits: bool, progress: Progress) -> Path:
        name = object_name(version, index)
        if not is_object(name):
            # It comes from Redis and is used as a path on this machine.
            raise PublishError(f"version {version} has an index {index!r:.100}, which is no digest: publish it again.")
        try:
            while (path := await self._got(name, index, progress)) is None:
                if not waits:
                    raise PublishError(f"version {version} is no longer offered over HTTP.")
                await self._offered(name, version, progress)
            await self._serve(name, path)
        except OSError as exc:
            why = "there is no room" if is_full(exc) else format_exc(exc)
            raise PublishError(f"version {version} cannot be kept in {self._store.folder}: {why}.") from exc
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc
        return path

    async def _got(self, name: str, index: str, progress: Progress) -> Path | None:
        """Return the folder, fetched if missing; None if it is not offered. One process per machine fetches."""
        if (here := await self._here(name, index)) is not None:
            return here
        async with self._store.fetching(progress.blocked_on):
            path = await to_its_end(self._found, index)
            if path is None and (offer := await self._offer_of(name)) is not None:
                path = await self._get(name, index, offer, progress)
            if path is not None:
                self._hold(name, path)
            return path

    async def _here(self, name: str, index: str) -> Path | None:
        """Return a folder that this process holds, or verifies while holding it, without the lock."""
        for path in await asyncio.to_thread(self._store.of_index, index):
            # One that is damaged or being deleted is checked again under the lock.
            with suppress(OSError, PublishError), closing(Hold(path)):
                if not self._has(path):
                    await to_its_end(prove, path, index)
                self._hold(name, path)
                return path
        return None

    def _has(self, path: Path) -> bool:
        return any(hold.path == path for hold in self._holds)

    def _found(self, index: str) -> Path | None:
        """Return a version fetched before, also under another number (a tick), if it passes verification."""
        for path in self._store.of_index(index):
            if self._has(path):
                return path
            try:
                prove(path, index)
            except PublishError as exc:
                log.warning("%s is fetched again: %s", path.name, exc)
                if not self._store.remove(path):
                    raise
            else:
                return path
        return None

    async def _get(self, name: str, index: str, offer: Offer, progress: Progress) -> Path:
        path, temporary = self._store.path(name), self._store.temporary(name)
        progress.blocked_on(step="index")
        came = await self._index_of(name, offer, temporary)
        await to_its_end(self._store.make_room, name, sum(came.offer.sizes().values()))
        await self._take(name, came.offer, temporary, lambda partial: partial.finish(path, index), progress, came.data)
        return path

    async def _index_of(self, name: str, offer: Offer, here: Path) -> Came:
        """Return the index of a version, and its offer, which must match the index."""
        control, keys, thing = self._opened(), self._keys, self._thing(name)

        async def peers(count: int) -> list[Peer]:
            return [*(await control.do(lambda client: read_peers(client, keys, thing, count))).values()]

        look = bound(self._offer_of, name)
        downloads = Downloads(self._config.serving, self._token)
        try:
            came = await IndexFirst(name, offer, downloads, look=look, peers=peers, liars=self._liars).get(here)
        finally:
            await downloads.close()
        if came.url == came.offer.url:
            self.from_trainer += len(came.data)
        elif came.url:
            self.from_peers += len(came.data)
        return came

    async def _bring_into(self, name: str, into: Path, room: Callable[[int], None]) -> Path:
        offer = await self._offer_of(name) if is_object(name) else None
        if offer is None:
            raise PublishError(f"{name} is no longer offered over HTTP.")
        path = into / name
        is_valid = bound(is_whole, path, offer.index) if is_version(name) else bound(holds, path, offer)
        if path.is_dir() and not await to_its_end(is_valid):
            log.warning("%s is fetched again: it differs from the offer", name)
            await to_its_end(shutil.rmtree, path)
        if not path.is_dir():
            temporary, index = into / f"{FETCHING}{name}", None
            if is_version(name):
                came = await self._index_of(name, offer, temporary)
                offer, index = came.offer, came.data
            await to_its_end(room, sum(offer.sizes().values()))
            await self._take(name, offer, temporary, lambda partial: partial.seal(path), Progress(), index)
        self._brought[name] = path
        await self._serve(name, path)
        return path

    async def _serve_held(self, name: str, path: Path) -> None:
        self._brought.pop(name, None)
        self._hold(name, path)
        await self._serve(name, path)

    async def _take(
        self,
        name: str,
        offer: Offer,
        folder: Path,
        finish: Callable[[Partial], None],
        progress: Progress,
        index: bytes | None,
    ) -> None:
        """Fetch an object except its ``index`` into ``folder``; ``finish`` renames the folder."""
        began, version = time.monotonic(), offer.version
        control, thing = self._opened(), self._thing(name)
        progress.blocked_on()
        partial = await to_its_end(Partial, folder, offer, index)
        announcer = Told(self._keys, control, thing, self._worker, self.server.url, partial.bitmap)
        self.server.shelf.put(name, partial.blobs())
        self._announced[name] = announcer
        downloads = Downloads(self._config.serving, self._token)
        fetches, liars = self._config.serving.fetches, self._liars
        swarm = Swarm(name, offer, partial, announcer, downloads, progress, fetches=fetches, liars=liars)
        try:
            await announcer.say()
            await swarm.run()
        except BaseException as exc:
            self._forget(name)
            if isinstance(exc, PublishError) and not partial.has_any:
                await asyncio.to_thread(partial.discard)  # free the allocated space
            raise
        finally:
            self.from_trainer += swarm.from_trainer
            self.from_peers += swarm.from_peers
            await downloads.close()
        await announcer.say()
        try:
            await to_its_end(finish, partial)
        except BaseException:
            self._forget(name)
            raise
        log.info(
            "version %d%s fetched in %.2f s: %s bytes from the trainer, %s from other workers",
            version,
            "" if name == object_name(version, offer.index) else "'s delta",
            time.monotonic() - began,
            f"{swarm.from_trainer:,}",
            f"{swarm.from_peers:,}",
        )

    async def _offered(self, name: str, version: int, progress: Progress) -> None:
        """Wait for an offer, without the lock of this machine. Raises PublishError."""
        deadline = time.monotonic() + OFFER_WAIT_S
        while await self._offer_of(name) is None:
            progress.blocked_on(step="offer")
            if await self._is_superseded(version):
                raise PublishError(f"version {version} was not offered over HTTP before a newer one was announced.")
            if time.monotonic() > deadline:
                raise PublishError(
                    f"version {version} is not offered over HTTP: set serving.enabled for its trainer too, or publish "
                    "to a folder that this machine sees.",
                    VersionNotServed(version),
                )
            await asyncio.sleep(LOOK_S)

    def _hold(self, name: str, path: Path) -> None:
        """Protect a folder from deletion and release older ones than the last ``HELD``; likewise its names."""
        hold = next((one for one in self._holds if one.path == path), None) or Hold(path)
        self._holds = [*(one for one in self._holds if one is not hold), hold]
        hold.names = [*(one for one in hold.names if one != name), name]
        for old in self._holds[:-HELD]:
            old.close()
        gone = [one for old in self._holds[:-HELD] for one in old.names] + hold.names[:-HELD]
        del self._holds[:-HELD], hold.names[:-HELD]
        for one in gone:
            self._forget(one)

    async def _serve(self, name: str, path: Path) -> None:
        """Serve a complete folder and announce it."""
        self.server.shelf.put(name, files_of(path))
        await self._announce(name)

    async def _announce(self, name: str) -> None:
        """Announce that this worker has all of an object, if it is offered."""
        if name in self._announced or (offer := await self._offer_of(name)) is None:
            return
        count = len(offer.ranges())
        full = bytes(0xFF if 8 * at + 8 <= count else 0xFF00 >> count % 8 & 0xFF for at in range(bitmap_bytes(count)))
        announcer = Told(self._keys, self._opened(), self._thing(name), self._worker, self.server.url, lambda: full)
        await announcer.say()
        if name in self.server.shelf.names():  # not removed meanwhile
            self._announced[name] = announcer

    async def _is_superseded(self, version: int) -> bool:
        key = self._keys.weights(self._config.model.name)
        entries = await self._opened().do(lambda client: client.xrevrange(key, count=1))
        newest = Publication.from_bytes(entries[0][1].get(b"p", b""), "the newest publication") if entries else None
        return newest is not None and newest.version > version

    async def _names(self) -> list[str]:
        model = self._config.model.name
        return await self._opened().do(lambda client: read_names(client, self._keys, model))

    async def _offer_of(self, name: str) -> Offer | None:
        thing = self._thing(name)
        return await self._opened().do(lambda client: read_offer(client, self._keys, thing))

    def _thing(self, name: str) -> str:
        return f"{self._config.model.name}:{name}"

    def _forget(self, name: str) -> None:
        self._announced.pop(name, None)
        self.server.shelf.remove(name)

    def _opened(self) -> AsyncControl:
        if self._control is None:
            self._control = AsyncControl(self._url)
        return self._control

    async def _announce_forever(self) -> None:
        """Renew the announcements: silent workers count as dead."""
        try:
            while True:
                await asyncio.sleep(HAVE_EVERY_S)
                for name in [name for name, path in self._brought.items() if not path.is_dir()]:
                    del self._brought[name]
                    self._forget(name)
                for name in self.server.shelf.names():
                    try:
                        known = self._announced.get(name)
                        await (known.say() if known is not None else self._announce(name))
                    except PenstockError as exc:
                        log.warning("failed to announce the weights this worker serves: %s", exc)
        finally:
            if self._control is not None:
                with suppress(Exception):
                    await self._control.close()
