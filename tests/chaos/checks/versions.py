"""A number of a version is of one set of weights, and never goes back (T1)."""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_reused_versions(evidence: Evidence) -> Iterator[Violation]:
    """Two sets of weights under one number; a folder without its index; a publication below an older one; weights that
    were there before their announcement."""
    weights: dict[tuple[str, int], dict[str, Operation]] = defaultdict(dict)
    for one in evidence.history.of("publish", "whole", "load"):
        if one.happened:
            weights[one.facts["model"], one.facts["version"]].setdefault(one.facts["weights"], one)
    for (model, version), sets in weights.items():
        if "" in sets:
            yield Violation(
                f"version {version} of {model} was told with a folder that has no index", proof(sets.pop(""))
            )
        if len(sets) > 1:
            yield Violation(f"version {version} of {model} is of {len(sets)} sets of weights", proof(*sets.values()))
    yield from _back(evidence)
    yield from _early(evidence)


def _back(evidence: Evidence) -> Iterator[Violation]:
    """In the order in which they were acknowledged; a version is announced again as a revision (rev)."""
    said = [one for one in evidence.history.of("publish") if one.happened]
    highest: dict[str, Operation] = {}
    for one in sorted(said, key=lambda one: one.ended or 0):
        model, version = one.facts["model"], one.facts["version"]
        before = highest.get(model)
        if before is not None and before.facts["version"] >= version:
            if not one.facts["rev"] and before.facts["version"] > version and (before.ended or 0) < one.began:
                was = before.facts["version"]
                yield Violation(f"version {version} of {model} was published after {was}", proof(before, one))
            continue
        highest[model] = one


def _early(evidence: Evidence) -> Iterator[Violation]:
    """No engine has a version, and no folder is told of, before somebody asked for its announcement."""
    asked: dict[tuple[str, int], Operation] = {}
    for one in evidence.history.of("publish"):
        if one.may_have_happened:
            asked.setdefault((one.facts["model"], one.facts["version"]), one)
    for one in evidence.history.of("whole", "load"):
        before = asked.get((one.facts["model"], one.facts["version"]))
        if one.happened and (before is None or one.began < before.began):
            version, model = one.facts["version"], one.facts["model"]
            yield Violation(f"version {version} of {model} was there before it was announced", proof(one, before))
