"""A span of time as a file: events as the trace event format wants them."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock.console.read.stages import Sources, Step
from penstock.console.read.timeline import tracks, write_perfetto
from penstock.history.reader import HistoryReader
from penstock.history.row import SampleRow, Use
from tests.unit.console.read.trace.samples import sample

STEPS = [
    Step(1, 1, 0, 1060.0, 5.0, 3.0, 1.0),
    Step(2, 2, 1, 1070.0, 4.0, 4.0, 2.0),
    Step(3, 3, 2, 1300.0, 1.0, 1.0, 1.0),
]


def sources(folder: Path, rows: list[SampleRow], uses: list[Use] | None = None) -> Sources:
    samples = HistoryReader(folder / "history")
    samples.show_too(rows, uses or [])
    return Sources(samples, None, STEPS, "actor")


@pytest.fixture
def rows() -> list[SampleRow]:
    many = [sample(k=k, drawn_s=1048.0 + k, rewarded_s=1050.0 + k, committed_s=1051.0 + k) for k in range(4)]
    return [*many, sample("math/0/8", first_token_s=0.0, worker="w-2")]


def written(folder: Path, rows: list[SampleRow], from_s: float = 1000.0, to_s: float = 1100.0) -> list[dict[str, Any]]:
    path = folder / "trace.json"
    path.unlink(missing_ok=True)
    count = write_perfetto(path, *tracks(sources(folder, rows), from_s, to_s), {"run": "r"})
    found = json.loads(path.read_bytes())
    assert found["otherData"] == {"run": "r"}
    assert len(found["traceEvents"]) == count
    assert list(folder.glob(".*")) == []
    return found["traceEvents"]  # type: ignore[no-any-return]


def check_format(events: list[dict[str, Any]]) -> None:
    """The rules of the format: fields by phase, names of tracks, pairs that close, slices that nest."""
    threads, pairs = defaultdict(list), defaultdict(list)
    named = {(one["pid"], one["tid"]) for one in events if one["ph"] == "M" and one["name"] == "thread_name"}
    processes = {one["pid"] for one in events if one["ph"] == "M" and one["name"] == "process_name"}
    for one in events:
        assert {"ph", "name", "pid", "tid"} <= one.keys()
        assert one["pid"] in processes
        if one["ph"] == "M":
            continue
        assert type(one["ts"]) is int
        if one["ph"] == "X":
            assert (one["pid"], one["tid"]) in named
            assert type(one["dur"]) is int
            assert one["dur"] >= 0
            threads[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
        else:
            assert one["ph"] in ("b", "e")
            pairs[one["pid"], one["cat"], one["id"], one["name"]].append((one["ts"], one["ph"]))
    for ends in pairs.values():
        assert [phase for _, phase in sorted(ends)] == ["b", "e"]
    for slices in threads.values():
        for at, (begin, end) in enumerate(slices):
            for other_begin, other_end in slices[:at]:
                apart = end <= other_begin or other_end <= begin
                nested = (other_begin <= begin and end <= other_end) or (begin <= other_begin and other_end <= end)
                assert apart or nested, "two slices of one thread overlap"


def test_a_file_keeps_the_rules_of_the_format(tmp_path: Path, rows: list[SampleRow]) -> None:
    events = written(tmp_path, rows)
    check_format(events)
    names = {one["args"]["name"] for one in events if one["ph"] == "M" and "name" in one["args"]}
    assert {"queue", "worker w-1", "worker w-2", "trainer actor", "slot 1", "slot 4", "steps", "publications"} <= names
    slices = {one["name"] for one in events if one["ph"] == "X"}
    wanted = {
        "math/0/7/3",
        "prefill",
        "decode",
        "generate",
        "paused",
        "reward",
        "commit",
        "step 2",
        "waits for batch 2",
    }
    assert wanted | {"publishes after step 2"} <= slices
    kinds = {one["cat"] for one in events if one["ph"] == "b"}
    assert kinds == {"lease", "queued", "waits to be cut", "waits to be trained"}


def test_only_what_is_in_the_span_is_written(tmp_path: Path, rows: list[SampleRow]) -> None:
    events = written(tmp_path, rows)
    assert "step 3" not in {one["name"] for one in events}
    check_format(late := written(tmp_path, rows, 1290.0, 1400.0))
    assert {one["name"] for one in late if one["ph"] == "X"} == {
        "waits for batch 3",
        "step 3",
        "publishes after step 3",
    }
    assert written(tmp_path, rows, 5000.0, 6000.0) == []


def test_leases_end_by_their_names_and_a_job_is_queued_between_them(tmp_path: Path) -> None:
    events = written(tmp_path, [sample()])
    ends = [one["args"]["end"] for one in events if one["ph"] == "b" and one["cat"] == "lease"]
    assert ends == ["crashed", "failed reward_raised", "committed"]
    queued = [(one["ts"] // 10**6, one["ph"]) for one in events if one.get("cat") == "queued"]
    assert queued == [(1000, "b"), (1010, "e"), (1020, "b"), (1025, "e"), (1030, "b"), (1040, "e")]


def test_pauses_that_cross_a_first_token_are_cut_in_two(tmp_path: Path) -> None:
    events = written(tmp_path, [sample(pauses=[[1042.5, 1043.5], [1043.4, 1044.0]])])
    check_format(events)
    spans = [(one["ts"] / 10**6, one["dur"] / 10**6) for one in events if one["name"] == "paused"]
    assert spans == [(1042.5, 0.5), (1043.0, 0.5), (1043.5, 0.5)]
