"""Objects in a folder, and in any store that fsspec knows."""

import os
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from penstock.errors import ConfigError, PublishError
from penstock.weights.delta_store import READER, DeltaStore


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DeltaStore:
    if request.param == "folder":
        return DeltaStore(str(tmp_path / "store"))
    return DeltaStore(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path.name}/store")


def test_what_was_put_is_listed_measured_and_read(store: DeltaStore, tmp_path: Path) -> None:
    assert store.names() == []
    (tmp_path / "a").write_bytes(b"0123456789")

    store.put("g/a", tmp_path / "a")
    store.mark("g/whole")

    assert sorted(store.names()) == ["g/a", "g/whole"]
    assert store.fetch("g/whole", tmp_path / "c", 10) == 0
    assert store.fetch("g/a", tmp_path / "b", 10) == 10
    assert (tmp_path / "b").read_bytes() == b"0123456789"
    store.delete("g/whole")
    store.delete("g/whole")
    store.delete("g/a")
    assert store.names() == []


def test_what_a_killed_writer_left_is_replaced(store: DeltaStore, tmp_path: Path) -> None:
    for text in ("old", "newer"):
        (tmp_path / text).write_text(text)
        store.put("g/a", tmp_path / text)
        store.put("g/a", tmp_path / text)

    assert store.names() == ["g/a"]
    assert store.fetch("g/a", tmp_path / "a", 10) == 5


def test_a_folder_of_the_same_file_system_takes_no_room(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")

    DeltaStore(str(tmp_path / "store")).put("g/a", tmp_path / "a")

    assert os.stat(tmp_path / "a").st_nlink == 2


def test_what_is_gone_or_too_large_is_one_error(store: DeltaStore, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    store.put("g/a", tmp_path / "a")

    with pytest.raises(PublishError, match="not in the delta store any more"):
        store.fetch("g/b", tmp_path / "b", 100)
    with pytest.raises(PublishError, match="more than the 9"):
        store.fetch("g/a", tmp_path / "c", 9)


QUICK = READER._replace(first_pause_s=0, longest_pause_s=0)


class Shaky(LocalFileSystem):
    """Returns a few bytes at a time, and fails in between."""

    def __init__(self, data: bytes, failures: float) -> None:
        super().__init__(skip_instance_cache=True)
        self.data, self.failures, self.requested = data, failures, list[int]()

    def find(self, *_: Any, **__: Any) -> list[str]:
        raise OSError("no answer")

    def size(self, path: str) -> int:
        return len(self.data)

    def cat_file(self, path: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
        self.requested.append(start)
        if self.failures and (len(self.requested) % 2 or self.failures > 100):
            self.failures -= 1
            raise OSError("cut off")
        return self.data[start : min(end, start + 3)]


def shaky_store(shaky: Shaky) -> DeltaStore:
    store = DeltaStore("/nowhere", QUICK)
    store._connect = lambda: setattr(store, "_fs", shaky)  # type: ignore[method-assign]
    return store


def test_an_interrupted_range_resumes_where_it_ended(tmp_path: Path) -> None:
    shaky = Shaky(b"0123456789", failures=3)

    shaky_store(shaky).fetch("x", tmp_path / "a", 10)

    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert shaky.requested == [0, 0, 3, 3, 6, 6, 9]


def test_a_store_that_never_answers_is_one_error(tmp_path: Path) -> None:
    shaky = Shaky(b"abc", failures=1000)

    with pytest.raises(PublishError, match="x cannot be fetched from the delta store: cut off"):
        shaky_store(shaky).fetch("x", tmp_path / "a", 10)
    assert len(shaky.requested) == READER.attempts
    with pytest.raises(PublishError, match="does not list what it has"):
        shaky_store(shaky).names()


def test_an_object_that_ends_early_is_one_error(tmp_path: Path) -> None:
    shaky = Shaky(b"abc", failures=0)
    shaky.size = lambda path: 10  # type: ignore[method-assign]

    with pytest.raises(PublishError, match="x cannot be fetched from the delta store: it ends at byte 3"):
        shaky_store(shaky).fetch("x", tmp_path / "a", 10)


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
    store = DeltaStore("moody://refuses", QUICK)
    with pytest.raises(PublishError, match=r"does not list what it has .*refused"):
        store.names()

    monkeypatch.setattr(moody, "refuses", False)

    assert store.names() == []


def test_a_lost_connection_is_made_again(moody: type[Moody], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DeltaStore("moody://breaks", QUICK)
    store.mark("g/whole")
    moody.made[-1].is_lost = True

    assert store.fetch("g/whole", tmp_path / "a", 10) == 0

    assert "g/whole in the object store: EOFError()" in caplog.text
    assert len(moody.made) == 2
    assert store.names() == ["g/whole"]


def test_a_missing_object_is_an_answer_and_no_lost_connection(moody: type[Moody], tmp_path: Path) -> None:
    store = DeltaStore("moody://answers", QUICK)
    for name in ("a", "b"):
        with pytest.raises(PublishError, match="g/none is not in the delta store any more"):
            store.fetch("g/none", tmp_path / name, 10)

    assert len(moody.made) == 1


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    assert DeltaStore(str(tmp_path / "none"), QUICK).names() == []
    monkeypatch.setattr(LocalFileSystem, "ls", refuse)
    with pytest.raises(PublishError, match=r"does not list what it has \(.*Permission denied"):
        DeltaStore(str(tmp_path), QUICK).names()


@pytest.mark.parametrize("place", ["nothing://a", "simplecache::nothing://a"])
def test_a_store_that_nobody_knows_is_refused_at_once(place: str) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        DeltaStore(place)


@pytest.mark.timeout(20)
def test_a_fifo_blocks_no_reader(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    os.mkfifo(tmp_path / "g" / "a")
    assert DeltaStore(str(tmp_path)).fetch("g/a", tmp_path / "b", 10) == 0
