"""Bytes of payloads, side arrays and columns: views, or an error that names the sample."""

import struct
import zlib
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from penstock.consumers.batch import columns
from penstock.consumers.batch.columns import Layout
from penstock.payloads import checksum_of, sides
from penstock.payloads.format import MAGIC, decode
from penstock.records.manifest import Row
from tests.hostile import SAME, is_read_or_refused, near

ROW = Row("d/0/1", 0, "t", "control", 1, 2, 4, 2, 2, 2, 5, 5, 5, 1.0, "completed")
SIDES = st.sampled_from(sides.DTYPES).flatmap(
    lambda name: arrays(name, array_shapes(min_dims=0, max_dims=4, max_side=3))
)


PAYLOAD = struct.pack("<4sIII3i4x2i2f2B6x", MAGIC, 2, 1, 1, 1, 2, 7, 11, 12, 0.0, -0.5, 0, 3)
SIDE = sides.pack("x", np.zeros((2, 3), np.float32), "d/0/1/0")


def test_the_payload_is_one() -> None:
    assert decode(PAYLOAD, "d/0/1/0").spans == ((1, 2, 7),)


@SAME
@given(data=near(PAYLOAD))
def test_a_payload_is_views_or_refused(data: bytes) -> None:
    is_read_or_refused(decode, data, "d/0/1/0")


@SAME
@given(data=near(SIDE))
def test_a_side_array_is_a_view_or_refused(data: bytes) -> None:
    is_read_or_refused(sides.unpack, "x", data, "d/0/1/0", checksum_of(data))


@SAME
@given(array=SIDES)
def test_a_side_array_comes_back_as_it_was(array: np.ndarray[Any, Any]) -> None:
    data = sides.pack("x", array, "d/0/1/0")
    again = sides.unpack("x", data, "d/0/1/0", checksum_of(data))

    np.testing.assert_array_equal(again, array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape


@SAME
@given(
    kind=st.integers(0, 255), code=st.integers(0, 255), width=st.sampled_from([0, 1, 3, 65536, 2**32 - 1]),
    body=st.binary(max_size=40), row=st.sampled_from([0, 1]),
)  # fmt: skip
@example(kind=2, code=0, width=1, body=bytes(2), row=0)  # a width in the value of a sample
def test_the_value_of_a_column_is_read_or_refused(kind: int, code: int, width: int, body: bytes, row: int) -> None:
    data = struct.pack("<4sBBxxII", b"PSC1", kind % 4, code % 11, width, zlib.crc32(body, row)) + body
    layout = Layout([0], [4])
    is_read_or_refused(columns.join, {0: data}, layout, [ROW], frozenset(), "x")
    is_read_or_refused(columns.join, {0: body}, layout, [ROW], frozenset(), "x")


@SAME
@given(
    array=st.sampled_from(["float16", "float64", "int8", "uint16", "int64"]).flatmap(lambda name: arrays(name, (1, 4)))
)
def test_a_column_comes_back_as_it_was(array: np.ndarray[Any, Any]) -> None:
    layout = Layout([0], [4])
    values = columns.split(array, layout, frozenset(), "batch 1", "x")

    np.testing.assert_array_equal(columns.join(values, layout, [ROW], frozenset(), "x"), array)
