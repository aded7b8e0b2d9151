"""A worker's presence: read by every version of penstock, and one that is broken is nobody else's trouble."""

import math
import time
from typing import Any

import pytest

from penstock.errors import ProtocolError
from penstock.protocol.presence import (
    FRESH_S,
    MAX_ENTRIES,
    MAX_GPUS,
    MAX_WHY,
    MAX_WORD,
    EnginePresence,
    EngineState,
    GpuLoad,
    WorkerPresence,
    WorkerState,
    live_workers,
    parse_workers,
)
from penstock.records import record as readable
from penstock.records.codec import pack, unpack
from penstock.records.keys import Keys

KEYS = Keys("run")
ENGINES = [EnginePresence(url="http://h:1", worker_type="prefill", bootstrap_port=9, state=EngineState.SERVING)]
GPUS = [GpuLoad(name="0", model="NVIDIA H200", use=0.5, used_bytes=1, size_bytes=2)]
WORKER = WorkerPresence(
    name="w.1", at=5.0, version=3, state=WorkerState.SERVING, offloaded=["kv"], engines=ENGINES, gpus=GPUS
)


def packed(**changes: Any) -> bytes:
    return pack(WORKER.to_record() | changes)


def test_what_a_worker_shows_is_read_back() -> None:
    record = unpack(packed(), "presence")
    found = WorkerPresence.from_record(record, now=7.0)
    assert found == WORKER
    assert (found.age_s, found.started_as, found.engine_urls) == (2.0, "w", ["http://h:1"])
    assert record["state"] == "serving"
    assert record["engines"][0]["bootstrap_port"] == 9
    assert "age_s" not in record


def test_the_record_has_the_names_that_other_versions_read() -> None:
    assert sorted(WORKER.to_record()) == sorted([
        "name", "at", "host", "pid", "engine", "engine_pid", "url", "version", "state", "held", "running", "slots",
        "tokens_per_s", "capacity_tokens_per_s", "open_samples", "generated_tokens", "samples", "groups", "failed",
        "lost_leases", "servers_seen", "engine_restarts", "external", "why", "ranks", "layout", "awaits", "offloaded",
        "unwatched",
        "revived_at", "metrics", "agents_url", "engines", "gpus", "waits",
    ])  # fmt: skip


def test_gpus_are_read_up_to_a_bound_and_only_as_what_they_are() -> None:
    many = [{"name": str(number)} for number in range(MAX_GPUS + 1)]
    found = WorkerPresence.from_record(unpack(packed(gpus=many), "presence"))
    assert [one.name for one in found.gpus] == [str(number) for number in range(MAX_GPUS)]
    assert found.gpus[0].use == -1
    for broken in ("0", [0], [{"use": "half"}], [{"use": math.inf}], [{"used_bytes": 0.5}]):
        with pytest.raises(ProtocolError, match=r"worker w\.1"):
            WorkerPresence.from_record(unpack(packed(gpus=broken), "presence"))


def test_a_worker_of_another_version_is_read_as_far_as_it_goes() -> None:
    older = WorkerPresence.from_record({"name": "w", "at": 1, "version": 3, "state": "serving"})
    assert (older.version, older.ranks, older.offloaded, older.engines) == (3, 0, [], [])
    newer = WorkerPresence.from_record(unpack(packed(colour="red", state="dreaming"), "presence"))
    assert (newer.version, newer.state) == (3, "dreaming")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "3"},
        {"at": math.nan},
        {"at": None},
        {"engines": [1]},
        {"engines": [{"url": 1}]},
        {"name": 4},
        {"capacity_tokens_per_s": math.nan},
        {"tokens_per_s": math.inf},
    ],
)
def test_a_field_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="The presence of worker"):
        WorkerPresence.from_record(unpack(packed(**changes), "presence"))


def test_texts_and_lists_of_any_length_are_cut_as_they_are_read() -> None:
    endless = {"why": "x" * 100_000, "state": "y" * 100_000, "offloaded": ["z" * 1000] * 5000}
    found = WorkerPresence.from_record(unpack(packed(**endless), "presence"))
    assert (len(found.why), len(found.state)) == (MAX_WHY, MAX_WORD)
    assert {len(one) for one in found.offloaded} == {MAX_WORD}
    assert len(found.offloaded) == MAX_ENTRIES


@pytest.mark.parametrize("broken", [b"", b"\xc1", pack([1]), packed(version="3"), packed(at=math.inf)])
def test_a_broken_worker_is_left_out_and_logged_once(
    broken: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readable, "_said", set())
    for _ in range(2):
        found = parse_workers({b"a": broken, b"b": pack({"version": 2}), b"w.1": packed()})
        assert [(one.name, one.version) for one in found] == [("b", 2), ("w.1", 3)]
    assert len(caplog.records) == 1, "who looks twice a second would fill the log"


@pytest.mark.parametrize("broken", [b"", b"\xc1", pack([1]), packed(version="3"), packed(at=math.inf)])
def test_who_must_know_all_workers_does_not_go_on_without_one(broken: bytes) -> None:
    """A version's number, the folders that are in use, and a server that is drained rest on every worker."""
    with pytest.raises(ProtocolError, match="End that worker"):
        parse_workers({b"a": broken, b"w.1": packed()}, now=5.0, all_=True)


def test_a_record_that_cannot_be_read_holds_nobody_up_once_its_worker_is_gone() -> None:
    broken = packed(version="3", at=1000.0)
    with pytest.raises(ProtocolError, match="End that worker"):
        parse_workers({b"a": broken}, now=1000.0 + FRESH_S, all_=True)
    assert parse_workers({b"a": broken}, now=1001.0 + FRESH_S, all_=True) == []


def test_a_worker_lives_as_long_as_its_presence_is_fresh() -> None:
    class Client:
        def hgetall(self, name: str) -> dict[bytes, bytes]:
            assert name == KEYS.workers
            now = time.time()
            return {b"gone": packed(at=now - FRESH_S - 1), b"here": packed(at=now), b"ahead": packed(at=now + 60)}

    assert [one.age_s for one in live_workers(Client(), KEYS)] == [0.0, pytest.approx(0.0, abs=1.0)]
