"""Whose a subscription is, by what Redis holds."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.consumers.subscription.ownership import Ownership
from penstock.consumers.subscription.rank import Seat
from penstock.errors import OwnershipLost
from penstock.records.keys import Keys


@pytest.mark.parametrize("token", [b"\xff", b"another", None])
def test_a_token_that_no_trainer_wrote_is_not_ours(token: bytes | None) -> None:
    client = SimpleNamespace(hmget=lambda *_: [token, b"0"])
    control: Any = SimpleNamespace(do=lambda work: work(client))
    waiting: Any = None
    ownership = Ownership(control, Keys("run"), "actor", Seat(), "", waiting)
    ownership.token = "ours"
    with pytest.raises(OwnershipLost, match="was taken over or rewound by another trainer"):
        ownership.check_lineage(0)
