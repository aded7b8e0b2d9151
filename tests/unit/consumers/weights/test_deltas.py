"""Which versions a trainer puts into the store whole, which by a delta, and what it deletes there."""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.consumers.clock import versions_in
from penstock.consumers.weights.deltas import Deltas
from penstock.consumers.weights.write import Written
from penstock.errors import PublishError
from penstock.records.publication import Publication
from penstock.weights.delta_store import Catalog, DeltaStore, catalog_of, find_chain
from tests.unit.penstock.weights.deltas.version_folders import a_model, moved, publish


class Line:
    """A trainer's versions, each a small step after the one before."""

    def __init__(self, tmp_path: Path, anchor_every: int = 4) -> None:
        self.path, self.anchor_every = tmp_path, anchor_every
        self.store = DeltaStore(str(tmp_path / "store"))
        self.in_use: set[int] = set()
        self.model = a_model(size=300)
        self.announced: Publication | None = None
        self.abandoned: list[list[int]] = []
        self.written: dict[int, Written] = {}
        self.restart()

    def restart(self) -> None:
        self.deltas = Deltas(self.store, self.anchor_every, lambda: self.in_use)

    def write(self, version: int) -> Written:
        self.model = moved(self.model, version)
        self.written[version] = publish(self.path, version, self.model)
        return self.written[version]

    def announce(self, version: int) -> None:
        written = self.written[version]
        self.announced = Publication("m", version, "delta", str(written.path), index=written.index_digest)

    def publish(self, version: int) -> None:
        self.deltas.put(self.write(version), version, self.announced, self.abandoned)
        self.announce(version)

    @property
    def catalog(self) -> Catalog:
        return catalog_of(self.store.names())

    @property
    def anchors(self) -> list[int]:
        return [one.version for one in self.catalog.anchors]

    @property
    def steps(self) -> list[tuple[int, int]]:
        return [(one.base_version, one.version) for one in self.catalog.deltas]


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_the_first_version_is_whole_and_the_next_ones_are_deltas(line: Line) -> None:
    for version in (1, 2, 3):
        line.publish(version)

    assert line.anchors == [1]
    assert line.steps == [(1, 2), (2, 3)]
    assert line.deltas.last is not None
    assert not line.deltas.last.is_anchor


def test_every_so_many_versions_one_is_whole_and_a_delta_leads_there_too(line: Line) -> None:
    line.in_use = {1}
    for version in range(1, 10):
        line.publish(version)

    assert line.anchors == [1, 5, 9]
    assert line.steps == [(v, v + 1) for v in range(1, 9)]


def test_what_nobody_needs_is_deleted(line: Line) -> None:
    for version in range(1, 11):
        line.publish(version)

    assert line.anchors == [9]
    assert line.steps == [(9, 10)]


def test_what_somebody_holds_can_be_reached_and_left(line: Line) -> None:
    line.in_use = {3}
    for version in range(1, 11):
        line.publish(version)

    assert line.anchors == [1, 9]
    assert line.steps == [(v, v + 1) for v in range(1, 10)]


def test_a_new_process_begins_with_a_whole_version(line: Line) -> None:
    line.publish(1)
    line.restart()

    line.publish(2)
    assert line.anchors == [1, 2], "the first one is announced still"
    line.publish(3)

    assert line.anchors == [2]
    assert line.steps == [(2, 3)]


@pytest.mark.parametrize("at", ["put", "mark"])
def test_who_goes_on_after_its_successor_takes_nothing_of_it_away(line: Line, at: str) -> None:
    """A trainer that is stopped past its lease (SIGSTOP), in a first version or a later one, and then goes on."""

    class Stopped(DeltaStore):
        has_stopped = False

        def put(self, name: str, path: Path) -> None:
            super().put(name, path)
            if at == "put" and not self.has_stopped:
                self.stop()

        def mark(self, name: str) -> None:
            super().mark(name)
            if at == "mark" and not self.has_stopped:
                self.stop()

        def stop(self) -> None:
            self.has_stopped = True
            line.restart()
            line.publish(3)

    line.publish(1)
    before = line.announced
    stopped = Deltas(Stopped(str(line.path / "store")), line.anchor_every, lambda: line.in_use)
    stopped.put(line.write(2), 2, before, [])
    assert line.announced is not None
    assert find_chain(line.catalog, line.announced.index, ()), "what is announced can be come to"
    line.publish(4)
    assert line.steps[-1] == (3, 4)


