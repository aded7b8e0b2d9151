"""Stores of payloads: Redis servers, the control Redis or others.

    put                    worker     write payloads that expire unless they are kept
    keep, unlink, unkeep   leader     make permanent after the commit, free, let expire if Redis lost the commit
    read, read_ranges      trainer    read all or a part of one
    names, delete          operator   drain a server, delete a run

The control Redis decides which payloads count, with all its fences; a store only has bytes under names.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from penstock.errors import QueueFull
from penstock.payloads.format import PAYLOAD_TTL_S
from penstock.protocol.scripts import persist
from penstock.redis import connect
from penstock.redis.call import run, translate
from penstock.redis.commands import AsyncClient, Client, delete_keys, is_full, scan_keys
from penstock.redis.control import AsyncControl, raise_passing

#: Keys per pipeline.
CHUNK = 1000


class PayloadStore:
    """One Redis with payloads, by the keys of the run. All methods block.

    If it does not answer they raise an error of ``PASSING`` (penstock.redis.control): retry, nothing is lost.
    """

    def __init__(self, client: Client, url: str) -> None:
        self.client = client
        #: Its address, which may hold a password.
        self.url = url

    def check(self) -> None:
        """Check that it is usable. Raises QueueUnavailable, QueueRefused, ConfigError."""
        connect.ask(self.client, self.url)

    def keep(self, names: Sequence[str]) -> list[bool]:
        """Make committed payloads permanent; False for a missing one."""
        return run(self.client, persist(names))

    def unkeep(self, names: Sequence[str]) -> None:
        """Undo ``keep``: they expire after ``PAYLOAD_TTL_S``, unless they are kept again. Missing ones are ignored."""
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.expire(name, PAYLOAD_TTL_S)
        pipe.execute()

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """Read payloads; None for a missing one."""
        return list(self.client.mget(names))

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Read (key, first byte, number of bytes); None if the payload is missing, or
        ends before the first; fewer bytes if it ends before the last."""
        pipe = self.client.pipeline(transaction=False)
        for name, begin, num_bytes in ranges:
            pipe.getrange(name, begin, begin + num_bytes - 1)
        # A missing key has only empty ranges.
        return [value or None for value in pipe.execute()]

    def unlink(self, names: Sequence[str]) -> None:
        """Free payloads; missing ones are ignored."""
        self.client.unlink(*names)

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        """Yield (key, is it permanent) of all payloads under ``prefix``, in any order."""
        found = scan_keys(self.client, prefix)
        while batch := list(islice(found, CHUNK)):
            pipe = self.client.pipeline(transaction=False)
            for key in batch:
                pipe.pttl(key)
            yield from ((key, ttl == -1) for key, ttl in zip(batch, pipe.execute(), strict=True) if ttl >= -1)

    def delete(self, prefix: str) -> int:
        """Delete all payloads of a run; return their number."""
        return delete_keys(self.client, prefix)

    def usage(self) -> tuple[int, int]:
        """Return used and total bytes (total 0: no limit)."""
        info = self.client.info("memory")
        return info["used_memory"], info["maxmemory"]

    def close(self) -> None:
        self.client.close()


def open_store(url: str, *, timeout_s: float = connect.TIMEOUT_S) -> PayloadStore:
    """Open the store at an address; nothing is contacted yet. Raises ConfigError if the address is invalid."""
    return PayloadStore(connect.connect(url, timeout_s=timeout_s, check=False), url)


class AsyncPayloadStore:
    """A worker's access to a store. All methods raise QueueUnavailable after the patience of ``control``."""

    def __init__(self, control: AsyncControl) -> None:
        self._control = control
        #: Its address, which may hold a password.
        self.url = control.url

    async def put(self, pairs: Sequence[tuple[str, bytes]], ttl_s: int) -> list[QueueFull | None]:
        """Write (key, bytes) that are not committed yet; repeating a write changes nothing.

        Args:
            ttl_s: time after which they expire, unless they are kept.

        Returns:
            None for each that is written, QueueFull for each that did not fit.
        """
        return await self._control.do(partial(_put_all, pairs, ttl_s))

    async def renew(self, names: Sequence[str], ttl_s: int) -> None:
        """Extend the time to live of payloads that are not kept to ``ttl_s``; missing ones are ignored."""
        await self._control.do(partial(_renew_all, names, ttl_s))

    async def read(self, names: Sequence[str]) -> list[bytes | None]:
        """Read payloads; None for a missing one."""
        return await self._control.do(lambda client: client.mget(names))

    async def is_full(self) -> bool:
        """Return whether the store is nearly full."""
        return await self._control.do(_has_no_room)

    async def close(self) -> None:
        """Close the connection; written payloads are safe."""
        await self._control.close()


async def _put_all(pairs: Sequence[tuple[str, bytes]], ttl_s: int, client: AsyncClient) -> list[QueueFull | None]:
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
    return is_full(await client.info("memory"))
