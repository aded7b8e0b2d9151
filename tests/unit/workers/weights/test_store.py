"""Workers of one machine fetch a version once: who waits for another one names it, and not for ever."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from penstock.errors import PublishError
from penstock.records.causes import LockHolderStalled, WeightsDiskFull, WeightsFetched, WeightsOverLimit
from penstock.workers.weights import fetched_versions, machine_lock
from penstock.workers.weights.download import Progress
from penstock.workers.weights.fetched_versions import FetchedVersions, Hold


async def test_I8_a_worker_that_stands_still_in_a_fetch_is_named_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_lock, "STILL_S", 0.2)
    store, progress, lock = FetchedVersions(tmp_path, 2**20), Progress(), tmp_path / ".lock"
    with lock.open("w") as held:  # and nobody says so
        held.write("4711")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            PublishError, match=r"process 4711 of this machine holds .* been stalled for 0.2 s"
        ) as caught:
            async with store.fetching(progress.blocked_on):
                pytest.fail("two fetch at once")
        assert caught.value.cause == LockHolderStalled(4711, str(lock))
        assert progress.cause == WeightsFetched(0, folder=str(tmp_path), process=4711)
        named = progress.cause
    async with store.fetching(progress.blocked_on):
        assert lock.read_text() == str(os.getpid())
    assert progress.cause is named, "no other process was waited for"


def test_what_is_being_deleted_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = FetchedVersions(tmp_path, 2**20), tmp_path / "v1"
    path.mkdir()
    held = Hold(path)
    assert not store.remove(path), "it is used"
    held.close()
    deleted: list[Path] = []

    def delete(doomed: Path) -> None:
        with pytest.raises(BlockingIOError):
            Hold(doomed)
        deleted.append(doomed)

    monkeypatch.setattr(shutil, "rmtree", delete)
    assert store.remove(path)
    assert [one.name for one in deleted] == [".gone-v1"]


def test_what_was_deleted_before_it_was_held_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = tmp_path / "v1", fcntl.flock
    path.mkdir()

    def late(handle: int, how: int) -> None:
        path.rename(tmp_path / "elsewhere")
        path.mkdir()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileNotFoundError, match="v1 was deleted"):
        Hold(path)


def test_weights_that_do_not_fit_carry_the_limit_as_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `penstock why` names the key to raise, not a version to publish again."""
    store = FetchedVersions(tmp_path, 100)
    with pytest.raises(PublishError, match=r"more than serving\.max_bytes") as caught:
        store.make_room("v2", 101)
    assert caught.value.cause == WeightsOverLimit("serving.max_bytes", str(tmp_path), 101, 0)

    monkeypatch.setattr(fetched_versions, "free_bytes", lambda folder: 7)
    with pytest.raises(PublishError, match="no room for more than 7 on the disk") as caught:
        store.make_room("v2", 99)
    assert caught.value.cause == WeightsDiskFull(str(tmp_path), 99, 7)
