"""Evaluation stands apart: a dataset belongs to one lane, and a batch has groups of its subscription's lanes (T18)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_mixed_lanes(evidence: Evidence) -> Iterator[Violation]:
    """Yield datasets that were admitted to train and to another lane, and groups in batches that do not take them."""
    lanes: dict[str, dict[str, Operation]] = {}
    for one in evidence.history.of("admit"):
        for job, _ in one.facts["jobs"] if one.may_have_happened else ():
            lanes.setdefault(job.partition("/")[0], {}).setdefault(one.facts["lane"], one)
    for dataset, by_lane in lanes.items():
        if "train" in by_lane and "eval" in by_lane:
            what = f"prompts of {dataset} were admitted to lanes {' and '.join(sorted(by_lane))}"
            yield Violation(what, proof(*by_lane.values()))
    taken: dict[str, str] = {}
    for one in evidence.history.of("subscribe"):
        if one.facts.get("lanes"):
            taken[one.facts["sub"]] = one.facts["lanes"]
    for cut in evidence.history.of("cut"):
        sub = cut.facts["sub"]
        for job in cut.facts["jobs"] if cut.happened and sub in taken else ():
            admit = evidence.asked.get(job)
            if admit is not None and admit.facts["lane"] not in taken[sub].split(","):
                what = f"group {job} of lane {admit.facts['lane']} is in batch {cut.facts['n']} of {sub}"
                yield Violation(f"{what}, which takes {taken[sub]}", proof(admit, cut))
