"""The shares of all ranks are the whole batch, and depend on the batch and the number of ranks alone (T14)."""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_wrong_shares(evidence: Evidence) -> Iterator[Violation]:
    """Yield batches that come again in another split over equally many ranks, and samples that no rank trained."""
    splits: dict[tuple[str, int, int], Operation] = {}
    steps: dict[tuple[object, ...], dict[int, Operation]] = defaultdict(dict)
    for one in evidence.history.of("deliver", "train"):
        facts = one.facts
        first = splits.setdefault((facts["digest"], facts["shares"], facts["share"]), one)
        if first.facts["rows"] != facts["rows"]:
            what = f"share {facts['share']} of {facts['shares']} of batch {facts['n']} of {facts['sub']}"
            yield Violation(f"{what} is not the one that it was before", proof(first, one))
        if one.op == "train":
            step = facts["sub"], facts["role"], facts["n"], facts["digest"], facts["gen"], facts["owner"]
            steps[*step, facts["shares"]][facts["share"]] = one
    for (sub, *_, num_shares), shares in steps.items():
        if len(shares) < int(str(num_shares)):
            continue  # a rank was killed, and the batch comes again
        any_rank = next(iter(shares.values()))
        cut = evidence.cut_of(any_rank)
        trained = {(job, k) for one in shares.values() for job, k in one.facts["rows"]}
        for job, k, _ in cut.facts["rows"] if cut is not None else ():
            if (job, k) not in trained:
                what = f"sample {job}/{k} of batch {any_rank.facts['n']} of {sub} is in no rank's share"
                yield Violation(what, proof(cut, *shares.values()))
