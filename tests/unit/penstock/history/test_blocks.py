import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zstandard

from penstock.errors import ProtocolError
from penstock.history.blocks import MAX_SAMPLES, Block, Piece, blocks_of, pack_block
from penstock.history.part import OpenPart, in_memory
from penstock.history.row import ARRAYS, COLUMNS, TIMES, SampleRow, id_of, key_of, place_of
from penstock.records.codec import pack, unpack_map
from tests.unit.penstock.history.rows import row

NO_ARRAYS = dict.fromkeys(ARRAYS)


def pieces(tokens: set[int]) -> Mapping[int, Piece]:
    """Map ids to a byte each; 9999 is the end of a turn."""
    found = {one: (bytes([one % 1000]), False) for one in tokens if one % 1000 < 256}
    return found | ({9999: (b"<end>", True)} if 9999 in tokens else {})


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(in_memory()) as made:
        yield made


def put(connection: sqlite3.Connection, *rows: SampleRow) -> Block:
    """Write rows as one block, and open it."""
    OpenPart(Path("memory"), connection, pieces).put(rows, [])
    return Block(connection, 1)


def spelled(text: str, answer: str, k: int = 0) -> SampleRow:
    tokens = [9999, *text.encode(), *(1000 + one for one in answer.encode()), 9999]
    count, prompt_length = len(tokens), 1 + len(text.encode())
    mask = (np.arange(count) >= prompt_length).astype(np.uint8)
    return row(
        k=k, prompt="<end>" + text, answer=answer, is_spelled=True, tokens=np.array(tokens, np.int32),
        prompt_length=prompt_length, logprobs=np.zeros(count, np.float32), versions=np.zeros(count, np.int32),
        generated=mask, loss_mask=mask,
    )  # fmt: skip


def test_a_block_returns_every_field_and_every_bit(connection: sqlite3.Connection) -> None:
    odd = np.array([0, -0.0, 1, -1e-45, -np.inf, np.nan, -(2.0**-24)], np.float32)
    shorter = {name: getattr(row(), name)[:5] for name in ARRAYS}
    rows = [
        row(),
        row(k=1, prompt="Another", label="6", tokens=np.array([0, 1, -1, 2**31 - 1, -(2**31), 5, 6], np.int32)),
        row(k=2, answer="", worker="", **shorter),
        row(k=3, logprobs=odd, reason="stale"),
        row(k=4, **NO_ARRAYS),
        row(k=5, **{name: getattr(row(), name)[:0] for name in ARRAYS}),
        spelled("a", "b", k=6),
    ]
    block = put(connection, *rows)

    assert len(block) == len(rows)
    for at, one in enumerate(rows):
        found = block.fields(at, pieces, arrays=True)
        for name, value in found.items():
            if name in ARRAYS:
                assert value.dtype == getattr(one, name).dtype, name
                assert value.tobytes() == getattr(one, name).tobytes(), name
            elif name != "pieces":
                assert value == getattr(one, name), name
        assert {*found, *COLUMNS} >= {*SampleRow.__slots__} - {*ARRAYS, "pieces"}
        assert (found.keys() >= {*ARRAYS, "pieces"}) is (one.tokens is not None)
        assert not block.fields(at, pieces, arrays=False).keys() & {*ARRAYS, "pieces"}


def test_a_text_that_its_tokens_spell_is_not_stored_twice(connection: sqlite3.Connection) -> None:
    answers = ("Der Himmel: \U0001f600.", "H", "Himmel " * 50)
    rows = [spelled("Was ist \u00fcber uns?", answer, k) for k, answer in enumerate(answers)]
    block = put(connection, *rows)
    for at, one in enumerate(rows):
        found = block.fields(at, pieces, arrays=False)
        assert (found["prompt"], found["answer"]) == (one.prompt, one.answer)
    fields = zstandard.decompress(pack_block(rows)[0])
    assert b"Himmel" not in fields
    assert b"uns" not in fields
    with pytest.raises(ProtocolError, match="tokens whose text is missing"):
        block.fields(0, lambda tokens: {}, arrays=False)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e300, 1e15, -1.0])
