"""No token that bears loss is staler than the bound (I6).

Staleness is counted anew from commits, publications and rewinds; of a manifest only its version, bound and mask are
taken, which say what the trainer was told.
"""

from bisect import bisect_right
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof

Spans = list[tuple[int, int]]


def find_over_bound(evidence: Evidence) -> Iterator[Violation]:
    """Samples of acknowledged cuts whose oldest token that bears loss is staler than the subscription's bound."""
    ageless = {model: _Ageless(spans) for model, spans in ageless_versions(evidence).items()}
    for cut in evidence.history.of("cut"):
        facts = cut.facts
        if not cut.happened or facts["bound"] is None or not facts["model"]:
            continue
        bound = evidence.account.subscriptions.get(facts["sub"], {}).get("bound", facts["bound"])
        spans = ageless[facts["model"]].until(cut.ended or cut.began) if facts["model"] in ageless else []
        for job, k, token in facts["rows"]:
            drawn = evidence.versions.get((job, k, token), ())
            bearing = [version for version in drawn if version >= facts["mask_below"]]
            if not bearing:
                continue
            oldest = max(bearing) if facts["mask_offpolicy"] else min(bearing)
            staleness = facts["train_version"] - oldest - _within(spans, oldest, facts["train_version"])
            if staleness > bound:
                what = f"sample {job}/{k} is {staleness} versions stale in batch {facts['n']} of {facts['sub']}"
                yield Violation(f"{what}, allowed are {bound}", proof(evidence.commits[job, k].get(token), cut))


def ageless_versions(evidence: Evidence) -> dict[str, list[tuple[int, tuple[int, int]]]]:
    """Model -> (since when, first and last version) of those that age nothing.

    A rewind abandons what was published since the weights that it restores; the first publication after it is of the
    same weights, where those had consumed all up to the batch that is gone back to (T1).
    """
    living: dict[str, list[tuple[int, int]]] = {}
    clock: dict[str, int] = {}
    again: dict[str, int | None] = {}
    found: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    for one in evidence.history.of("publish", "rewind"):
        model = one.facts["model"]
        if not model or not one.may_have_happened:
            continue
        stack, spans = living.setdefault(model, [(0, 0)]), found.setdefault(model, [])
        if one.op == "rewind":
            while len(stack) > 1 and stack[-1][1] > one.facts["n"]:
                stack.pop()
            restored, through = stack[-1]
            if clock.get(model, 0) > restored:
                spans.append((one.began, (restored + 1, clock[model])))
            again[model] = through if restored and through == one.facts["n"] else None
            continue
        version, through = one.facts["version"], one.facts["through"]
        if version <= clock.get(model, 0):
            continue
        if version > clock.get(model, 0) + 1:  # lost in a failover, and abandoned by the publication
            spans.append((one.began, (clock.get(model, 0) + 1, version - 1)))
        if again.pop(model, None) == through:
            spans.append((one.began, (version, version)))
        clock[model] = version
        stack.append((version, through))
    return found


class _Ageless:
    """Those of one model, as they were known at a time."""

    def __init__(self, spans: list[tuple[int, tuple[int, int]]]) -> None:
        self._since = [since for since, _ in spans]
        self._spans = [span for _, span in spans]
        self._merged: dict[int, Spans] = {}

    def until(self, time_ns: int) -> Spans:
        known = bisect_right(self._since, time_ns)
        if known not in self._merged:
            self._merged[known] = _merge(self._spans[:known])
        return self._merged[known]


def _merge(spans: Spans) -> Spans:
    merged: Spans = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _within(spans: Spans, oldest: int, newest: int) -> int:
    """Versions of the spans above ``oldest``, up to ``newest``."""
    start = bisect_right(spans, oldest, key=lambda span: span[1])
    counted = 0
    for first, last in spans[start:]:
        if first > newest:
            break
        counted += max(0, min(last, newest) - max(first, oldest + 1) + 1)
    return counted
