"""Download versions whose folder a worker cannot access from their trainer over HTTP, in a thread of its own.

    on this machine? ─no─> wait for an offer ─> lock ─> index ─> room ─> files in parallel ─> verify ─> rename

A download in progress has the bytes of each file that came so far; the next download of this version requests the rest.
Only the announced digest proves the index, and only the index proves files: an offer gives nothing but an address.
"""

import asyncio
import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from penstock.config import Config
from penstock.errors import ProtocolError, PublishError
from penstock.protocol.scripts import OFFER_EVERY_S, read_offer
from penstock.records.causes import VersionNotServed, WeightsFetched
from penstock.records.keys import Keys
from penstock.records.offer import Offer
from penstock.records.publication import Publication
from penstock.redis.control import AsyncControl
from penstock.system.disk import fsync, is_full, remove
from penstock.text import format_exc
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, WeightsIndex, digest, index_in
from penstock.weights.serving import LoopThread, client_context, is_object, object_name, token_of
from penstock.workers.weights.file_hashes import differing
from penstock.workers.weights.machine_lock import MachineLock
from penstock.workers.weights.version_folders import VersionFolders, size_of

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Longest wait for the offer of a published version, and polling interval.
OFFER_WAIT_S, LOOK_S = 120.0, 0.2
#: A download fails if no bytes arrive for this long, or if its version was not offered for ``GONE_S``; received bytes
#: are kept. A restarted Redis has no offers for a while.
GIVE_UP_S, GONE_S = 60.0, 3 * OFFER_EVERY_S
#: Pause after a failed request.
AGAIN_S = 0.5
#: Bytes of one request, after which others may have the connection, and of one read.
REQUEST_BYTES, CHUNK_BYTES = 64 * 1024**2, 256 * 1024
#: Times that a file with wrong bytes is fetched.
ATTEMPTS = 2

