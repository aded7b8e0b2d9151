import math
from collections.abc import Collection, Mapping
from dataclasses import fields, replace

import numpy as np
import pytest

from penstock.errors import ProtocolError
from penstock.history import blocks, bodies
from penstock.history.blocks import MAX_SAMPLES, Block, Packed, blocks_of, pack_block, pack_logprobs, unpack_logprobs
from penstock.history.bodies import Body, Group, group_of
from penstock.history.packing import (
    Piece,
    Spelling,
    nothing_known,
    pack_integers,
    pack_planes,
    squeeze,
    unpack_integers,
    unpack_planes,
    unsqueeze,
)
from penstock.history.row import SampleRow, id_of, key_of, place_of
from penstock.records import codec
from penstock.records.codec import pack
from tests.unit.penstock.history.rows import row

ARRAYS = ("tokens", "logprobs", "versions", "generated", "loss_mask")
NO_SPELLING = Spelling(nothing_known)


def back(*rows: SampleRow, of: SampleRow | None = None, spelling: Spelling = NO_SPELLING) -> list[dict[str, object]]:
    """``rows`` through the bytes of a block, and those of the group that ``of`` made."""
    group = Group.from_bytes(group_of(of or rows[0], spelling).to_bytes())
    block = Block(pack_block(rows, group, spelling), group)
    return [block.fields(at, spelling, arrays=True) for at in range(len(rows))]


@pytest.mark.parametrize("other", [None, row(prompt="Else", label="6", tokens=np.arange(7, dtype=np.int32))])
def test_rows_come_back_as_they_were(other: SampleRow | None) -> None:
    shorter = {name: getattr(row(), name)[:5] for name in ARRAYS}
    rows = [
        row(),
        row(k=2, answer="", worker=""),
        row(**shorter, answer=""),
        row(logprobs=np.arange(7, dtype=np.float32)),
        row(**dict.fromkeys(ARRAYS)),
        row(prompt="Another", tokens=np.arange(7, dtype=np.int32)),
    ]
    for some in (rows, rows[:3], rows[:1]):
        for one, found in zip(some, back(*some, of=other), strict=True):
            for name, value in found.items():
                if name in ARRAYS:
                    assert np.array_equal(value, getattr(one, name)), name  # type: ignore[arg-type]
                    assert value.dtype == getattr(one, name).dtype  # type: ignore[attr-defined]
                elif name.endswith("_s"):
                    assert math.isclose(value, getattr(one, name), rel_tol=1e-15), name  # type: ignore[arg-type]
                else:
                    assert value == getattr(one, name), name


