"""A job that failed has one try fewer: what it was charged with is not forgotten."""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_forgotten_tries(evidence: Evidence) -> Iterator[Violation]:
    """Leases that tell of fewer tries than had failed when they were asked for."""
    if evidence.lost_any:
        return  # a failure too, perhaps
    # Whoever is given its tries back may have had them back before anything that is told of it.
    excused = {one.facts["job"] for one in evidence.history.of("requeue") if one.may_have_happened}
    failed: dict[str, list[Operation]] = defaultdict(list)
    for one in evidence.history.of("fail"):
        if one.happened:
            failed[one.facts["job"]].append(one)
    for lease in evidence.history.of("lease"):
        for job, _, attempts, *_ in lease.answer.get("jobs", ()):
            before = [one for one in failed.get(job, ()) if one.ended is not None and one.ended < lease.began]
            if attempts < len(before) and job not in excused:
                what = f"job {job} had failed {len(before)} times, and was leased with {attempts} tries used up"
                yield Violation(what, proof(*before, lease))
