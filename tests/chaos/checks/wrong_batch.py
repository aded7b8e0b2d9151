"""A subscription's batches hold what it takes, and all its ranks train the batch that was cut for it."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.checks.losses import find_losses
from tests.chaos.recording.history import Operation


def find_wrong_batch(evidence: Evidence) -> Iterator[Violation]:
    """Groups of a lane that it does not take, groups that it gave up, two batches of one number, foreign batches."""
    yield from _wrong_groups(evidence)
    yield from _two_of_one_number(evidence)
    yield from _foreign_batches(evidence)


def _wrong_groups(evidence: Evidence) -> Iterator[Violation]:
    given_up = _given_up(evidence)
    for cut in evidence.history.of("cut"):
        sub = cut.facts["sub"]
        lanes = evidence.account.subscriptions.get(sub, {}).get("lanes")
        for job in cut.facts["jobs"] if cut.happened else ():
            admit = evidence.asked.get(job)
            if lanes is not None and admit is not None and admit.facts["lane"] not in lanes:
                what = f"group {job} of lane {admit.facts['lane']} is in batch {cut.facts['n']} of {sub}"
                yield Violation(f"{what}, which takes {', '.join(lanes)}", proof(admit, cut))
            before = given_up.get((sub, job))
            if before is not None and before.ended is not None and before.ended < cut.began:
                what = f"group {job} was given up by {sub} ({before.facts['reason']})"
                yield Violation(f"{what}, and is in batch {cut.facts['n']}", proof(before, cut))


def _given_up(evidence: Evidence) -> dict[tuple[str, str], Operation]:
    """(subscription, job) -> the disposal that all its jobs were counted in."""
    return {
        (one.facts["sub"], job): one
        for one in evidence.history.of("dispose")
        if one.happened and one.facts["sub"] and one.answer["count"] == len(one.facts["jobs"])
        for job in one.facts["jobs"]
    }


def _two_of_one_number(evidence: Evidence) -> Iterator[Violation]:
    # What was lost or taken back is cut anew, perhaps of other groups.
    lost = {loss.name for loss in find_losses(evidence)["batches"]}
    reported = evidence.account.reported.get("batches")
    for (sub, n), digests in evidence.cuts.items():
        happened = [one for one in digests.values() if one.happened]
        excused = sub in evidence.parked or f"{sub}/{n}" in lost or (reported is not None and reported.count)
        if len(happened) > 1 and not excused:
            yield Violation(f"batch {n} of {sub} was cut {len(happened)} times, of other bytes", proof(*happened))


def _foreign_batches(evidence: Evidence) -> Iterator[Violation]:
    cut_by_digest = {digest: one for digests in evidence.cuts.values() for digest, one in digests.items()}
    samples: dict[str, set[tuple[str, int]]] = {}
    for one in evidence.history.of("deliver", "train"):
        sub, n, digest = one.facts["sub"], one.facts["n"], one.facts["digest"]
        cut = evidence.cut_of(one)
        if cut is None:
            if (other := cut_by_digest.get(digest)) is not None:
                what = f"{sub} used batch {other.facts['n']} of {other.facts['sub']} as its batch {n}"
                yield Violation(what, proof(other, one))
            continue
        if digest not in samples:
            samples[digest] = {(job, k) for job, k, _ in cut.facts["rows"]}
        for job, k in one.facts["rows"]:
            if (job, k) not in samples[digest]:
                yield Violation(f"sample {job}/{k} was used in batch {n} of {sub}, and is not in it", proof(cut, one))
