"""Bytes of payloads, side arrays and columns: views, or an error that names the sample."""

import struct
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from penstock.consumers.batch import columns
from penstock.consumers.batch.columns import Layout
from penstock.errors import PayloadError
from penstock.payloads import sides
from penstock.payloads.format import MAGIC
from penstock.payloads.read import decode
from penstock.records.manifest import Row
from tests.hostile import SAME, is_read_or_refused, packed_near

HEADER = {
    "length": 2, "prompt": 1, "spans": [1, 2, 7],
    "arrays": [["tokens", "int32", [2], 0], ["logprobs", "float32", [2], 8], ["mask", "uint8", [2], 16],
               ["experts", "int16", [2, 1], 24]],
}  # fmt: skip
ROW = Row("d/0/1", 0, "t", "control", 1, 2, 4, 2, 2, 2, 5, 5, 5, 1.0, "completed")
SIDES = st.sampled_from(sides.DTYPES).flatmap(
    lambda name: arrays(name, array_shapes(min_dims=0, max_dims=4, max_side=3))
)


def framed(magic: bytes, header: bytes, body: bytes) -> bytes:
    return struct.pack("<4sI", magic, len(header)) + header + bytes(-(8 + len(header)) % 8) + body


@SAME
@given(header=packed_near(HEADER), body=st.sampled_from([bytes(32), b"\x01" * 32, b"\x03" * 32, b"", bytes(31)]))
def test_a_payload_is_views_or_refused(header: bytes, body: bytes) -> None:
    is_read_or_refused(decode, framed(MAGIC, header, body), "d/0/1/0")
    is_read_or_refused(decode, header, "d/0/1/0")


@SAME
@given(header=packed_near(["float32", [2, 3]]), body=st.sampled_from([bytes(24), b"", bytes(23)]))
def test_a_side_array_is_a_view_or_refused(header: bytes, body: bytes) -> None:
    data = framed(sides.MAGIC, header, body)
    is_read_or_refused(sides.unpack, "x", data, "d/0/1/0", zlib.crc32(data))
    is_read_or_refused(sides.unpack, "x", header, "d/0/1/0", zlib.crc32(header))


@SAME
@given(array=SIDES)
def test_a_side_array_comes_back_as_it_was(array: np.ndarray[Any, Any]) -> None:
    data = sides.pack("x", array, "d/0/1/0")
    again = sides.unpack("x", data, "d/0/1/0", zlib.crc32(data))

    np.testing.assert_array_equal(again, array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape


@SAME
@given(
    kind=st.integers(0, 255), code=st.integers(0, 255), width=st.sampled_from([0, 1, 3, 65536, 2**32 - 1]),
    body=st.binary(max_size=40), row=st.sampled_from([0, 1]),
)  # fmt: skip
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


def test_a_header_is_not_made_room_for_before_it_is_read() -> None:
    claims = b"\xdd\x00\x0e\xff\xff" * 1000 + bytes(1000 * 1000)

    is_read_or_refused(decode, framed(MAGIC, claims, b""), "d/0/1/0")
    is_read_or_refused(decode, framed(MAGIC, msgpack.packb([]) * 10, b""), "d/0/1/0")


@pytest.mark.parametrize(
    "array", [["x" * 10**5, "int32", [-1], 0], ["a", "x" * 10**5, [1], 0], ["x" * 10**5], [2] * 10**5]
)
def test_a_payload_is_refused_shortly(array: list[Any]) -> None:
    with pytest.raises(PayloadError, match="d/0/1/0") as caught:
        decode(framed(MAGIC, msgpack.packb(HEADER | {"arrays": [array]}), bytes(32)), "d/0/1/0")
    assert len(str(caught.value)) < 500
