"""Claim version numbers in the folder of weights, where claims outlive Redis and processes.

A number is claimed before it is announced, so that it never names two sets of weights (T1), even if its folder is never
written and Redis loses the announcement. Each claim is an empty file, ``claimed-00000042``, created exclusively: only
one of two competing trainers gets the number, and a late one undoes nothing.
"""

import os
from pathlib import Path

from penstock.errors import DiskFull, PublishError
from penstock.system.disk import fsync, is_full

CLAIMED = "claimed-"


def claimed(folder: Path) -> int:
    """Return the highest claimed number; 0: none. Blocks while it lists a folder. Raises PublishError."""
    return max(_claims(folder), default=0)


def claim(folder: Path, version: int) -> None:
    """Claim a number higher than all before. Blocks until the claim is on the disk.

    Raises:
        PublishError: it or a later one is claimed already, or a disk error.
        DiskFull: the disk is full.
    """
    file, is_made = folder / f"{CLAIMED}{version:08d}", False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch(0o644, exist_ok=False)
        is_made = True
        fsync(folder)
    except FileExistsError as exc:
        raise PublishError(f"version {version} was claimed by another trainer in {folder}: end one of them.") from exc
    except OSError as exc:
        if is_made:  # otherwise a retry would fail
            file.unlink(missing_ok=True)
        kind = DiskFull if is_full(exc) else PublishError
        raise kind(f"version {version} cannot be claimed in {folder}: {exc}.") from exc
    claims = _claims(folder)
    if max(claims, default=version) > version:
        file.unlink(missing_ok=True)
        raise PublishError(
            f"version {version} cannot be claimed in {folder}: another trainer claimed {max(claims)}; end one of them."
        )
    for old in claims:
        if old < version:
            (folder / f"{CLAIMED}{old:08d}").unlink(missing_ok=True)


def _claims(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise PublishError(f"{folder} cannot be read ({exc}): it says which versions were begun.") from exc
    numbers = [name.removeprefix(CLAIMED) for name in names if name.startswith(CLAIMED)]
    return [int(number) for number in numbers if number.isdigit()]
