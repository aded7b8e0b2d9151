"""Read, check and lay out batches ahead of their use, in one thread, in order."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.consumers.batch.batch import Batch

#: Reads batch n; the callable returns True once the batch is no longer wanted.
Read = Callable[[int, Callable[[], bool]], "Batch"]


class Ahead:
    """Hold at most ``depth`` batches in memory beside the one that is trained; 0: do not read ahead."""

    def __init__(self, depth: int, read: Read) -> None:
        self.depth = depth
        self._read = read
        self._futures: dict[int, Future[Batch]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if depth else None

    def look(self, first: int) -> None:
        """Start reading those of batch ``first`` and the batches after it that are not being read yet."""
        if self._pool is None:
            return
        for n in range(first, first + self.depth):
            if n not in self._futures:
                self._futures[n] = self._pool.submit(self._read, n, lambda n=n: n not in self._futures)  # type: ignore[misc]

    def get(self, n: int) -> "Future[Batch] | None":
        return self._futures.get(n)

    def take(self, n: int) -> "Batch":
        """Return the finished batch, or raise its error."""
        return self._futures.pop(n).result()

    def drop(self) -> None:
        """Discard everything. Blocks until the thread has stopped reading."""
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
