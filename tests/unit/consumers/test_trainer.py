"""What a trainer is, before it meets a Redis."""

from pathlib import Path
from typing import Any

import pytest

from consumers.trainer import Trainer
from penstock.config import Config
from penstock.config.subscription import Definition


class Told:
    """A session that keeps what it is told."""

    def __init__(self, *_: Any, **told: Any) -> None:
        self.told = told

    def stream(self, prefetch: int) -> None:
        """Nobody reads."""


@pytest.mark.parametrize("driving", [True, False])
def test_a_trainer_drives_where_its_definition_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driving: bool
) -> None:
    monkeypatch.setattr("consumers.trainer.config_of", lambda config, *_: config)
    monkeypatch.setattr("consumers.trainer.Session", Told)
    data = {"train": [{"name": "d", "path": "d.jsonl"}]}
    config = Config.model_validate({"run": "r", "model": {"path": str(tmp_path)}, "data": data})
    definition = Definition(driving=driving, model="policy", size=3)
    trainer = Trainer(config, subscription={"driving": not driving}, definition=definition)
    told = trainer.session.told  # type: ignore[attr-defined]
    assert (trainer.drives, told["publishes"], told["definition"]) == (driving, driving, definition)
