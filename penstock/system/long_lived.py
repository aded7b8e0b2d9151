"""Settings for long-running processes that move arrays of megabytes."""

import gc

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
