"""Report to one tracker in a thread: training continues, even if the tracker is slow or fails."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.consumers.grpo.trackers.tracker import Position, Tracker
from penstock.text import format_exc

#: Most queued entries; further ones are dropped.
MAX_WAITING = 1000
#: Seconds between two attempts to open a tracker.
REOPEN_S = 60.0
#: Consecutive failures after which a tracker is reopened: a writer whose disk was full never recovers.
FAILURES = 3

log = logging.getLogger(__name__)


class Reporter:
    """Reports to one tracker; every method but ``close`` returns at once.

    Args:
        name: display name of the tracker.
        position: last step and version reported there before.
        make: opens the tracker. Called in the thread, and again after a while if it raises, or if the tracker fails
            repeatedly.
    """

    def __init__(self, name: str, position: Position, make: Callable[[], Tracker]) -> None:
        self.name = name
        self.position = position
        #: Number of repeated steps and versions that were reported before.
        self.repeated = 0
        self._make = make
        self._tracker: Tracker | None = None
        self._retry_at = 0.0
        self._failed_in_a_row = 0
        self._warned = False
        #: Entries dropped because the queue was full, and entries that failed: each is counted by one thread.
        self._no_place = self._failed = 0
        #: Entries queued, and entries finished: equal when idle.
        self._given = self._done = 0
        self._closed = False
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"report to {name}", daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """Return the number of entries not reported; after ``close`` including those still queued."""
        return self._no_place + self._failed + (self._given - self._done if self._closed else 0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Report figures of a step."""
        self._tell(partial(self._metrics, step, values))

    def evaluation(self, version: int, values: Mapping[str, float], place: float | None = None) -> None:
        """Report figures of an evaluation of ``version``; ``place``: its position among versions, None: ``version``."""
        self._tell(partial(self._evaluation, version, values, version if place is None else place))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Report the final figures of the run."""
        self._tell(lambda tracker: tracker.summary(values))

    def close(self, until: float) -> None:
        """Block until all entries are reported, at most until ``until`` (``time.monotonic``); log dropped ones."""
        try:
            self._waiting.put(None, timeout=max(0.0, until - time.monotonic()))
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, until - time.monotonic()))
        self._closed = True
        if self._thread.is_alive():
            log.warning("%s did not take everything in time: %d entries wait", self.name, self._given - self._done)
        if self.left_out:
            log.warning("%d entries were left out at %s", self.left_out, self.name)

    def _tell(self, entry: Callable[[Tracker], None]) -> None:
        try:
            self._waiting.put_nowait(entry)
            self._given += 1
        except queue.Full:
            self._no_place += 1
            self._warn(f"{MAX_WAITING} entries wait for it")

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            self._try(entry)
            self._done += 1
        if self._tracker is not None:
            self._try(lambda tracker: tracker.close())

    def _try(self, entry: Callable[[Tracker], None]) -> None:
        try:
            if (tracker := self._open()) is not None:
                entry(tracker)
                self._failed_in_a_row = 0
            else:
                self._failed += 1
        # A library may raise SystemExit or a cancellation: this thread must continue.
        except BaseException as exc:
            self._failed += 1
            self._failed_in_a_row += 1
            self._warn(format_exc(exc))
            if self._failed_in_a_row >= FAILURES:
                self._drop()

    def _open(self) -> Tracker | None:
        if self._tracker is None and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + REOPEN_S
            self._tracker = self._make()
        return self._tracker

    def _drop(self) -> None:
        """Close the tracker; the next entry opens another."""
        tracker, self._tracker, self._failed_in_a_row = self._tracker, None, 0
        if tracker is None:
            return
        try:
            tracker.close()
        except BaseException as exc:
            log.debug("%s was not closed: %s", self.name, format_exc(exc))

    def _metrics(self, step: int, values: Mapping[str, float], tracker: Tracker) -> None:
        position = self.position
        if step <= position.step and not tracker.replaces:
            self.repeated += 1
            return
        tracker.metrics(step, values)
        position.step = step
        position.save()

    def _evaluation(self, version: int, values: Mapping[str, float], place: float, tracker: Tracker) -> None:
        position = self.position
        if version <= position.version:
            self.repeated += 1
            return
        tracker.evaluation(place, values)
        position.version = version
        position.save()

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: entry not reported: %s; training continues, further dropped entries are counted", self.name, why
            )
