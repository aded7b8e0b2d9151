"""A turn that an environment has seen is never generated again (durable turns of ``workers/jobs/episodes.py``)."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_turns_generated_again(evidence: Evidence) -> Iterator[Violation]:
    """Two generations of a turn whose first its environment had seen.

    Unless its version was abandoned between them, or the attempt failed: another agent begins the next one.
    """
    if evidence.lost_any:
        return  # Redis forgot turns
    seen: dict[tuple[str, int], list[Operation]] = defaultdict(list)
    for one in evidence.history.of("turn"):
        if one.facts["resumes"]:
            seen[one.facts["sample"], one.facts["turn"]].append(one)
    for (sample, turn), steps in seen.items():
        for before, after in pairwise(steps):
            is_other = before.facts["digest"] != after.facts["digest"]
            if is_other and not _is_abandoned(evidence, before, after) and not _has_failed(evidence, before, after):
                yield Violation(f"turn {turn} of {sample} was generated again", proof(before, after))


def _is_abandoned(evidence: Evidence, before: Operation, after: Operation) -> bool:
    """Return whether a trainer went back after the newest version of the first generation was published."""
    newest = max(before.facts["versions"], default=-1)
    published = [one.began for one in evidence.history.of("publish") if one.facts["version"] == newest]
    since = min(published, default=0)
    return any(since < one.began < after.began for one in evidence.history.of("rewind"))


def _has_failed(evidence: Evidence, before: Operation, after: Operation) -> bool:
    """Return whether an attempt of the job failed between two generations."""
    job = before.facts["sample"].rpartition("/")[0]
    fails = (one for one in evidence.history.of("fail") if one.facts["job"] == job and one.may_have_happened)
    return any(before.began < one.began < after.began for one in fails)
