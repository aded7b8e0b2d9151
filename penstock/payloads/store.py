"""Stores of payloads: a Redis, or a folder that machines share. Callers do not depend on which it is.

    put                     worker     write payloads that expire unless they are kept (async_store.py)
    keep, unlink, expire    leader     make permanent after the commit, free after use, delete what was not kept
    unkeep                  leader     make them expire again, since Redis has lost their commit
    read, read_ranges       trainer    read all or a part of one
    claim, names, delete    operator   begin a run, drain a store, delete a run

The control Redis decides which payloads count, with all its fences; a store only has bytes under names.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from penstock.config.redis import is_folder
from penstock.payloads.folder import PayloadFolder
from penstock.protocol.scripts import persist
from penstock.redis import connect
from penstock.redis.call import run
from penstock.redis.commands import Client, delete_keys, scan_keys

#: Keys per pipeline.
CHUNK = 1000


class PayloadRedis:
    """A Redis with payloads, the control Redis or another one; see ``PayloadStore``."""

    def __init__(self, client: Client, url: str) -> None:
        self.url = url
        self.columns = self._client = client

    def check(self) -> None:
        connect.ask(self._client, self.url)

    def ping(self, prefix: str = "") -> None:
        self._client.ping()

    def claim(self, prefix: str) -> None:
        """Do nothing: keys of a run contain its name."""

    def keep(self, names: Sequence[str]) -> list[bool]:
        return run(self._client, persist(names))

    def unkeep(self, names: Sequence[str], ttl_s: float) -> None:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.expire(name, int(ttl_s) + 1)
        pipe.execute()

    def read(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        # Redis limits the size of its values itself.
        return list(self._client.mget([name for name, _ in wanted]))

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        pipe = self._client.pipeline(transaction=False)
        for name, begin, num_bytes in ranges:
            pipe.getrange(name, begin, begin + num_bytes - 1)
        # A missing key has only empty ranges.
        return [value or None for value in pipe.execute()]

    def unlink(self, names: Sequence[str]) -> None:
        self._client.unlink(*names)

    def expire(self, prefix: str, ttl_s: float) -> int:
        """Return 0: Redis expires keys itself."""
        return 0

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        found = scan_keys(self._client, prefix)
        while batch := list(islice(found, CHUNK)):
            pipe = self._client.pipeline(transaction=False)
            for key in batch:
                pipe.pttl(key)
            yield from ((key, ttl == -1) for key, ttl in zip(batch, pipe.execute(), strict=True) if ttl >= -1)

    def delete(self, prefix: str) -> int:
        return delete_keys(self._client, prefix)

    def usage(self) -> tuple[int, int]:
        info = self._client.info("memory")
        return info["used_memory"], info["maxmemory"]

    def close(self) -> None:
        self._client.close()


class PayloadStore(Protocol):
    """One store of payloads, by the keys of the run. All methods block.

    If the store does not answer they raise an error of ``PASSING`` (penstock.redis.control): retry, nothing is lost.
    """

    @property
    def url(self) -> str:
        """Its address, which may hold a password."""

    @property
    def columns(self) -> Client | None:
        """The Redis that keeps columns beside the payloads; None if the store has only payloads."""

    def check(self) -> None:
        """Check that the store is usable. Raises QueueUnavailable, QueueRefused, ConfigError."""

    def ping(self, prefix: str = "") -> None:
        """Check that it answers, with the calls that a leader makes for the run of this prefix of keys."""

    def claim(self, prefix: str) -> None:
        """Prepare it for a run; ``prefix`` is that of the run's keys. Raises ConfigError if that is not possible."""

    def keep(self, names: Sequence[str]) -> list[bool]:
        """Make committed payloads permanent; False for a missing one. Raises ConfigError: it is another folder."""

    def unkeep(self, names: Sequence[str], ttl_s: float) -> None:
        """Undo ``keep``: they expire after ``ttl_s``, unless they are kept again. Missing ones are ignored."""

    def read(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Read payloads by (key, size in the record); None for a missing one. Raises ConfigError: another folder.

        A payload longer than its record says is not read: it is not the committed one.
        """

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Read (key, first byte, number of bytes); None if the payload is missing, or ends before."""

    def unlink(self, names: Sequence[str]) -> None:
        """Free payloads; missing ones are ignored."""

    def expire(self, prefix: str, ttl_s: float) -> int:
        """Delete payloads not committed within ``ttl_s``, unless the store expires them itself; return their number."""

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        """Yield (key, is it permanent) of all payloads under ``prefix``, in any order.

        Raises ConfigError if they are not known: this machine does not have the run's folder.
        """

    def delete(self, prefix: str) -> int:
        """Delete all payloads of a run; return their number. Raises ConfigError if the folder holds other files."""

    def usage(self) -> tuple[int, int]:
        """Return used and total bytes (total 0: no limit). Raises ConfigError if the folder does not exist."""

    def close(self) -> None:
        """Close the connection, after freeing what was to be freed."""


def open_store(url: str, *, timeout_s: float = connect.TIMEOUT_S) -> PayloadStore:
    """Open the store at an address; nothing is contacted yet.

    Args:
        timeout_s: longest wait for one answer of a Redis, or for progress of a folder's file system.

    Raises:
        ConfigError: the address is invalid.
    """
    if is_folder(url):
        return PayloadFolder(url, timeout_s=timeout_s)
    return PayloadRedis(connect.connect(url, timeout_s=timeout_s, check=False), url)
