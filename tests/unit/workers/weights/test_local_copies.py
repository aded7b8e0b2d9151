"""Copies on a worker's machine: made by the best way, proven, held, bounded; no base that is not there is believed."""

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DiskFull, PublishError
from penstock.records.worker_causes import WeightsDiskFull
from penstock.weights import delta_store
from penstock.weights.delta_store import DeltaStore
from penstock.workers.weights import local_copies, version_folders
from penstock.workers.weights.local_copies import LocalCopies
from penstock.workers.weights.machine_lock import Stopped
from penstock.workers.weights.version_folders import NoRoom
from tests.unit.consumers.weights.test_deltas import Line
from tests.unit.penstock.weights.deltas.test_delta_format import joined, split

GIB = 2**30


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Versions 1 to 6; whole are 1 and 5."""
    line = Line(tmp_path, anchor_every=4)
    line.in_use = {1}
    for version in range(1, 7):
        line.publish(version)
    return line


def copies_of(line: Line, name: str = "copies", max_bytes: int = GIB) -> LocalCopies:
    return LocalCopies(line.path / name, DeltaStore(str(line.path / "store")), max_bytes)


def get(copies: LocalCopies, line: Line, version: int, stopped: Callable[[], bool] = lambda: False) -> Path:
    line.announce(version)
    assert line.announced is not None
    path = copies.get(line.announced, stopped)
    assert contents(path) == contents(line.written[version].path)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def here(line: Line, name: str = "copies") -> list[int]:
    return sorted(int(path.name[1:9]) for path in (line.path / name).glob("v*"))


def spoil(path: Path) -> None:
    """Other bytes under the same name, of this file alone."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.unlink()
    path.write_bytes(data)


def last(copies: LocalCopies) -> tuple[bool, int]:
    return copies.last.is_whole, copies.last.num_deltas


def test_a_late_joiner_takes_the_nearest_anchor_and_its_chain(line: Line) -> None:
    copies = copies_of(line)

    get(copies, line, 6)

    assert last(copies) == (True, 1)


def test_who_has_a_version_takes_the_deltas_alone(line: Line) -> None:
    copies = copies_of(line)
    get(copies, line, 1)

    for version in (2, 4):
        before = contents(line.path / "copies" / get(copies, line, version).name)

    assert last(copies) == (False, 2)
    assert before == contents(line.written[4].path)
    assert copies.last.num_bytes < line.written[4].num_bytes / 2


def test_what_is_here_is_made_once_for_all_workers_of_a_machine(line: Line) -> None:
    one, other = copies_of(line), copies_of(line)
    done: list[Path] = []
    threads = [threading.Thread(target=lambda c=c: done.append(get(c, line, 6))) for c in (one, other)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(done)) == 1
    assert sorted(copies.last.num_bytes > 0 for copies in (one, other)) == [False, True]


def test_a_tick_needs_no_other_copy(line: Line) -> None:
    copies = copies_of(line)
    path = get(copies, line, 6)
    assert line.announced is not None

    from dataclasses import replace

    assert copies.get(replace(line.announced, version=7)) == path