class Tokenizer:
    """Ids that stand for a letter each, those above 1000 for the bytes of another, 9999 for the end."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, tokens: Collection[int]) -> Mapping[int, Piece]:
        self.asked += len(tokens)
        found = {one: Piece(bytes([one % 1000]), one == 9999) for one in tokens if one % 1000 < 256 and one != 9999}
        return found | ({9999: Piece(b"<end>", True)} if 9999 in tokens else {})


def spelled(text: str, answer: str) -> SampleRow:
    tokens = [9999, *text.encode(), *(1000 + one for one in answer.encode()), 9999]
    count = len(tokens)
    mask = (np.arange(count) > len(text.encode())).astype(np.uint8)
    return row(
        prompt="<end>" + text, answer=answer, tokens=np.array(tokens, np.int32), prompt_length=1 + len(text.encode()),
        logprobs=np.zeros(count, np.float32), versions=np.zeros(count, np.int32), generated=mask, loss_mask=mask,
    )  # fmt: skip


def test_a_text_that_its_tokens_spell_is_not_kept_twice() -> None:
    look_up = Tokenizer()
    spelling = Spelling(look_up)
    rows = [spelled("Was ist \u00fcber uns?", answer) for answer in ("Der Himmel: \U0001f600.", "H", "Himmel " * 50)]
    group = group_of(rows[0], spelling)
    packed = pack_block(rows, group, spelling)

    assert group.prompt is None
    assert len(packed.bodies) < 300
    for one, found in zip(rows, back(*rows, spelling=spelling), strict=True):
        assert (found["prompt"], found["answer"]) == (one.prompt, one.answer)
    asked = look_up.asked
    back(*rows, spelling=spelling)
    assert look_up.asked == asked

    other = row(answer="said otherwise", **{name: getattr(rows[0], name) for name in (*ARRAYS, "prompt_length")})
    (found,) = back(other, spelling=spelling)
    assert (found["prompt"], found["answer"]) == (other.prompt, "said otherwise")


def test_tokens_whose_pieces_are_gone_spell_nothing() -> None:
    spelling = Spelling(Tokenizer())
    one = spelled("a", "b")
    group = group_of(one, spelling)
    block = Block(pack_block([one], group, spelling), group)
    with pytest.raises(ProtocolError, match="tokens whose text is not there"):
        block.fields(0, NO_SPELLING, arrays=False)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e300, 1e15, -1.0])
def test_a_time_that_is_none_is_not_known(odd: float) -> None:
    (found,) = back(row(drawn_s=odd))
    assert (found["drawn_s"], found["admitted_s"]) == (0.0, row().admitted_s)


def test_blocks_have_bounds() -> None:
    assert [len(block) for block in blocks_of([row()] * (2 * MAX_SAMPLES + 1))] == [MAX_SAMPLES, MAX_SAMPLES, 1]
    long = row(answer="x" * 150_000)
    assert [len(block) for block in blocks_of([row(), long, long, row()])] == [2, 2]
    assert list(blocks_of([])) == []


def test_what_no_record_holds_is_left_out_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that changes with each token, so that its runs are more than a list has room for."""
    for module in (codec, blocks):
        monkeypatch.setattr(module, "MAX_ITEMS", 300)
    length = 102
    changing = np.arange(length, dtype=np.int64) % 2
    long = row(
        tokens=np.ones(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        generated=changing.astype(np.uint8),
        loss_mask=np.zeros(length, np.uint8),
    )
    (found,) = back(long)
    assert "tokens" not in found
    assert (found["answer"], found["prompt"]) == (long.answer, long.prompt)
    steady = replace(long, generated=np.ones(length, np.uint8))
    (found,) = back(steady)
    assert np.array_equal(found["generated"], steady.generated)  # type: ignore[arg-type]


def test_the_tokens_of_a_prompt_that_no_record_holds_are_kept_with_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codec, bodies):
        monkeypatch.setattr(module, "MAX_TEXT_BYTES", 1000)
    length = 500
    tokens = np.random.default_rng(0).integers(0, 2**18, length, np.int32)
    made = row(
        tokens=tokens,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        generated=np.zeros(length, np.uint8),
        loss_mask=np.zeros(length, np.uint8),
        prompt_length=length,
        answer="",
    )
    (found,) = back(made)
    assert np.array_equal(found["tokens"], tokens)  # type: ignore[arg-type]
    assert found["prompt"] == made.prompt


def test_a_block_of_more_tokens_than_are_written_is_refused_before_room_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = row()
    group = group_of(made, NO_SPELLING)
    packed = pack_block([made, row(k=1)], group, NO_SPELLING)
    monkeypatch.setattr("penstock.history.blocks.MAX_LENGTH", 13)
    with pytest.raises(ProtocolError, match="longer arrays than penstock writes"):
        Block(packed, group)
    monkeypatch.setattr("penstock.history.bodies.MAX_LENGTH", 3)
    with pytest.raises(ProtocolError, match="values that no row has"):
        Group.from_bytes(group.to_bytes())


def test_logprobs_keep_every_bit() -> None:
    rng = np.random.default_rng(3)
    near = np.log(1 - 2.0**-24 * rng.integers(1, 2**20, 2000)).astype(np.float32)
    neighbours = (near.view(np.uint32) + rng.integers(-2, 3, 2000).astype(np.uint32)).view(np.float32)
    odd = np.array([0, -0.0, 1.0, -1e-45, -1.2e-38, -np.inf, np.nan, -1e30, -(2.0**-5), -(2.0**-24)], np.float32)
    for raw in (
        *(near, neighbours, near[:1], near[:0], odd, odd[:2], odd[-2:], -rng.exponential(2, 999).astype(np.float32)),
        rng.integers(0, 2**32, 1000, dtype=np.uint32).view(np.float32),
    ):
        assert unpack_logprobs(pack_logprobs(raw), len(raw)).tobytes() == raw.tobytes()
    assert len(pack_logprobs(near)) < 2.9 * len(near) < len(pack_logprobs(neighbours.repeat(2)))
    assert len(pack_logprobs(np.zeros(10_000, np.float32))) < 50


