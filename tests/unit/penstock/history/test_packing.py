import math

import numpy as np
import pytest

from penstock.errors import ProtocolError
from penstock.history import bodies
from penstock.history.packing import pack_numbers, pack_runs, pack_text, unpack_numbers, unpack_runs, unpack_text
from penstock.history.row import SampleRow, id_of, key_of, place_of
from penstock.protocol.records.codec import pack
from tests.unit.penstock.history.rows import row

ARRAYS = ("tokens", "logprobs", "versions", "generated", "loss_mask")


def back(one: SampleRow, of: SampleRow | None = None) -> dict[str, object]:
    """``one`` through its bytes and those of the group that ``of`` made."""
    group = bodies.group_from_bytes(bodies.to_bytes(bodies.group_of(of or one)))
    body = bodies.body_from_bytes(bodies.to_bytes(bodies.body_of(one, group)))
    return bodies.fields_of(body, group, arrays=True)


@pytest.mark.parametrize("other", [None, row(prompt="Else", label="6", tokens=np.arange(7, dtype=np.int32))])
def test_a_row_comes_back_as_it_was(other: SampleRow | None) -> None:
    for one in (row(), row(k=2, answer="", worker=""), row(logprobs=np.arange(7, dtype=np.float32))):
        found = back(one, other)
        for name, value in found.items():
            if name in ARRAYS:
                assert np.array_equal(value, getattr(one, name)), name  # type: ignore[arg-type]
                assert value.dtype == getattr(one, name).dtype  # type: ignore[union-attr,attr-defined]
            elif name.endswith("_s"):
                assert math.isclose(value, getattr(one, name), rel_tol=1e-15), name  # type: ignore[arg-type]
            else:
                assert value == getattr(one, name), name


def test_arrays_that_are_not_kept_stay_none() -> None:
    bare = row(**dict.fromkeys(ARRAYS))
    assert {name: back(bare)[name] for name in ARRAYS} == dict.fromkeys(ARRAYS)


def test_logprobs_keep_every_bit() -> None:
    raw = np.random.default_rng(3).integers(0, 2**32, 1000, dtype=np.uint32).view(np.float32)
    again = unpack_numbers(pack_numbers(raw), "float32")
    assert again.tobytes() == raw.tobytes()


@pytest.mark.parametrize("text", ["", "a", "five " * 1000, "日本語 \U0001f600", "x" * 40_000])
def test_a_text_comes_back(text: str) -> None:
    for near in ("", "five five", "five " * 20_000):
        assert unpack_text(pack_text(text, near), near) == text
    assert len(pack_text("It is the answer to this question.", "What is the answer to this question?")) < 25


def test_runs_come_back() -> None:
    for values in ([], [3], [-1, -1, 4, 4, 4, 5], [2**31 - 1, -(2**31)]):
        assert unpack_runs(pack_runs(np.array(values, np.int32)), "int32").tolist() == values


@pytest.mark.parametrize(
    "packed",
    [
        None,
        [],
        [1, b"", b"", b"", b"", b""],
        [-1, b"", b"", b"", b""],
        [2**40, b"", b"", b"", b""],
        [2**26, b"", b"", b"", b""],
        [2, b"\0a", b"", b"", b""],
        [2, b"\1a", b"", b"", b""],
        [2, "ab", b"", b"", b""],
    ],
)
def test_numbers_that_nobody_packed_are_refused(packed: object) -> None:
    with pytest.raises(ProtocolError, match="did not write"):
        unpack_numbers(packed, "int32")


@pytest.mark.parametrize("packed", [None, [1], [1, -1], [1, 2**40], ["a", 1], [2**40, 1], [1, 2**25, 1, 2**26]])
def test_runs_that_nobody_packed_are_refused(packed: object) -> None:
    with pytest.raises(ProtocolError, match="did not write"):
        unpack_runs(packed, "int32")


@pytest.mark.parametrize("packed", [None, b"", b"\0\xff", b"\1\xff", "a", b"\1" + bytes(30)])
def test_texts_that_nobody_packed_are_refused(packed: object) -> None:
    with pytest.raises(ProtocolError, match="did not write"):
        unpack_text(packed)


@pytest.mark.parametrize("data", [b"", b"\xc1", pack({}), pack([]), pack([1] * 50), pack(["stop", 3])])
def test_bodies_that_nobody_packed_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        bodies.body_from_bytes(data)


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(ProtocolError, match="different lengths"):
        back(row(versions=np.zeros(3, np.int32)))


def test_ids() -> None:
    assert id_of("math/0/7", 3) == "math/0/7/3"
    for key in (("math/0/7", 3, 0), ("math/0/7", 3, 2), ("math/0/7", -1, 0)):
        assert key_of(id_of(*key)) == key
    assert place_of("a/b/0/7") == ("a/b", 0, 7)
    assert place_of("odd") == ("", -1, -1)
