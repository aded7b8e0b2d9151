"""What a run makes of an audit."""

import pytest

from tests.chaos.recording.account import Account
from tests.chaos.run import differing

LOST = "payloads: 30 committed samples lost theirs; they were trained with mask 0"


@pytest.mark.parametrize(
    ("found", "servers", "words"),
    [
        ({"ok": True, "differences": []}, [], ""),
        ({"ok": False, "differences": [LOST]}, [], LOST),
        ({"ok": False, "differences": [LOST]}, ["payload-0"], ""),
        ({"ok": False, "differences": [LOST, "queue: a job"]}, ["payload-0"], "queue: a job"),
        ({"ok": False, "differences": []}, ["payload-0"], "it found a difference"),
    ],
)
def test_lost_payloads_differ_rightly_where_their_server_was_lost(
    found: dict[str, object], servers: list[str], words: str
) -> None:
    assert differing(found, Account(lost_servers=servers)) == words
