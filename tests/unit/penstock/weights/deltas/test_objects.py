"""Objects in a folder, and in what fsspec knows."""

import io
import os
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.errors import ConfigError, PublishError
from penstock.weights.deltas import objects
from penstock.weights.deltas.objects import FolderObjects, ObjectStore, fetch, listed, open_objects


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


class Moody(MemoryFileSystem):
    """A store that may refuse, or lose its connections."""

    protocol = "moody"
    refuses = False
    made: ClassVar[list["Moody"]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self.refuses:
            raise ConnectionRefusedError(111, "Connection refused")
        super().__init__(*args, **kwargs)
        self.is_lost = False
        self.made.append(self)

    def size(self, path: str) -> int:
        if self.is_lost:
            raise EOFError
        return int(super().size(path))


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> type[Moody]:
    fsspec.register_implementation("moody", Moody, clobber=True)
    monkeypatch.setattr(Moody, "made", [])
    return Moody


def test_a_store_that_refuses_is_asked_again(moody: type[Moody], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moody, "refuses", True)
    store = open_objects("moody://refuses")
    with pytest.raises(PublishError, match=r"does not list what it has .*refused"):
        listed(store)

    monkeypatch.setattr(moody, "refuses", False)

    assert listed(store) == []


def test_a_connection_that_broke_is_made_again(moody: type[Moody]) -> None:
    store = open_objects("moody://breaks")
    store.mark("g/whole")
    moody.made[-1].is_lost = True

    with pytest.raises(OSError, match=r"g/whole in the object store: EOFError\(\)"):
        store.size("g/whole")

    assert store.size("g/whole") == 0
    assert listed(store) == ["g/whole"]


def test_what_is_not_there_is_an_answer_and_no_broken_connection(moody: type[Moody]) -> None:
    store = open_objects("moody://answers")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            store.size("g/none")

    assert len(moody.made) == 1


@pytest.mark.parametrize("place", ["nothing://a", "simplecache::nothing://a"])
def test_a_store_that_nobody_knows_is_refused_at_once(place: str) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_objects(place)


@pytest.mark.timeout(20)
def test_a_fifo_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    os.mkfifo(tmp_path / "g" / "a")
    with pytest.raises(OSError, match="no plain file"):
        FolderObjects(tmp_path).open_range("g/a", 0, 1)
