"""Logs stay bounded while processes write them, and the last words of a process are found over a rotation."""

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.system.log_files import KEEP, bound, mark, numbered, rotate
from penstock.system.processes import Child


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@pytest.fixture
def writer(log: Path) -> Iterator[int]:
    """An open file as a process has it that was started with this log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield file
    os.close(file)


def held(log: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(log.parent.iterdir())}


def test_a_log_that_is_short_enough_stays(log: Path) -> None:
    log.write_text("12345678")
    assert not rotate(log, 8)
    assert held(log) == {"worker.log": "12345678"}


def test_a_log_that_is_not_there_is_no_mistake(log: Path) -> None:
    assert not rotate(log, 8)


def test_writers_go_on_in_the_emptied_log_and_the_oldest_is_dropped(log: Path, writer: int) -> None:
    for n in range(6):
        os.write(writer, f"lines of {n}\n".encode())
        assert rotate(log, 8)
    os.write(writer, b"now\n")
    kept = {f"worker.log.{n}": f"lines of {6 - n}\n" for n in range(1, KEEP + 1)}
    assert held(log) == {"worker.log": "now\n"} | kept


def test_a_log_that_another_process_rotates_is_left_to_it(log: Path) -> None:
    log.write_text("long enough")
    with log.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not rotate(log, 8)
    assert rotate(log, 8)


def test_what_a_killed_rotation_left_is_overwritten(log: Path) -> None:
    log.write_text("long enough")
    (log.parent / ".worker.log.copy").write_text("half of a copy, longer than what is copied now")
    assert rotate(log, 8)
    assert held(log) == {"worker.log": "", "worker.log.1": "long enough"}


def test_without_room_for_the_copy_the_log_stays_and_the_others_are_bounded(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = log.with_name("other.log")
    for path in (log, other):
        path.write_text("long enough")
    copy = shutil.copyfileobj

    def full_once(source: Any, out: Any, size: int) -> None:
        monkeypatch.setattr(shutil, "copyfileobj", copy)
        out.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full_once)
    with caplog.at_level(logging.WARNING):
        bound([log, other], 8)
    assert "worker.log is longer than logs.max_bytes = 8 and cannot be rotated" in caplog.text
    assert held(log) == {"other.log": "", "other.log.1": "long enough", "worker.log": "long enough"}


@pytest.mark.parametrize("rotations", [0, 1, 2])
def test_last_words_are_those_of_the_latest_process_over_rotations(log: Path, writer: int, rotations: int) -> None:
    os.write(writer, b"of an earlier process\n")
    begun = mark(log)
    assert begun.last_lines(3) == ""
    for n in range(rotations + 1):
        os.write(writer, f"one of {n}\n\ntwo of {n}\n".encode())
        if n < rotations:
            assert rotate(log, 8)
    assert begun.last_lines(3).splitlines() == [f"one of {rotations}", "", f"two of {rotations}"]


def test_last_words_reach_back_into_what_was_just_rotated(log: Path, writer: int) -> None:
    begun = mark(log)
    os.write(writer, b"why it died\n")
    rotate(log, 8)
    os.write(writer, b"the end\n")
    assert begun.last_lines(2) == "why it died\nthe end"


def test_a_child_writes_on_after_its_log_was_rotated(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    script = "seq 1 5000; while [ ! -e go ]; do sleep 0.01; done; echo last"
    child = Child("child", ["sh", "-c", script], dict(os.environ), log, tmp_path)
    child.start()
    try:
        until(lambda: log.read_text().endswith("5000\n"))
        assert rotate(log, 1024)
        (tmp_path / "go").touch()
        until(child.ended)
    finally:
        child.kill()
    assert log.read_text() == "last\n"
    assert numbered(log, 1).read_text().splitlines() == [str(n) for n in range(1, 5001)]
    assert child.last_words(2) == "5000\nlast"


def until(done: Any) -> None:
    patience = time.monotonic() + 60
    while not done():
        assert time.monotonic() < patience
        time.sleep(0.01)
