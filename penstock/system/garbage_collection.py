"""Pause the cycle collector while many records are made.

A batch of 512 samples makes about 5,000 containers that live as long as it does; the collector, which runs after
every 700, would scan them and all older ones a dozen times meanwhile, and find nothing.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: The largest block by which glibc's mmap threshold can be raised (DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB).
_LARGEST_BYTES = 30 * 1024 * 1024


def settle() -> None:
    """Tune garbage collection and allocator; call it after all imports. Returns at once.

    Imported objects are excluded from later passes of the cycle collector: scanning them repeatedly takes a tenth of a
    trainer's work on its batches.

    Freed memory is kept, up to 60 MiB: payloads and messages are allocated and freed in blocks of megabytes, which
    glibc would map and page in again each time. Freeing one large block raises its threshold (mallopt(3),
    M_MMAP_THRESHOLD); other allocators are not affected.
    """
    gc.freeze()
    bytearray(_LARGEST_BYTES)  # freed at once, and never touched


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
