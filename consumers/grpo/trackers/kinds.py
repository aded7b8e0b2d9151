"""TensorBoard, Weights & Biases and trackio, each through its own library, which is imported when it is opened.

A tracker is made and used in a thread of its own: every method may block, and may raise anything.

| method | reports |
|---|---|
| ``metrics(step, values)`` | figures of one step of the trainer |
| ``evaluation(version, values)`` | figures of an evaluation; the mean version of its tokens, which may be fractional |
| ``summary(values)`` | the final figures of the run: numbers and texts |
| ``close()`` | nothing: it flushes and closes |

``replaces``: a repeated step replaces the earlier values of it and of all later ones; otherwise it is reported once.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, PrivateAttr

from penstock.config import Config
from penstock.config.reading.secrets import masked
from penstock.consumers.grpo.trackers.names import numbers
from penstock.names import new_token
from penstock.system.disk import put

log = logging.getLogger(__name__)

#: Most bytes of a position's file.
MAX_BYTES = 4096
#: Longest wait for W&B's server at start and end; data not uploaded stay in the run's folder, for `wandb sync`.
SERVER_S = 20.0


class Position(BaseModel):
    """Last step and version reported to a tracker, saved in the run's folder so that a restart continues after them."""

    #: Name of the run at the tracker; starting over makes a new one.
    id: str
    #: Last reported step, and last version with a reported evaluation; -1 before the first.
    step: int
    version: int
    #: Number of reported entries, if the tracker numbers them.
    entries: int
    _path: Path = PrivateAttr()

    def save(self) -> None:
        """Write it to its file. Blocks for the file system; raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        put(self._path, self.model_dump_json() + "\n")

    @classmethod
    def at(cls, path: Path) -> "Position":
        """Load the position from a file; make a new one if it is missing or, with a warning, unreadable."""
        found = cls(id=f"{time.strftime('%Y%m%d-%H%M%S')}-{new_token()[:6]}", step=-1, version=-1, entries=0)
        try:
            with path.open("rb") as file:
                found = cls.model_validate_json(file.read(MAX_BYTES))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:
            log.warning("%s cannot be read (%s); reporting continues as a new run", path, exc)
        found._path = path
        return found


def settings_of(config: Config) -> dict[str, Any]:
    """Return the resolved configuration, secrets masked."""
    return masked(config.model_dump(mode="json"))


class TensorBoard:
    """Event files by torch's writer, for ``tensorboard --logdir runs``.

    Steps and evaluations are two runs, ``NAME/tensorboard/steps`` and ``.../evaluations``: their axes are steps and
    versions. A repeated step hides the earlier values of it and of all later ones (``purge_step``).
    """

    replaces = True

    def __init__(self, config: Config, position: Position) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Callable[..., Any] = SummaryWriter
        self._folder, self._settings = config.run_dir / "tensorboard", settings_of(config)
        self._last: int | None = None
        self._steps: Any = None
        self._evaluations: Any = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        _add(self._writer_at(step), step, values)
        self._last = step

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        self._evaluations = self._evaluations or self._writer(str(self._folder / "evaluations"))
        _add(self._evaluations, round(version), values)

    def summary(self, values: Mapping[str, Any]) -> None:
        last = self._last or 0
        self._writer_at(last + 1).add_text("summary", _block(values), last)

    def close(self) -> None:
        for writer in (self._steps, self._evaluations):
            if writer is not None:
                writer.close()

    def _writer_at(self, step: int) -> Any:
        """Return the writer of steps; a new one that hides earlier values if this step repeats one."""
        if self._last is None or step <= self._last:
            if self._steps is not None:
                self._steps.close()
            self._steps = self._writer(str(self._folder / "steps"), purge_step=step)
            self._steps.add_text("config", _block(self._settings), step)
        return self._steps


def _add(writer: Any, at: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, at)
    writer.flush()


def _block(values: Mapping[str, Any]) -> str:
    """Format as YAML in a Markdown code block."""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return "".join(f"    {line}\n" for line in text.splitlines())


class Wandb:
    """One run of ``wandb.init``: WANDB_PROJECT (default penstock), WANDB_ENTITY, WANDB_MODE and its other variables.

    A restart continues the same run, by its id, and the numbers of its rows, with the trainer's ``step`` or the version
    of an evaluation as their axes. Rows cannot be removed.
    """

    replaces = False

    def __init__(self, config: Config, position: Position) -> None:
        self._run, self._position = self._begin(config, position.id), position

    def _begin(self, config: Config, id_: str) -> Any:
        import wandb

        settings = wandb.Settings(
            # The output of processes is in the run's logs.
            console="off",
            silent=True,
            disable_git=True,
            # Its own hook at the process's exit waits for these, after ours have run.
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", SERVER_S)),
            finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", SERVER_S)),
        )
        project = os.environ.get("WANDB_PROJECT", "penstock")
        begun = wandb.init(project=project, id=id_, name=config.run, resume="allow", dir=str(config.run_dir),
                           config=settings_of(config), settings=settings)  # fmt: skip
        for axis, figures in (("step", "*"), ("eval/version", "eval/*")):
            begun.define_metric(axis)
            begun.define_metric(figures, step_metric=axis)
        return begun

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._log({**values, "step": step}, step)

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        self._log({**values, "eval/version": version}, round(version))

    def _log(self, row: dict[str, float], at: int) -> None:
        # Numbered here: offline, W&B does not know how many rows earlier starts wrote.
        self._run.log(row, step=self._position.entries, commit=True)
        self._position.entries += 1
        self._position.save()

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """The same by ``trackio.init``: TRACKIO_PROJECT (default penstock), below TRACKIO_DIR, for ``trackio show``.

    A restart continues the run of the same name, NAME and its start time. Final figures are ``summary/...`` at the last
    step.
    """

    def _begin(self, config: Config, id_: str) -> Any:
        import trackio

        project, space = os.environ.get("TRACKIO_PROJECT", "penstock"), os.environ.get("TRACKIO_SPACE_ID")
        return trackio.init(project=project, name=f"{config.run}-{id_}", resume="allow", space_id=space,
                            config=settings_of(config), embed=False)  # fmt: skip

    def _log(self, row: dict[str, float], at: int) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=at)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._log({f"summary/{name}": value for name, value in numbers(values).items()}, max(0, self._position.step))


Tracker = TensorBoard | Wandb
#: By the name of its library.
KINDS: Mapping[str, Callable[[Config, Position], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
