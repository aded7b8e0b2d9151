"""A worker's side of the places where payloads lie: written there, and gone after a time unless somebody keeps them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from redis.exceptions import ConnectionError as NoAnswer

from penstock.errors import QueueFull
from penstock.payloads.addresses import is_folder
from penstock.payloads.daemon_threads import DaemonThreads, Step
from penstock.payloads.folder import ANSWER_S, CLOSE_S, PayloadFolder
from penstock.payloads.run_files import file_of, renew
from penstock.redis.call import translate
from penstock.redis.commands import AsyncClient
from penstock.redis.control import AsyncControl, raise_passing, until_answered_async
from penstock.redis.memory import is_full

T = TypeVar("T")
Pairs = Sequence[tuple[str, bytes]]
Wanted = Sequence[tuple[str, int]]
log = logging.getLogger(__name__)

#: Payloads that a worker writes to one folder at once.
THREADS = 8


class AsyncPayloadStore(Protocol):
    """One place to write payloads to; a silent one is waited for, for as long as it was opened with.

    All of them raise QueueUnavailable when that time is over.
    """

    @property
    def url(self) -> str:
        """Its address, which may hold a password."""

    async def put(self, pairs: Pairs, ttl_s: int) -> list[QueueFull | None]:
        """Write (key, bytes) that nobody has committed yet; again with the same: nothing changes.

        Args:
            ttl_s: they are gone after so long, unless they are kept.

        Returns:
            None for each that is written, QueueFull for each that found no room.
        """

    async def renew(self, names: Sequence[str], ttl_s: int) -> None:
        """What nobody has kept lives ``ttl_s`` from now on; what is gone does not matter."""

    async def read(self, wanted: Wanted) -> list[bytes | None]:
        """Bytes of (key, bytes that it has by its record) each; None where one is gone."""

    async def is_full(self) -> bool:
        """Is there hardly any room left?"""

    async def close(self) -> None:
        """Close the connection; what was written is safe."""


class AsyncPayloadRedis:
    """Writes to a Redis; see ``AsyncPayloadStore``.

    Args:
        control: the connection; its patience is this writer's.
    """

    def __init__(self, control: AsyncControl) -> None:
        self._control = control
        self.url = control.url

    async def put(self, pairs: Pairs, ttl_s: int) -> list[QueueFull | None]:
        return await self._control.do(partial(_put_all, pairs, ttl_s))

    async def renew(self, names: Sequence[str], ttl_s: int) -> None:
        await self._control.do(partial(_renew_all, names, ttl_s))

    async def read(self, wanted: Wanted) -> list[bytes | None]:
        # A Redis bounds its values by itself.
        return await self._control.do(lambda client: client.mget([name for name, _ in wanted]))

    async def is_full(self) -> bool:
        return await self._control.do(_has_no_room)

    async def close(self) -> None:
        await self._control.close()


async def _put_all(pairs: Pairs, ttl_s: int, client: AsyncClient) -> list[QueueFull | None]:
    """- -> written: SET NX EX of each.

    No script: a plain SET keeps the very bytes that came in, a script copies them twice. The key carries the lease's
    token, so saying it twice writes the same bytes, or nothing.
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
    """Why it was not written, for want of room; any other error is raised."""
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
    """Writes to a folder, in threads; see ``AsyncPayloadStore``. The leader removes what expires (``expire``).

    A file system that gives neither an answer nor an error does not answer; a large payload is waited for while its
    bytes find their way.

    Args:
        silent_s: longest time in which nothing comes back.
    """

    def __init__(self, folder: PayloadFolder, patience_s: float, silent_s: float = ANSWER_S) -> None:
        self._folder = folder
        self._patience_s, self._silent_s = patience_s, silent_s
        self._threads = DaemonThreads("payload folder writes", THREADS)
        #: The event loop's own threads are for those who wait for other things.
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
    """The store at an address, to be written to; nobody is asked yet.

    Args:
        makes: whether a folder is made where it is not there; False where nobody on this machine named it.

    Raises:
        ConfigError: the address cannot be read.
    """
    if is_folder(url):
        return AsyncPayloadFolder(PayloadFolder(url, makes=makes), patience_s)
    return AsyncPayloadRedis(AsyncControl(url, patience_s=patience_s))
