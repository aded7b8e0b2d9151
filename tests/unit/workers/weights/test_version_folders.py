"""Workers of one machine share proven versions: one makes them at a time, and none is deleted that is used."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from penstock.errors import PublishError
from penstock.records.cause import Cause
from penstock.records.publication import Publication
from penstock.records.worker_causes import FolderLocked, LockHolderStalled, WeightsDiskFull, WeightsOverLimit
from penstock.weights.serving import object_name
from penstock.workers.weights import machine_lock, version_folders
from penstock.workers.weights.machine_lock import alone_in
from penstock.workers.weights.version_folders import Fetched, Hold, VersionFolders
from tests.integration.fetch_parts import make_version


class Folders(VersionFolders):
    """Folders in which nothing is made."""

    def make(self, publication: Publication) -> tuple[Path, Fetched]:
        raise AssertionError(publication)


def folders_in(folder: Path, max_bytes: int = 2**20) -> VersionFolders:
    return Folders(folder, max_bytes, "serving.max_bytes")


def test_I8_a_worker_that_stands_still_in_a_fetch_is_named_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_lock, "STILL_S", 0.2)
    lock, said = folders_in(tmp_path).lock_file(), list[Cause | None]()
    with lock.open("w") as held:  # and nobody says so
        held.write("4711")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(
                PublishError, match=r"process 4711 of this machine holds .* been stalled for 0.2 s"
            ) as caught,
            alone_in(lock, said.append),
        ):
            pytest.fail("two fetch at once")
        assert caught.value.cause == LockHolderStalled(4711, str(lock))
        assert set(said) == {FolderLocked(4711, str(tmp_path))}
    with alone_in(lock, said.append):
        assert lock.read_text() == str(os.getpid())


def test_a_held_version_is_proven_once_and_a_damaged_one_is_deleted_when_no_engine_may_read_it(tmp_path: Path) -> None:
    made = make_version(tmp_path / "published", num_bytes=100)
    path = tmp_path / "fetched" / object_name(1, made.index)
    shutil.copytree(made.folder, path)
    first, second = folders_in(tmp_path / "fetched"), folders_in(tmp_path / "fetched")
    assert first.find(made.index, repairs=False) == path
    (path / "config.json").write_text("[]")
    assert first.find(made.index, repairs=True) == path, "its engine may read it, and it was proven"
    assert second.find(made.index, repairs=False) is None
    with pytest.raises(PublishError, match=f"{path} is damaged, and an engine of this machine may read it"):
        second.find(made.index, repairs=True)
    assert path.exists()
    first.close()
    assert second.find(made.index, repairs=True) is None
    assert not path.exists()


def test_what_is_being_deleted_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = folders_in(tmp_path), tmp_path / "v1"
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
    store = folders_in(tmp_path, 100)
    with pytest.raises(PublishError, match=r"more than serving\.max_bytes") as caught:
        store.make_room(101)
    assert caught.value.cause == WeightsOverLimit("serving.max_bytes", str(tmp_path), 101, 0)

    monkeypatch.setattr(version_folders, "free_bytes", lambda folder: 7)
    with pytest.raises(PublishError, match="no room for more than 7 on the disk") as caught:
        store.make_room(99)
    assert caught.value.cause == WeightsDiskFull(str(tmp_path), 99, 7)
