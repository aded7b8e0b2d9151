"""The trainer's steps, from its rows in the folder of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.reading.yaml_file import read_yaml
from penstock.config.trainer import TrainerConfig
from penstock.consumers.grpo.rows import Row, read_rows
from penstock.errors import ConfigError
from penstock.redis.saved_config import CONFIG_FILE

_SPENT = ("wait_s", "step_s", "publish_s")
#: Upper limit of valid numbers: as a time, the year 5138.
_MOST = 1e11


@dataclass(frozen=True, slots=True)
class Step:
    """One step: it waited, trained and published, one after the other."""

    step: int
    batch: int
    #: Version of the batch, and the version published after it.
    version: int
    #: When it ended (Unix seconds).
    ended_s: float
    wait_s: float
    train_s: float
    publish_s: float
    #: Subscription that was trained; '' in rows of an earlier release.
    trainer: str = ""

    @property
    def published_from_s(self) -> float:
        return self.ended_s - self.publish_s

    @property
    def trained_from_s(self) -> float:
        return self.published_from_s - self.train_s

    @property
    def waited_from_s(self) -> float:
        return self.trained_from_s - self.wait_s


def read_steps(folder: Path) -> list[Step]:
    """Return the steps of the run in ``folder``, by number; [] without any. Blocks for the disk."""
    return list(_steps(read_rows(folder).steps))


def trainer_of(folder: Path, steps: Sequence[Step]) -> str:
    """Return the subscription of the run's own trainer, by its last step or its configuration. Blocks for the disk."""
    if steps and steps[-1].trainer:
        return steps[-1].trainer
    try:
        section = read_yaml(folder / CONFIG_FILE).get("trainer")
    except (ConfigError, OSError):
        section = None
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else str(TrainerConfig.model_fields["name"].default)


def _steps(rows: list[Row]) -> Iterator[Step]:
    for row in rows:
        numbers = {name: _finite(row.get(name)) for name in ("step", "batch", "version", "time_s")}
        if any(value is None for value in numbers.values()):
            continue
        step, batch, version, ended = (value or 0.0 for value in numbers.values())
        wait_s, train_s, publish_s = (max(0.0, _finite(row.get(name)) or 0.0) for name in _SPENT)
        name = row.get("trainer")
        trainer = name if isinstance(name, str) else ""
        yield Step(int(step), int(batch), int(version), ended, wait_s, train_s, publish_s, trainer)


def _finite(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < _MOST else None
