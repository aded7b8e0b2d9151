"""Objects in a folder, and in what fsspec knows."""

import io
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from penstock.errors import PublishError
from penstock.weights.deltas import objects
from penstock.weights.deltas.objects import FolderObjects, FsspecObjects, ObjectStore, fetch, listed, open_objects


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return open_objects(str(tmp_path / "store"))
    return open_objects(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path.name}/store")


def test_what_was_put_is_listed_measured_and_read(store: ObjectStore, tmp_path: Path) -> None:
    assert listed(store) == []
    (tmp_path / "a").write_bytes(b"0123456789")

    store.put("g/a", tmp_path / "a")
    store.mark("g/whole")

    assert sorted(listed(store)) == ["g/a", "g/whole"]
    assert (store.size("g/a"), store.size("g/whole")) == (10, 0)
    with store.open_range("g/a", 2, 5) as stream:
        assert stream.read(3) == b"234"
    assert fetch(store, "g/a", tmp_path / "b", 10) == 10
    assert (tmp_path / "b").read_bytes() == b"0123456789"
    store.delete("g/whole")
    store.delete("g/whole")
    store.delete("g/a")
    assert listed(store) == []


def test_what_a_killed_writer_left_is_replaced(store: ObjectStore, tmp_path: Path) -> None:
    for text in ("old", "newer"):
        (tmp_path / text).write_text(text)
        store.put("g/a", tmp_path / text)
        store.put("g/a", tmp_path / text)

    assert listed(store) == ["g/a"]
    assert store.size("g/a") == 5


def test_a_folder_of_the_same_file_system_takes_no_room(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")

    FolderObjects(tmp_path / "store").put("g/a", tmp_path / "a")

    assert os.stat(tmp_path / "a").st_nlink == 2


def test_what_is_gone_or_too_large_is_one_error(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    store.put("g/a", tmp_path / "a")

    with pytest.raises(PublishError, match="not in the store of deltas any more"):
        fetch(store, "g/b", tmp_path / "b", 100)
    with pytest.raises(PublishError, match="more than the 9"):
        fetch(store, "g/a", tmp_path / "c", 9)


class Shaky:
    """Gives a few bytes at a time, and fails in between."""

    def __init__(self, data: bytes, failures: int) -> None:
        self.data, self.failures, self.asked = data, failures, []

    def names(self) -> list[str]:
        raise OSError("no answer")

    def size(self, name: str) -> int:
        return len(self.data)

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        self.asked.append(start)
        if self.failures and len(self.asked) % 2:
            self.failures -= 1
            raise OSError("cut off")
        return io.BytesIO(self.data[start : min(end, start + 3)])


def test_a_range_that_was_cut_off_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "AGAIN_S", 0)
    shaky = Shaky(b"0123456789", failures=3)

    fetch(shaky, "x", tmp_path / "a", 10)

    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert shaky.asked == [0, 0, 3, 3, 6, 6, 9]


def test_a_store_that_never_answers_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "AGAIN_S", 0)

    class Dead(Shaky):
        def open_range(self, name: str, start: int, end: int) -> BinaryIO:
            raise OSError("cut off")

    with pytest.raises(PublishError, match="cannot be fetched from the store of deltas: cut off"):
        fetch(Dead(b"abc", 0), "x", tmp_path / "a", 10)
    with pytest.raises(PublishError, match="does not list what it has"):
        listed(Dead(b"", 0))


def test_errors_of_a_stores_own_are_translated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = FsspecObjects("memory://errors")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("AccessDenied")

    monkeypatch.setattr(store._fs, "size", fail)
    with pytest.raises(OSError, match="AccessDenied"):
        store.size("g/a")
