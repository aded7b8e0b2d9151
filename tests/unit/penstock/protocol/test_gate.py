"""Who holds the gate."""

from penstock.protocol.gate import Holder, gates


def test_a_pool_holds_the_gate_with_all_of_its_members_where_one_drives() -> None:
    subs = {
        "student-b": Holder("share:students", drives=False),
        "actor": Holder("actor", drives=True),
        "critic": Holder("critic", drives=False),
        "student-a": Holder("share:students", drives=True),
        "other": Holder("share:others", drives=False),
    }
    assert gates(subs) == [["actor"], ["student-a", "student-b"]]
