"""A tracker may be slow, fail or hang: whoever reports goes on, and what was left out is counted."""

import logging
import threading
import time
from asyncio import CancelledError
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.consumers.grpo.trackers import trackers
from penstock.consumers.grpo.trackers.tracker import Position
from penstock.consumers.grpo.trackers.trackers import Reporter

#: Longer than any wait of these tests.
PATIENCE_S = 60.0


class Recording:
    """Remembers what it is told; ``trouble`` is called before."""

    def __init__(self, replaces: bool = False) -> None:
        self.replaces = replaces
        self.told: list[tuple[Any, ...]] = []
        self.trouble: Any = lambda: None

    def _tell(self, *entry: Any) -> None:
        self.trouble()
        self.told.append(entry)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._tell(step, dict(values))

    def evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._tell("evaluation", version, dict(values))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._tell("summary", dict(values))

    def close(self) -> None:
        self._tell("close")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trackers" / "one.json"


def report(path: Path, tracker: Recording, steps: range, patience_s: float = PATIENCE_S) -> Reporter:
    """One process's life: it tells ``steps`` and ends."""
    made = Reporter("one", Position.at(path), lambda: tracker)
    for step in steps:
        made.metrics(step, {"x": step})
    made.close(time.monotonic() + patience_s)
    return made


def test_a_tracker_is_told_all_in_order_and_closed(path: Path) -> None:
    tracker = Recording()
    made = Reporter("one", Position.at(path), lambda: tracker)
    made.metrics(1, {"x": 1.0})
    made.evaluation(4, {"eval/d": 0.5})
    made.summary({"steps": 1})
    made.close(time.monotonic() + PATIENCE_S)
    assert tracker.told == [(1, {"x": 1.0}), ("evaluation", 4, {"eval/d": 0.5}), ("summary", {"steps": 1}), ("close",)]
    assert made.left_out == 0


@pytest.mark.parametrize("error", [ValueError("no \x1b[2J such run"), SystemExit(1), MemoryError(), CancelledError()])
def test_one_that_fails_warns_once_and_is_told_the_rest(
    error: BaseException, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker, calls = Recording(), iter(range(100))

    def fail_twice() -> None:
        if next(calls) < 2:
            raise error

    tracker.trouble = fail_twice
    with caplog.at_level(logging.WARNING):
        made = report(path, tracker, range(1, 5))
    assert tracker.told == [(3, {"x": 3}), (4, {"x": 4}), ("close",)]
    assert made.left_out == 2
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"one: entry not reported: {type(error).__name__}")
    assert last == "2 entries were left out at one"


def test_one_that_cannot_be_opened_is_tried_again_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, made = Recording(), 0

    def make() -> Recording:
        nonlocal made
        made += 1
        if made == 1:
            raise ConnectionError("no server")
        return tracker

    found = Reporter("one", Position.at(path), make)
    found.metrics(1, {})
    found.metrics(2, {})
    until(lambda: found.left_out == 2)
    assert made == 1
    monkeypatch.setattr(found, "_retry_at", 0.0)
    found.metrics(3, {})
    found.close(time.monotonic() + PATIENCE_S)
    assert tracker.told == [(3, {}), ("close",)]


def test_one_that_fails_again_and_again_is_closed_and_opened_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a writer does whose disk was full for a moment, and which keeps that error for ever."""
    monkeypatch.setattr(trackers, "REOPEN_S", 0.0)
    broken, sound = Recording(), Recording()
    left = iter([broken, sound])

    def keeps_its_error() -> None:
        raise OSError(28, "No space left on device")

    broken.trouble = keeps_its_error
    made = Reporter("one", Position.at(path), lambda: next(left))
    for step in range(1, 6):
        made.metrics(step, {})
    made.close(time.monotonic() + PATIENCE_S)
    assert sound.told == [(4, {}), (5, {}), ("close",)]
    assert made.left_out == 3


def test_one_that_hangs_holds_up_nobody_and_what_has_no_place_is_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    tracker, inside, free = Recording(), threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        free.wait(PATIENCE_S)

    tracker.trouble = hang
    made = Reporter("one", Position.at(path), lambda: tracker)
    made.metrics(1, {})
    assert inside.wait(PATIENCE_S)
    for step in range(2, 9):
        made.metrics(step, {})
    assert made.left_out == 4
    with caplog.at_level(logging.WARNING):
        made.close(time.monotonic())
    assert "one did not take everything in time: 4 entries wait" in caplog.text
    assert made.left_out == 8, "what it was still to be told is not told"
    free.set()


def test_a_step_that_comes_again_is_told_once_over_starts(path: Path) -> None:
    report(path, first := Recording(), range(1, 6))
    again = report(path, second := Recording(), range(3, 8))
    assert [entry[0] for entry in first.told] == [1, 2, 3, 4, 5, "close"]
    assert [entry[0] for entry in second.told] == [6, 7, "close"]
    assert again.repeated == 3
    assert again.position.id == Position.at(path).id


def test_one_that_replaces_is_told_again(path: Path) -> None:
    report(path, Recording(replaces=True), range(1, 6))
    report(path, second := Recording(replaces=True), range(3, 5))
    assert [entry[0] for entry in second.told] == [3, 4, "close"]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"id": 1, "step": 1, "entries": 1}', b"[" * 4096])
def test_a_position_that_cannot_be_read_begins_another_run(
    content: bytes, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    position = Position.at(path)
    assert (position.step, position.entries) == (-1, 0)
    assert "reporting continues as a new run" in caplog.text


def until(done: Any) -> None:
    patience = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < patience
        time.sleep(0.005)
