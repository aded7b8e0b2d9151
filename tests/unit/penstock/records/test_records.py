"""Records of all kinds: what is written is read back, and nothing else is."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProtocolError
from penstock.protocol.staleness import Lineage
from penstock.records import codec
from penstock.records.codec import pack, unpack
from penstock.records.job import Job
from penstock.records.manifest import Manifest
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.records.sample_meta import SampleMeta, iter_metas
from tests.integration.play import manifest, meta


def test_records_come_back_as_they_were() -> None:
    job = Job("d/3/7", 4, prompt_ids=[1, 2], label="x", metadata={"a": [1]}, sampling={"temperature": 0.5})
    assert Job.from_bytes(job.to_bytes()) == job
    assert (job.dataset, job.epoch, job.index) == ("d", 3, 7)
    publication = Publication("policy", 3, "disk", "/w", abandoned=[[1, 2]], index="a" * 32)
    assert Publication.from_bytes(publication.to_bytes()) == publication
    assert Manifest.from_bytes(manifest(4)).n == 4


def test_a_record_of_another_kind_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"job x has fields .* 'colour'"):
        Job.from_bytes(pack({"id": "d/0/0", "n": 1, "colour": "red"}), "job x")
    with pytest.raises(ProtocolError, match="job x lacks a field"):
        Job.from_bytes(pack({"id": "d/0/0"}), "job x")
    with pytest.raises(ProtocolError, match="job x is not a map"):
        Job.from_bytes(pack([1]), "job x")


def test_unknown_fields_of_any_kind_and_number_are_a_sentence() -> None:
    with pytest.raises(ProtocolError, match="'y', b'x'"):
        Job.from_bytes(msgpack.packb({"id": "d/0/0", "n": 1, "y": 2, b"x": 1}), "job x")
    with pytest.raises(ProtocolError, match=r"'f0', .* and 92 more") as found:
        Job.from_bytes(pack({"id": "d/0/0", "n": 1} | {f"f{at}": at for at in range(100)}), "job x")
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack({"a": 1})[:-1],
        pack(1) + b"\x00",
        msgpack.packb(msgpack.ExtType(4, b"x")),
        msgpack.packb({1: 2}),
    ],
)
def test_bytes_that_penstock_never_wrote_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="thing is not a record"):
        unpack(data, "thing")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("token", bad) for bad in ("", "b" * 300, "a/b", "..", "a\n", "ü")),
        *(
            ("sides", [bad])
            for bad in (
                [],
                [7, 1, 1],
                ["x", 1],
                ["x", 1, 1, -1],
                ["x", 1, 1, 2**16],
                ["x", 1, 1, 0, 0],
                ["../x", 1, 1],
                ["x", -1, 1],
            )
        ),
        *(("sides", [bad]) for bad in (["x", 2**41, 1], ["x", 1, -1], ["x", True, 1], ["x" * 65, 1, 1])),
        *(("shared", bad) for bad in ([-5, 0, 9], [0, -1, 9], [0, 0, 2**62], [0, 9, 9], [0, 0], [2**20, 0, 9])),
        *((version, bad) for version in ("oldest", "newest") for bad in (-2, 2**53 + 1)),
        *(("loss_by_version", [[3, bad]]) for bad in (-1, 2**31 + 1)),
    ],
)
def test_a_committed_sample_whose_key_or_numbers_cannot_be_ones_are_refused(name: str, value: Any) -> None:
    """Its token, its side arrays' names and where it lies are parts of keys, of which the leader asks every server."""
    good = replace(meta(0, "0f" * 12 + ".15"), sides=[["experts", 1, 2**64 - 1]], shared=[0, 8, 9])
    assert SampleMeta.from_bytes(good.to_bytes()) == good
    with pytest.raises(ProtocolError, match="has values that no committed sample has"):
        SampleMeta.from_bytes(replace(good, **{name: value}).to_bytes(), "metadata")


