"""Reading of hashes with many writers: an invalid entry must not prevent reading the others."""

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.errors import ProtocolError

T = TypeVar("T")
V = TypeVar("V")

log = logging.getLogger(__name__)

#: Most messages that are remembered as logged.
_MOST = 1000
_said: set[str] = set()


def readable(records: Mapping[bytes, V], read: Callable[[bytes, V], T]) -> list[T]:
    """Read each entry (field, value), sorted by field. Entries that ``read`` refuses are skipped and logged.

    Args:
        read: raises ProtocolError for an invalid entry.
    """
    found = []
    for field, raw in sorted(records.items()):
        try:
            found.append(read(field, raw))
        except ProtocolError as exc:
            _leave_out(str(exc))
    return found


def _leave_out(why: str) -> None:
    """Log a skipped entry once: readers that poll twice a second would fill the log."""
    if why in _said:
        return
    if len(_said) >= _MOST:
        _said.clear()
    _said.add(why)
    log.warning("an entry that cannot be read is left out: %s", why)
