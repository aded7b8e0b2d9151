"""Deliver the batches of one rank in order, with reported waits and optional prefetch."""

import math
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.reader import BatchReader
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.subscription.manifests import Delivery
from penstock.consumers.subscription.progress import Progress
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.records.causes import BatchNotCut

#: Reads batch n; the callable argument returns True once the batch is no longer needed.
Read = Callable[[int, Callable[[], bool]], "Batch"]


class Prefetcher:
    """Prefetch at most ``depth`` batches besides the one being trained; 0 disables prefetching."""

    def __init__(self, depth: int, read: Read) -> None:
        self.depth = depth
        self._read = read
        self._futures: dict[int, Future[Batch]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if depth else None

    def start(self, first: int) -> None:
        """Start reading batch ``first`` and its successors, unless already started."""
        if self._pool is None:
            return
        for n in range(first, first + self.depth):
            if n not in self._futures:
                self._futures[n] = self._pool.submit(self._read, n, lambda n=n: n not in self._futures)  # type: ignore[misc]

    def get(self, n: int) -> "Future[Batch] | None":
        return self._futures.get(n)

    def take(self, n: int) -> "Batch":
        """Return the finished batch or raise its error."""
        return self._futures.pop(n).result()

    def drop(self) -> None:
        """Discard all batches. Blocks until the thread has stopped reading."""
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.cancel()
        for future in futures.values():
            if not future.cancelled():
                future.exception()

    def close(self) -> None:
        self.drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


#: Seconds between reports of a wait for a prefetched batch.
POLL_S = 0.5


class Stream:
    """Deliver batches in order to a trainer.

    Args:
        prefetch: batches cut and fetched ahead in a separate thread; 0: none.
        on_wait: called repeatedly during a wait for a batch; its exceptions end the wait.
        tally: counts the time spent waiting for batches.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        reader: BatchReader,
        progress: Progress,
        *,
        prefetch: int = 0,
        on_wait: Callable[[], None] = lambda: None,
        tally: Tally,
    ) -> None:
        self._subscriber = subscriber
        self._reader = reader
        self._progress = progress
        self._prefetcher = Prefetcher(prefetch, self._read_ahead)
        self._on_wait = on_wait
        self._tally = tally
        #: Number of batches delivered, or committed before this rank joined.
        self.last = 0

    def take(self, timeout_s: float | None) -> Batch:
        """Return the batch after ``last``. Blocks until its payloads are read; raises like ``Trainer.next``."""
        with self._tally.waiting("batch"):
            return self._take(timeout_s)

    def _take(self, timeout_s: float | None) -> Batch:
        if self._progress.begin(timeout_s):
            self.last = self._progress.position
        n = self.last + 1
        ahead = self._prefetcher.get(n)
        if ahead is not None:
            return self._await(n, ahead, timeout_s)
        self._request(n)
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        delivery = self._subscriber.read(n, timeout_s, on_wait=self._on_wait)
        return self._reader.prepare(self._make(delivery, deadline_s))

    def hand_out(self, batch: Batch) -> None:
        """Record the delivery of ``batch`` and prefetch its successors. Blocks for a round trip if prefetching."""
        self.last = batch.n
        if self._prefetcher.depth:
            self._request(batch.n + self._prefetcher.depth)
            self._prefetcher.start(batch.n + 1)

    def drop(self) -> None:
        """Discard prefetched batches. Blocks until the thread has stopped reading."""
        self._prefetcher.drop()

    def close(self) -> None:
        """Stop the thread. Blocks briefly."""
        self._prefetcher.close()

    def _request(self, n: int) -> None:
        if self._subscriber.seat.drives:
            self._subscriber.ask(n)

    def _await(self, n: int, ahead: "Future[Batch]", timeout_s: float | None) -> Batch:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not ahead.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._subscriber.timeout(
                    f"Batch {n} of subscription {self._subscriber.name!r} did not arrive within {timeout_s} s"
                )
            self._on_wait()
            self._subscriber.waiting.blocked_on(BatchNotCut(self._subscriber.name, n))
            futures.wait([ahead], min(POLL_S, left))
        self._subscriber.waiting.end()
        return self._prefetcher.take(n)

    def _read_ahead(self, n: int, stopped: Callable[[], bool]) -> Batch:
        batch = self._make(self._subscriber.read(n, stopped=stopped, ahead=True))
        batch.decode()
        return self._reader.prepare(batch)

    def _make(self, delivery: Delivery, deadline_s: float = math.inf) -> Batch:
        redone = delivery.manifest.n <= self._progress.redone
        return self._reader.read(delivery, redone=redone, deadline_s=deadline_s)
