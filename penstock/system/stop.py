"""Counting of Ctrl-C and SIGTERM."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator


def pause_s(failures: int, first_s: float, most_s: float) -> float:
    """Return the seconds to wait after so many failures in a row: doubled after each, at most ``most_s``.

    Args:
        failures: 0 returns 0, 1 returns ``first_s``.
    """
    # A larger power would overflow a float.
    return min(most_s, first_s * 2.0 ** min(failures - 1, 64)) if failures > 0 else 0.0


class Stop:
    """Counts Ctrl-C and SIGTERM."""

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def press(self) -> None:
        """Count one more, as Ctrl-C does."""
        self.count += 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and SIGHUP within the block."""

        def count(number: int, frame: object) -> None:
            self.press()

        old = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def watched_signals(on_signal: Callable[[int], None], *numbers: signal.Signals) -> Iterator[None]:
    """Call ``on_signal`` with 1 for the first of these signals, 2 for the second, ..., in a thread.

    A Python handler runs between two instructions of the main thread, and a backward pass may be one for minutes.
    The thread receives a signal at once. Call it in the main thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        count = 0
        while data := os.read(reading, 64):
            for number in data:
                if number in numbers:
                    count += 1
                    on_signal(count)

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(writing)
        thread.join()
        os.close(reading)
