"""Who waits for a lock of this machine accuses its holder of what he has seen alone."""

import fcntl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import PublishError
from penstock.workers.weights import machine_lock
from penstock.workers.weights.machine_lock import LOOK_COUNTS_S, STILL_S, MachineLock


class Clock:
    """That of who waits."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(machine_lock, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / ".lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path


def looks(lock: MachineLock, clock: Clock, of_s: float, for_s: float) -> set[int]:
    """Process ids of the holder, looked at every ``of_s`` seconds."""
    said = set()
    for _ in range(int(for_s / of_s)):
        clock.now_s += of_s
        assert not lock.try_acquire()
        said.add(lock.holder)
    return said


def test_who_stood_still_himself_accuses_nobody(file: Path, clock: Clock) -> None:
    """As in a container that was paused, with its holder."""
    file.write_text("4711")
    with closing(MachineLock(file)) as lock:
        assert not lock.try_acquire()
        assert looks(lock, clock, 2 * STILL_S, 2 * STILL_S) == {4711}
        assert looks(lock, clock, 0.1, STILL_S - LOOK_COUNTS_S - 0.5) == {4711}
        with pytest.raises(PublishError, match=r"process 4711 of this machine holds .* been stalled for 30 s"):
            looks(lock, clock, 0.1, LOOK_COUNTS_S + 1)


def test_who_never_signed_cannot_be_seen_to_stand_still(file: Path, clock: Clock) -> None:
    with closing(MachineLock(file)) as lock:
        assert looks(lock, clock, 0.5, 3 * STILL_S) == {0}


def test_who_signed_on_a_full_disk_can(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    file = tmp_path / ".lock"
    monkeypatch.setattr(machine_lock.os, "pwrite", full)
    with closing(MachineLock(file)) as holder, closing(MachineLock(file)) as lock:
        assert holder.try_acquire()
        with pytest.raises(PublishError, match=r"another process of this machine holds .* been stalled"):
            looks(lock, clock, 0.5, STILL_S + 2)
