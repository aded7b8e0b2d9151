"""Blocking work that may never come back, such as a look at a network file system whose server is gone."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
#: Called by work whenever something has come back.
Step = Callable[[], None]


class DaemonThreads:
    """Does work in daemon threads, and goes on without what makes no progress. Thread-safe.

    Nobody can end such a thread, and nobody waits for it, not even at the end of the process. While one hangs no other
    work is begun, so that they never pile up.

    Args:
        name: of the threads.
        most: so many calls are under way at once; others wait their turn.
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._name = name
        self._turns = threading.Semaphore(most)
        self._lock = threading.Lock()
        #: Those that were given up for their silence.
        self._silent: list[threading.Thread] = []

    def do(self, work: Callable[[Step], T], silent_s: float) -> T:
        """What ``work`` returns, or raises. It is given what it calls whenever something has come back.

        Blocks until nothing has come back for ``silent_s``, and before that for its turn. An event loop asks in a
        thread of its own.

        Raises:
            TimeoutError: it made no progress, and may still be done; or an earlier call has not come back, and this one
                is not begun.
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
                self._give_up(thread)
                raise TimeoutError(f"nothing came back in {silent_s:g} s")
        return call.answer.result()

    def _give_up(self, thread: threading.Thread) -> None:
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
