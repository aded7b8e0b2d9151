"""Modes ``sync`` and ``one_step`` train cohorts in the order of admission, ``one_step`` each of one version (T5)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation

#: Modes whose batches are cohorts.
COHORTS = frozenset(("sync", "one_step"))


def find_wrong_cohorts(evidence: Evidence) -> Iterator[Violation]:
    """Yield batches with tokens of several versions, and groups that were admitted after a group of a later batch."""
    places = _places(evidence)
    last: dict[str, tuple[int, str, Operation]] = {}
    for (sub, n), digests in sorted(evidence.cuts.items()):
        for cut in digests.values():
            if cut.facts["mode"] not in COHORTS or not cut.happened:
                continue
            if cut.facts["mode"] == "one_step":
                yield from _mixed(evidence, cut)
            inside = sorted((places[job], job) for job in cut.facts["jobs"] if job in places)
            if inside and sub in last and inside[0][0] < last[sub][0]:
                _, before, earlier = last[sub]
                what = f"group {inside[0][1]} is in batch {n} of {sub}, behind group {before} that was admitted later"
                yield Violation(what, proof(evidence.asked.get(inside[0][1]), earlier, cut))
            if inside:
                last[sub] = *inside[-1], cut


def _mixed(evidence: Evidence, cut: Operation) -> Iterator[Violation]:
    versions = {
        version for job, k, token in cut.facts["rows"] for version in evidence.versions.get((job, k, token), ())
    }
    if len(versions) > 1:
        what = f"batch {cut.facts['n']} of {cut.facts['sub']} has tokens of versions {sorted(versions)}"
        yield Violation(f"{what}: a cohort is generated with one", proof(cut))


def _places(evidence: Evidence) -> dict[str, int]:
    """Return the place of each job in the order of admission; a requeued job gets another one, and has none here."""
    requeued = {one.facts["job"] for one in evidence.history.of("requeue") if one.may_have_happened}
    return {
        job: admit.facts["position"] + at
        for admit in evidence.history.of("admit")
        if admit.may_have_happened and admit.facts["lane"] == "train" and "position" in admit.facts
        for at, (job, _) in enumerate(admit.facts["jobs"])
        if job not in requeued
    }
