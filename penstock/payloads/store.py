"""Where payloads lie: on a Redis, or in a folder that machines share. Callers do not ask which it is.

    put                     worker     written, and gone after a time unless it is kept (async_store.py)
    keep, unlink, expire    leader     made permanent once committed, freed once nobody needs it, gone if nobody kept it
    unkeep                  leader     not permanent any more, since Redis has forgotten that it was committed
    read, read_ranges       trainer    whole, or a part of it
    claim, names, delete    operator   a run begins, a store is drained, a run is deleted

What makes a payload count is said in the control Redis, with all its fences; a store only has bytes under names.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.payloads.addresses import is_folder
from penstock.payloads.folder import PayloadFolder
from penstock.payloads.redis_store import PayloadRedis
from penstock.redis import connect
from penstock.redis.commands import Client


class PayloadStore(Protocol):
    """One place of payloads, by the keys of the run. All methods block.

    A store that does not answer raises an error of ``PASSING`` (penstock.redis.control): ask again, nothing is lost.
    """

    @property
    def url(self) -> str:
        """Its address, which may hold a password."""

    @property
    def columns(self) -> Client | None:
        """The Redis that keeps columns beside the payloads; None where only payloads can lie."""

    def check(self) -> None:
        """See whether it will do. Raises QueueUnavailable, QueueRefused, ConfigError."""

    def ping(self, prefix: str = "") -> None:
        """See whether it answers, and would do what a leader asks of it for the run of this prefix of keys."""

    def claim(self, prefix: str) -> None:
        """Make it ready for a run; ``prefix`` is that of the run's keys. Raises ConfigError where it is not to be."""

    def keep(self, names: Sequence[str]) -> list[bool]:
        """Make committed payloads permanent; False where one is gone. Raises ConfigError: it is another folder."""

    def unkeep(self, names: Sequence[str], ttl_s: float) -> None:
        """Take back what ``keep`` did: gone after so long, unless they are kept again. What is gone does not matter."""

    def read(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """(key, bytes that it has by its record) each; None where one is gone. Raises ConfigError: another folder.

        What is longer than its record says is not read: it is not what was committed.
        """

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """(key, first byte, number of bytes) each; None where the payload is gone, or ends before it."""

    def unlink(self, names: Sequence[str]) -> None:
        """Free payloads; what is gone does not matter."""

    def expire(self, prefix: str, ttl_s: float) -> int:
        """Remove what nobody committed in ``ttl_s``, where that does not happen by itself; how many."""

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        """(key, is it permanent) of all that lies there under ``prefix``, in no order.

        Raises ConfigError where it cannot be known: this machine does not have the run's folder.
        """

    def delete(self, prefix: str) -> int:
        """Delete all of a run that lies there; how many. Raises ConfigError where it is not ours."""

    def usage(self) -> tuple[int, int]:
        """Bytes that are used, and that there are in all (0: no limit). Raises ConfigError: there is no such folder."""

    def close(self) -> None:
        """Close the connection; what was to be freed is."""


def open_store(url: str, *, timeout_s: float = connect.TIMEOUT_S) -> PayloadStore:
    """The store at an address; nobody is asked yet.

    Args:
        timeout_s: longest wait for one answer of a Redis, or for a folder's file system to do anything.

    Raises:
        ConfigError: the address cannot be read.
    """
    if is_folder(url):
        return PayloadFolder(url, timeout_s=timeout_s)
    return PayloadRedis(connect.connect(url, timeout_s=timeout_s, check=False), url)