def test_a_spoilt_delta_is_said_and_the_anchor_taken(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    copies = copies_of(line)
    get(copies, line, 4)
    (delta,) = line.path.glob("store/d00000004-*/delta")
    spoil(delta)

    get(copies, line, 6)

    assert last(copies) == (True, 1)
    assert "copy of version 6 failed, trying another chain" in caplog.text


def test_a_break_in_the_chain_is_jumped_by_the_anchor(line: Line) -> None:
    copies = copies_of(line)
    get(copies, line, 3)
    (marker,) = line.path.glob("store/d00000003-*/whole")
    marker.unlink()

    get(copies, line, 6)

    assert last(copies) == (True, 1)


def test_where_no_way_is_left_the_error_is_the_callers(line: Line) -> None:
    copies = copies_of(line)
    for file in line.path.glob("store/*/*"):
        if file.name in ("delta", "weights.index"):
            spoil(file)

    with pytest.raises(PublishError, match="version 6 of 'm' cannot be made from the delta store"):
        get(copies, line, 6)

    assert here(line) == []
    assert not list((line.path / "copies").glob(".making*"))


def test_slime_2104_after_a_failed_apply_the_next_delta_is_not_applied_to_what_is_not_there(line: Line) -> None:
    copies = copies_of(line)
    get(copies, line, 3)
    for group in ("d00000003-*", "v00000005-*", "v00000001-*"):
        for file in line.path.glob(f"store/{group}/*"):
            if file.name != "whole":
                spoil(file)

    with pytest.raises(PublishError):
        get(copies, line, 4)
    assert here(line) == [3]
    with pytest.raises(PublishError):
        get(copies, line, 6)

    assert here(line) == [3]
    assert contents(next((line.path / "copies").glob("v00000003*"))) == contents(line.written[3].path)


def test_a_copy_that_rotted_is_made_again(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    copies = copies_of(line)
    path = get(copies, line, 6)
    copies.close()  # else it was proven, and stays
    spoil(max(path.glob("*.safetensors"), key=lambda one: one.stat().st_size))

    get(copies, line, 6)

    assert "is damaged and made again" in caplog.text


def test_a_base_that_rotted_is_dropped_and_the_anchor_taken(line: Line) -> None:
    copies = copies_of(line)
    path = get(copies, line, 5)
    copies.close()
    for file in path.glob("*.safetensors"):
        spoil(file)

    get(copies, line, 6)

    assert last(copies) == (True, 1)
    assert here(line) == [6]


def test_a_folder_of_another_version_under_the_name_is_not_believed(line: Line) -> None:
    copies = copies_of(line)
    wrong = get(copies, line, 3)
    copies.close()
    line.announce(4)
    assert line.announced is not None
    wrong.rename(wrong.with_name(f"v00000004-{line.announced.index}"))

    get(copies, line, 4)


def test_copies_are_bounded_and_what_may_be_read_stays(line: Line) -> None:
    size = sum(len(data) for data in contents(line.written[1].path).values())
    copies = copies_of(line, max_bytes=size * 9 // 2)

    for version in range(1, 7):
        get(copies, line, version)
        assert sum(len(d) for p in (line.path / "copies").glob("v*") for d in contents(p).values()) <= size * 9 // 2

    assert {5, 6} <= set(here(line))


def test_what_another_process_holds_is_not_deleted(line: Line) -> None:
    size = sum(len(data) for data in contents(line.written[1].path).values())
    other = copies_of(line)
    get(other, line, 1)
    copies = copies_of(line, max_bytes=size * 11 // 2)

    for version in range(2, 7):
        get(copies, line, version)
    assert 1 in here(line)
    other.close()
    line.publish(7)
    get(copies, line, 7)

    assert 1 not in here(line)


def test_without_room_it_is_said_what_to_raise(line: Line) -> None:
    copies = copies_of(line, max_bytes=5000)

    with pytest.raises(PublishError, match=r"worker\.copies_bytes|more than the 5000"):
        get(copies, line, 6)


def test_what_a_killed_worker_left_is_removed(line: Line) -> None:
    left = line.path / "copies" / ".making-1-00000003"
    left.mkdir(parents=True)
    (left / "delta").write_bytes(b"half")

    get(copies_of(line), line, 6)

    assert not left.exists()


def test_a_worker_that_stops_waits_for_nothing(line: Line) -> None:
    stop = threading.Event()
    copies = LocalCopies(line.path / "copies", DeltaStore(str(line.path / "store")), GIB)
    stop.set()

    with pytest.raises(Stopped, match="stops"):
        get(copies, line, 6, stop.is_set)


def test_a_store_of_objects_serves_too(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_store, "RANGE_BYTES", 1000)
    store = DeltaStore(f"memory://{line.path.name}/copies")
    for file in line.path.glob("store/*/*"):
        store.put(f"{file.parent.name}/{file.name}", file)

    copies = LocalCopies(line.path / "copies", store, GIB)
    get(copies, line, 5)
    get(copies, line, 6)

    assert last(copies) == (False, 1)


def test_no_handle_stays_open(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    copies = copies_of(line)
    before = len(os.listdir("/proc/self/fd"))

    for version in range(1, 7):
        get(copies, line, version)
    copies.close()

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_base_that_lost_a_file_is_dropped_and_the_anchor_taken(line: Line) -> None:
    copies = copies_of(line)
    (get(copies, line, 5) / "config.json").unlink()
    copies.close()

    get(copies, line, 6)

    assert last(copies) == (True, 1)
    assert here(line) == [6]


def test_a_full_disk_is_the_callers_error_and_no_broken_way(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    copies = copies_of(line)
    get(copies, line, 5)
    monkeypatch.setattr(local_copies, "apply_delta", full)

    with pytest.raises(DiskFull, match="No space left"):
        get(copies, line, 6)

    assert here(line) == [5]


def test_a_disk_that_fills_in_the_second_delta_is_reported_and_no_other_chain_is_tried(
    line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = copies_of(line)
    get(earlier, line, 2)
    earlier.close()  # no engine reads version 2, so it is deleted to make room
    monkeypatch.setattr(
        version_folders, "free_bytes", lambda path: 0 if list(path.glob(".making-*/v00000004")) else 2**40
    )

    with pytest.raises(DiskFull, match="no room for more than 0 on the disk") as failed:
        get(copies_of(line), line, 4)

    assert isinstance(failed.value, NoRoom)
    assert isinstance(failed.value.cause, WeightsDiskFull)
    assert "trying another chain" not in caplog.text


def test_a_delta_without_a_file_that_its_base_lacks_is_not_used_and_the_base_stays(tmp_path: Path) -> None:
    line = Line(tmp_path, anchor_every=1)
    line.publish(1)
    (tmp_path / "source" / "generation_config.json").write_text("{}")
    line.publish(2)
    copies = copies_of(line)
    get(copies, line, 1)
    (delta,) = line.path.glob("store/d00000001-*/delta")
    head, frames = split(delta.read_bytes())
    delta.unlink()
    delta.write_bytes(head + joined(frames[:-1]))  # without the new file

    get(copies, line, 2)

    assert last(copies) == (True, 0)
    assert here(line) == [1, 2]


@pytest.mark.parametrize("name", [".making-x", "v00000009-x"])
@pytest.mark.parametrize("kind", ["file", "link", "lost link"])
def test_what_is_no_folder_is_removed_and_what_it_leads_to_stays(line: Line, name: str, kind: str) -> None:
    elsewhere, stray = line.path / "elsewhere", line.path / "copies" / name
    elsewhere.mkdir()
    (elsewhere / "file").write_text("")
    stray.parent.mkdir(parents=True)
    if kind == "file":
        stray.write_text("")
    else:
        stray.symlink_to(elsewhere if kind == "link" else line.path / "nowhere")

    get(copies_of(line), line, 6)

    assert not os.path.lexists(stray)
    assert (elsewhere / "file").exists()


def test_a_link_in_the_place_of_a_copy_is_none(line: Line) -> None:
    copies = copies_of(line)
    path = get(copies, line, 6)
    path.rename(line.path / "elsewhere")
    path.symlink_to(line.path / "elsewhere")

    assert not get(copies, line, 6).is_symlink()
    assert contents(line.path / "elsewhere") == contents(path)


def test_a_link_to_nothing_in_an_old_copy_stands_in_nobodys_way(line: Line) -> None:
    copies = copies_of(line)
    (get(copies, line, 5) / "stray").symlink_to("nowhere")

    get(copies, line, 6)
