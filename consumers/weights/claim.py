"""The newest number that a trainer claimed for a version, in the folder of weights: it outlives Redis and processes.

A number is claimed before anybody hears of it, so that it never names two sets of weights (T1), though its folder may
never come and Redis may forget its announcement.
"""

import os
from pathlib import Path

from penstock.errors import DiskFull, PublishError
from penstock.system.disk import is_full, put

CLAIMED = "claimed"
_MOST_BYTES = 32


def claimed(folder: Path) -> int:
    """The newest number that was claimed; 0: none. Blocks for a small file. Raises PublishError."""
    path = folder / CLAIMED
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return 0
    except OSError as exc:
        raise PublishError(f"{path} cannot be read ({exc}): it says which versions were begun.") from exc
    if not text.strip().isdigit():
        raise PublishError(f"{path} holds no number: write the newest version that anybody has seen into it.")
    return int(text)


def claim(folder: Path, version: int) -> None:
    """Claim a number, above every one before. Blocks until it is on the disk. Raises PublishError, DiskFull."""
    path = folder / CLAIMED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put(path, f"{version}\n", 0o644)
        for synced in (path, folder):
            handle = os.open(synced, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError as exc:
        kind = DiskFull if is_full(exc) else PublishError
        raise kind(f"version {version} cannot be claimed in {path}: {exc}.") from exc
