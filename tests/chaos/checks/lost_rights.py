"""Who lost a right changes nothing: a worker its lease (I3), a leader its leadership.

What began after somebody else was told that the right is theirs cannot have been in time. Where Redis lost what it had
said, a right may be the former holder's again: then nothing is looked at.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation

#: What a leader does under its epoch.
BY_LEADER = ("cut", "dispose", "seal")
#: And a recorder under its own.
BY_RECORDER = ("recorded",)


def find_lost_rights(evidence: Evidence) -> Iterator[Violation]:
    """A lease that two were given, commits under a lease that was another's, and acts of a leader before the last."""
    if evidence.lost_any:
        return
    leases = _leases(evidence)
    yield from _given_twice(leases)
    yield from _late_commits(evidence, leases)
    yield from _deposed(evidence, BY_LEADER)
    yield from _deposed(evidence, BY_RECORDER)


@dataclass(frozen=True, slots=True)
class Given:
    """A lease of one job as it was told."""

    token: str
    #: k that were committed when it was given; None: not told.
    committed: frozenset[int] | None
    lease: Operation


def _leases(evidence: Evidence) -> dict[str, list[Given]]:
    """Leases by job, in the order in which they began."""
    found: dict[str, list[Given]] = defaultdict(list)
    for one in evidence.history.of("lease"):
        for job, token, *more in one.answer.get("jobs", ()):
            found[job].append(Given(token, frozenset(more[1]) if len(more) > 1 else None, one))
    return found


def _given_twice(leases: dict[str, list[Given]]) -> Iterator[Violation]:
    for job, given in leases.items():
        first: dict[str, Operation] = {}
        for one in given:
            if one.token in first:
                yield Violation(
                    f"job {job} was leased twice under token {one.token}", proof(first[one.token], one.lease)
                )
            first.setdefault(one.token, one.lease)


def _late_commits(evidence: Evidence, leases: dict[str, list[Given]]) -> Iterator[Violation]:
    for one in evidence.history.of("commit"):
        job, token = one.facts["job"], one.facts["token"]
        if not one.happened or not one.answer["new"] or len(leases.get(job, ())) < 2:
            continue
        own = next((given for given in leases[job] if given.token == token), None)
        if own is None or own.lease.ended is None:
            continue
        for other in leases[job]:
            if other.token != token and own.lease.ended < other.lease.began and _is_behind(one, other):
                worker, before = other.lease.facts["worker"], own.lease.facts["worker"]
                what = f"job {job} was leased to {worker}, and {before} committed after it"
                yield Violation(what, proof(own.lease, other.lease, one))
                break


def _is_behind(commit: Operation, other: Given) -> bool:
    """Whether it was carried out after a lease: it began after that was told, or that knew nothing of it."""
    if other.lease.ended is not None and other.lease.ended < commit.began:
        return True
    known = other.committed
    return known is not None and sum(k in known for k, _ in commit.facts["samples"]) < commit.answer["new"]


def _deposed(evidence: Evidence, acts_of: tuple[str, ...]) -> Iterator[Violation]:
    acts = [one for one in evidence.history.of(*acts_of) if one.happened and "epoch" in one.facts]
    ends = sorted(acts, key=lambda one: one.ended or 0)
    newest: Operation | None = None
    at = 0
    for one in acts:
        while at < len(ends) and (ends[at].ended or 0) < one.began:
            if newest is None or ends[at].facts["epoch"] > newest.facts["epoch"]:
                newest = ends[at]
            at += 1
        if newest is not None and one.facts["epoch"] < newest.facts["epoch"] and _changed(one):
            what = f"a {one.op} of epoch {one.facts['epoch']} was carried out in epoch {newest.facts['epoch']}"
            yield Violation(what, proof(newest, one))


def _changed(one: Operation) -> bool:
    """Not where it said again what had been carried out before."""
    return bool(one.answer.get("said") == "cut" or one.answer.get("count") or one.answer.get("jobs"))
