"""Addresses of payload folders: ``file:///FOLDER``."""

from pathlib import Path
from urllib.parse import unquote

SCHEME = "file://"


def is_folder(url: str) -> bool:
    """Return whether this is the address of a folder, not of a Redis."""
    return url.startswith(SCHEME)


def path_of(url: str) -> Path:
    """Return the folder of an address; raise ValueError that says what to write if it names none."""
    path = Path(unquote(url.removeprefix(SCHEME)))
    if not path.is_absolute():
        raise ValueError(f"names no folder: write {SCHEME}/FOLDER, an absolute path that all machines share")
    return path
