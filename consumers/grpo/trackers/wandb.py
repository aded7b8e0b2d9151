"""Weights & Biases: configured by WANDB_PROJECT (default penstock), WANDB_ENTITY, WANDB_MODE and its other variables.

A restart continues the same run, by its id, and the numbers of its rows, with the trainer's ``step`` or the version of
an evaluation as their axes. Rows cannot be removed, so each step is reported once.
"""

import os
from collections.abc import Mapping
from typing import Any

from penstock.consumers.grpo.trackers.tracker import TrackedRun

#: Longest wait for its server at start and end; data not uploaded stay in the run's folder, for `wandb sync`.
SERVER_S = 20.0


class Wandb:
    """One run of ``wandb.init``."""

    replaces = False

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._position = run.position
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "penstock"),
            id=run.position.id,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=run.config,
            settings=wandb.Settings(
                # The output of processes is in the run's logs.
                console="off",
                silent=True,
                disable_git=True,
                # Its own hook at the process's exit waits for these, after ours have run.
                init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", SERVER_S)),
                finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", SERVER_S)),
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/version")
        self._run.define_metric("eval/*", step_metric="eval/version")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._log({**values, "step": step})

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        self._log({**values, "eval/version": version})

    def _log(self, row: dict[str, float]) -> None:
        # Numbered here: offline, W&B does not know how many rows earlier starts wrote.
        self._run.log(row, step=self._position.entries, commit=True)
        self._position.entries += 1
        self._position.save()

    def summary(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._run.summary[name] = value

    def close(self) -> None:
        self._run.finish()


def make(run: TrackedRun) -> Wandb:
    """Open the tracker for a run. Blocks for the import, and for the server unless it is offline."""
    return Wandb(run)
