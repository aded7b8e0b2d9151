"""What the buffer says of a batch that it does not cut."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.buffer import cutter
from penstock.buffer.decision import NeedInFlight
from penstock.buffer.subscription import Subscription
from penstock.config.subscription import Definition
from penstock.errors import ProtocolError
from penstock.protocol.position import Position
from penstock.records.keys import Keys
from penstock.records.worker_causes import RecordUnreadable


def test_a_subscription_at_the_gate_that_cannot_be_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is another one's, and the leader goes on for all that can be read."""

    def broken(*_: object) -> Any:
        raise ProtocolError("Field p of subscription 'critic' is 'x'.")

    state: Any = SimpleNamespace(
        clock={}, away={}, groups={}, gates=list, versions=list, catch_up=lambda: pytest.fail("nothing was seen")
    )
    monkeypatch.setattr(cutter, "decide", lambda view: NeedInFlight())
    monkeypatch.setattr(cutter, "read", broken)
    unused: Any = None
    sub = Subscription("actor", Definition(), Position(ask=1))

    cause = cutter.Cutter(unused, Keys("run"), unused, state).try_cut(sub)

    assert cause == RecordUnreadable("Field p of subscription 'critic' is 'x'.")
