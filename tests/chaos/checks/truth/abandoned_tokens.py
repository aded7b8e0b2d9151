"""No batch trains on tokens of a version that a rewind abandoned (T1)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_abandoned_tokens(evidence: Evidence) -> Iterator[Violation]:
    """Yield samples of batches cut after a rewind whose loss tokens are of a version that the rewind abandoned."""
    spans = {model: list(_spans(moves)) for model, moves in _moves(evidence).items()}
    for cut in evidence.history.of("cut"):
        facts = cut.facts
        known = [one for one in spans.get(facts["model"], ()) if (one[2].ended or cut.began) < cut.began]
        for job, k, token in facts["rows"] if cut.happened and known else ():
            versions = evidence.versions.get((job, k, token), ())
            bearing = [version for version in versions if version >= facts["mask_below"]]
            for first, last, rewind in known:
                found = [version for version in bearing if first <= version <= last]
                if found:
                    what = f"sample {job}/{k} in batch {facts['n']} of {facts['sub']} has tokens of version {found[0]}"
                    commit = evidence.commits[job, k].get(token)
                    yield Violation(f"{what}, which a rewind abandoned", proof(rewind, commit, cut))
                    break


def _moves(evidence: Evidence) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for one in evidence.history.of("publish", "rewind"):
        if one.facts["model"] and one.may_have_happened:
            found.setdefault(one.facts["model"], []).append(one)
    return found


def _spans(moves: list[Operation]) -> Iterator[tuple[int, int, Operation]]:
    """Yield the first and last version that each acknowledged rewind abandoned for certain, with the rewind.

    A publication that may not have happened counts as the restored one, and is not abandoned.
    """
    living: list[tuple[int, int, bool]] = []
    clock = 0
    for one in moves:
        if one.op == "publish":
            living.append((one.facts["version"], one.facts["through"], one.happened))
            clock = max(clock, one.facts["version"] if one.happened else 0)
            continue
        while living and living[-1][1] > one.facts["n"]:
            living.pop()
        restored = living[-1][0] if living else 0
        if one.happened and clock > restored:
            yield restored + 1, clock, one
