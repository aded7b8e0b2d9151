"""A file system that is quickly full: a small tmpfs, mounted by the test."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.missing import lack


class SmallDisk:
    """A folder on a file system of its own, to be filled and emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / ".ballast"

    def fill(self) -> None:
        """Leave no room at all."""
        file = os.open(self._ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file, bytes(size))
        finally:
            os.close(file)
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
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "penstock-test", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            lack("a small disk cannot be mounted: there is no mount here")
        if done.returncode:
            lack(f"a small disk cannot be mounted: {done.stderr.strip()}")
        mounted.append(path)
        return SmallDisk(path)

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)
