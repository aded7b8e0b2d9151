"""A sample is committed at most once, whoever tries, however late (I2)."""

from collections import Counter
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.checks.losses import find_losses, unreported


def find_committed_twice(evidence: Evidence) -> Iterator[Violation]:
    """Two leases were told that they committed the same sample, or one was told of more than there are.

    A commit that Redis lost is made again under another token: what was reported lost is no violation.
    """
    samples = find_losses(evidence)["samples"]
    unsaid = {loss.name for loss in unreported(evidence, "samples", samples)}
    covered = {loss.name for loss in samples} - unsaid
    for (job, k), tokens in evidence.committed.items():
        if len(tokens) > 1 and f"{job}/{k}" not in covered:
            yield Violation(f"sample {job}/{k} was committed under {' and '.join(tokens)}", proof(*tokens.values()))
    alone = {loss.name: loss for loss in samples if loss.replaced and loss.name in unsaid}
    for name, loss in alone.items():
        job, _, k = name.rpartition("/")
        if len(evidence.committed[job, int(k)]) == 1:
            yield Violation(loss.what, loss.by)
    yield from _counted_twice(evidence, covered)


def _counted_twice(evidence: Evidence, covered: set[str]) -> Iterator[Violation]:
    new, seen = Counter[str](), Counter[str]()
    for one in evidence.history.of("commit"):
        if one.happened:
            new[one.facts["job"]] += one.answer["new"]
    for job, k in evidence.commits:
        # A second commit under another token is told above.
        seen[job] += len(evidence.commits[job, k])
    for job, count in new.items():
        if count > seen[job]:
            by = [one for one in evidence.history.of("commit") if one.happened and one.facts["job"] == job]
            yield Violation(f"job {job} was told of {count} new samples, and {seen[job]} were given", proof(*by))
