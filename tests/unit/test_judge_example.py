"""The example of a judge: what it makes of answers, its configuration, and what it says at its end."""

import pytest
import yaml

from penstock.config import Config
from penstock.records.job import Job
from penstock.records.sample import Sample
from tests.unit.example_parts import EXAMPLES, load

FOLDER = EXAMPLES / "judge"


class Critic:
    """Says what it is told to, and keeps what it was asked."""

    def __init__(self, said: str) -> None:
        self.said = said
        self.asked: list[str] = []

    async def generate(self, prompt: str, **_: object) -> str:
        self.asked.append(prompt)
        return self.said


@pytest.mark.parametrize(
    ("answer", "said", "score"),
    [
        ("12345", "12345", 1.0),
        ("12354", "12345 ", 0.6),
        ("", "12345", 0.0),
        ("123456", "12345", 0.0),
        ("12345", "", 0.0),
    ],
)
async def test_an_answer_is_worth_what_the_judge_would_have_written(answer: str, said: str, score: float) -> None:
    critic = Critic(said)
    sample = Sample(Job("digits/0/0", 1, prompt="54321=", label="never looked at"), 0, text=answer)
    found = await load("judge/judge.py").agrees(sample, {"critic": critic})
    assert found == {"score": score, "wanted": said.strip()}
    assert critic.asked == ["54321="], "it is told the prompt alone, so no answer can talk it into points"


def test_its_judge_is_a_frozen_model_of_the_fleet() -> None:
    config = Config.model_validate(yaml.safe_load((FOLDER / "run.yaml").read_text()) | {"redis": {"url": "redis://x"}})
    assert config.reward.function == "examples.judge.judge:agrees"
    assert [one.name for one in config.fleet.models] == [config.model.name, config.reward.judges[0].name]
