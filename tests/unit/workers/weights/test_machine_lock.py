"""Who waits for a lock of this machine accuses its holder of what he has seen alone."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import PublishError
from penstock.workers.weights import machine_lock
from penstock.workers.weights.machine_lock import LOOK_COUNTS_S, STILL_S, Holder


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


def looks(holder: Holder, clock: Clock, of_s: float, for_s: float) -> set[int]:
    """Process ids of the holder, looked at every ``of_s`` seconds."""
    said = set()
    for _ in range(int(for_s / of_s)):
        clock.now_s += of_s
        said.add(holder.process())
    return said


def test_who_stood_still_himself_accuses_nobody(file: Path, clock: Clock) -> None:
    """As in a container that was paused, with its holder."""
    file.write_text("4711")
    with file.open() as handle:
        holder = Holder(handle.fileno(), file)
        holder.process()
        clock.now_s += 2 * STILL_S
        assert holder.process() == 4711
        assert looks(holder, clock, 0.1, STILL_S - LOOK_COUNTS_S - 0.5) == {4711}
        with pytest.raises(PublishError, match=r"process 4711 of this machine holds .* been stalled for 30 s"):
            looks(holder, clock, 0.1, LOOK_COUNTS_S + 1)


def test_who_never_signed_cannot_be_seen_to_stand_still(file: Path, clock: Clock) -> None:
    with file.open() as handle:
        assert looks(Holder(handle.fileno(), file), clock, 0.5, 3 * STILL_S) == {0}


def test_who_signed_on_a_full_disk_can(file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    with file.open("r+") as handle:
        monkeypatch.setattr(machine_lock.os, "pwrite", full)
        machine_lock._sign(handle.fileno())
        with pytest.raises(PublishError, match=r"another process of this machine holds .* been stalled"):
            looks(Holder(handle.fileno(), file), clock, 0.5, STILL_S + 2)
