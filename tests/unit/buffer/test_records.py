"""Metadata at hand: what is put is read without asking, what falls out is asked for again."""

from typing import Any

import pytest

from penstock.buffer.state import Records
from penstock.errors import ProtocolError
from penstock.records.keys import Keys
from penstock.records.sample_meta import SampleMeta
from tests.integration import play

KEYS = Keys("run")


class Asked:
    """A Redis that holds metadata, and notes what it is asked for."""

    def __init__(self, **metas: bytes) -> None:
        self.metas = {KEYS.meta(job): meta for job, meta in metas.items()}
        self.asked: list[list[str]] = []

    def mget(self, names: list[str]) -> list[bytes | None]:
        self.asked.append(names)
        return [self.metas.get(name) for name in names]


def meta(*values: int) -> bytes:
    return b"".join(play.meta(value, "token").to_bytes() for value in values)


def values(found: list[list[SampleMeta]]) -> list[list[int]]:
    return [[record.k for record in group] for group in found]


def test_what_is_put_is_not_asked_for_until_it_falls_out() -> None:
    client: Any = Asked(a=meta(1, 2), b=meta(3, 4), c=meta(5))
    records = Records(client, KEYS, kept_samples=3)
    for job in "ab":
        records.put(job, client.metas[KEYS.meta(job)])
    assert values(records.read(["b", "a", "c"])) == [[3, 4], [1, 2], [5]]
    assert client.asked == [[KEYS.meta("a"), KEYS.meta("c")]]
    records.forget("b")
    records.forget("b")
    records.put("a", meta(1, 2))
    records.put("a", meta(1, 2))
    assert values(records.read(["a", "gone"])) == [[1, 2], []]
    records.put("c", meta(5))
    assert values(records.read(["a", "c"])) == [[1, 2], [5]]
    assert client.asked[1:] == [[KEYS.meta("gone")]], "counted once, however often it was put and forgotten"


def test_one_that_is_too_large_for_all_is_kept_alone() -> None:
    client: Any = Asked()
    records = Records(client, KEYS, kept_samples=1)
    records.put("a", meta(1, 2))
    assert values(records.read(["a"])) == [[1, 2]]
    assert client.asked == []


def test_metadata_that_are_none_name_their_group() -> None:
    client: Any = Asked()
    with pytest.raises(ProtocolError, match="metadata of group a"):
        Records(client, KEYS).put("a", b"\xc1")
