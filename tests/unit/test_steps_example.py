"""The example of rewards of steps: what its reward says of an answer's tokens, and its configuration."""

import pytest
import yaml

from penstock.config import Config
from penstock.records.job import Job
from penstock.records.sample import Sample
from tests.unit.example_parts import EXAMPLES, load


@pytest.mark.parametrize(
    ("text", "drawn", "rewards"),
    [
        ("12345", 6, [1, 1, 1, 1, 1, 1]),  # the end is a token
        ("12345", 5, [1, 1, 1, 1, 1]),  # cut off before it
        ("54321", 6, [0, 0, 1, 0, 0, 1]),
        ("12", 3, [1, 1, 0]),  # ended too early
        ("1234567", 8, [1, 1, 1, 1, 1, 0, 0, 0]),
        ("", 1, [0]),
    ],
)
def test_each_digit_where_it_belongs_is_worth_one_and_so_is_the_end(
    text: str, drawn: int, rewards: list[float]
) -> None:
    job = Job("digits/0/0", 1, prompt="54321=", label="12345")
    sample = Sample(job, 0, text=text, tokens=[7] * (6 + drawn), prompt_length=6)

    said = load("steps/rewards.py").digits(sample)

    assert said == {"score": float(text == "12345"), "token_rewards": rewards}


def test_it_learns_from_the_steps_alone() -> None:
    settings = yaml.safe_load((EXAMPLES / "steps" / "run.yaml").read_text())
    config = Config.model_validate(settings | {"redis": {"url": "redis://x"}})
    assert config.trainer.process is not None
    assert not config.trainer.process.with_rewards
    assert config.rollout.sides == ["step_rewards"]
