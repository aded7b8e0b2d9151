"""The clock of a wait belongs to its cause: it restarts with another cause, and not with other counts."""

from typing import Any

import pytest

from penstock.protocol import waits
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import unpack
from penstock.protocol.waits import Waiting


class Shown:
    """What a wait shows, by a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.record: dict[str, Any] = {}
        client: Any = None
        monkeypatch.setattr(waits.time, "time", lambda: self.now)
        monkeypatch.setattr(waits, "note", lambda _keys, _hash, _who, record: record)
        monkeypatch.setattr(waits, "run", self._take)
        self.waiting = Waiting(client, Keys("r"), "worker:w.1:intake")

    def _take(self, _client: Any, record: bytes) -> None:
        self.record = unpack(record, "a wait") if record else {}

    def said(self, what: str, seconds: float) -> tuple[str, float]:
        """Say ``what`` every 0.1 s for so long: what is shown then, and for how many seconds."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.waiting.for_(what)
        return self.record["what"], round(self.now - self.record["since"])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch)


def test_I8_the_clock_of_a_wait_restarts_when_its_cause_changes(shown: Shown) -> None:
    assert shown.said("jobs that an engine of version 26 may start, from the producer", 37) == (
        "jobs that an engine of version 26 may start, from the producer",
        37,
    )
    assert shown.said("version 27 to be loaded", 3) == ("version 27 to be loaded", 3)
    assert shown.said("version 28 to be loaded", 3) == ("version 28 to be loaded", 3), "another subject"


def test_I8_the_clock_of_a_wait_goes_on_when_only_its_counts_change(shown: Shown) -> None:
    shown.said("4 more groups (0 of 4 are ready, 7 are queued or running)", 5)
    said = "3 more groups (1 of 4 are ready, 6 are queued or running, dropped so far: stale 3)"
    assert shown.said(said, 5) == (said, 10)
    shown.said("the engine, which was asked for sample d/0/0/1, and sent nothing for 40 s", 5)
    assert shown.said("the engine, which was asked for sample d/0/0/1, and sent nothing for 45 s", 5)[1] == 10


def test_I8_a_passing_reason_restarts_no_clock(shown: Shown) -> None:
    shown.said("4 more groups", 5)
    shown.said("another look at what has just moved", 0.2)
    assert shown.said("4 more groups", 4) == ("4 more groups", 9)


def test_I8_reasons_that_take_turns_are_shown(shown: Shown) -> None:
    shown.said("4 more groups", 5)
    for _ in range(30):
        shown.said("a", 0.1)
        what, _ = shown.said("b", 0.1)
    assert what in ("a", "b")
