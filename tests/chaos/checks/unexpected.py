"""Nothing is there that nobody asked for."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof


def find_unexpected(evidence: Evidence) -> Iterator[Violation]:
    """Jobs that nobody admitted, samples that nobody committed, batches that nobody cut."""
    yield from _jobs(evidence)
    yield from _samples(evidence)
    yield from _batches(evidence)


def _jobs(evidence: Evidence) -> Iterator[Violation]:
    for job in [*evidence.account.jobs, *evidence.account.done]:
        if job not in evidence.asked:
            yield Violation(f"job {job} is there, and nobody admitted it")
    for one in evidence.history.of("lease"):
        for job, *_ in one.answer.get("jobs", ()):
            if job not in evidence.asked:
                yield Violation(f"job {job} was leased, and nobody admitted it", proof(one))


def _samples(evidence: Evidence) -> Iterator[Violation]:
    for job, about in evidence.account.jobs.items():
        for k, token in about["samples"].items():
            if token not in evidence.commits.get((job, int(k)), ()):
                yield Violation(f"sample {job}/{k} is there under {token}, and nobody committed it so")
    for (job, k), tokens in evidence.cut_samples.items():
        for token, cut in tokens.items():
            if token not in evidence.commits.get((job, k), ()):
                what = f"batch {cut.facts['n']} of {cut.facts['sub']} has {job}/{k} under {token}"
                yield Violation(f"{what}, and nobody committed it so", proof(cut))


def _batches(evidence: Evidence) -> Iterator[Violation]:
    digests = {digest for cuts in evidence.cuts.values() for digest in cuts}
    for one in evidence.history.of("deliver", "train"):
        if one.facts["digest"] not in digests:
            what = f"batch {one.facts['n']} of {one.facts['sub']} was used, and nobody cut it so"
            yield Violation(f"{what} ({one.op}, {one.facts['digest']})", proof(one))
