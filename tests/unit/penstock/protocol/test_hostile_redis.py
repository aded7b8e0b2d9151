"""Whatever stands in Redis is read, or refused by an error of penstock's own that says what it is about."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given

from penstock.buffer.retire import last_report_s
from penstock.payloads.servers import parse as parse_servers
from penstock.protocol import snapshot, subs, waits
from penstock.protocol.burials import _lengths_of
from penstock.protocol.memory_control import MemoryWish, parse_wish
from penstock.protocol.presence import EnginePresence, GpuLoad, WorkerPresence, parse_workers
from penstock.protocol.transfers import Decision, enrolled
from penstock.records.codec import pack, unpack, unpack_each
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.records.publication import Publication
from penstock.records.sample_meta import SampleMeta, iter_metas
from penstock.redis.commands import Client
from penstock.workers.fleet.state import CAPACITY, STATE, WANTED, read_capacity, read_state, read_wanted
from penstock.workers.router.members import decode_members
from tests import hostile_records
from tests.hostile import SAME, OneHash, is_read_or_refused, packed_near
from tests.integration.play import meta

KEYS = Keys("run")
FLEET = {
    "at": 2.0**40,
    "host": "h",
    "groups": {"policy.engines": {"worker_type": "regular", "engines": 2}},
    "processes": [{"name": "policy.engines.0", "state": "running"}],
    "endpoints": {"policy": "http://h:1"},
    "autoscale": {"group": "policy.engines", "engines": 2, "wanted": 2, "binds": "min", "capacity_tokens_per_s": 9.0},
}
WORKER = WorkerPresence(
    name="w.1", at=1.0, engines=[EnginePresence(url="http://h:1")], gpus=[GpuLoad(name="0")]
).to_record()
PUBLICATION = Publication("policy", 3, "disk", "/w", abandoned=[[1, 2]], index="a" * 32)


def client(held: dict[bytes, bytes]) -> Client:
    return cast(Client, OneHash(held))


def field(name: str, read: Callable[[Client], object]) -> Callable[[bytes], object]:
    return lambda data: read(client({name.encode(): data}))


#: What reads one value -> one that it reads.
VALUES: dict[str, tuple[Callable[[bytes], object], Any]] = {
    "unpack": (lambda data: unpack(data, "it"), [1, {"a": b"x"}]),
    "unpack_each": (lambda data: list(unpack_each(data, "it")), [1, {"a": b"x"}]),
    "job": (lambda data: Job.from_bytes(data, "job"), hostile_records.JOB.to_map()),
    "meta": (lambda data: SampleMeta.from_bytes(data, "meta").num_loss, unpack(meta(0, "t").to_bytes(), "meta")),
    "metas": (lambda data: [one.num_loss for one in iter_metas(data, "it")], unpack(meta(0, "t").to_bytes(), "meta")),
    "manifest": (lambda data: Manifest.from_bytes(data, "it"), hostile_records.manifest().to_map()),
    "publication": (lambda data: Publication.from_bytes(data, "it"), PUBLICATION.to_map()),
    "wish": (lambda data: parse_wish([(b"1-0", {b"w": data})]), MemoryWish(offloaded=["weights"], by="x").to_map()),
    "enrollment": (lambda data: enrolled({b"m:w": data}), {"worker": "w", "url": "http://h", "num_ranks": 1}),
    "decision": (Decision.from_bytes, {"id": "1-0"}),
    "workers": (lambda data: parse_workers({b"w.1": data}), WORKER),
    "all workers": (lambda data: parse_workers({b"w.1": data}, all_=True), WORKER),
    "part": (lambda data: snapshot._present({b"p": data}, "part"), {"at": 1.0, "name": "p"}),
    "waits": (
        lambda data: waits.waits_in({b"w": data}, ()),
        {"cause": "x", "fields": {}, "since": 1.0, "at": 2**40},
    ),
    "holdings": (lambda data: subs._held(data, "a"), {"groups": 1, "samples": 2, "tokens": 3, "bytes": 4}),
    "payload server": (lambda data: parse_servers({b"s:a": data}), {"url": "redis://h", "state": "live", "rev": 1}),
    "members": (lambda data: decode_members(data, "w"), [{"url": "http://h:1"}]),
    "fleet": (field(STATE, lambda one: read_state(one, KEYS)), FLEET),
    "wanted": (field(WANTED, lambda one: read_wanted(one, KEYS)), {"policy.engines": 2}),
    "capacity": (field(CAPACITY, lambda one: read_capacity(one, KEYS)), 1.5),
    "age of a record": (last_report_s, {"at": 1.0}),
    "dead letter": (lambda data: _lengths_of({b"id": b"j", b"body": data}, data), hostile_records.JOB.to_map()),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_read_or_refused(name: str) -> None:
    decode, good = VALUES[name]
    decode(pack(good))

    @SAME
    @given(data=packed_near(good))
    def holds(data: bytes) -> None:
        is_read_or_refused(decode, data)

    holds()
