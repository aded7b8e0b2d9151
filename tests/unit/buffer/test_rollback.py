"""What the leader takes for lost."""

from typing import cast

from penstock.buffer.main import Rollback
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from tests.hostile import OneHash


def test_a_counter_that_cannot_be_read_is_not_taken_for_lost() -> None:
    held = {b"admitted": b"7", b"cut": b"3"}
    rollback = Rollback(cast(Client, OneHash(held)), Keys("run"))
    rollback.check()
    assert (rollback.seen["admitted"], rollback.seen["cut"]) == (7, 3)
    held[b"admitted"] = b"many"
    assert rollback.check() == {}
    held[b"admitted"] = b"1"
    assert rollback.check() == {}, "what it was before nobody knows any more"
