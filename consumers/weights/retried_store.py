"""The store of deltas as a trainer writes to it: a put that the store breaks off is made again, for a while."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

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
        tell: called now and then with what is waited for; '' at the end.
    """

    def __init__(self, store: ObjectStore, tell: Callable[[str], None]) -> None:
        self._store, self._tell = store, tell

    def names(self) -> list[str]:
        return self._tried("list what it has", self._store.names)

    def put(self, name: str, path: Path) -> None:
        self._tried(f"take {name}", lambda: self._store.put(name, path))

    def mark(self, name: str) -> None:
        self._tried(f"take {name}", lambda: self._store.mark(name))

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def size(self, name: str) -> int:
        return self._store.size(name)

    def near(self, group: str, room: Callable[[int], None], stopped: Callable[[], bool]) -> Path | None:
        return self._store.near(group, room, stopped)

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        return self._store.open_range(name, start, end)

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        failures = 0
        try:
            while True:
                try:
                    return call()
                except OSError as exc:
                    failures += 1
                    if failures == TRIES or is_full(exc) or isinstance(exc, _LASTING):
                        raise
                    log.warning("the store of deltas did not %s, try %d of %d: %s", what, failures, TRIES, exc)
                    self._pause(failures, f"the store of deltas to {what} ({exc})")
        finally:
            if failures:
                self._tell("")

    def _pause(self, failures: int, what: str) -> None:
        end = time.monotonic() + pause_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while (left := end - time.monotonic()) > 0:
            self._tell(what)
            time.sleep(min(left, TELL_S))
