"""The change of a piece: exact, small, and bounded whatever is read."""

import struct
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PublishError
from penstock.weights.delta_format import decode, encode

SIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def pieces(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Return a piece, what became of it, and the size of its elements."""
    item, count = draw(SIZES), draw(st.integers(1, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    before = rng.bytes(item * count)
    after = bytearray(before)
    for at in rng.choice(count, int(count * draw(st.sampled_from([0, 0.001, 0.02, 0.3, 1]))), replace=False):
        after[at * item : (at + 1) * item] = rng.bytes(item)
    return before, bytes(after), item


@settings(deadline=None)
@given(pieces())
def test_decode_returns_what_was_encoded(piece: tuple[bytes, bytes, int]) -> None:
    before, after, item = piece

    frame = encode(before, after, item)

    assert decode(frame, before, len(after)) == after
    assert len(frame) <= len(after) + 64


def test_a_piece_without_a_base_is_a_difference_to_zeros() -> None:
    assert decode(encode(None, b"abcd", 2), None, 4) == b"abcd"


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_the_ends_of_the_range_wrap(item: int) -> None:
    before, after = b"\x00" * item * 64 + b"\xff" * item * 64, b"\xff" * item * 64 + b"\x00" * item * 64

    assert decode(encode(before, after, item), before, len(after)) == after


@pytest.mark.parametrize("bits", [0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0x8000, 0x0001])
def test_NaN_payloads_infinities_negative_zero_and_subnormals_keep_their_bits(bits: int) -> None:
    special = struct.pack("<H", bits) * 99
    for before, after in ((bytes(198), special), (special, bytes(198)), (special[:2] + bytes(196), special)):
        assert decode(encode(before, after, 2), before, 198) == after


def test_an_odd_number_of_bytes_is_encoded_by_bytes() -> None:
    before, after = b"0123456789abc", b"0123456789abd"

    assert decode(encode(before, after, 8), before, 13) == after


def test_distant_changes_keep_their_places() -> None:
    before = np.zeros(2_000_000, np.uint16)
    after = before.copy()
    after[[0, 254, 509, 70_000, 1_999_999]] = 1, 2, 3, 4, 5

    frame = encode(before.tobytes(), after.tobytes(), 2)

    assert len(frame) < 100
    assert decode(frame, before.tobytes(), before.nbytes) == after.tobytes()


def test_one_to_three_percent_of_bf16_steps_take_about_as_many_percent() -> None:
    rng = np.random.default_rng(7)
    before = rng.integers(0, 2**16, 500_000, dtype=np.uint16)
    for share, most in ((0.01, 0.011), (0.03, 0.026)):
        moved = rng.random(before.size) < share
        after = before + np.where(moved, rng.choice([1, 65535], before.size), 0).astype(np.uint16)
        assert len(encode(before.tobytes(), after.tobytes(), 2)) < most * before.nbytes


def test_random_bytes_grow_by_a_few() -> None:
    rng = np.random.default_rng(7)

    assert len(encode(rng.bytes(4096), rng.bytes(4096), 2)) < 4096 + 32


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 255), st.booleans())
def test_any_frame_is_a_piece_of_the_right_size_or_one_error(data: bytes, kind: int, is_compressed: bool) -> None:
    content = bytes([kind]) + data
    try:
        found = decode(zstandard.compress(content) if is_compressed else content, bytes(240), 240)
    except PublishError:
        return
    assert len(found) == 240


@settings(deadline=None)
@given(pieces(), st.data())
def test_a_flipped_or_shortened_frame_is_a_piece_of_the_right_size_or_one_error(
    piece: tuple[bytes, bytes, int], data: st.DataObject
) -> None:
    before, after, item = piece
    frame = encode(before, after, item)
    at = data.draw(st.integers(0, len(frame) - 1))
    flipped = bytearray(frame)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for spoilt in (bytes(flipped), frame[:at], frame + b"\x00"):
        try:
            found = decode(spoilt, before, len(after))
        except PublishError:
            continue
        assert len(found) == len(after)


BOMBS = """
import resource, zstandard
from penstock.errors import PublishError
from penstock.weights.delta_format import decode

def frame(num_bytes, **claims):
    made = zstandard.ZstdCompressor(**claims.pop("settings", {})).compressobj(**claims)
    return made.compress(bytes(num_bytes)) + made.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_content_size=False)
bombs = frame(2**28), frame(64, size=2**33), frame(64, settings={"compression_params": wide})
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**25,) * 2)
for bomb in bombs:
    try:
        decode(bomb, bytes(64), 64)
    except PublishError as exc:
        print(exc)
"""


def test_a_frame_that_claims_more_than_the_index_allows_takes_no_memory_for_it() -> None:
    """Frames that expand to 256 MiB, claim a content of 8 GiB, and claim a window of 128 MiB; 32 MiB are left."""
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    expands, claims, wide = done.stdout.splitlines()
    assert "more than the 65 bytes that its index allows" in expands
    assert "of another size" in claims or "unknown kind" in claims or "too much memory" in claims
    assert "too much memory" in wide
