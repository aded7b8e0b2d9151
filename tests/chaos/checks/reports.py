"""What buffers and trainers report of a loss, where a fault loses data by its nature.

A buffer counts by how much counters went back since its last look, so it reports at least what it had seen by then,
and never more than what was acknowledged while the fault was at work.
"""

from collections.abc import Callable, Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.doubts import begun_in
from tests.chaos.recording.history import Operation

#: Counter of a report -> operation, and how many it counts.
COUNTED: dict[str, tuple[str, Callable[[Operation], int]]] = {
    "admitted": ("admit", lambda one: len(one.facts["jobs"])),
    "committed": ("commit", lambda one: len(one.facts["samples"])),
    "completed": ("commit", lambda one: 1),
    "cut": ("cut", lambda one: 1),
    "published": ("publish", lambda one: 1),
}
#: The leader looks at the counters thrice a lease; what it saw so long ago (ns) it has seen for certain.
SEEN_NS = 3_000_000_000


def find_overstated(evidence: Evidence) -> Iterator[Violation]:
    """More was reported as rolled back than can have been."""
    spans = evidence.account.forgotten
    said: dict[str, int] = {}
    reports = [one for one in _reports(evidence) if one.may_have_happened]
    for one in reports:
        for name, count in counters_of(one).items():
            said[name] = said.get(name, 0) + count
    # What Redis says at the end is what people are told; a report can be forgotten as well, and be made again.
    said = evidence.account.rolled_back or said
    for name, count in said.items():
        op, number = COUNTED[name]
        most = sum(map(number, begun_in(evidence.history.of(op), spans)))
        if count > most:
            yield Violation(f"{count} {name} were reported rolled back, and at most {most} are", proof(*reports))


def _reports(evidence: Evidence) -> list[Operation]:
    """What was said of counters that went back."""
    return [one for one in evidence.history.of("report") if {"counters", "seen"} & one.facts.keys()]


def counters_of(report: Operation) -> dict[str, int]:
    """By how much a report says that counters went back; nothing where others had reported it, or nobody knows."""
    told: dict[str, int] = report.facts.get("counters") or report.answer.get("counters", {})
    return told


def find_silent(evidence: Evidence) -> Iterator[Violation]:
    """A sample was lost and committed anew, the leader had seen the first commit and lived on, and nobody reported."""
    reports = [one for one in _reports(evidence) if counters_of(one) or "counters" not in one.answer]
    for first, last in evidence.account.forgotten:
        if any(first <= one.began for one in reports) or not _has_leader_through(evidence, first, last):
            continue
        for (job, k), tokens in evidence.commits.items():
            lost = [one for one in tokens.values() if first <= evidence.told_at.get(one.where, 0) <= last - SEEN_NS]
            anew = [one for one in tokens.values() if one.happened and one.began > last]
            if lost and anew:
                what = f"sample {job}/{k} was committed, forgotten and committed anew, and no loss was reported"
                yield Violation(what, proof(*lost, *anew))


def _has_leader_through(evidence: Evidence, first: int, last: int) -> bool:
    """Whether a process cut in the span, and after it too."""
    cuts = evidence.history.of("cut")
    after = {one.process for one in cuts if one.began > last}
    return any(one.process in after for one in cuts if first <= one.began <= last)
