"""No job starts on weights older than those of its admission (T12).

A job requires the version that its lease names, and at least the newest one whose publication was acknowledged before
its admission began: an admission that records too low a version is found as well.
"""

from bisect import bisect_left
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation

#: Where a lease names the required version of a job, behind the job and its token.
NOT_BEFORE = 2


def find_early_starts(evidence: Evidence) -> Iterator[Violation]:
    """Yield leases by an engine that lacks the required version, and samples with tokens of an older version.

    A publication that engines crashed on may be set aside. Then an engine with an older version may lease jobs that
    require the one set aside; the lease records both versions.
    """
    required = _required_versions(evidence)
    crashed_on = {_version_of(one) for one in evidence.history.of("crash") if one.may_have_happened}
    requeued = {one.facts["job"] for one in evidence.history.of("requeue") if one.may_have_happened}
    substituted: set[str] = set()
    for lease in evidence.history.of("lease"):
        version, highest = lease.facts["version"], lease.facts["highest"]
        for job, _, *more in lease.answer.get("jobs", ()):
            wanted, publish = required.get(job, (0, None))
            if len(more) > NOT_BEFORE and more[NOT_BEFORE] > wanted:
                wanted, publish = more[NOT_BEFORE], None
                if job not in requeued:  # else what was drawn before may be older
                    required[job] = wanted, publish
            if wanted <= version:
                continue
            if wanted <= highest and highest in crashed_on:
                substituted.add(job)
                continue
            what = f"job {job} was leased for an engine of version {version}, and requires {wanted}"
            yield Violation(what, proof(publish, evidence.asked.get(job), lease))
    yield from _old_tokens(evidence, required, substituted)


def _old_tokens(
    evidence: Evidence, required: dict[str, tuple[int, Operation | None]], substituted: set[str]
) -> Iterator[Violation]:
    for commit in evidence.history.of("commit"):
        job = commit.facts["job"]
        if not commit.happened or job not in required or job in substituted:
            continue
        wanted, publish = required[job]
        for k, versions in commit.facts["samples"]:
            if versions and 0 <= min(versions) < wanted:
                what = f"sample {job}/{k} has tokens of version {min(versions)}, and its job requires {wanted}"
                yield Violation(what, proof(publish, evidence.asked.get(job), commit))


def _required_versions(evidence: Evidence) -> dict[str, tuple[int, Operation | None]]:
    """Return the version that each job requires at least by its admission, with its publication.

    A job that several admissions name requires the least of them: only the first one admitted it.
    """
    published = sorted(
        (one for one in evidence.history.of("publish") if one.happened and one.facts["model"]),
        key=lambda one: one.ended or 0,
    )
    ends = [one.ended or 0 for one in published]
    newest: list[Operation] = []
    for one in published:
        newest.append(max(newest[-1], one, key=lambda two: int(two.facts["version"])) if newest else one)
    first: dict[str, Operation] = {}
    for admit in evidence.history.of("admit"):
        for job, _ in admit.facts["jobs"] if admit.may_have_happened else ():
            first.setdefault(job, admit)
    found: dict[str, tuple[int, Operation | None]] = {}
    for job, admit in first.items():
        if known := bisect_left(ends, admit.began):
            found[job] = newest[known - 1].facts["version"], newest[known - 1]
    return found


def _version_of(crash: Operation) -> int:
    """Return the version of the publication that the engine had; -1 for none."""
    number = str(crash.facts["publication"]).partition("-")[0]
    return int(number) if number else -1
