"""Who lost a right changes nothing: a worker its lease (I3), a leader its leadership.

What began after somebody else was told that the right is theirs cannot have been in time. Where Redis lost what it had
said, a right may be the former holder's again: then nothing is looked at.
"""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.history import Operation

#: What a leader does under its epoch.
BY_LEADER = ("cut", "dispose", "seal")


def find_lost_rights(evidence: Evidence) -> Iterator[Violation]:
    """A lease that two were given, commits under a lease that was another's, and acts of a leader before the last."""
    if evidence.lost_any:
        return
    leases = _leases(evidence)
    yield from _given_twice(leases)
    yield from _late_commits(evidence, leases)
    yield from _deposed(evidence)


def _leases(evidence: Evidence) -> dict[str, list[tuple[str, Operation]]]:
    """Job -> (token, the lease that was told of it), in the order in which they began."""
    found: dict[str, list[tuple[str, Operation]]] = defaultdict(list)
    for one in evidence.history.of("lease"):
        for job, token, *_ in one.answer.get("jobs", ()):
            found[job].append((token, one))
    return found


def _given_twice(leases: dict[str, list[tuple[str, Operation]]]) -> Iterator[Violation]:
    for job, given in leases.items():
        first: dict[str, Operation] = {}
        for token, one in given:
            if token in first:
                yield Violation(f"job {job} was leased twice under token {token}", proof(first[token], one))
            first.setdefault(token, one)


def _late_commits(evidence: Evidence, leases: dict[str, list[tuple[str, Operation]]]) -> Iterator[Violation]:
    for one in evidence.history.of("commit"):
        job, token = one.facts["job"], one.facts["token"]
        if not one.happened or not one.answer["new"] or len(leases.get(job, ())) < 2:
            continue
        own = next((lease for given, lease in leases[job] if given == token), None)
        for other, lease in leases[job] if own is not None and own.ended is not None else ():
            if other != token and own.ended < lease.began and lease.ended is not None and lease.ended < one.began:
                what = f"job {job} was leased to {lease.facts['worker']}, and {own.facts['worker']} committed after it"
                yield Violation(what, proof(own, lease, one))
                break


def _deposed(evidence: Evidence) -> Iterator[Violation]:
    acts = [one for one in evidence.history.of(*BY_LEADER) if one.happened and "epoch" in one.facts]
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
