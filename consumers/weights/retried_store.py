"""The store of deltas as a trainer writes to it: a put that the store breaks off is made again, for a while."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from penstock.protocol.records.causes import Cause, ObjectStoreFailing
from penstock.system.backoff import pause_s
from penstock.system.disk import is_full
from penstock.weights.deltas.objects import ObjectStore

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Tries of one object, and the pause between two, which doubles: a minute and a half in all, beside the tries.
TRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
#: How often a pause is told of.
TELL_S = 0.5
#: What stays as it is.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class RetriedStore:
    """An ``ObjectStore`` whose ``names``, ``put`` and ``mark`` are tried so often; each may be done again.

    A delete is not: what stays is deleted with the next version.

    Args:
        blocked_on: called now and then with the cause of the wait; None at the end.
    """

    def __init__(self, store: ObjectStore, blocked_on: Callable[[Cause | None], None]) -> None:
        self._store, self._blocked_on = store, blocked_on

    def names(self) -> list[str]:
        return self._tried("", self._store.names)

    def put(self, name: str, path: Path) -> None:
        self._tried(name, lambda: self._store.put(name, path))

    def mark(self, name: str) -> None:
        self._tried(name, lambda: self._store.mark(name))

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def size(self, name: str) -> int:
        return self._store.size(name)

    def near(self, group: str, room: Callable[[int], None], stopped: Callable[[], bool]) -> Path | None:
        return self._store.near(group, room, stopped)

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        return self._store.open_range(name, start, end)

    def _tried(self, name: str, call: Callable[[], T]) -> T:
        failures = 0
        try:
            while True:
                try:
                    return call()
                except OSError as exc:
                    failures += 1
                    if failures == TRIES or is_full(exc) or isinstance(exc, _LASTING):
                        raise
                    cause = ObjectStoreFailing(name, str(exc))
                    log.warning("try %d of %d failed, waiting for %s", failures, TRIES, cause)
                    self._pause(failures, cause)
        finally:
            if failures:
                self._blocked_on(None)

    def _pause(self, failures: int, cause: Cause) -> None:
        end = time.monotonic() + pause_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while (left := end - time.monotonic()) > 0:
            self._blocked_on(cause)
            time.sleep(min(left, TELL_S))
