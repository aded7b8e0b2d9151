"""Deliver the batches of one rank in order: request, wait with a reported cause, optionally prefetch."""

import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from penstock.consumers.batch.ahead import Ahead
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.reader import BatchReader
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.subscription.manifests import Delivery
from penstock.consumers.subscription.progress import Progress
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.protocol.records.causes import BatchNotCut

#: Seconds between two reports of a wait for a prefetched batch.
LOOK_S = 0.5


class Stream:
    """Batches in the order of their delivery to a trainer.

    Args:
        prefetch: batches cut and fetched ahead, by a separate thread; 0: none.
        look: called repeatedly during a wait for a batch; an error that it raises ends the wait.
        tally: counts the time spent waiting for batches.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        reader: BatchReader,
        progress: Progress,
        *,
        prefetch: int = 0,
        look: Callable[[], None] = lambda: None,
        tally: Tally,
    ) -> None:
        self._subscriber = subscriber
        self._reader = reader
        self._progress = progress
        self._ahead = Ahead(prefetch, self._read_ahead)
        self._look = look
        self._tally = tally
        #: Number of batches handed out, or committed before this rank joined.
        self.last = 0

    def take(self, timeout_s: float | None) -> Batch:
        """Return the batch after ``last``; blocks until its payloads are read. Raises like ``Trainer.next``."""
        with self._tally.waiting("batch"):
            return self._take(timeout_s)

    def _take(self, timeout_s: float | None) -> Batch:
        if self._progress.begin(timeout_s):
            self.last = self._progress.position
        n = self.last + 1
        ahead = self._ahead.get(n)
        if ahead is not None:
            return self._await(n, ahead, timeout_s)
        self._ask(n)
        return self._reader.prepare(self._make(self._subscriber.read(n, timeout_s, look=self._look)))

    def hand_out(self, batch: Batch) -> None:
        """Hand out ``batch`` and prefetch its successors. Blocks for a round trip if prefetching."""
        self.last = batch.n
        if self._ahead.depth:
            self._ask(batch.n + self._ahead.depth)
            self._ahead.look(batch.n + 1)

    def drop(self) -> None:
        """Discard prefetched batches. Blocks until the thread has stopped reading."""
        self._ahead.drop()

    def close(self) -> None:
        """Stop the thread. Blocks shortly."""
        self._ahead.close()

    def _ask(self, n: int) -> None:
        if self._subscriber.seat.drives:
            self._subscriber.ask(n)

    def _await(self, n: int, ahead: "Future[Batch]", timeout_s: float | None) -> Batch:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not ahead.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._subscriber.timeout(
                    f"Batch {n} of subscription {self._subscriber.name!r} did not arrive within {timeout_s} s"
                )
            self._look()
            self._subscriber.waiting.blocked_on(BatchNotCut(self._subscriber.name, n))
            futures.wait([ahead], min(LOOK_S, left))
        self._subscriber.waiting.end()
        return self._ahead.take(n)

    def _read_ahead(self, n: int, stopped: Callable[[], bool]) -> Batch:
        batch = self._make(self._subscriber.read(n, stopped=stopped, ahead=True))
        batch.decode()
        return self._reader.prepare(batch)

    def _make(self, delivery: Delivery) -> Batch:
        return self._reader.read(delivery, redone=delivery.manifest.n <= self._progress.redone)
