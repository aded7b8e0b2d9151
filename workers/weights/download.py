"""Download versions whose folder a worker cannot access from their trainer over HTTP.

    on this machine? ─no─> wait for an offer ─> lock ─> index ─> room ─> files in parallel ─> verify ─> rename

A download in progress has the bytes of each file that came so far; the next download of this version requests the rest.
Only the announced digest proves the index, and only the index proves files: an offer gives nothing but an address.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import aiohttp
from yarl import URL

from penstock.config import Config
from penstock.errors import ProtocolError, PublishError
from penstock.protocol.scripts import read_offer
from penstock.records.cause import Cause
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import VersionNotServed, WeightsFetched
from penstock.redis.control import AsyncControl
from penstock.system.disk import is_full, remove
from penstock.text import format_exc
from penstock.weights.index import INDEX_FILE
from penstock.weights.serving import STALL_S, client_context, object_name, token_of
from penstock.workers.weights.machine_lock import Stopped
from penstock.workers.weights.version_folders import Fetched, NoRoom, Report, VersionFolders, size_of

#: Longest wait for the offer of a published version, and polling interval.
OFFER_WAIT_S, LOOK_S = 120.0, 0.2
#: A download fails if no bytes arrive for this long; received bytes are kept.
GIVE_UP_S = 60.0
#: Pause after a failed request.
AGAIN_S = 0.5
#: Bytes of one request, after which others may have the connection, and of one read.
REQUEST_BYTES, CHUNK_BYTES = 64 * 1024**2, 256 * 1024
#: Files that are fetched at once.
FETCHES = 4

_URL = re.compile(r"(https?)://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

# Remedies, for error messages.
_BE_RUNNING = "check that its trainer is running"
_SAME_TOKEN = (
    "give every part the same (serving.token, or the file weights.token of the run's folder where that is not set)"
)
_KNOWN_CERTIFICATE = "set serving.tls_ca to what its certificate is signed with, and reached_at to its name"


class _Failed(Exception):
    """A request failed; the message says why."""

    def __init__(self, why: str, remedy: str = _BE_RUNNING) -> None:
        super().__init__(f"{why}; {remedy}")


class Download(VersionFolders):
    """Download versions from their trainer, which may restart at another address.

    Received bytes are kept if a download is stopped or killed.

    Args:
        config: with ``redis.url`` set and ``serving.enabled``.

    Raises:
        ConfigError: there is no token, or the TLS settings are invalid.
    """

    def __init__(self, config: Config, keys: Keys, blocked_on: Report = lambda cause: None) -> None:
        assert config.redis.url is not None
        serving = config.serving
        super().__init__(
            serving.folder or config.run_dir / "fetched", serving.max_bytes, "serving.max_bytes", blocked_on
        )
        self._keys, self._model, self._redis_url = keys, config.model.name, config.redis.url
        self._token, self._tls = token_of(config), client_context(serving)
        self._scheme = "http" if self._tls is None else "https"
        #: Bytes received so far, of all versions.
        self.num_bytes = 0

    def prepare(self, publication: Publication) -> None:
        """Wait for an offer of the version. Raises PublishError."""
        self._version, self._index, self._url = publication.version, publication.index, ""
        self._name = object_name(self._version, self._index)
        self._cause: Callable[[], Cause] = lambda: WeightsFetched(self._version, "offer")
        self._run(self._await_offer())

    def make(self, publication: Publication) -> tuple[Path, Fetched]:
        """Download a version, and hold it. Raises PublishError, OSError."""
        folder, before = self.temporary(self._index), self.num_bytes  # a tick continues it
        self.remove_leftovers(self._index)
        self._cause = lambda: WeightsFetched(self._version, "index")

        def fetch(sizes: Mapping[str, int]) -> None:
            if (size := sum(sizes.values())) and INDEX_FILE not in sizes:
                self._cause = lambda: WeightsFetched(self._version, missing=size - size_of(folder), size=size)
            self._run(self._receive(folder, sizes))

        try:
            self.complete(folder, self._index, fetch)
            return self.add(folder, self._name), Fetched(self.num_bytes - before, is_whole=True)
        except (PublishError, OSError) as exc:
            has_filled_disk = is_full(exc) and not isinstance(exc, NoRoom)
            if has_filled_disk or not any(one.stat().st_size for one in folder.iterdir() if one.name != INDEX_FILE):
                remove(folder)  # the disk is not left full
            raise

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in an event loop until it ends, and report what it waits for. Blocks.

        Raises:
            PublishError: it failed; Stopped: this worker stops. OSError.
        """
        try:
            asyncio.run(self._watched(work))
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        #: Time at which bytes arrived last (monotonic, s).
        self._came_at = time.monotonic()
        self._control = AsyncControl(self._redis_url)
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=STALL_S, sock_read=STALL_S),
            connector=aiohttp.TCPConnector(force_close=True, limit=0, ssl=self._tls or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=CHUNK_BYTES,
        ) as self._session:
            task = asyncio.create_task(work)
            try:
                while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                    self.blocked_on(self._cause())
                    if self.stopped():
                        raise Stopped(f"version {self._version} was not fetched completely: this worker stops.")
                task.result()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self._control.close()

    async def _look(self) -> bool:
        """Read the offer of the version and its address; return whether there is one."""
        offer = await self._control.do(
            lambda client: read_offer(client, self._keys, self._model, self._version, self._index)
        )
        self._url = self._url if offer is None else offer.url
        return offer is not None

    async def _await_offer(self) -> None:
        """Wait for an offer, without the lock of this machine. Raises PublishError."""
        deadline = time.monotonic() + OFFER_WAIT_S
        while not await self._look():
            if time.monotonic() > deadline:
                raise PublishError(
                    f"version {self._version} is not offered over HTTP: set serving.enabled for its trainer too, or "
                    "publish to a folder that this machine sees.",
                    VersionNotServed(self._version),
                )
            await asyncio.sleep(LOOK_S)

    async def _receive(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Append to the files in ``folder`` what is missing; retry failures.

        Raises:
            PublishError: no bytes arrived for ``GIVE_UP_S``, or the version is no longer offered.
            OSError: a disk error.
        """
        turns = asyncio.Semaphore(FETCHES)

        async def receive(path: Path, size: int) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            async with turns:
                with os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0) as file:
                    while await self._request(path.name, size, file):
                        pass

        try:
            async with asyncio.TaskGroup() as group:
                for name, num_bytes in sizes.items():
                    group.create_task(receive(folder / name, num_bytes))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _request(self, name: str, size: int, into: BinaryIO) -> bool:
        """Request a range of a file and append what comes of it; return whether some of the file is missing.

        Waits after a failure. Raises as ``_receive``.

        Args:
            size: of the file; of an index the most that it may have.
        """
        start = os.fstat(into.fileno()).st_size
        if start >= size:
            return False
        try:
            url = _URL.fullmatch(self._url)
            if url is None or url[1] != self._scheme:
                raise _Failed(
                    f"{self._url[:200]!r} is no address of {self._scheme}", "give every part the same tls_cert"
                )
            async with self._session.get(
                URL(f"{self._url}/{self._name}/{quote(name, safe='')}", encoded=True),
                headers={"Range": f"bytes={start}-{min(start + REQUEST_BYTES, size) - 1}"},
                allow_redirects=False,
            ) as answer:
                end, size = _span(answer, start, size, is_index=name == INDEX_FILE)
                while start < end and (part := await answer.content.read(min(CHUNK_BYTES, end - start))):
                    self._came_at = time.monotonic()
                    self.num_bytes += len(part)
                    start += len(part)
                    while part:
                        part = part[into.write(part) or 0 :]
            if start < end:
                raise _Failed(f"{self._url}: the answer ends too early")
            return end < size
        except _Failed as exc:
            failed = exc
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError) as exc:  # others are of the disk
            is_unknown = isinstance(exc, aiohttp.ClientSSLError)
            failed = _Failed(f"{self._url}: {format_exc(exc)}", _KNOWN_CERTIFICATE if is_unknown else _BE_RUNNING)
        await asyncio.sleep(AGAIN_S)
        await self._look()
        if time.monotonic() - self._came_at > GIVE_UP_S:
            raise PublishError(f"version {self._version} cannot be fetched: {failed}.")
        return True


def _span(answer: aiohttp.ClientResponse, start: int, size: int, *, is_index: bool) -> tuple[int, int]:
    """Return the end of the bytes that an answer has, and of the file; raise _Failed if others were requested."""
    if answer.status == 401:
        raise _Failed(f"{answer.url.origin()} refuses our token of the run", _SAME_TOKEN)
    if answer.status != 206:
        raise _Failed(f"{answer.url.origin()} answers with status {answer.status}")
    span = _SPAN.fullmatch(answer.headers.get("Content-Range", ""))
    first, last, found = map(int, span.groups()) if span is not None else (-1, -1, -1)
    is_of_size = found <= size if is_index else found == size
    if not is_of_size or (first, last + 1) != (start, min(start + REQUEST_BYTES, found)):
        raise _Failed(f"{answer.url.origin()} answers with another range")
    return last + 1, found