def test_a_record_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_RECORD_BYTES", 10)
    with pytest.raises(ProtocolError, match="thing has 21 bytes"):
        unpack(pack("x" * 20), "thing")
    monkeypatch.setattr(codec, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(codec, "MAX_TEXT_BYTES", 10)
    with pytest.raises(ProtocolError, match="thing is not a record"):
        unpack(pack("x" * 20), "thing")


def test_metadata_of_a_group_is_the_records_one_after_another() -> None:
    records = [meta(k, "token", version=3) for k in range(3)]
    data = b"".join(record.to_bytes() for record in records)
    assert list(iter_metas(data, "group")) == records
    assert list(iter_metas(b"", "group")) == []
    assert records[0].num_loss == 2


def test_damaged_metadata_names_the_group() -> None:
    with pytest.raises(ProtocolError, match="metadata of group g lacks fields"):
        list(iter_metas(pack([1, "token"]), "metadata of group g"))
    with pytest.raises(ProtocolError, match="metadata of group g lacks fields"):
        list(iter_metas(pack({"k": 1}), "metadata of group g"))
    with pytest.raises(ProtocolError, match="metadata of group g"):
        list(iter_metas(b"\xc1", "metadata of group g"))


def test_columns_that_no_manifest_has_are_named_shortly() -> None:
    values = unpack(manifest(1), "it")
    values["rows"] |= {b"\xff" * 1000: [], "colour": []} | {f"more-{n}": [] for n in range(1000)}
    with pytest.raises(ProtocolError, match=r"columns that this version .* more") as caught:
        Manifest.from_bytes(pack(values))
    assert len(str(caught.value)) < 1000


EMPTY: list[Any] = [[], {}, [[]], {"a": {}}]


@pytest.mark.parametrize("value", EMPTY)
def test_a_record_of_more_values_than_any_has_is_refused_before_they_are_made(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """57 MiB of empty lists would take 4.5 GiB."""
    monkeypatch.setattr(codec, "MAX_VALUES", 150_000)
    few, many = [[value] * 1000] * 20, [[value] * 1000] * 200
    assert unpack(pack(few), "thing") == few
    with pytest.raises(ProtocolError, match=r"^thing is not a record .*: it has more than 150000 values"):
        unpack(pack(many), "thing")
    with pytest.raises(ProtocolError, match="more than 150000 values"):
        list(codec.unpack_each(pack(many) * 2, "thing"))
    with pytest.raises(ProtocolError, match="more than 150000 values"):
        list(codec.unpack_each(pack(few) * 20, "thing"))
    with pytest.raises(ProtocolError, match="more than 150000 values"):
        list(codec.unpack_each(pack(None) * 150_001, "thing"))


def test_a_digest_names_the_bytes_of_a_manifest() -> None:
    assert Manifest.digest(manifest(1)) == Manifest.digest(manifest(1))
    assert Manifest.digest(manifest(1)) != Manifest.digest(manifest(2))


def test_T8_what_was_drawn_and_what_was_given_are_told_apart() -> None:
    sample = Sample(Job("d/0/0", 1), 0)
    sample.append([1, 2])
    sample.append([3, 4], version=5, logprobs=[-0.1, -0.2])
    sample.append([6], version=5, logprobs=[-0.3], loss=False)
    assert sample.generated == [0, 0, 1, 1, 1]
    assert sample.loss_mask == [0, 0, 1, 1, 0]
    assert sample.versions == [-1, -1, 5, 5, 5]
    assert sample.logprobs == [0.0, 0.0, -0.1, -0.2, -0.3]
    with pytest.raises(ProtocolError, match="sample d/0/0/0: 1 logprobs for 2 tokens"):
        sample.append([1, 2], version=1, logprobs=[0.1])


def test_sample_records_of_another_version_are_refused() -> None:
    values = unpack(meta(0, "t").to_bytes(), "m")
    with pytest.raises(ProtocolError, match="sample has fields that this version of penstock does not know"):
        SampleMeta.from_bytes(pack([*values, "red"]), "sample")


def test_a_sample_record_of_a_version_with_fewer_fields_is_read() -> None:
    record = meta(0, "t")
    values = unpack(record.to_bytes(), "m")
    assert SampleMeta.from_bytes(pack(values[:-1]), "sample") == record
    assert SampleMeta.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize("ranges", [[[1]], [[]], [[1, 2, 3]], [[1, "2"]], [1], [[1, None]]])
def test_ranges_of_versions_are_pairs(ranges: Any) -> None:
    """Whoever reads them takes them apart as such."""
    record = Publication("policy", 3, "disk", "/w").to_map() | {"abandoned": ranges}
    with pytest.raises(ProtocolError, match="a field abandoned that it cannot have"):
        Publication.from_map(record, "publication")


@given(
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=4),
    version=st.integers(0, 14),
    rev=st.integers(0, 3),
)
def test_T1_a_publication_and_a_lineage_agree_on_which_versions_live(
    spans: list[tuple[int, int]], version: int, rev: int
) -> None:
    ranges = [(first, first + more) for first, more in spans]
    newest = Publication("policy", 20, "disk", "/w", rev=rev, abandoned=[list(one) for one in ranges])
    gone = {v for first, last in ranges for v in range(first, last + 1)}
    assert newest.abandons(version) == (version in gone) != Lineage(tuple(ranges)).lives(version)
    assert newest.id == f"20-{rev}"
