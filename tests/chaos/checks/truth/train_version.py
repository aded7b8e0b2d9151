"""A batch is trained at the version that its manifest names, by which its staleness is counted (T2)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_wrong_train_versions(evidence: Evidence) -> Iterator[Violation]:
    """Yield batches whose manifest names a version that is not the one at their first optimizer step."""
    yield from _behind(evidence)
    yield from _not_held(evidence)


def _behind(evidence: Evidence) -> Iterator[Violation]:
    """Yield batches that were cut for a version although a newer one had been published."""
    newest: dict[str, Operation] = {}
    ends = sorted((one for one in evidence.history.of("publish") if one.happened), key=lambda one: one.ended or 0)
    at = 0
    for cut in evidence.history.of("cut"):
        while at < len(ends) and (ends[at].ended or 0) < cut.began:
            before = newest.get(ends[at].facts["model"])
            if before is None or before.facts["version"] < ends[at].facts["version"]:
                newest[ends[at].facts["model"]] = ends[at]
            at += 1
        publish = newest.get(cut.facts["model"])
        if cut.happened and publish is not None and cut.facts["train_version"] < publish.facts["version"]:
            what = f"batch {cut.facts['n']} of {cut.facts['sub']} was cut for version {cut.facts['train_version']}"
            yield Violation(f"{what}, and {publish.facts['version']} had been published", proof(publish, cut))


def _not_held(evidence: Evidence) -> Iterator[Violation]:
    """Yield batches whose manifest names another version than the one that the trainer holds when it takes them.

    Only the first delivery of a batch counts, and only one that was cut after the trainer was restored: a batch that
    comes again keeps the version of its first delivery.
    """
    seen: set[tuple[str, str]] = set()
    held: dict[str, Operation] = {}
    restored: dict[str, Operation] = {}
    # Trainers publish, restore and take batches one after the other in one process.
    for one in evidence.history.of("publish", "restore", "deliver"):
        if one.op == "publish" and one.may_have_happened:
            held[one.process] = one
        elif one.op == "restore":
            restored[one.process] = one
            held.pop(one.process, None)
        elif one.op == "deliver":
            batch = one.facts["sub"], one.facts["digest"]
            is_first = batch not in seen
            seen.add(batch)
            publish, cut, restore = held.get(one.process), evidence.cut_of(one), restored.get(one.process)
            if publish is None or cut is None or restore is None or not is_first:
                continue
            wanted, named = publish.facts["version"], cut.facts["train_version"]
            if (restore.ended or cut.began) < cut.began and publish.happened and wanted != named:
                what = f"batch {one.facts['n']} of {one.facts['sub']} was cut for version {named}"
                yield Violation(f"{what}, and is trained at version {wanted}", proof(cut, publish, one))
