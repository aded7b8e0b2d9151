"""A sample of several parts is encoded as one, and each part is read back as if it were a sample of its own."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import payloads
from penstock.errors import PayloadError, ProtocolError
from penstock.records.codec import pack
from penstock.records.sample import Sample
from penstock.records.sample_meta import MAX_PARTS, Part, SampleMeta, iter_metas
from penstock.workers.jobs.prefixes import growth_to_bytes, partial_from_bytes, partial_to_bytes
from tests.hostile import SAME
from tests.parted_samples import Turn, apart, make_sample, packed, turn

TURNS = st.builds(
    Turn,
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(3, 6), st.integers(1, 3), st.booleans()), max_size=3).map(tuple),
)
SAMPLES = st.lists(TURNS, min_size=1, max_size=5).map(lambda parts: make_sample(0, parts))


@SAME
@given(sample=SAMPLES)
def test_each_part_is_read_back_as_a_sample_of_its_own(sample: Sample) -> None:
    data, meta = packed(sample)
    payload = payloads.decode(data, sample.id, meta.checksum)
    ends = list(pairwise([0, *sample.parts, len(payload)]))

    assert SampleMeta.from_bytes(meta.to_bytes()) == meta
    assert list(iter_metas(2 * meta.to_bytes(), "it")) == [meta, meta]
    assert len(meta.parts) == (len(ends) if sample.parts else 0)
    for i, (one, (begin, end)) in enumerate(zip(apart(sample, 1), ends, strict=True)):
        alone, expected = packed(one)
        cut, whole = payload.cut(begin, end), payloads.decode(alone, one.id)
        for name in ("tokens", "logprobs", "mask", "versions"):
            np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name))
        assert (cut.spans, cut.prompt_length) == (whole.spans, whole.prompt_length)
        if sample.parts:
            names = ("length", "prompt_length", "num_generated", "oldest", "newest", "loss_by_version")
            assert Part(*meta.parts[i]) == Part(*(getattr(expected, name) for name in names))


def test_an_ordinary_sample_grows_by_an_empty_list() -> None:
    _, meta = packed(make_sample(0, [turn(2, 3)]))

    assert meta.to_bytes().endswith(pack([]))
    assert meta.parts == []


@pytest.mark.parametrize(
    "parts",
    [[0], [1], [4], [3, 5], [3, 3], [4, 3], [6], [99], [-1], ["3"], [True], [3.0], 3, None, list(range(MAX_PARTS))],
)
def test_starts_that_are_no_parts_are_refused(parts: Any) -> None:
    # given, given, drawn, given, drawn, drawn
    sample = make_sample(0, [turn(2, 1), turn(1, 2)])
    assert sample.parts == [3]
    sample.parts = parts

    assert not sample.has_valid_parts()
    with pytest.raises(PayloadError, match=r"its parts .* are not at most 63 ascending indices"):
        packed(sample)
    with pytest.raises(PayloadError, match="cannot be read"):
        partial_from_bytes(partial_to_bytes(sample), sample.job, 0)


def record() -> SampleMeta:
    return packed(make_sample(0, [turn(2, 1, 4), turn(1, 2, 5)]))[1]


@pytest.mark.parametrize(
    "parts",
    [
        [[3, 2, 1, 4, 4, [[4, 1]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [2, 1, 1, 5, 5, [[5, 2]]]],
        [[3, 1, 1, 4, 4, [[4, 1]]], [3, 1, 2, 5, 5, [[5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, 0, 2, 5, 5, [[5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, 1, 2, 5, 5, [[5, 1]]]],
        [[3, 2, 1, 4, 4, [[5, 1]]], [3, 1, 2, 5, 5, [[5, 2]]]],
        [[3, 2, 1, 5, 5, [[4, 1]]], [3, 1, 2, 5, 5, [[5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, 1, 1, 5, 5, [[5, 2]]]],
        [[3, 2, 2, 4, 4, [[4, 1]]], [3, 1, 1, 5, 5, [[5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, 1, 2, 6, 5, [[5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, 1, 2, 5, 5, [[5, 2.0]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, 1, 2, 5, 5, [[5, 2], [5]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, True, 2, 5, 5, [[5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [0, 0, 0, -1, -1, []], [3, 1, 2, 5, 5, [[5, 2]]]],
        [[-1, -2, 1, 4, 4, [[4, 1]]], [7, 1, 2, 5, 5, [[5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], [3, 1, 2, 5, 6, [[5, 2]]]],
        [[6, 2, 3, 4, 5, [[4, 1], [5, 2]]]],
        [[3, 2, 1, 4, 4, [[4, 1]]], "five"],
        [[3, 2, 1, 4, 4, [[4, 1]]], []],
    ],
)
def test_a_record_whose_parts_do_not_add_up_is_refused(parts: list[Any]) -> None:
    good = record()
    assert good.parts == [[3, 2, 1, 4, 4, [[4, 1]]], [3, 1, 2, 5, 5, [[5, 2]]]]

    with pytest.raises(ProtocolError):
        SampleMeta.from_bytes(replace(good, parts=parts).to_bytes())


def test_a_part_without_tokens_is_refused() -> None:
    parts = [[0, 0, 0, -1, -1, []], [6, 1, 3, 4, 5, [[4, 1], [5, 2]]]]

    with pytest.raises(ProtocolError):
        SampleMeta.from_bytes(replace(record(), prompt_length=0, parts=parts).to_bytes())


def test_a_record_has_at_most_64_parts() -> None:
    most = make_sample(0, [turn(1, 1) for _ in range(MAX_PARTS)])
    meta = packed(most)[1]
    assert len(SampleMeta.from_bytes(meta.to_bytes()).parts) == MAX_PARTS
    more = replace(
        meta, length=meta.length + 1, parts=[*meta.parts[:-1], [2, 1, 1, 5, 5, [[5, 1]]], [1, 1, 0, -1, -1, []]]
    )
    with pytest.raises(ProtocolError):
        SampleMeta.from_bytes(more.to_bytes())
    with pytest.raises(PayloadError, match="not at most 63"):
        packed(make_sample(0, [turn(1, 1) for _ in range(MAX_PARTS + 1)]))


@SAME
@given(parts=st.lists(TURNS, min_size=2, max_size=5), first=st.integers(1, 4))
def test_a_prefix_has_its_parts_and_those_that_came_while_it_grew(parts: list[Turn], first: int) -> None:
    unmasked = [
        Turn(one.context, tuple((version, count, True) for version, count, _ in one.generated)) for one in parts
    ]
    before, after = make_sample(0, unmasked[:first]), make_sample(0, unmasked)

    data = partial_to_bytes(before)
    assert partial_from_bytes(data, before.job, 0).parts == before.parts
    grown = partial_from_bytes(data + growth_to_bytes(after, len(before.tokens), 0), after.job, 0)
    assert (grown.parts, grown.tokens, grown.versions) == (after.parts, after.tokens, after.versions)


def test_a_growth_that_changes_earlier_parts_is_refused() -> None:
    before, after = (make_sample(0, [turn(1, 1)] * count) for count in (3, 4))
    after.parts = [2, 6]

    with pytest.raises(PayloadError, match=r"its parts are \[2, 6\]"):
        partial_from_bytes(partial_to_bytes(before) + growth_to_bytes(after, 6, 0), after.job, 0)
