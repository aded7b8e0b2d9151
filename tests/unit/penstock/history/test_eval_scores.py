"""Chances to pass, votes, and categories of held-out answers."""

import itertools
import random
from typing import Any

import pytest

from penstock.consumers.grpo.trackers.names import of_evaluation
from penstock.history.eval_rows import (
    MAX_CATEGORIES,
    NONE,
    OTHERS,
    Answer,
    by_category,
    majority_rates,
    pass_rates,
    scores_of,
    summarize,
)
from tests.batch_factory import make_manifest
from tests.unit.penstock.history.test_eval_rows import row


def answers(job: str, said: str, right: str = "5", category: str = "") -> list[Answer]:
    """A sample per letter of ``said``; '-' has no result."""
    return [Answer(job, k, float(one == right), one.replace("-", ""), category) for k, one in enumerate(said)]


@pytest.mark.parametrize(
    ("said", "rates"),
    [
        ("5", {}),
        ("5556", {2: 0.75, 4: 1.0}),
        ("6665", {2: 0.25, 4: 0.0}),
        ("5566", {2: 0.5, 4: 0.5}),
        ("5-67", {2: 0.5, 4: 1 / 3}),
        ("5---", {2: 0.5, 4: 1.0}),
        ("----", {}),
        ("5656565", {2: 0.5, 4: 0.5}),
    ],
)
def test_what_most_answers_come_to_is_what_counts(said: str, rates: dict[int, float]) -> None:
    found = answers("held/1/0", said)
    random.Random(3).shuffle(found)
    assert majority_rates(found) == pytest.approx(rates)


def test_prompts_count_alike_and_a_prompt_with_fewer_answers_bounds_k() -> None:
    found = [*answers("held/1/0", "5555"), *answers("held/1/1", "667")]
    assert majority_rates(found) == {2: 0.5}
    assert pass_rates(found) == {1: 0.5, 2: 0.5}


def test_both_estimates_are_unbiased() -> None:
    """Over all orders of 4 answers, those of 2 drawn from them."""
    said = "5567"
    orders = [answers("held/1/0", "".join(order)) for order in itertools.permutations(said)]
    votes = [majority_rates(order)[2] for order in orders]
    pairs = list(itertools.permutations(said, 2))
    wanted = sum(majority_rates(answers("held/1/0", "".join(pair)))[2] for pair in pairs) / len(pairs)
    assert sum(votes) / len(votes) == pytest.approx(wanted)
    assert pass_rates(orders[0])[2] == pytest.approx(sum("5" in pair for pair in pairs) / len(pairs))


def test_scores_are_told_by_category_and_the_rest_of_many_together() -> None:
    found = [*answers("held/1/0", "55", category="sum"), *answers("held/1/1", "56", category="sum")]
    found += answers("held/1/2", "66")
    assert by_category(found) == {
        NONE: {"accuracy": 0.0, "num": 2, "prompts": 1, "pass@1": 0.0, "pass@2": 0.0, "maj@2": 0.0},
        "sum": {"accuracy": 0.75, "num": 4, "prompts": 2, "pass@1": 0.75, "pass@2": 1.0, "maj@2": 0.75},
    }
    assert by_category(answers("held/1/0", "56")) == {}
    many = [Answer(f"held/1/{i}", 0, 1.0, "", f"kind {i}") for i in range(MAX_CATEGORIES + 5)]
    told = by_category(many)
    assert len(told) == MAX_CATEGORIES + 1
    assert told[OTHERS] == scores_of(many[-5:])


def test_a_row_of_an_evaluation_and_trackers_have_them() -> None:
    rows = [row("held/1/0", {1: 10}, reward=float(k == 0)) for k in range(2)]
    rows[1].k = 1
    said: dict[tuple[str, int], dict[str, Any]] = {
        ("held/1/0", k): {"pred": str(5 + k), "category": "a b/c\n"} for k in range(2)
    }
    [found] = summarize(make_manifest(rows).samples(), 1, said)
    assert (found["pass@2"], found["maj@2"]) == (1.0, 0.5)
    assert found["categories"]["a b/c\n"]["maj@2"] == 0.5
    shown = of_evaluation(found)
    assert shown["eval/held-maj@2"] == 0.5
    assert shown["eval/held/a b_c_"] == 0.5
    assert shown["eval/held/a b_c_-pass@2"] == 1.0
    [plain] = summarize(make_manifest(rows).samples(), 1)
    assert "categories" not in plain
    assert not any(key.startswith("maj@") for key in plain)
