"""Filters as a user writes them, by import path."""

import threading

from penstock.records.sample_meta import CompletedGroup

#: Set by a test that wants ``hang`` to end.
RELEASE = threading.Event()


def not_all_wrong(group: CompletedGroup) -> tuple[bool, str]:
    return max(group.rewards) > 0, "all_wrong"


def overwrites(group: CompletedGroup) -> tuple[bool, str]:
    """Reject groups whose rewards are equal, and change every field of every record."""
    keep = len(set(group.rewards)) > 1
    for sample in group.samples:
        sample.loss_by_version.clear()
        sample.reward_info["changed"] = True
        for name in type(sample).__slots__:
            setattr(sample, name, None)
    return keep, "equal"


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