def test_integers_come_back() -> None:
    rng = np.random.default_rng(3)
    for values in ([], [0], [-1, 2**31 - 1, -(2**31), 127, 128], rng.integers(0, 150_000, 999), [7] * 5000):
        array = np.array(values, np.int32)
        packed = pack_integers(array)
        assert np.array_equal(unpack_integers(packed, len(array)), array)
        assert np.array_equal(unpack_planes(pack_planes(array), len(array), "<i4"), array)
    assert len(pack_integers(rng.integers(0, 2**17, 4096).astype(np.int32))) < 2.3 * 4096


@pytest.mark.parametrize("count", [2, 2**40, -1])
@pytest.mark.parametrize(
    "packed",
    [
        *(None, b"", b"\2", b"\0", b"\0\0", b"\0\0\x80\x80", b"\0\0\1\2\3", b"\0\1\xff", b"\0\2", b"\1"),
        *(b"\1\x80\x80\x80\x80\x80\x80", b"\1\3\3\3\3\0a", b"\1" + b"\2" * 4 + b"\0a" * 4, "ab"),
        *(b"\0\0" + b"\xff" * 4 + b"\x7f\1", b"\0\0" + b"\x80" * 5 + b"\1\1"),
        b"\0" + squeeze(bytes(10_000)),
    ],
)
def test_arrays_that_nobody_packed_are_refused(packed: bytes, count: int) -> None:
    for unpack in (unpack_integers, unpack_logprobs):
        with pytest.raises(ProtocolError, match="did not write"):
            unpack(packed, count)


def test_logprobs_that_are_cut_or_of_no_class_are_refused() -> None:
    whole = pack_logprobs(np.array([-0.5, -1e-6], np.float32))
    assert len(unpack_logprobs(whole, 2)) == 2
    for wrong in (*(whole[:end] for end in range(len(whole))), whole + b"a", whole.replace(b"\x7e", b"\xff")):
        with pytest.raises(ProtocolError, match="did not write"):
            unpack_logprobs(wrong, 2)


@pytest.mark.parametrize(
    "packed", [None, b"", b"\2", b"\1\xff", "a", b"\1" + bytes(30), squeeze(bytes(101)), b"\0" * 102]
)
def test_bytes_that_nobody_packed_are_refused(packed: object) -> None:
    with pytest.raises(ProtocolError, match="did not write"):
        unsqueeze(packed, 100)


@pytest.mark.parametrize(
    "bodies",
    [b"", b"\xc1", pack({}), pack([]), pack([True, 3]), pack([True, [[1] * 50]]), pack([True, [["stop", 3]]])],
)
def test_blocks_that_nobody_packed_are_refused(bodies: bytes) -> None:
    group = group_of(row(), NO_SPELLING)
    with pytest.raises(ProtocolError):
        Block(Packed(squeeze(bodies), b"", b""), group)
    with pytest.raises(ProtocolError):
        Block(Packed(bodies, b"", b""), group).fields(0, NO_SPELLING, arrays=False)


@pytest.mark.parametrize(
    "group", [b"", pack(3), *(squeeze(pack(one)) for one in ([], [1, 2, 3], ["", "", 3], [None] * 3))]
)
def test_groups_that_nobody_packed_are_refused(group: bytes) -> None:
    with pytest.raises(ProtocolError):
        Group.from_bytes(group)


def test_marks_of_a_sample_without_arrays_mean_nothing() -> None:
    group = group_of(row(), NO_SPELLING)
    whole = pack_block([row(), row(k=1, **dict.fromkeys(ARRAYS))], group, NO_SPELLING)
    of_drawn, bodies = codec.unpack(unsqueeze(whole.bodies, 10_000), "it")
    bodies[1][[one.name for one in fields(Body)].index("marks")] = [1, "odd"]
    block = Block(whole._replace(bodies=squeeze(pack([of_drawn, bodies]))), group)
    assert block.fields(0, NO_SPELLING, arrays=True)["logprobs"].tolist() == row().logprobs.tolist()  # type: ignore[union-attr]


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        back(row(versions=np.zeros(3, np.int32)))
    with pytest.raises(ValueError, match="some are missing"):
        back(row(logprobs=None))


def test_ids() -> None:
    assert id_of("math/0/7", 3) == "math/0/7/3"
    for key in (("math/0/7", 3, 0), ("math/0/7", 3, 2), ("math/0/7", -1, 0)):
        assert key_of(id_of(*key)) == key
    assert place_of("a/b/0/7") == ("a/b", 0, 7)
    assert place_of("odd") == ("", -1, -1)
