"""Whether an answer says the same again and again, as slime counts it (``rollout/repetition_frac``)."""

import zlib

#: Shorter texts are not looked at; of longer ones these many characters at the end are.
LOOKED_AT = 10_000
#: So many times smaller a text gets that repeats itself.
RATIO = 10


def is_repetitive(text: str) -> bool:
    """Whether the end of a long text compresses like nothing that says something. Takes a millisecond or so."""
    if len(text) <= LOOKED_AT:
        return False
    end = text[-LOOKED_AT:].encode(errors="replace")
    return len(end) > RATIO * len(zlib.compress(end, level=9))
