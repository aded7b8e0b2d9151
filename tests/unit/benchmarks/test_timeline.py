"""What a timeline makes of its events, and of a worker that counts what it hears."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import patched
from benchmarks.engine_overhead import Load
from benchmarks.paired import mean_interval
from benchmarks.publish import Publishing
from benchmarks.ticks import Account, Ticks
from benchmarks.timeline import Event, Timeline
from benchmarks.watched_worker import EVERY, PAUSES, TICKS, read_pauses, watch
from penstock.workers.sglang.client import SglangClient
from penstock.workers.sglang.controls import SglangControls
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.stream import Answer


def event(leg: str, lost_in_pause: float, lost_outside: float, failure: str = "", blocked_s: float = 0.5) -> Event:
    account = Account(1000.0, 2.0, 1500, 0.1, lost_in_pause, lost_outside)
    return Event(leg, 0.6, blocked_s, account, [50], [50, 0, 25], [("send", 0.25, 0.5)], failure)


def timeline(file: Path, *events: Event) -> Timeline:
    return Timeline(Load(0, 64, 32, 64), "gloo", "cpu", file, events=list(events))


def test_a_leg_is_told_by_its_means_and_their_intervals(tmp_path: Path) -> None:
    made = timeline(tmp_path / "f.json", event("first", 90, 200), event("nothing", 0, 0), event("first", 110, 400))

    made.write()

    told = json.loads((tmp_path / "f.json").read_text())
    assert [(row["leg"], row["events"]) for row in told["rows"]] == [("first", 2), ("nothing", 1)]
    first = told["rows"][0]
    assert (first["lost"], first["lost_in_pause"], first["lost_outside"]) == (400, 100, 300)
    half = 12.706 * 100
    assert (first["lost_outside_low"], first["lost_outside_high"]) == pytest.approx((300 - half, 300 + half))
    assert first["timeline"] == [1.0, 0.0, 0.5]
    assert told["lost_outside"] == {"first": 300, "nothing": 0}
    assert len(told["events"]) == 3


def test_an_event_that_failed_counts_in_no_mean_and_is_told(tmp_path: Path) -> None:
    stuck = replace(event("send", 0, 0), account=Account(0.0, 2.0, 0, 0.0, 0.0, 0.0))
    by_disk = event("send", 9e9, 9e9, "version 3 went by disk")
    made = timeline(tmp_path / "f.json", event("send", 90, 200), by_disk, stuck)

    (row,) = made.report().rows

    assert (row["events"], row["failed"], row["lost"]) == (1, 2, 290)
    assert row["lost_low"] is None


def test_an_engine_that_stands_still_ends_it_and_the_events_before_stand(tmp_path: Path) -> None:
    made = timeline(tmp_path / "f.json", event("send", 90, 200))

    with pytest.raises(RuntimeError, match=r"No token came for 31\.0 s: the engine stands still"):
        made.take(replace(event("send", 0, 0), account=Account(900.0, 31.0, 0, 0.0, 0.0, 27_900.0)))

    assert [len(one["bins"]) for one in json.loads((tmp_path / "f.json").read_text())["events"]] == [3, 3]


def test_publications_of_a_timeline_are_those_of_publish(tmp_path: Path) -> None:
    publishing = Publishing(Load(0, 64, 32, 64), "gloo", tmp_path / "publish.json")
    events = [event("behind", 10, 20, blocked_s=one) for one in (0.1, 0.2, 9.0)]

    publishing.take(timeline(tmp_path / "f.json", *events, event("first", 5, 5, blocked_s=4.0), event("pause", 1, 1)))

    told = json.loads((tmp_path / "publish.json").read_text())
    assert (told["blocked_s"], told["blocked_folder_first_s"]) == ({"tiny": 0.2}, {"tiny": 4.0})
    assert (told["rate"], told["tokens_lost"], told["send_s"]) == ({"tiny": 1000}, {"tiny": 30}, {"tiny": 0.25})
    assert [row["folder_first"] for row in told["rows"]] == [False, True]

    more = timeline(tmp_path / "f.json", event("behind", 10, 20, blocked_s=0.3))
    publishing.take(more)
    publishing.take(more)
    told = json.loads((tmp_path / "publish.json").read_text())
    assert told["rows"][0]["blocked"] == [0.1, 0.2, 9.0, 0.3]


async def test_a_watched_worker_writes_down_tokens_and_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def called(self: Any, method: str, path: str, *args: Any, **more: Any) -> str:
        return path

    async def generated(self: Any, *args: Any, **more: Any) -> dict[str, Any]:
        return more

    monkeypatch.setattr(Answer, "add", Answer.add)
    monkeypatch.setattr(SglangClient, "generate", generated)
    monkeypatch.setattr(SglangControls, "call", called)
    engine: Any = SglangEngine.__new__(SglangEngine)
    with closing(Ticks.make(tmp_path / TICKS, 60.0)) as ticks:
        (tmp_path / PAUSES).touch()
        watch(tmp_path)
        answer = Answer("r", incremental=True)
        for ids in ([5, 6, 7], [8]):
            answer.add({"output_ids": ids, "meta_info": {"output_token_logprobs": [[-1.0, one, None] for one in ids]}})
        assert ticks.total() == 4

    assert await engine.call("POST", "/pause_generation") == "/pause_generation"
    assert read_pauses(tmp_path) == []
    await engine.call("POST", "/continue_generation")
    ((began_s, ended_s),) = read_pauses(tmp_path)
    assert began_s <= ended_s
    # One that looks at its answers anyway does so as it would.
    assert (await engine.generate([1], {}, rid="r"))["interval"] == EVERY
    assert await engine.generate([1], {}, rid="r", on_tokens=print, interval=9) == {
        "rid": "r", "on_tokens": print, "interval": 9,
    }  # fmt: skip


def test_a_mean_of_one_has_no_interval() -> None:
    assert mean_interval([3.0]) == (3.0, None, None)


def test_what_was_patched_is_as_before() -> None:
    class Thing:
        own: str

        def method(self) -> str:
            return "of the class"

    thing = Thing()
    thing.own = "its own"
    with patched(thing, own="another", method=lambda: "patched"):
        assert (thing.own, thing.method()) == ("another", "patched")
    assert (thing.own, thing.method()) == ("its own", "of the class")
    assert set(vars(thing)) == {"own"}
