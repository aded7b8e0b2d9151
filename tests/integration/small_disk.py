"""A file system that is quickly full: a small tmpfs, mounted by the test."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.missing import lack
from tests.small_disks import fill, mount, unmount

#: Between two fillings of a disk that others write to and delete from.
REFILL_S = 0.05


class SmallDisk:
    """A folder on a file system of its own, to be filled and emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / ".ballast"
        self._is_over = threading.Event()
        self._filling: threading.Thread | None = None

    def fill(self) -> None:
        """Leave no room at all until ``make_room``: what others give back meanwhile is taken as well."""
        fill(self._ballast)
        self._is_over.clear()
        self._filling = threading.Thread(target=self._stay_full, name="ballast", daemon=True)
        self._filling.start()

    def make_room(self) -> None:
        """Everything that ``fill`` took is free again."""
        self.let_be()
        self._ballast.unlink()

    def let_be(self) -> None:
        """Fill it no more."""
        self._is_over.set()
        if self._filling:
            self._filling.join()

    def _stay_full(self) -> None:
        while not self._is_over.wait(REFILL_S):
            fill(self._ballast)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str, int], SmallDisk]]:
    """``small_disk(NAME, MEGABYTES)``; where nothing may be mounted the test is skipped, and fails in CI."""
    mounted: list[SmallDisk] = []

    def make(name: str, megabytes: int) -> SmallDisk:
        path = tmp_path / name
        path.mkdir()
        if why := mount(path, megabytes):
            lack(f"a small disk cannot be mounted: {why}")
        mounted.append(SmallDisk(path))
        return mounted[-1]

    yield make
    for disk in mounted:
        disk.let_be()
        unmount(disk.path)