def test_an_invalid_time_is_unknown(connection: sqlite3.Connection, odd: float) -> None:
    found = put(connection, row(drawn_s=odd)).fields(0, pieces, arrays=False)
    assert (found["drawn_s"], found["admitted_s"]) == (0.0, row().admitted_s)


def test_blocks_have_bounds() -> None:
    assert [len(block) for block in blocks_of([row()] * (2 * MAX_SAMPLES + 1))] == [MAX_SAMPLES, MAX_SAMPLES, 1]
    long = row(answer="x" * 150_000)
    assert [len(block) for block in blocks_of([row(), long, long, row()])] == [2, 2]
    assert list(blocks_of([])) == []


def test_longer_arrays_and_texts_are_left_out(connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.history.blocks.MAX_LENGTH", 6)
    monkeypatch.setattr("penstock.history.blocks.MAX_CHARS", 10)
    block = put(connection, row(prompt="x" * 20), spelled("ab", "cdefg", k=1), spelled("a", "b", k=2))
    long, other, short = (block.fields(at, pieces, arrays=True) for at in range(3))
    assert "tokens" not in long
    assert (long["prompt"], other["answer"], other["is_spelled"]) == ("xxxxx ... xxxxx", "cdefg", False)
    assert short["tokens"].tolist() == [9999, 97, 1098, 9999]


def columns(**changed: object) -> dict[str, object]:
    """Return the columns of a block of one row."""
    return unpack_map(zstandard.decompress(pack_block([row()])[0]), "it") | changed


def harmed() -> Iterator[tuple[str, object]]:
    compress = zstandard.compress
    stream = zstandard.ZstdCompressor(write_content_size=False)
    for data in (b"", b"\xc1", pack({}), pack([]), pack(columns() | {"more": [1]})):
        yield "fields", compress(data)
    for changed in (
        {"answer": [3]}, {"answer": []}, {"answer": None}, {"tries": [None]}, {TIMES[0]: ["now"]}, {"pauses": [[3]]},
        {"lengths": None}, {"lengths": []}, {"lengths": ["7"]}, {"lengths": [-2]}, {"lengths": [2**40]},
        {"lengths": [6]}, {"lengths": [8]}, {"lengths": [True]}, {"reward_info": [[]]},
    ):  # fmt: skip
        yield "fields", compress(pack(columns(**changed)))
    tokens = row().tokens
    assert tokens is not None
    raw = tokens.tobytes()
    for value in (
        3, "text", b"", raw, compress(raw)[:-1], compress(raw) + b"a", compress(raw[:-1]), compress(raw + raw),
        compress(bytes(10**6)), stream.compress(raw),
    ):  # fmt: skip
        yield "tokens", value


@pytest.mark.parametrize(("column", "value"), list(harmed()))
def test_a_damaged_block_is_refused(connection: sqlite3.Connection, column: str, value: object) -> None:
    put(connection, row())
    connection.execute(f"UPDATE blocks SET {column} = ?", (value,))
    with pytest.raises(ProtocolError):
        Block(connection, 1).fields(0, pieces, arrays=True)


def test_a_frame_that_claims_a_large_content_is_refused_before_memory_is_allocated(
    connection: sqlite3.Connection,
) -> None:
    bomb = zstandard.compress(bytes(2**28))
    put(connection, row())
    connection.execute("UPDATE blocks SET logprobs = ?", (bomb,))
    with pytest.raises(ProtocolError, match="did not write"):
        Block(connection, 1).fields(0, pieces, arrays=True)


def test_a_block_of_more_tokens_than_are_written_is_refused_before_memory_is_allocated(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(connection, row(), row(k=1))
    monkeypatch.setattr("penstock.history.blocks.MAX_LENGTH", 13)
    with pytest.raises(ProtocolError, match="longer arrays"):
        Block(connection, 1)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        pack_block([row(versions=np.zeros(3, np.int32))])
    with pytest.raises(ValueError, match="some are missing"):
        pack_block([row(logprobs=None)])


def test_ids() -> None:
    assert id_of("math/0/7", 3) == "math/0/7/3"
    for key in (("math/0/7", 3, 0), ("math/0/7", 3, 2), ("math/0/7", -1, 0)):
        assert key_of(id_of(*key)) == key
    assert place_of("a/b/0/7") == ("a/b", 0, 7)
    assert place_of("odd") == ("", -1, -1)
