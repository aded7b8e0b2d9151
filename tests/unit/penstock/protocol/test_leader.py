"""Verbs of the leader: what becomes of their answers."""

from collections.abc import Callable

import pytest

from penstock.errors import LeadershipLost
from penstock.protocol import scripts
from penstock.protocol.scripts import Call, Leadership
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys

KEYS, LEAD = Keys("demo"), Leadership(3, "token")

VERBS: list[Callable[[], Call[object]]] = [
    lambda: scripts.keep(KEYS, LEAD, [("d/0/0", 2)]),
    lambda: scripts.skip(KEYS, LEAD, "actor", revision=1, place=1, places=2),
    lambda: scripts.cut(
        KEYS, LEAD, "actor", revision=1, n=1, manifest=b"", digest="", consumes=1, model="", version=0,
        oldest_allowed=-1, jobs=["d/0/0"],
    ),
    lambda: scripts.dispose(KEYS, LEAD, "actor", Disposal.STALE, ["d/0/0"]),
    lambda: scripts.judge(KEYS, LEAD, "actor", []),
    lambda: scripts.shorten(KEYS, LEAD, "d/0/0"),
    lambda: scripts.drop(KEYS, LEAD, "d/0/0"),
    lambda: scripts.seal(KEYS, LEAD, revision=1, subs=["actor"], jobs=["d/0/0"]),
    lambda: scripts.park(KEYS, LEAD, "actor", revision=1, absent_ms=1),
    lambda: scripts.grant(KEYS, LEAD, "actor", 1, 0, ["actor"]),
    lambda: scripts.conclude(KEYS, LEAD, "actor", n=1, end=1, completed=0, lanes=["train"]),
    lambda: scripts.sweep(KEYS, LEAD, [("d/0/0", 2)]),
    lambda: scripts.unrecorded(KEYS, LEAD, 1),
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb().script.name)
def test_who_does_not_lead_is_told_so_by_every_verb(verb: Callable[[], Call[object]]) -> None:
    call = verb()
    assert [*call.keys[:1], *call.args[:3]] == [KEYS.leader, KEYS.prefix, LEAD.epoch, LEAD.token]
    assert "then return -1 end" in call.script.text
    with pytest.raises(LeadershipLost, match="The lease of this buffer ran out, or another one leads"):
        call.parse(-1)


def test_each_reason_of_a_disposal_has_a_number_of_its_own() -> None:
    assert len({reason.code for reason in Disposal}) == len(Disposal)
