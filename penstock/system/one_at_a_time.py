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

    def do(self, work: Callable[[], T], limit_s: float) -> T:
        """What ``work`` returns, or raises. Blocks for ``limit_s`` at most, and for callers before this one.

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
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise TimeoutError(f"nothing came back in {limit_s:g} s")
        if raised:
            raise raised[0]
        return returned[0]
