"""Parse paths of datasets: ``FILE``, ``hf:FOLDER_OR_NAME`` or ``OWNER/NAME``, ``python:module:Class``; any of them with
``@[FIRST:LAST]`` for a slice of its lines.
"""

import re
from pathlib import Path

from penstock.config.reading.hub import is_hub_id

#: Extensions of data files; an id with one of them is a file, not a dataset at the Hub.
_FILE_EXTENSIONS = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".txt")
_SLICE = re.compile(r"(.*)@\[(\d*):(\d*)\]")
_MEANT_AS_SLICE = re.compile(r"@\[[^/]*$")
#: Prefixes of the paths of Hugging Face datasets and of user classes.
HUB, CODE = "hf:", "python:"
#: End of a slice that has none.
END = 2**62


def hub_name(text: str) -> str | None:
    """Return the folder or name in ``hf:FOLDER_OR_NAME``; None for another path."""
    return str(parse_path(text)[0]).removeprefix(HUB) if text.startswith(HUB) else None


def code_name(text: str) -> str | None:
    """Return the import path in ``python:module:Class``; None for another path."""
    return str(parse_path(text)[0]).removeprefix(CODE) if text.startswith(CODE) else None


def is_file(text: str) -> bool:
    """Return whether ``text`` is the path of a file."""
    return not text.startswith((HUB, CODE))


def anchored(text: str, folder: Path, *, may_be_id: bool = True) -> str:
    """Make a path absolute, relative to ``folder``; ids at the Hub become ``hf:ID``, import paths are unchanged.

    Args:
        may_be_id: treat OWNER/NAME as an id if ``folder`` has no OWNER.
    """
    if is_file(text):
        file = text.partition("@[")[0]
        is_id = may_be_id and is_hub_id(file, folder) and not file.endswith(_FILE_EXTENSIONS)
        return HUB + text if is_id else str(folder / text)
    name = hub_name(text)
    if name and Path(folder, name).is_dir():
        return HUB + str(folder / text.removeprefix(HUB))
    return text


def parse_path(text: str) -> tuple[Path, int, int]:
    """Parse ``FILE`` or ``FILE@[a:b]`` into (file, first line, line after the last), counted from 0.

    Raises:
        ValueError: the slice is invalid or empty.
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
