"""A record that was written is read back as it was, whatever its fields hold."""

from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.names import MAX_ANSWERS
from penstock.payloads.format import MAX_TOKENS
from penstock.protocol.memory_control import MemoryWish
from penstock.protocol.presence import EnginePresence, GpuLoad, WorkerPresence
from penstock.protocol.transfers import Decision, Enrollment
from penstock.records.codec import pack, unpack
from penstock.records.job import Job
from penstock.records.manifest import Manifest, Row
from penstock.records.publication import Publication, Whole
from penstock.records.sample_meta import MAX_PAYLOAD_BYTES, MAX_VERSION, SampleMeta, iter_metas
from penstock.weights.index import WeightsIndex
from tests.hostile import SAME

INTS, TEXTS, FLOATS = st.integers(-(2**63), 2**64 - 1), st.text(max_size=9), st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
LISTS, MAPS = st.lists(PLAIN, max_size=3), st.dictionaries(TEXTS, PLAIN, max_size=3)
PAIRS = st.lists(st.lists(INTS, min_size=2, max_size=2), max_size=3)
BY_HINT: dict[Any, st.SearchStrategy[Any]] = {
    list[bytes]: st.lists(st.binary(max_size=20), max_size=3),
    int: INTS, str: TEXTS, float: FLOATS, bool: st.booleans(), Any: PLAIN, str | None: st.none() | TEXTS,
    int | None: st.none() | INTS, list[int]: st.lists(INTS, max_size=3), list[int] | None: st.none() | st.lists(INTS),
    list[str]: st.lists(TEXTS, max_size=3), list[Any]: LISTS, list[list[Any]]: st.lists(LISTS, max_size=2),
    list[dict[str, Any]]: st.lists(MAPS, max_size=2),
    list[list[int]]: PAIRS, dict[str, Any]: MAPS, dict[str, int]: st.dictionaries(TEXTS, INTS, max_size=3),
    dict[str, list[Any]]: st.dictionaries(TEXTS, LISTS, max_size=3),
}  # fmt: skip


def made(cls: type, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A record whose fields hold anything that their types allow."""
    found: dict[str, st.SearchStrategy[Any]] = {}
    for field in fields(cls):
        values = given[field.name] if field.name in given else BY_HINT[get_type_hints(cls)[field.name]]
        optional = field.default is not MISSING or field.default_factory is not MISSING
        found[field.name] = st.just(MISSING) | values if optional else values
    return st.fixed_dictionaries(found).map(
        lambda values: cls(**{name: value for name, value in values.items() if value is not MISSING})
    )


ROWS = made(Row)
RECORDS = {
    "job": made(Job, n=st.integers(1, MAX_ANSWERS)),
    "publication": made(Publication),
    "whole": made(Whole),
    "manifest": made(Manifest, rows=st.lists(ROWS, max_size=4)),
    "wish": made(MemoryWish),
    "enrollment": made(Enrollment),
    "decision": made(Decision),
    "index": made(WeightsIndex),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back_as_it_was(name: str) -> None:
    @SAME
    @given(record=RECORDS[name])
    def holds(record: Any) -> None:
        assert type(record).from_bytes(record.to_bytes(), "it") == record

    holds()


COUNTS, VERSIONS = st.integers(0, MAX_TOKENS), st.integers(-1, MAX_VERSION)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
METAS = made(
    SampleMeta, k=st.integers(0, MAX_ANSWERS - 1), length=st.just(MAX_TOKENS), prompt_length=COUNTS,
    num_generated=COUNTS, num_unproven=COUNTS, num_bytes=st.integers(0, 2**20), reward=FINITE, temperature=FINITE,
    token=NAMES, oldest=VERSIONS, newest=VERSIONS,
    loss_by_version=st.lists(st.tuples(INTS, COUNTS).map(list), max_size=3),
    pauses=st.lists(st.tuples(COUNTS, COUNTS).map(list), max_size=2),
    sides=st.lists(st.tuples(NAMES, COUNTS, st.integers(0, 2**32 - 1)).map(list), max_size=2),
    shared=st.just([]) | st.tuples(st.integers(0, MAX_ANSWERS - 1), COUNTS, st.just(MAX_PAYLOAD_BYTES)).map(list),
    parts=st.just([]),
)  # fmt: skip


@SAME
@given(metas=st.lists(METAS, max_size=4))
def test_metadata_of_a_group_comes_back_as_it_was(metas: list[SampleMeta]) -> None:
    whole = b"".join(meta.to_bytes() for meta in metas)

    assert list(iter_metas(whole, "it")) == metas
    assert [SampleMeta.from_bytes(meta.to_bytes()) for meta in metas] == metas


@SAME
@given(
    worker=made(
        WorkerPresence,
        engines=st.lists(made(EnginePresence), max_size=2),
        gpus=st.lists(made(GpuLoad, use=FINITE), max_size=2),
        at=FINITE,
        revived_at=FINITE,
        tokens_per_s=FINITE,
        capacity_tokens_per_s=FINITE,
        age_s=st.just(0.0),
    )
)
def test_the_presence_of_a_worker_comes_back_as_it_was(worker: WorkerPresence) -> None:
    assert WorkerPresence.from_record(unpack(pack(worker.to_record()), "it")) == worker


@SAME
@given(value=PLAIN)
def test_a_plain_value_comes_back_as_it_was(value: Any) -> None:
    assert unpack(pack(value), "it") == value
