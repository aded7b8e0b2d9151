"""Rows and scores of the real reasoning-gym."""

import json

import pytest

from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.agents.adapters.reasoning_gym import ReasoningGym, score
from tests.missing import module

gym = module("reasoning_gym")
ARGUMENTS = {"name": "chain_sum", "size": 5, "seed": 3, "min_terms": 2, "max_terms": 3}


def sample(row: dict[str, object], text: str) -> Sample:
    # As it comes out of a queue.
    metadata = json.loads(json.dumps(row["metadata"]))
    return Sample(Job(id="a/0/0", n=1, metadata=metadata), 0, text=text, turns=[text])


def test_rows_depend_on_the_arguments_alone() -> None:
    source, again = ReasoningGym(**ARGUMENTS), ReasoningGym(**ARGUMENTS)  # type: ignore[arg-type]
    rows = [source.row(index) for index in range(len(source))]

    assert rows == [again.row(index) for index in range(5)]
    assert len({row["prompt"] for row in rows}) == 5
    assert rows[0]["prompt"] == gym.create_dataset(**ARGUMENTS)[0]["question"]
    json.dumps(rows)


@pytest.mark.parametrize("form", ["{}", "so it is <answer> {} </answer>"])
def test_answers_are_scored_by_their_dataset(form: str) -> None:
    row = ReasoningGym(**ARGUMENTS).row(2)  # type: ignore[arg-type]

    assert score(sample(row, form.format(row["label"]))) == 1.0
    assert score(sample(row, form.format("no"))) < 1.0


def test_a_dataset_with_a_scorer_of_its_own_uses_it() -> None:
    """An equation has many right answers."""
    row = ReasoningGym("countdown", 3, 1).row(0)

    assert score(sample(row, row["label"])) == 1.0
