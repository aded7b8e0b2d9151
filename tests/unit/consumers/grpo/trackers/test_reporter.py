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
from penstock.consumers.grpo.trackers.kinds import Position
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


def report(path: Path, make: Any, steps: range, patience_s: float = PATIENCE_S) -> Reporter:
    """One process's life: it tells ``steps`` and ends."""
    made = Reporter("one", Position.at(path), make)
    for step in steps:
        made.metrics(step, {"x": step})
    made.close(time.monotonic() + patience_s)
    return made


def test_a_tracker_is_told_all_in_order_and_closed(path: Path) -> None:
    tracker = Recording()
    made = Reporter("one", Position.at(path), lambda: tracker)
    made.metrics(1, {"x": 1.0})
    made.evaluation(4, {"eval/d": 0.5}, 4)
    made.summary({"steps": 1})
    made.close(time.monotonic() + PATIENCE_S)
    assert tracker.told == [(1, {"x": 1.0}), ("evaluation", 4, {"eval/d": 0.5}), ("summary", {"steps": 1}), ("close",)]
    assert made.left_out == 0


@pytest.mark.parametrize("error", [ValueError("no \x1b[2J such run"), SystemExit(1), MemoryError(), CancelledError()])
def test_one_that_fails_warns_once_is_opened_anew_and_is_told_the_rest(
    error: BaseException, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer whose disk was full for a moment keeps that error for ever."""
    monkeypatch.setattr(trackers, "REOPEN_S", 0.0)

    def fail() -> None:
        raise error

    broken, sound = Recording(), Recording()
    broken.trouble = fail
    left = iter([broken, broken, sound])
    with caplog.at_level(logging.WARNING):
        made = report(path, lambda: next(left), range(1, 5))
    assert sound.told == [(3, {"x": 3}), (4, {"x": 4}), ("close",)]
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
    until(found._waiting.empty)
    monkeypatch.setattr(found, "_retry_at", 0.0)
    found.metrics(3, {})
    found.close(time.monotonic() + PATIENCE_S)
    assert tracker.told == [(3, {}), ("close",)]
    assert (made, found.left_out) == (2, 2)


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
    with caplog.at_level(logging.WARNING):
        made.close(time.monotonic())
    assert "one: entry not reported: 3 entries wait for it" in caplog.text
    assert "8 entries were left out at one, as it did not take everything in time" in caplog.text
    free.set()


def test_a_step_that_comes_again_is_told_once_over_starts(path: Path) -> None:
    first, second = Recording(), Recording()
    report(path, lambda: first, range(1, 6))
    again = report(path, lambda: second, range(3, 8))
    assert [entry[0] for entry in first.told] == [1, 2, 3, 4, 5, "close"]
    assert [entry[0] for entry in second.told] == [6, 7, "close"]
    assert again.left_out == 0
    assert again.position.id == Position.at(path).id


def test_one_that_replaces_is_told_again(path: Path) -> None:
    second = Recording(replaces=True)
    report(path, lambda: Recording(replaces=True), range(1, 6))
    report(path, lambda: second, range(3, 5))
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
