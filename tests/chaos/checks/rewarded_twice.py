"""The reward of a group is written once, by the lease that it has then (I3)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_rewarded_twice(evidence: Evidence) -> Iterator[Violation]:
    """Two leases were told that they wrote the reward of one group, or one was that had been another's since."""
    if evidence.lost_any:
        return  # what Redis forgot is written again
    leases: dict[str, dict[str, Operation]] = defaultdict(dict)
    for lease in evidence.history.of("lease"):
        for job, token, *_ in lease.answer.get("jobs", ()):
            leases[job].setdefault(token, lease)
    wrote: dict[str, dict[str, Operation]] = defaultdict(dict)
    for one in evidence.history.of("reward"):
        if one.happened:
            wrote[one.facts["job"]].setdefault(one.facts["token"], one)
    for job, by in wrote.items():
        if len(by) > 1:
            yield Violation(f"the reward of group {job} was written under {' and '.join(by)}", proof(*by.values()))
        for token, one in by.items():
            yield from _late(job, one, leases[job].get(token), leases[job].values())


def _late(job: str, wrote: Operation, own: Operation | None, leases: Iterable[Operation]) -> Iterator[Violation]:
    """It was written after the job had been leased once more, and that was told."""
    if own is None or own.ended is None:
        return
    for other in leases:
        if own.ended < other.began and other.ended is not None and other.ended < wrote.began:
            what = (
                f"job {job} was leased to {other.facts['worker']}, and {own.facts['worker']} wrote its reward after it"
            )
            yield Violation(what, proof(own, other, wrote))
            return
