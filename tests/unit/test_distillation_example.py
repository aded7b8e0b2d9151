"""The example of a teacher: its configuration, and what it says at its end."""

import yaml

from penstock.config import Config
from tests.unit.example_parts import EXAMPLES

FOLDER = EXAMPLES / "distillation"


def test_it_learns_from_a_frozen_model_alone() -> None:
    config = Config.model_validate(yaml.safe_load((FOLDER / "run.yaml").read_text()) | {"redis": {"url": "redis://x"}})
    assert config.trainer.distill is not None
    assert not config.trainer.distill.with_rewards
    assert config.rollout.teacher is not None
    assert config.folder_of(config.rollout.teacher) == "data/teacher"
    assert [one.name for one in config.fleet.models] == [config.model.name, config.rollout.teacher.name]
