"""Detect repetitive answers, as slime counts them (``rollout/repetition_frac``)."""

import zlib

#: Shorter texts are not checked; of longer ones, this many characters at the end are.
LOOKED_AT = 10_000
#: Compression ratio above which a text is repetitive.
RATIO = 10


def is_repetitive(text: str) -> bool:
    """Return whether the end of a long text compresses by more than ``RATIO``. Takes about a millisecond."""
    if len(text) <= LOOKED_AT:
        return False
    end = text[-LOOKED_AT:].encode(errors="replace")
    return len(end) > RATIO * len(zlib.compress(end, level=9))
