"""The change of a piece: exact, small, and bounded whatever is read."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PublishError
from penstock.weights.deltas.blocks import KINDS, Block, decode, encode

SIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def pieces(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """A piece, what became of it, and the size of its elements."""
    item, count = draw(SIZES), draw(st.integers(1, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    before = rng.bytes(item * count)
    after = bytearray(before)
    for at in rng.choice(count, int(count * draw(st.sampled_from([0, 0.001, 0.02, 0.3, 1]))), replace=False):
        after[at * item : (at + 1) * item] = rng.bytes(item)
    return before, bytes(after), item


@settings(deadline=None)
@given(pieces())
def test_what_is_decoded_is_what_was_encoded(piece: tuple[bytes, bytes, int]) -> None:
    before, after, item = piece

    block = encode(before, after, item)

    assert decode(block, before, len(after), item) == after
    assert len(block.data) <= len(after) + 64


def test_a_piece_without_a_base_is_kept_as_it_is() -> None:
    assert decode(encode(None, b"abcd", 2), None, 4, 2) == b"abcd"


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_the_ends_of_the_range_wrap(item: int) -> None:
    before, after = b"\x00" * item * 64 + b"\xff" * item * 64, b"\xff" * item * 64 + b"\x00" * item * 64

    assert decode(encode(before, after, item), before, len(after), item) == after


def test_changes_far_apart_are_found_again() -> None:
    before = np.zeros(200_000, np.uint16)
    after = before.copy()
    after[[0, 254, 509, 765, 199_999]] = 1, 2, 3, 4, 5

    block = encode(before.tobytes(), after.tobytes(), 2)

    assert (block.kind, block.num_changed, block.num_far) == ("sparse", 5, 3)
    assert decode(block, before.tobytes(), before.nbytes, 2) == after.tobytes()


def test_one_to_three_percent_of_bf16_steps_take_less_than_a_fiftieth_of_the_whole() -> None:
    rng = np.random.default_rng(7)
    before = rng.integers(0, 2**16, 500_000, dtype=np.uint16)
    for share, most in ((0.01, 0.01), (0.03, 0.02)):
        moved = rng.random(before.size) < share
        after = before + np.where(moved, rng.choice([1, 65535], before.size), 0).astype(np.uint16)
        block = encode(before.tobytes(), after.tobytes(), 2)
        assert len(block.data) < most * before.nbytes


def test_what_cannot_be_smaller_is_kept_raw() -> None:
    rng = np.random.default_rng(7)

    assert encode(rng.bytes(4096), rng.bytes(4096), 2).kind == "raw"


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(-5, 2**40),
    st.integers(-5, 2**40),
    st.binary(max_size=300),
    st.booleans(),
    SIZES,
)
def test_any_block_is_a_piece_of_the_right_size_or_one_error(
    kind: str, changed: int, far: int, data: bytes, deflated: bool, item: int
) -> None:
    block = Block(kind, changed, far, zlib.compress(data) if deflated else data)  # type: ignore[arg-type]
    try:
        found = decode(block, bytes(240), 240, item)
    except PublishError:
        return
    assert len(found) == 240


@settings(deadline=None)
@given(pieces(), st.data())
def test_a_flipped_or_shortened_block_is_a_piece_of_the_right_size_or_one_error(
    piece: tuple[bytes, bytes, int], data: st.DataObject
) -> None:
    before, after, item = piece
    block = encode(before, after, item)
    if not block.data:
        return
    at = data.draw(st.integers(0, len(block.data) - 1))
    flipped = bytearray(block.data)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for spoilt in (bytes(flipped), block.data[:at], block.data + b"\x00"):
        try:
            found = decode(block._replace(data=spoilt), before, len(after), item)
        except PublishError:
            continue
        assert len(found) == len(after)


def test_a_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(bytes(100_000_000), 9)

    with pytest.raises(PublishError, match="a piece of another size"):
        decode(Block("dense", 0, 0, bomb), bytes(64), 64, 2)


def test_a_delta_is_not_applied_to_what_is_not_there() -> None:
    with pytest.raises(PublishError, match="its base does not have"):
        decode(Block("same", 0, 0, b""), None, 64, 2)
