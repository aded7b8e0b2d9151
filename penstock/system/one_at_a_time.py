"""Work that may never come back, such as a look at a network file system whose server is gone."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OneAtATime:
    """Does work in a daemon thread, and goes on without it where it does not come back. Thread-safe.

    Nobody can end such a thread. While one hangs no other is begun, so that they never pile up.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._steps = 0

    def step(self) -> None:
        """Called by long work whenever something has come back: it is waited for from then on."""
        self._steps += 1

    def do(self, work: Callable[[], T], limit_s: float) -> T:
        """What ``work`` returns, or raises.

        Blocks for ``limit_s`` at most, counted from its last ``step``, and for callers before this one.

        Raises:
            TimeoutError: it did not come back in time, and may still be done; or an earlier one has not come back, and
                this one is not begun.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise TimeoutError("what was asked before has not come back")
            returned: list[T] = []
            raised: list[BaseException] = []

            def body() -> None:
                try:
                    returned.append(work())
                except BaseException as exc:
                    raised.append(exc)

            self._thread = threading.Thread(target=body, name=self._name, daemon=True)
            self._thread.start()
            steps = -1
            while self._thread.is_alive() and self._steps != steps:
                steps = self._steps
                self._thread.join(limit_s)
            if self._thread.is_alive():
                raise TimeoutError(f"nothing came back in {limit_s:g} s")
        if raised:
            raise raised[0]
        return returned[0]
