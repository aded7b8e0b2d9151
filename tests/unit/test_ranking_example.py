"""The example of a reward that ranks: its judge, its configuration, and what it says at its end."""

import pytest
import yaml

from penstock.config import Config
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.group_reward import ranks
from tests.unit.example_parts import EXAMPLES, load

FOLDER = EXAMPLES / "ranking"


def answers(prompt: str, *texts: str) -> list[Sample]:
    job = Job("digits/0/0", len(texts), prompt=prompt, label="12345")
    return [Sample(job, k, text=text) for k, text in enumerate(texts)]


@pytest.mark.parametrize("prompt", ["54321=", "31245=", "15234="])
def test_ranks_are_the_same_whatever_the_mood_of_the_judge(prompt: str) -> None:
    grade = load("ranking/judge.py").grade
    group = answers(prompt, "12345", "54321", "12354", "", "12345")
    for one in group:
        one.reward = grade(one)
    assert ranks(group) == [0.875, 0.25, 0.5, 0.0, 0.875]


def test_its_moods_differ_by_orders_of_magnitude() -> None:
    grade = load("ranking/judge.py").grade
    scales = []
    for i in range(50):
        best, worst = answers(f"{i}=", "12345", "")
        scales.append(grade(best) - grade(worst))
    assert max(scales) > 1000 * min(scales) > 0


def test_its_configuration_names_both_rewards() -> None:
    config = Config.model_validate(yaml.safe_load((FOLDER / "run.yaml").read_text()) | {"redis": {"url": "redis://x"}})
    assert (config.reward.function, config.reward.group) == ("examples.ranking.judge:grade", "ranks")
