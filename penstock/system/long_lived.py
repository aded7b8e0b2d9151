"""What a process does once that will run for long and move arrays of megabytes."""

import gc

#: The largest piece that glibc lets raise the size from which pieces are mapped (DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB).
_LARGEST_BYTES = 30 * 1024 * 1024


def settle() -> None:
    """Call when everything is imported. Returns at once.

    What was imported is left out of later passes of the cycle collector: walking it again and again takes a tenth of a
    trainer's work on its batches.

    And memory that is freed is kept, up to 60 MiB: payloads and what is sent of them come and go in pieces of
    megabytes, which glibc would map and page in again each time. Freeing one large piece has it keep those below that
    size (mallopt(3), M_MMAP_THRESHOLD); other allocators do not mind.
    """
    gc.freeze()
    bytearray(_LARGEST_BYTES)  # freed at once, and never touched
