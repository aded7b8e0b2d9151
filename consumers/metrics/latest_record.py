"""Keep one small record in Redis up to date without making the caller wait for a round trip."""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import pack
from penstock.protocol.scripts import note
from penstock.redis.control import PASSING, Control

log = logging.getLogger(__name__)

#: Shortest time between two writes: a record that changes more often is written once with its latest content.
PACE_S = 0.1
#: Longest wait for the last write when it is closed.
CLOSE_S = 2.0


class LatestRecord:
    """Write the latest version of a record from a thread, which starts with the first one.

    Args:
        url: control Redis.
        records: name of the hash that holds the record.
        field: field of that hash.
    """

    def __init__(self, url: str, keys: Keys, records: str, field: str) -> None:
        self._url = url
        self._keys = keys
        self._records = records
        self._field = field
        self._latest: dict[str, Any] | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, record: Mapping[str, Any]) -> None:
        """Write this record soon. Returns at once."""
        self._latest = dict(record)
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"record of {self._field}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the latest record and end the thread. Blocks for ``CLOSE_S`` at most."""
        self._closed.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        control = Control(self._url, stopped=self._closed.is_set, check=False)
        while not self._closed.is_set() or self._changed.is_set():
            self._changed.wait()
            self._changed.clear()
            try:
                if self._latest is not None:
                    control.call(note(self._keys, self._records, self._field, pack(self._latest)))
            except (PenstockError, *PASSING) as exc:
                log.warning("the figures of %s could not be written to Redis: %s", self._field, exc)
            self._closed.wait(PACE_S)
        control.close()
