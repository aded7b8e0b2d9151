"""An object store that breaks off what a trainer puts there, as S3 and its kin do now and then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.consumers.weights.deltas import Deltas
from penstock.consumers.weights.write import Written
from penstock.errors import PublishError
from penstock.records.cause import Cause
from penstock.records.causes import ObjectStoreFailing
from penstock.records.publication import Publication
from penstock.weights.delta_store import WRITER, DeltaStore, catalog_of
from tests.unit.penstock.weights.deltas.version_folders import a_model, moved, publish

QUICK = WRITER._replace(first_pause_s=0.001, longest_pause_s=0.001)


class Store(DeltaStore):
    """One in memory, through fsspec. The next ``resets`` calls that write are broken off."""

    def __init__(self, name: str) -> None:
        super().__init__(f"memory://{name}/store", QUICK)
        super()._connect()
        self.resets = 0
        self.written: list[str] = []
        real, self._put_file, self._pipe_file = self._fs, self._fs.put_file, self._fs.pipe_file
        self._fs = type("Fs", (type(real),), {"cachable": False})()
        self._fs.use_listings_cache = False
        self._fs.put_file, self._fs.pipe_file = self._half_put, self._piped
        self._breaking = self._fs

    def _connect(self) -> None:
        self._fs = self._breaking

    def _half_put(self, path: str, target: str, **_: Any) -> None:
        if self.resets:
            self.resets -= 1
            self._pipe_file(target, Path(path).read_bytes()[:100])
            raise ConnectionResetError(104, "Connection reset by peer")
        self._put_file(path, target)
        self.written.append(target)

    def _piped(self, target: str, data: bytes, **_: Any) -> None:
        self._pipe_file(target, data)
        self.written.append(target)
        if self.resets:
            self.resets -= 1
            raise RuntimeError("SlowDown")  # it has it all the same

    def bytes_of(self, group: str) -> dict[str, bytes]:
        return {name.rpartition("/")[2]: self._fs.cat_file(f"{self._root}/{name}") for name in self.of(group)}

    def of(self, group: str) -> list[str]:
        return [name for name in self.names() if name.startswith(f"{group}/")]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path.name)


def deltas(store: DeltaStore, blocked_on: Callable[[Cause | None], None]) -> Deltas:
    store._blocked_on = blocked_on
    return Deltas(store, 10, tuple)


def files(written: Written) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in written.path.iterdir()}


def test_a_put_that_was_broken_off_is_made_again_and_the_marker_comes_last(store: Store, tmp_path: Path) -> None:
    said: list[Cause | None] = []
    model = a_model(size=300)
    first, second = publish(tmp_path, 1, model), publish(tmp_path, 2, moved(model, 1))
    line = deltas(store, said.append)
    store.resets = 2
    line.put(first, 1, None, [])
    (anchor,) = catalog_of(store.names()).anchors
    assert store.bytes_of(anchor.group) == files(first) | {"whole": b""}
    assert store.written[-1].endswith("/whole")
    failing = [one for one in said if isinstance(one, ObjectStoreFailing)]
    assert any(one.written.startswith("v00000001") and "Connection reset by peer" in one.error for one in failing)
    assert said[-1] is None

    store.resets = 1
    line.put(second, 2, Publication("m", 1, "delta", str(first.path), index=first.index_digest), [])
    assert [one.version for one in catalog_of(store.names()).deltas] == [2]


def test_a_marker_whose_answer_was_lost_is_set_again(store: Store, tmp_path: Path) -> None:
    written = publish(tmp_path, 1, a_model(size=300))
    store._fs.put_file = store._put_file
    store.resets = 2
    deltas(store, lambda what: None).put(written, 1, None, [])
    assert [one.version for one in catalog_of(store.names()).anchors] == [1]
    assert store.resets == 0


def test_a_store_that_is_gone_for_long_fails_the_publication_marks_nothing_and_takes_it_later(
    store: Store, tmp_path: Path
) -> None:
    written, said = publish(tmp_path, 1, a_model(size=300)), []
    line = deltas(store, said.append)
    store.resets = 1000
    with pytest.raises(PublishError, match=r"cannot be put into trainer\.delta_store: .*Connection reset by peer"):
        line.put(written, 1, None, [])
    assert store.resets == 1000 - WRITER.attempts
    assert catalog_of(store.names()).anchors == []
    assert said[-1] is None
    store.resets = 0
    line.put(written, 1, None, [])
    (anchor,) = catalog_of(store.names()).anchors
    assert store.bytes_of(anchor.group) == files(written) | {"whole": b""}


def test_what_cannot_pass_is_tried_once(store: Store, tmp_path: Path) -> None:
    tries: list[str] = []

    def refuse(path: str, target: str) -> None:
        tries.append(target)
        raise PermissionError(13, "Permission denied")

    store._fs.put_file = refuse
    line = deltas(store, lambda what: None)
    with pytest.raises(PublishError, match="Permission denied"):
        line.put(publish(tmp_path, 1, a_model(size=300)), 1, None, [])
    assert len(tries) == 1


def test_what_a_killed_trainer_left_fails_nothing_where_it_cannot_be_deleted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(target: str) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    left = f"v00000001-{'0' * 32}/model.safetensors"
    store.put(left, publish(tmp_path, 1, a_model(size=300)).path / "config.json")
    monkeypatch.setattr(store._breaking, "rm_file", breaks_off)
    deltas(store, lambda what: None).put(publish(tmp_path, 2, a_model(size=300)), 2, None, [])
    assert [one.version for one in catalog_of(store.names()).anchors] == [2]
