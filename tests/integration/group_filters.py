"""Filters as a user writes them, by import path."""

import threading

from penstock.protocol.groups import CompletedGroup

#: Set by a test that wants ``hang`` to end.
RELEASE = threading.Event()


def not_all_wrong(group: CompletedGroup) -> tuple[bool, str]:
    return max(group.rewards) > 0, "all_wrong"


def raises(group: CompletedGroup) -> bool:
    raise ZeroDivisionError("no lengths")


def raises_on_first(group: CompletedGroup) -> bool:
    if group.job.endswith("/0"):
        raise ZeroDivisionError("no lengths")
    return True


def hangs_on_first(group: CompletedGroup) -> bool:
    if group.job.endswith("/0"):
        RELEASE.wait(60)
    return True


def makes_up_reasons(group: CompletedGroup) -> tuple[bool, str]:
    return False, f"reason_{group.job.rsplit('/', 1)[1]}"


def says_what_it_sees(group: CompletedGroup) -> bool:
    assert [sample.k for sample in group.samples] == [0, 1]
    assert group.lengths == [2, 2]
    assert (group.lane, group.num_wanted) == ("train", 2)
    return "not a bool"  # type: ignore[return-value]
