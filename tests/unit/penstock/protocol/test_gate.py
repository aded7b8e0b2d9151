"""Who holds the gate, and what it counts of subscriptions, as Redis holds them."""

from typing import Any

import pytest

from penstock.errors import ProtocolError
from penstock.protocol.gate import Counted, Holder, gates, read_rooms, room
from penstock.protocol.position import read_count
from penstock.records.keys import Keys

KEYS = Keys("run")
#: Each field that is counted, with a value that no other one has.
FIELDS = {"bound": 2, "gb": 5, "over": 7, "owed": 11, "p": 13, "disposed": 17, "start": 19, "skipped": 23}


class Redis:
    """Has one subscription, and 100 groups admitted of which 3 were buried."""

    def __init__(self, **fields: str) -> None:
        self.raw = {name.encode(): value.encode() for name, value in fields.items()}
        self.answers: list[Any] = []

    def pipeline(self, *, transaction: bool) -> "Redis":
        assert transaction
        return self

    def hmget(self, key: str, *names: str) -> None:
        self.answers.append([b"100", b"3", None])

    def hgetall(self, key: str) -> None:
        self.answers.append({} if key == KEYS.subs else self.raw)

    def execute(self) -> list[Any]:
        return self.answers


def read(**fields: str) -> Any:
    client: Any = Redis(**fields)
    return read_rooms(client, KEYS, [["actor"]])["actor"]


@pytest.mark.parametrize(("sampler", "cohort", "parked"), [("fifo", False, "1"), ("cohort", True, "0")])
def test_T3_every_field_of_a_subscription_is_counted_as_what_it_is(sampler: str, cohort: bool, parked: str) -> None:
    counted = Counted(2, 5, 18, 13, 17, 19, 23, cohort=cohort, parked=parked == "1")
    fields = {name: str(value) for name, value in FIELDS.items()}
    assert read(**fields, sampler=sampler, parked=parked) == room([counted], admitted=100, gone=3)


def test_T3_what_was_never_set_counts_nothing() -> None:
    assert read() == room([Counted()], admitted=100, gone=3)


@pytest.mark.parametrize("field", [*FIELDS, "sampler"])
def test_a_field_that_is_not_what_penstock_writes_is_named(field: str) -> None:
    named = f"Field {field} of subscription 'actor' is b'x'|'actor' cannot be read from Redis: .*{field}"
    with pytest.raises(ProtocolError, match=named):
        read(**{field: "x"})


def test_a_count_that_is_read_alone_is_held_to_the_same() -> None:
    assert (read_count(b"-7", "cut", "actor"), read_count(None, "cut", "actor")) == (-7, 0)
    with pytest.raises(ProtocolError, match="Field cut of subscription 'actor' is b'x' in Redis"):
        read_count(b"x", "cut", "actor")


def test_a_pool_holds_the_gate_with_all_of_its_members_where_one_drives() -> None:
    subs = {
        "student-b": Holder("share:students", drives=False),
        "actor": Holder("actor", drives=True),
        "critic": Holder("critic", drives=False),
        "student-a": Holder("share:students", drives=True),
        "other": Holder("share:others", drives=False),
    }
    assert gates(subs) == [["actor"], ["student-a", "student-b"]]
