"""What the leader deletes."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.buffer import retire
from penstock.buffer.retire import Retirement
from penstock.names import MAX_ANSWERS
from penstock.records.keys import Keys


class Retiring:
    """A Redis in which groups are retiring: job -> what it holds as their number of samples."""

    def __init__(self, held: dict[bytes, bytes | None]) -> None:
        self._held = held

    def srandmember(self, _: str, number: int) -> list[bytes]:
        return list(self._held)

    def pipeline(self, *, transaction: bool) -> "Retiring":
        return self

    def hget(self, _: str, field: str) -> None:
        assert field == "n"

    def execute(self) -> list[bytes | None]:
        return list(self._held.values())


def test_a_group_whose_record_no_verb_wrote_holds_up_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many samples as such a record claims Redis would look for prefixes, and do nothing else meanwhile."""
    most = str(MAX_ANSWERS).encode()
    held = {b"d/0/0": most, b"d/0/1": b"9" * 15, b"d/0/2": b"x", b"d/0/3": b"9" * 5000, b"d/0/\xff": None}
    records = SimpleNamespace(read=lambda jobs: [[] for _ in jobs], forget=lambda job: None)
    state: Any = SimpleNamespace(records=records, forget=lambda jobs: None)
    servers: Any = SimpleNamespace(unlink=lambda payloads: set())
    client: Any = Retiring(held)
    swept: list[Any] = []
    monkeypatch.setattr(retire.scripts, "sweep", lambda keys, lead, sizes: sizes)
    monkeypatch.setattr(retire, "run", lambda client, sizes: swept.extend(sizes) or len(sizes))
    lead: Any = None
    assert Retirement(client, Keys("run"), servers, lead, state).sweep() == 5
    assert swept == [("d/0/0", MAX_ANSWERS), ("d/0/1", 0), ("d/0/2", 0), ("d/0/3", 0), ("d/0/\\xff", 0)]
