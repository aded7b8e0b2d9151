"""A file system that is quickly full: a small tmpfs, mounted by the test."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.missing import lack
from tests.small_disks import fill, mount, unmount


class SmallDisk:
    """A folder on a file system of its own, to be filled and emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / ".ballast"

    def fill(self) -> None:
        """Leave no room at all."""
        fill(self._ballast)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (self.path / ".probe").write_bytes(b"x")

    def make_room(self) -> None:
        """Everything that ``fill`` took is free again."""
        self._ballast.unlink()
        (self.path / ".probe").unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str, int], SmallDisk]]:
    """``small_disk(NAME, MEGABYTES)``; where nothing may be mounted the test is skipped, and fails in CI."""
    mounted: list[Path] = []

    def make(name: str, megabytes: int) -> SmallDisk:
        path = tmp_path / name
        path.mkdir()
        if why := mount(path, megabytes):
            lack(f"a small disk cannot be mounted: {why}")
        mounted.append(path)
        return SmallDisk(path)

    yield make
    for path in mounted:
        unmount(path)
