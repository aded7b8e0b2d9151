"""The clock of a wait belongs to its cause and subject: it restarts with another one, and not with other counts."""

from typing import Any

import pytest

from penstock.protocol import waits
from penstock.protocol.presence import WorkerPresence
from penstock.protocol.waits import PublishedWaiting, Waiting, waits_in
from penstock.records.cause import Cause, Unknown
from penstock.records.causes import CutRepeated, FirstBatchTooSmall, GroupsMissing
from penstock.records.codec import unpack
from penstock.records.keys import Keys
from penstock.records.worker_causes import EngineSilent, LeaseHeld, NoJobs, VersionLoading


class Shown:
    """What a wait shows, by a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.record: dict[str, Any] = {}
        client: Any = None
        monkeypatch.setattr(waits.time, "time", lambda: self.now)
        monkeypatch.setattr(waits, "note", lambda _keys, _hash, _who, record: record)
        monkeypatch.setattr(waits, "run", self._take)
        self.waiting = PublishedWaiting(client, Keys("r"), "producer")

    def _take(self, _client: Any, record: bytes) -> None:
        self.record = unpack(record, "a wait") if record else {}

    def report(self, cause: Cause, seconds: float) -> tuple[str, dict[str, Any], float]:
        """Report ``cause`` every 0.1 s for so long: name and fields that are shown then, and for how many seconds."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.waiting.blocked_on(cause)
        return self.record["cause"], self.record["fields"], round(self.now - self.record["since"])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch)


def test_I8_the_clock_of_a_wait_restarts_when_its_cause_or_subject_changes(shown: Shown) -> None:
    assert shown.report(NoJobs(26), 37) == ("no_jobs", {"version": 26}, 37)
    assert shown.report(VersionLoading(27), 3) == ("version_loading", {"version": 27}, 3)
    assert shown.report(VersionLoading(28), 3) == ("version_loading", {"version": 28}, 3), "another subject"


def test_I8_the_clock_of_a_wait_continues_when_only_its_counts_change(shown: Shown) -> None:
    shown.report(GroupsMissing(0, 4, "groups", running=7), 5)
    name, fields, seconds = shown.report(GroupsMissing(1, 4, "groups", running=6, dropped={"stale": 3}), 5)
    assert (name, fields["have"], fields["dropped"], seconds) == ("groups_missing", 1, {"stale": 3}, 10)
    shown.report(EngineSilent("d/0/0/1", 40.0), 5)
    assert shown.report(EngineSilent("d/0/0/1", 45.0), 5)[1:] == ({"sample": "d/0/0/1", "seconds": 45.0, "more": 0}, 10)


def test_I8_a_passing_cause_restarts_no_clock(shown: Shown) -> None:
    shown.report(NoJobs(1), 5)
    shown.report(CutRepeated(), 0.2)
    assert shown.report(NoJobs(1), 4) == ("no_jobs", {"version": 1}, 9)


def test_I8_causes_that_take_turns_are_shown(shown: Shown) -> None:
    shown.report(FirstBatchTooSmall(4, 0, 0), 5)
    for _ in range(30):
        shown.report(NoJobs(1), 0.1)
        name, _, _ = shown.report(CutRepeated(), 0.1)
    assert name in ("no_jobs", "cut_repeated")


def test_I8_a_wait_of_a_worker_is_in_its_presence_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(waits.time, "time", lambda: now)
    waiting = Waiting()
    waiting.blocked_on(LeaseHeld("trainer"))
    assert waiting.record() is None, "a moment is no wait"
    now += 3
    waiting.blocked_on(LeaseHeld("trainer"))
    record = WorkerPresence(name="w.1", at=now, waits=[{"task": "intake", **(waiting.record() or {})}]).to_record()

    (wait,) = waits_in({}, [WorkerPresence.from_record(record, now=now)])

    assert (wait.who, wait.cause, wait.since_s) == ("worker:w.1:intake", LeaseHeld("trainer"), 1000.0)
    assert waits_in({}, [WorkerPresence.from_record(record, now=now + waits.GONE_S)]) == [], "of a worker that is gone"
    waiting.end()
    assert waiting.record() is None


def test_one_unreadable_wait_of_a_worker_hides_no_other() -> None:
    good = {"task": "intake", "since": 1.0, "cause": "of_tomorrow", "fields": {"x": [1]}}
    shown = [good, {**good, "task": "a", "fields": {"x": [[[]]]}}, {**good, "task": "b", "cause": None}, {"task": 3}]
    (wait,) = waits_in({}, [WorkerPresence(name="w.1", waits=shown)])
    assert wait.cause == Unknown("of_tomorrow", {"x": [1]})
