"""trackio: project TRACKIO_PROJECT (default penstock), below TRACKIO_DIR, for ``trackio show``.

A restart continues the run of the same name, NAME and its start time. Values cannot be removed, so each step is
reported once. Final figures are ``summary/...`` at the last step.
"""

import os
from collections.abc import Mapping
from typing import Any

from penstock.consumers.grpo.trackers.tracker import TrackedRun, numbers


class Trackio:
    """One run of ``trackio.init``."""

    replaces = False

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._position = run.position
        # Any: its methods have no types, and it is usually not installed for type checks.
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "penstock"),
            name=f"{run.name}-{run.position.id}",
            resume="allow",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=run.config,
            embed=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "eval/version": version}, step=round(version))

    def summary(self, values: Mapping[str, Any]) -> None:
        shown = {f"summary/{name}": value for name, value in numbers(values).items()}
        self._run.log(shown, step=max(0, self._position.step))

    def close(self) -> None:
        self._run.finish()


def make(run: TrackedRun) -> Trackio:
    """Open the tracker for a run. Blocks for the import."""
    return Trackio(run)
