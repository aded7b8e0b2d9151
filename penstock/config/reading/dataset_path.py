"""Where prompts come from: ``FILE``, or ``FILE@[FIRST:LAST]`` for a slice of its lines."""

import re
from pathlib import Path

_SLICE = re.compile(r"(.*)@\[(\d*):(\d*)\]")
_MEANT_AS_SLICE = re.compile(r"@\[[^/]*$")
#: Line after the last one of a file.
END = 2**62


def parse_path(text: str) -> tuple[Path, int, int]:
    """``FILE`` or ``FILE@[a:b]`` as (file, first line, line after the last), counted from 0.

    Raises:
        ValueError: it is not a slice, or an empty one.
    """
    match = _SLICE.fullmatch(text)
    if match is None:
        if _MEANT_AS_SLICE.search(text):
            raise ValueError(f"{text!r} does not end in a slice: write FILE@[FIRST:LAST], lines counted from 0")
        return Path(text), 0, END
    first, last = int(match[2] or 0), int(match[3] or END)
    if first >= last:
        raise ValueError(f"the slice [{match[2]}:{match[3]}] of {match[1]} is empty: its end is not after its start")
    return Path(match[1]), first, last