def test_a_store_that_deletes_nothing_has_the_version_all_the_same(
    line: Line, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hiccup, or credentials that may write alone: no reason to end a training."""

    def refuse(self: DeltaStore, name: str) -> None:
        raise OSError("AccessDenied")

    with monkeypatch.context() as patch:
        patch.setattr(DeltaStore, "delete", refuse)
        for version in range(1, 7):
            line.publish(version)
        assert line.anchors == [1, 5]
        assert "AccessDenied" in caplog.text
    line.publish(7)
    assert line.anchors == [5], "it is made up for"


def test_who_begins_after_its_successor_leaves_what_that_puts(line: Line) -> None:
    line.publish(1)
    half = f"v00000003-{'c' * 32}/model.safetensors"
    line.store.put(half, line.written[1].path / "config.json")
    line.restart()
    line.publish(2)
    assert half in line.store.names()


def test_after_a_rewind_a_version_is_whole(line: Line) -> None:
    for version in (1, 2, 3):
        line.publish(version)
    line.abandoned = [[2, 3]]

    line.publish(4)
    assert line.anchors == [1, 4]
    assert line.steps == [(1, 2), (2, 3)]
    line.publish(5)

    assert line.anchors == [4]
    assert line.steps == [(4, 5)]


def test_a_version_that_was_never_announced_is_no_base(line: Line) -> None:
    """slime 2104: the base must not move before the others have heard of it."""
    line.publish(1)
    line.deltas.put(line.write(2), 2, line.announced, [])

    line.publish(3)

    assert (1, 3) in line.steps
    assert all(base != 2 for base, _ in line.steps)


def test_a_tick_between_changes_nothing(line: Line) -> None:
    line.publish(1)
    line.announced = Publication("m", 2, "disk", str(line.written[1].path), index=line.written[1].index_digest)

    line.publish(3)

    assert line.steps == [(2, 3)]
    chain = find_chain(line.catalog, line.written[3].index_digest, ())
    assert chain is not None
    assert chain.start is not None


def test_the_same_weights_again_need_no_delta(line: Line) -> None:
    line.publish(1)
    again = publish(line.path, 2, line.model)

    line.deltas.put(again, 2, line.announced, [])

    assert line.anchors == [2]
    assert line.steps == []


def test_a_base_that_is_damaged_costs_a_whole_version_and_is_said(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    line.publish(1)
    (line.written[1].path / "weights.index").write_bytes(b"junk")

    line.publish(2)

    assert line.anchors == [1, 2]
    assert line.steps == []
    assert "no delta can be made" in caplog.text


@pytest.mark.parametrize("calls", range(1, 10))
def test_a_kill_between_any_two_acts_leaves_nothing_that_is_taken_for_whole(
    line: Line, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.publish(1)
    line.publish(2)
    last = line.written[2].index_digest
    counter = itertools.count()

    class Killed(BaseException):
        pass

    def dying(act: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            if next(counter) >= calls:
                raise Killed
            act(*args)

        return call

    for name in ("put", "mark", "delete"):
        monkeypatch.setattr(line.store, name, dying(getattr(line.store, name)))
    written = line.write(3)
    line.deltas._anchored = -10
    with contextlib.suppress(Killed):
        line.deltas.put(written, 3, line.announced, [])
    monkeypatch.undo()

    for digest in (last, *([written.index_digest] if line.catalog.anchors[-1].version == 3 else [])):
        if (way := find_chain(line.catalog, digest, ())) is not None:
            for group in [way.start.group if way.start else "", *(delta.group for delta in way.deltas)]:
                names = {name for name in line.store.names() if name.startswith(group)}
                assert f"{group}/delta" in names or f"{group}/weights.index" in names
    line.restart()
    line.publish(4)
    assert line.anchors[-1] == 4
    assert {name.partition("/")[0] for name in line.store.names()} == {
        one.group for one in (*line.catalog.anchors, *line.catalog.deltas)
    }


def test_a_store_that_refuses_is_one_error(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(line.store, "put", refuse)
    with pytest.raises(PublishError, match=r"trainer\.delta_store: read-only"):
        line.publish(1)


def test_the_store_may_lie_beside_the_versions(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.store = DeltaStore(str(tmp_path / "weights" / "deltas"))
    line.restart()

    line.publish(1)
    line.publish(2)

    assert line.steps == [(1, 2)]
    assert versions_in(tmp_path / "weights") == [1, 2]
