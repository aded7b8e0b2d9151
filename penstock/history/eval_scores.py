"""Scores of held-out answers: mean reward, pass rates, majority votes; of all, and by category."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Protocol

#: Most categories that are reported by name: the largest; the others are combined.
MAX_CATEGORIES = 64
#: Name of the combined categories, and of prompts without one.
OTHERS, NONE = "(others)", "(none)"


class Rewarded(Protocol):
    """An answer to the prompt of a job."""

    @property
    def job(self) -> str: ...
    @property
    def reward(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One held-out answer."""

    job: str
    k: int
    reward: float
    #: Its result as it is compared in votes; '' if it has none.
    pred: str = ""
    #: Category of its prompt; '' if it has none.
    category: str = ""


def scores_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return ``accuracy`` (mean reward), ``num`` answers, ``prompts`` answered, ``pass@K`` and ``maj@K``."""
    return {
        "accuracy": sum(one.reward for one in answers) / len(answers),
        "num": len(answers),
        "prompts": len({one.job for one in answers}),
        **rates_of(answers),
    }


def rates_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return ``pass@K`` and ``maj@K``; {} if prompts have one answer."""
    passed = {f"pass@{k}": rate for k, rate in pass_rates(answers).items()}
    return passed | {f"maj@{k}": rate for k, rate in majority_rates(answers).items()}


def by_category(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return ``scores_of`` of each category, by name; {} if no prompt has one."""
    if not any(one.category for one in answers):
        return {}
    sizes = Counter(one.category or NONE for one in answers)
    named = {name for name, _ in sizes.most_common(MAX_CATEGORIES)}
    found: dict[str, list[Answer]] = {}
    for one in answers:
        name = one.category or NONE
        found.setdefault(name if name in named else OTHERS, []).append(one)
    return {name: scores_of(found[name]) for name in sorted(found)}


def pass_rates(answers: Iterable[Rewarded]) -> dict[int, float]:
    """Return k -> probability that one of k samples of a prompt has reward 1, mean over prompts; {} for one sample.

    k are 1, 2, 4, ..., up to the samples that each prompt has. Of n samples, c with reward 1, the unbiased estimate is
    1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    prompts: dict[str, list[bool]] = {}
    for one in answers:
        prompts.setdefault(one.job, []).append(one.reward == 1)
    counts = [(len(one), sum(one)) for one in prompts.values()]
    return {k: sum(1 - comb(n - c, k) / comb(n, k) for n, c in counts) / len(counts) for k in _sizes(prompts.values())}


def majority_rates(answers: Iterable[Answer]) -> dict[int, float]:
    """Return k -> reward of the majority result of k samples of a prompt, mean over prompts; {} without results.

    k are 2, 4, 8, ..., up to the samples that each prompt has. Unbiased: the mean over disjoint runs of k samples, in
    their order. If several results have the most votes, each counts alike; a sample without a result has no vote,
    unless none has one (self-consistency, arXiv 2203.11171).
    """
    prompts: dict[str, list[Answer]] = {}
    for one in answers:
        prompts.setdefault(one.job, []).append(one)
    if not any(one.pred for some in prompts.values() for one in some):
        return {}
    for some in prompts.values():
        some.sort(key=lambda one: one.k)
    return {
        k: sum(_mean([_vote(some[at : at + k]) for at in range(0, len(some) - k + 1, k)]) for some in prompts.values())
        / len(prompts)
        for k in _sizes(prompts.values())[1:]
    }


def _vote(answers: Sequence[Answer]) -> float:
    voters = [one for one in answers if one.pred] or list(answers)
    votes = Counter(one.pred for one in voters)
    most = max(votes.values())
    winners = [pred for pred, count in votes.items() if count == most]
    return _mean([_mean([one.reward for one in voters if one.pred == pred]) for pred in winners])


def _sizes(prompts: Iterable[Sequence[Any]]) -> list[int]:
    """Return 1, 2, 4, ..., up to the answers that each prompt has; [] if that is one."""
    most = min(map(len, prompts), default=0)
    return [2**power for power in range(most.bit_length())] if most > 1 else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
