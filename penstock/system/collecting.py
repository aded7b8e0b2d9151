"""Pause the cycle collector while many records are made.

A batch of 512 samples makes about 5,000 containers that live as long as it does; the collector, which runs after
every 700, would scan them and all older ones a dozen times meanwhile, and find nothing.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_paused = 0
_was_enabled = False


@contextmanager
def collecting_later() -> Iterator[None]:
    """Pause the collector until the last thread has left. A collector that was off stays off."""
    global _paused, _was_enabled
    with _lock:
        if _paused == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if _paused == 0 and _was_enabled:
                gc.enable()
