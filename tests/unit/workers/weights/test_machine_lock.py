"""Who waits for a lock of this machine accuses its holder of what he has seen alone."""

import fcntl
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import PublishError
from penstock.records.cause import Cause
from penstock.records.worker_causes import FolderLocked
from penstock.workers.weights import machine_lock
from penstock.workers.weights.machine_lock import LOOK_COUNTS_S, STILL_S, Stopped, alone_in


class Clock:
    """That of who waits: each pause between two looks takes the next of ``pauses``, and the wait ends after them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pauses: Iterator[float] = iter(())
        self.is_over = False

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _: float) -> None:
        pause_s = next(self.pauses, 0.0)
        self.now_s += pause_s
        self.is_over = not pause_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(machine_lock, "time", SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / ".lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path


def wait(file: Path, clock: Clock, pauses: Iterable[float]) -> set[int]:
    """Process ids of the holder, looked at with these pauses."""
    said: list[Cause | None] = []
    clock.pauses, clock.is_over = iter(pauses), False
    with pytest.raises(Stopped), alone_in(file, said.append, lambda: clock.is_over):
        pytest.fail("it is held")
    return {cause.process for cause in said if isinstance(cause, FolderLocked)}


def every(of_s: float, for_s: float) -> list[float]:
    return [of_s] * int(for_s / of_s)


def test_who_stood_still_himself_accuses_nobody(file: Path, clock: Clock) -> None:
    """As in a container that was paused, with its holder."""
    file.write_text("4711")
    pauses = [2 * STILL_S, *every(0.1, STILL_S - LOOK_COUNTS_S - 0.5)]
    assert wait(file, clock, pauses) == {4711}
    with pytest.raises(PublishError, match=r"process 4711 of this machine holds .* been stalled for 30 s"):
        wait(file, clock, [*pauses, *every(0.1, LOOK_COUNTS_S + 1)])


def test_who_never_signed_cannot_be_seen_to_stand_still(file: Path, clock: Clock) -> None:
    assert wait(file, clock, every(0.5, 3 * STILL_S)) == {0}


def test_who_signed_on_a_full_disk_can(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    file = tmp_path / ".lock"
    monkeypatch.setattr(machine_lock.os, "pwrite", full)
    with (
        alone_in(file),
        pytest.raises(PublishError, match=r"another process of this machine holds .* been stalled"),
    ):
        wait(file, clock, every(0.5, STILL_S + 2))
