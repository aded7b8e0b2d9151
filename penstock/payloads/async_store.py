"""A worker's access to payload stores: it writes payloads, which expire unless they are made permanent."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from redis.exceptions import ConnectionError as NoAnswer

from penstock.config.redis import is_folder
from penstock.errors import QueueFull
from penstock.payloads.daemon_threads import DaemonThreads, Step
from penstock.payloads.folder import ANSWER_S, CLOSE_S, PayloadFolder
from penstock.payloads.run_files import file_of, renew
from penstock.redis.call import translate
from penstock.redis.commands import AsyncClient, is_full
from penstock.redis.control import AsyncControl, raise_passing, until_answered_async

T = TypeVar("T")
Pairs = Sequence[tuple[str, bytes]]
Wanted = Sequence[tuple[str, int]]
log = logging.getLogger(__name__)

#: Most concurrent writes of a worker to one folder.
THREADS = 8


class AsyncPayloadStore(Protocol):
    """One store to write payloads to; if it does not answer, calls retry for as long as it was opened with.

    All methods raise QueueUnavailable after that time.
    """

    @property
    def url(self) -> str:
        """Its address, which may hold a password."""

    async def put(self, pairs: Pairs, ttl_s: int) -> list[QueueFull | None]:
        """Write (key, bytes) that are not committed yet; repeating a write changes nothing.

        Args:
            ttl_s: time after which they expire, unless they are kept.

        Returns:
            None for each that is written, QueueFull for each that did not fit.
        """

    async def renew(self, names: Sequence[str], ttl_s: int) -> None:
        """Extend the time to live of payloads that are not kept to ``ttl_s``; missing ones are ignored."""

    async def read(self, wanted: Wanted) -> list[bytes | None]:
        """Read payloads by (key, size in the record); None for a missing one."""

    async def is_full(self) -> bool:
        """Return whether the store is nearly full."""

    async def close(self) -> None:
        """Close the connection; written payloads are safe."""


class AsyncPayloadRedis:
    """Writes to a Redis; see ``AsyncPayloadStore``.

    Args:
        control: the connection; its patience limits retries.
    """

    def __init__(self, control: AsyncControl) -> None:
        self._control = control
        self.url = control.url

    async def put(self, pairs: Pairs, ttl_s: int) -> list[QueueFull | None]:
        return await self._control.do(partial(_put_all, pairs, ttl_s))

    async def renew(self, names: Sequence[str], ttl_s: int) -> None:
        await self._control.do(partial(_renew_all, names, ttl_s))

    async def read(self, wanted: Wanted) -> list[bytes | None]:
        # Redis limits the size of its values itself.
        return await self._control.do(lambda client: client.mget([name for name, _ in wanted]))

    async def is_full(self) -> bool:
        return await self._control.do(_has_no_room)

    async def close(self) -> None:
        await self._control.close()


async def _put_all(pairs: Pairs, ttl_s: int, client: AsyncClient) -> list[QueueFull | None]:
    """Write payloads that are not committed yet: SET NX EX of each.

    No script: a plain SET stores the received buffer, a script copies it twice. The key has the lease's token, so
    repeating it writes the same bytes, or nothing.
    """
    pipe = client.pipeline(transaction=False)
    for key, data in pairs:
        pipe.set(key, data, nx=True, ex=ttl_s)
    return [_refusal(answer) for answer in raise_passing(await pipe.execute(raise_on_error=False))]


async def _renew_all(names: Sequence[str], ttl_s: int, client: AsyncClient) -> None:
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.expire(name, ttl_s)
    await pipe.execute()


def _refusal(answer: object) -> QueueFull | None:
    """Return the error if Redis is full, None if it was written; raise any other error."""
    if not isinstance(answer, Exception):
        return None
    translated = translate(answer, "payload")
    if isinstance(translated, QueueFull):
        return translated
    raise answer


async def _has_no_room(client: AsyncClient) -> bool:
    info = await client.info("memory")
    return is_full(info)


class AsyncPayloadFolder:
    """Writes to a folder, in threads; see ``AsyncPayloadStore``. The leader deletes expired files (``expire``).

    A call to the file system that makes no progress for ``silent_s`` counts as unanswered; large payloads may take
    longer as long as they progress.

    Args:
        silent_s: longest time without progress.
    """

    def __init__(self, folder: PayloadFolder, patience_s: float, silent_s: float = ANSWER_S) -> None:
        self._folder = folder
        self._patience_s, self._silent_s = patience_s, silent_s
        self._threads = DaemonThreads("payload folder writes", THREADS)
        #: The event loop's default executor is left to other blocking calls.
        self._waiting = ThreadPoolExecutor(THREADS, "payload folder waits")
        self.url = folder.url

    async def put(self, pairs: Pairs, ttl_s: int) -> list[QueueFull | None]:
        return await self._until_answered(partial(self._folder.put, pairs))

    async def renew(self, names: Sequence[str], ttl_s: int) -> None:
        await self._until_answered(partial(self._renew, names))

    def _renew(self, names: Sequence[str], step: Step) -> None:
        try:
            for name in names:
                renew(file_of(self._folder.path, name))
                step()
        except OSError as exc:
            raise NoAnswer(f"the folder of payloads {self._folder.path} does not answer: {exc}") from exc

    async def read(self, wanted: Wanted) -> list[bytes | None]:
        return await self._until_answered(lambda step: self._folder.read(wanted))

    async def is_full(self) -> bool:
        return await self._until_answered(lambda step: self._folder.is_full())

    async def close(self) -> None:
        try:
            await self._within(CLOSE_S, lambda step: self._folder.close())
        except TimeoutError as exc:
            log.warning("what was just written to %s may not be on its disk: %s", self._folder.path, exc)
        self._waiting.shutdown(wait=False, cancel_futures=True)

    async def _until_answered(self, work: Callable[[Step], T]) -> T:
        return await until_answered_async(partial(self._do, work), self.url, patience_s=self._patience_s)

    async def _do(self, work: Callable[[Step], T]) -> T:
        try:
            return await self._within(self._silent_s, work)
        except TimeoutError as exc:
            raise NoAnswer(f"the folder of payloads {self._folder.path} does not answer: {exc}") from exc

    async def _within(self, silent_s: float, work: Callable[[Step], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._waiting, self._threads.do, work, silent_s)


def open_async_store(url: str, *, patience_s: float, makes: bool = True) -> AsyncPayloadStore:
    """Open the store at an address, for writing; nothing is contacted yet.

    Args:
        makes: whether to create a missing folder; False if the configuration of this machine does not name it.

    Raises:
        ConfigError: the address is invalid.
    """
    if is_folder(url):
        return AsyncPayloadFolder(PayloadFolder(url, makes=makes), patience_s)
    return AsyncPayloadRedis(AsyncControl(url, patience_s=patience_s))
