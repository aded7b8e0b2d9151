"""MLflow: at MLFLOW_TRACKING_URI, or ``mlflow.db`` in the run's folder; experiment MLFLOW_EXPERIMENT_NAME (penstock).

A restart continues the same run, by its id. MLflow keeps repeated values side by side, so each step is reported once.
"""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from penstock.consumers.grpo.trackers.tracker import TrackedRun, flat, numbers

#: Characters not allowed in names.
_FORBIDDEN = re.compile(r"[^\w\-. /]")
#: Entries of one call, and characters of a parameter.
_MAX_PARAMS, _MAX_PARAM = 100, 500


class MLflow:
    """One run at a tracking server or in a folder; uses a client of its own, independent of MLflow's active run."""

    replaces = False

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._position = run.position
        if self._position.step < 0 and not self._position.entries:
            self._begin(run)
        else:
            self._client.update_run(self._position.id, status="RUNNING")

    def _begin(self, run: TrackedRun) -> None:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "penstock")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        made = self._client.create_run(experiment, run_name=run.name)
        self._position.id, self._position.entries = made.info.run_id, 1
        self._position.save()
        params = [Param(_name(key), value[:_MAX_PARAM]) for key, value in flat(run.config).items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._position.id, params=params[start : start + _MAX_PARAMS])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._position.id, metrics=metrics)

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        self.metrics(round(version), values)

    def summary(self, values: Mapping[str, Any]) -> None:
        figures = numbers(values)
        self.metrics(max(0, self._position.step), {f"summary/{name}": value for name, value in figures.items()})
        for name in values.keys() - figures.keys():
            self._client.set_tag(self._position.id, f"summary.{_name(name)}", str(values[name]))

    def close(self) -> None:
        self._client.set_terminated(self._position.id)


def _name(text: str) -> str:
    return _FORBIDDEN.sub("_", text)


def make(run: TrackedRun) -> MLflow:
    """Open the tracker for a run. Blocks for the import, and for the server if there is one."""
    return MLflow(run)