_URL = re.compile(r"(https?)://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

# Remedies, for error messages.
_BE_RUNNING = "check that its trainer is running"
_SAME_TOKEN = (
    "give every part the same (serving.token, or the file weights.token of the run's folder where that is not set)"
)
_KNOWN_CERTIFICATE = "set serving.tls_ca to what its certificate is signed with, and serving.reached_at to its name"


async def to_thread_shielded(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
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


@dataclass(slots=True)
class Progress:
    """Hold the progress of one download: written by the thread that downloads, read by any."""

    #: The version that is fetched, and the cause of the wait.
    cause: WeightsFetched = field(default_factory=lambda: WeightsFetched(0))

    def blocked_on(self, **fields: Any) -> None:
        """Set the cause of the wait, as fields of ``WeightsFetched``; no fields: not waiting."""
        self.cause = WeightsFetched(self.cause.version, **fields)


class Download:
    """Download versions for one worker, until ``close``.

    Args:
        config: with ``redis.url`` set and ``serving.enabled``.

    Raises:
        ConfigError: there is no token, or the TLS settings are invalid.
    """

    def __init__(self, config: Config, keys: Keys) -> None:
        assert config.redis.url is not None
        self.config, self.keys, self.model, self._token = config.serving, keys, config.model.name, token_of(config)
        self._url = config.redis.url
        self._tls = client_context(config.serving)
        self.scheme = "http" if self._tls is None else "https"
        #: The versions on this machine.
        self.versions = VersionFolders(
            config.serving.folder or config.run_dir / "fetched", config.serving.max_bytes, "serving.max_bytes"
        )
        #: Bytes received so far.
        self.num_bytes = 0
        self._thread = LoopThread("weights-download")

    async def fetch(self, version: int, index: str, progress: Progress | None = None) -> Path:
        """Return the folder of a version on this machine; download it if missing. May be awaited in any event loop.

        A version that exists here is returned without waiting for other workers' downloads. It is not deleted until
        two others were requested. Received bytes are kept if this is cancelled or killed, and a later call resumes.

        Args:
            index: digest of its index, from the publication.
            progress: updated during the download.

        Raises:
            PublishError: the index is no digest, or the version is not offered, cannot be fetched in time, is not the
                announced one, or does not fit on the disk.
        """
        return await asyncio.wrap_future(self._thread.submit(self._fetch(version, index, progress or Progress())))

    def close(self) -> None:
        """Stop downloading, and release all versions. Blocks briefly."""
        self._thread.close()
        self.versions.close()

    def session(self) -> aiohttp.ClientSession:
        """Return a client of the trainer."""
        stall_s = self.config.stall_s
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s),
            connector=aiohttp.TCPConnector(force_close=True, limit=0, ssl=self._tls or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=CHUNK_BYTES,
        )

    async def _fetch(self, version: int, index: str, progress: Progress) -> Path:
        if not is_object(object_name(version, index)):
            # It comes from Redis and is used as a path on this machine.
            raise PublishError(f"version {version} has an index {index!r:.100}, which is no digest: publish it again.")
        control = AsyncControl(self._url)
        try:
            path = await to_thread_shielded(self.versions.find, index, repairs=False)
            return path or await _Fetch(self, control, version, index, progress).run()
        except OSError as exc:
            why = "there is no room" if is_full(exc) else format_exc(exc)
            raise PublishError(f"version {version} cannot be kept in {self.versions.folder}: {why}.") from exc
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc
        finally:
            await control.close()


class _Failed(Exception):
    """A request failed; the message says why."""

    def __init__(self, why: str, remedy: str = _BE_RUNNING) -> None:
        super().__init__(why)
        self.remedy = remedy


class _Fetch:
    """Fetch one version from its trainer, which may restart at another address."""

    def __init__(self, owner: Download, control: AsyncControl, version: int, index: str, progress: Progress) -> None:
        self._owner, self._control, self._progress = owner, control, progress
        self._version, self._index, self._name = version, index, object_name(version, index)
        self._versions, self._folder = owner.versions, owner.versions.temporary(self._name)
        self._turns, self._url = asyncio.Semaphore(owner.config.fetches), ""
        #: Times at which bytes arrived last, and the version was offered (monotonic, s).
        self._came_at = self._offered_at = 0.0

    async def run(self) -> Path:
        """Wait for an offer and for the lock of this machine, download, and return the folder, which is held."""
        await self._await_offer()
        with closing(MachineLock(self._versions.lock_file())) as lock:
            while not lock.try_acquire():
                self._progress.blocked_on(folder=str(self._versions.folder), process=lock.holder)
                await asyncio.sleep(LOOK_S)
            await to_thread_shielded(self._versions.remove_leftovers, self._name)
            path = await to_thread_shielded(self._versions.find, self._index, repairs=True)
            return path or await self._download()

    async def _look(self) -> Offer | None:
        owner = self._owner
        return await self._control.do(
            lambda client: read_offer(client, owner.keys, owner.model, self._version, self._index)
        )

    async def _await_offer(self) -> None:
        """Wait for an offer, without the lock of this machine. Raises PublishError."""
        version, deadline = self._version, time.monotonic() + OFFER_WAIT_S
        while await self._look() is None:
            self._progress.blocked_on(step="offer")
            if await self._is_superseded():
                raise PublishError(f"version {version} was not offered over HTTP before a newer one was announced.")
            if time.monotonic() > deadline:
                raise PublishError(
                    f"version {version} is not offered over HTTP: set serving.enabled for its trainer too, or publish "
                    "to a folder that this machine sees.",
                    VersionNotServed(version),
                )
            await asyncio.sleep(LOOK_S)

    async def _is_superseded(self) -> bool:
        key = self._owner.keys.weights(self._owner.model)
        entries = await self._control.do(lambda client: client.xrevrange(key, count=1))
        newest = Publication.from_bytes(entries[0][1].get(b"p", b""), "the newest publication") if entries else None
        return newest is not None and newest.version > self._version

    async def _download(self) -> Path:
        """Download and hold the version; the caller holds the lock of this machine."""
        began, before, folder = time.monotonic(), self._owner.num_bytes, self._folder
        self._came_at = self._offered_at = began
        async with self._owner.session() as self._session:
            self._progress.blocked_on(step="index")
            data = await self._receive_index()
            record = index_in(data, f"the index of version {self._version}")
            if record.sizes.keys() != record.files.keys():
                raise PublishError(
                    f"the index of version {self._version} does not say how large its files are, as an earlier "
                    "penstock wrote it: publish again."
                )
            size = sum(record.sizes.values()) + len(data)
            try:
                await to_thread_shielded(prepare, folder, record.sizes)
                await to_thread_shielded(self._versions.make_room, size, size_of(folder))
                await self._receive(record)
                await to_thread_shielded(_finish, folder, data)
                path = await to_thread_shielded(self._versions.add, folder, self._name)
            except (PublishError, OSError) as exc:
                if is_full(exc) or not any(file.stat().st_size for file in folder.glob("*")):
                    await to_thread_shielded(remove, folder)  # the disk is not left full
                raise
        took_s, num_bytes = time.monotonic() - began, self._owner.num_bytes - before
        log.info("version %d fetched in %.2f s: %s bytes", self._version, took_s, f"{num_bytes:,}")
        return path

    async def _receive_index(self) -> bytes:
        """Return the bytes of the announced index. Raises PublishError."""
        received = io.BytesIO()
        while not await self._request(INDEX_FILE, 0, None, received):
            received = io.BytesIO()
        if digest(received.getvalue()) != self._index:
            raise PublishError(
                f"version {self._version} cannot be fetched: its trainer sends another index than was announced; "
                "publish it again."
            )
        return received.getvalue()

    async def _receive(self, record: WeightsIndex) -> None:
        """Receive what is missing of all files, until they have the checksums of the index.

        Raises:
            PublishError: they do not come, or are other ones. OSError: a disk error.
        """
        folder, size = self._folder, sum(record.sizes.values())
        for _ in range(ATTEMPTS):
            tasks = [
                asyncio.create_task(self._receive_file(folder / name, size)) for name, size in record.sizes.items()
            ]
            try:
                while not all(task.done() for task in tasks):
                    self._progress.blocked_on(missing=size - size_of(folder), size=size)
                    done, _ = await asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
                    for task in done:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._progress.blocked_on()
            if not (wrong := await to_thread_shielded(differing, folder, record.files, self._index)):
                return
            log.warning("%s is fetched again: %s differ from the index", folder.name, ", ".join(wrong[:8]))
            for name in wrong:
                (folder / name).unlink()
        raise PublishError(
            f"version {self._version} cannot be fetched: {wrong[0]} is not the file that its index names; publish it "
            "again."
        )

    async def _receive_file(self, path: Path, size: int) -> None:
        """Append to a file what is missing; retry failures.

        Raises:
            PublishError: no bytes arrived for ``GIVE_UP_S``, or the version is no longer offered. OSError.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        async with self._turns:
            with os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0) as file:
                while (start := os.fstat(file.fileno()).st_size) < size:
                    await self._request(path.name, start, min(start + REQUEST_BYTES, size), file)

    async def _request(self, file: str, start: int, end: int | None, into: BinaryIO | io.RawIOBase) -> bool:
        """Request a range of a file (None: to its end) and write what comes of it; return whether all came.

        Waits after a failure. Raises as ``_receive_file``.
        """
        if not self._url:
            await self._renew_offer(None)
        try:
            url, last = _URL.fullmatch(self._url), (MAX_INDEX_BYTES if end is None else end) - 1
            if url is None or url[1] != self._owner.scheme:
                why = f"{self._url[:200]!r} is no address of {self._owner.scheme}"
                raise _Failed(why, "give every part the same tls_cert")
            async with self._session.get(
                URL(f"{self._url}/{self._name}/{quote(file, safe='')}", encoded=True),
                headers={"Range": f"bytes={start}-{last}"},
                allow_redirects=False,
            ) as answer:
                end = _checked_end(answer, start, end)
                while start < end and (part := await answer.content.read(min(CHUNK_BYTES, end - start))):
                    self._came_at = time.monotonic()
                    self._owner.num_bytes += len(part)
                    start += len(part)
                    while part:
                        part = part[into.write(part) or 0 :]
            if start < end:
                raise _Failed(f"{self._url}: the answer ends too early")
            return True
        except _Failed as exc:
            failed = exc
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as exc:  # others are of the disk
            is_unknown = isinstance(exc, aiohttp.ClientSSLError)
            failed = _Failed(f"{self._url}: {format_exc(exc)}", _KNOWN_CERTIFICATE if is_unknown else _BE_RUNNING)
        await self._renew_offer(failed)
        return False

    async def _renew_offer(self, failed: _Failed | None) -> None:
        """Read the address again, after a pause if a request failed. Raises PublishError if that is too late."""
        if failed is not None:
            await asyncio.sleep(AGAIN_S)
        offer, now = await self._look(), time.monotonic()
        if offer is not None:
            self._url, self._offered_at = offer.url, now
        why = f"{failed}; {failed.remedy}" if failed is not None else f"it was not offered; {_BE_RUNNING}"
        if now - self._offered_at > GONE_S:
            raise PublishError(f"version {self._version} cannot be fetched: its trainer no longer offers it; {why}.")
        if now - self._came_at > GIVE_UP_S:
            raise PublishError(f"version {self._version} cannot be fetched: {why}.")


def prepare(folder: Path, sizes: Mapping[str, int]) -> None:
    """Make the folder of a download, and delete what cannot be the beginning of a file. Raises OSError."""
    if folder.is_symlink():
        folder.unlink()  # do not delete files in its target
    folder.mkdir(exist_ok=True)
    for entry in folder.iterdir():
        if entry.is_symlink() or not entry.is_file() or entry.stat().st_size > sizes.get(entry.name, -1):
            remove(entry)


def _finish(folder: Path, index: bytes) -> None:
    """Add the index, and sync all files. Raises OSError."""
    (folder / INDEX_FILE).write_bytes(index)
    for path in (*sorted(folder.iterdir()), folder):
        fsync(path)


def _checked_end(answer: aiohttp.ClientResponse, start: int, end: int | None) -> int:
    """Return the end of the bytes that an answer has; raise _Failed if they are not the requested ones."""
    if answer.status == 401:
        raise _Failed(f"{answer.url.origin()} refuses our token of the run", _SAME_TOKEN)
    if answer.status != 206:
        raise _Failed(f"{answer.url.origin()} answers with status {answer.status}")
    span = _SPAN.fullmatch(answer.headers.get("Content-Range", ""))
    found = (int(span[1]), int(span[2]) + 1) if span is not None else (0, 0)
    if span is None or found != (start, end if end is not None else int(span[3])):
        raise _Failed(f"{answer.url.origin()} answers with another range")
    return found[1]
