"""Ctrl-C and SIGTERM, counted."""

import contextlib
import signal
from collections.abc import Iterator


class Stop:
    """Counts Ctrl-C and SIGTERM."""

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def press(self) -> None:
        """As Ctrl-C does."""
        self.count += 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        def count(number: int, frame: object) -> None:
            self.press()

        old = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
