"""Who waits for a lock of this machine accuses its holder of what he has seen alone."""

import fcntl
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import PublishError
from penstock.records.cause import Cause
from penstock.records.worker_causes import FolderLocked
from penstock.workers.weights import machine_lock
from penstock.workers.weights.machine_lock import LOOK_S, STILL_S, Stopped, alone_in

STALLED = int(STILL_S / LOOK_S) + 3


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_lock, "time", SimpleNamespace(sleep=lambda _: None))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / ".lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path


def wait(file: Path, num_looks: int) -> set[int]:
    """Process ids of the holder, looked at so often."""
    said: list[Cause | None] = []
    looks = itertools.count(1)
    with pytest.raises(Stopped), alone_in(file, said.append, lambda: next(looks) > num_looks):
        pytest.fail("it is held")
    return {cause.process for cause in said if isinstance(cause, FolderLocked)}


def test_a_holder_that_signed_and_renews_nothing_is_stalled(file: Path) -> None:
    """However long the pauses between two looks were, as in a container that was paused with its holder."""
    file.write_text("4711")
    assert wait(file, STALLED - 5) == {4711}
    with pytest.raises(PublishError, match=r"process 4711 of this machine holds .* been stalled for 30 s"):
        wait(file, STALLED)


def test_who_never_signed_cannot_be_seen_to_stand_still(file: Path) -> None:
    assert wait(file, 3 * STALLED) == {0}


def test_who_signed_on_a_full_disk_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    file = tmp_path / ".lock"
    monkeypatch.setattr(machine_lock.os, "pwrite", full)
    with (
        alone_in(file),
        pytest.raises(PublishError, match=r"another process of this machine holds .* been stalled"),
    ):
        wait(file, STALLED)
