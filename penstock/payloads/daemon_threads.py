"""Blocking calls that may never return, such as one to a network file system whose server is gone."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
#: Called by the work whenever it makes progress.
Step = Callable[[], None]


class DaemonThreads:
    """Runs work in daemon threads, and continues without work that makes no progress. Thread-safe.

    Such a thread cannot be ended, and is not joined, not even at the end of the process. While one hangs no other work
    is started, so that they do not accumulate.

    Args:
        name: name of the threads.
        most: most concurrent calls; others wait.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._name = name
        self._turns = threading.Semaphore(most)
        self._lock = threading.Lock()
        #: Threads that were abandoned because they made no progress.
        self._silent: list[threading.Thread] = []

    def do(self, work: Callable[[Step], T], silent_s: float) -> T:
        """Run ``work`` with a function to call on progress; return its result, or raise its error.

        Blocks until there is no progress for ``silent_s``, and before that until it is started. Call it from a thread,
        not
        from an event loop.

        Raises:
            TimeoutError: it made no progress, and may still complete; or an earlier call has not returned, and this one
                was not started.
        """
        with self._turns:
            if any(thread.is_alive() for thread in self._silent):
                raise TimeoutError("what was asked before has not come back")
            call = _Call(work)
            thread = threading.Thread(target=call.run, name=self._name, daemon=True)
            thread.start()
            steps = -1
            while thread.is_alive() and call.steps != steps:
                steps = call.steps
                thread.join(silent_s)
            if thread.is_alive():
                self._abandon(thread)
                raise TimeoutError(f"nothing came back in {silent_s:g} s")
        return call.answer.result()

    def _abandon(self, thread: threading.Thread) -> None:
        with self._lock:
            self._silent = [*filter(threading.Thread.is_alive, self._silent), thread]


class _Call(Generic[T]):
    def __init__(self, work: Callable[[Step], T]) -> None:
        self._work = work
        self.answer: Future[T] = Future()
        self.steps = 0

    def run(self) -> None:
        try:
            self.answer.set_result(self._work(self._step))
        except BaseException as exc:
            self.answer.set_exception(exc)

    def _step(self) -> None:
        self.steps += 1
