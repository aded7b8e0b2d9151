"""With ``on_expiry: wait`` no group is given up because of its age (T4)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof


def find_early_discards(evidence: Evidence) -> Iterator[Violation]:
    """Yield groups given up as stale by a subscription that waits for the groups that are due.

    Not if its bound or its batch size has changed: then there may be groups that no order of training can save.
    """
    waits: dict[str, bool] = {}
    for cut in evidence.history.of("cut"):
        waits[cut.facts["sub"]] = waits.get(cut.facts["sub"], True) and cut.facts["on_expiry"] == "wait"
    sizes: dict[str, set[tuple[str | None, str | None]]] = {}
    for one in evidence.history.of("subscribe"):
        sizes.setdefault(one.facts["sub"], set()).add((one.facts.get("bound"), one.facts.get("gb")))
    for one in evidence.history.of("dispose"):
        sub = one.facts["sub"]
        is_steady = len(sizes.get(sub, ())) == 1
        if one.happened and one.facts["reason"] == "stale" and one.answer["count"] and waits.get(sub) and is_steady:
            what = f"{one.answer['count']} groups were given up as stale by {sub}, which waits for them"
            yield Violation(what, proof(one))
