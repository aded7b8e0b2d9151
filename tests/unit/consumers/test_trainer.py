"""What a trainer is, before it meets a Redis."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.config.subscription import Definition
from penstock.consumers.subscription.evaluation import Evaluations
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError


class Told:
    """A session that keeps what it is told."""

    def __init__(self, *_: Any, **told: Any) -> None:
        self.told = told
        self.evaluations = Evaluations()
        self.steps = None

    def stream(self, prefetch: int) -> None:
        """Nobody reads."""


def alone(monkeypatch: pytest.MonkeyPatch, folder: Path, **trainer: Any) -> Config:
    """A configuration of which a trainer is made that meets no Redis."""
    monkeypatch.setattr("penstock.consumers.trainer.config_of", lambda config, *_: config)
    monkeypatch.setattr("penstock.consumers.trainer.Session", Told)
    data = {"train": [{"name": "d", "path": "d.jsonl"}]}
    return Config.model_validate({"run": "r", "model": {"path": str(folder)}, "data": data, "trainer": trainer})


@pytest.mark.parametrize("driving", [True, False])
def test_a_trainer_drives_where_its_definition_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driving: bool
) -> None:
    config = alone(monkeypatch, tmp_path)
    definition = Definition(driving=driving, model="policy", size=3)
    trainer = Trainer(config, subscription={"driving": not driving}, definition=definition)
    told = trainer.session.told  # type: ignore[attr-defined]
    assert (trainer.drives, told["publishes"], told["definition"]) == (driving, driving, definition)


@pytest.mark.parametrize(
    ("trainer", "arguments"),
    [
        ({"subscription": {"size": 7}}, {}),
        ({}, {"subscription": {"unit": "samples", "size": 4}}),
        ({}, {"definition": Definition(size=7)}),
    ],
)
def test_groups_per_batch_are_refused_beside_another_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trainer: dict[str, Any], arguments: dict[str, Any]
) -> None:
    config = alone(monkeypatch, tmp_path, **trainer)
    with pytest.raises(ConfigError, match=r"Trainer\(batch_groups=4\) contradicts its subscription"):
        Trainer(config, batch_groups=4, **arguments)
    same = Trainer(alone(monkeypatch, tmp_path, subscription={"size": 4}), batch_groups=4)
    assert same.session.told["definition"].size == 4  # type: ignore[attr-defined]
