"""TensorBoard, through torch's writer of event files: ``tensorboard --logdir runs``.

Steps and evaluations are two runs, ``NAME/tensorboard/steps`` and ``.../evaluations``: their axes are steps and
versions. A repeated step hides the earlier values of it and of all later ones (``purge_step``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.consumers.grpo.trackers.tracker import TrackedRun


class TensorBoard:
    """Writes event files below one folder."""

    replaces = True

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder = folder
        self._config = config
        self._last: int | None = None
        self._steps: Any = None
        self._evaluations: Any = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._writer(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()
        self._last = step

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        if self._evaluations is None:
            self._evaluations = _writer(self._folder / "evaluations")
        for name, value in values.items():
            self._evaluations.add_scalar(name, value, round(version))
        self._evaluations.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        last = self._last or 0
        self._writer(last + 1).add_text("summary", _block(values), last)

    def close(self) -> None:
        for writer in (self._steps, self._evaluations):
            if writer is not None:
                writer.close()

    def _writer(self, step: int) -> Any:
        """Return the writer of steps; a new one that hides earlier values if this step repeats one."""
        if self._last is None or step <= self._last:
            if self._steps is not None:
                self._steps.close()
            self._steps = _writer(self._folder / "steps", purge_step=step)
            self._steps.add_text("config", _block(self._config), step)
        return self._steps


def _writer(folder: Path, purge_step: int | None = None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=purge_step)


def _block(values: Mapping[str, Any]) -> str:
    """Format as YAML in a Markdown code block."""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return "".join(f"    {line}\n" for line in text.splitlines())


def make(run: TrackedRun) -> TensorBoard:
    """Open the tracker for a run. Blocks for the import."""
    return TensorBoard(run.folder / "tensorboard", run.config)
