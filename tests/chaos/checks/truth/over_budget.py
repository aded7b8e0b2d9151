"""A sample has at most ``max_new_tokens`` generated tokens per turn, however often it was resumed (T8)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


def find_over_budget(evidence: Evidence) -> Iterator[Violation]:
    """Yield committed samples with more generated tokens than the budget of their job; the largest one counts."""
    budgets: dict[str, Operation] = {}
    for one in evidence.history.of("sampling"):
        before = budgets.get(one.facts["job"])
        if one.happened and (before is None or before.answer["max_new_tokens"] < one.answer["max_new_tokens"]):
            budgets[one.facts["job"]] = one
    for commit in evidence.history.of("commit"):
        job = commit.facts["job"]
        budget = budgets.get(job)
        if budget is None or not commit.happened:
            continue
        most = budget.answer["max_new_tokens"]
        for (k, _), (generated, turns) in zip(commit.facts["samples"], commit.facts["generated"], strict=True):
            if most and generated > most * turns:
                what = f"sample {job}/{k} has {generated} generated tokens in {turns} turns, allowed are {most} in each"
                yield Violation(what, proof(budget, commit))
