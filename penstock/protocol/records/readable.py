"""Hashes in Redis that many write to: one bad entry must not keep anybody from reading the others."""

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.errors import ProtocolError

T = TypeVar("T")
V = TypeVar("V")

log = logging.getLogger(__name__)

#: Most texts that are remembered as said.
_MOST = 1000
_said: set[str] = set()


def readable(records: Mapping[bytes, V], read: Callable[[bytes, V], T]) -> list[T]:
    """What ``read`` makes of each entry (its field, its value), by field. One that it refuses is left out, and said.

    Args:
        read: raises ProtocolError for what penstock did not write.
    """
    found = []
    for field, raw in sorted(records.items()):
        try:
            found.append(read(field, raw))
        except ProtocolError as exc:
            _leave_out(str(exc))
    return found


def _leave_out(why: str) -> None:
    """Say it once: whoever looks twice a second would fill the log."""
    if why in _said:
        return
    if len(_said) >= _MOST:
        _said.clear()
    _said.add(why)
    log.warning("an entry that cannot be read is left out: %s", why)
