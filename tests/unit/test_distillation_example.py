"""The example of a teacher: its configuration, and what it says at its end."""

import importlib.util
from pathlib import Path
from types import ModuleType

import yaml

from penstock.config import Config

FOLDER = Path(__file__).parents[2] / "examples" / "distillation"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"distillation_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_from_a_frozen_model_alone() -> None:
    config = Config.model_validate(yaml.safe_load((FOLDER / "run.yaml").read_text()) | {"redis": {"url": "redis://x"}})
    assert config.trainer.distill is not None
    assert not config.trainer.distill.with_rewards
    assert config.rollout.teacher is not None
    assert config.folder_of(config.rollout.teacher) == "data/teacher"
    assert [one.name for one in config.fleet.models] == [config.model.name, config.rollout.teacher.name]
