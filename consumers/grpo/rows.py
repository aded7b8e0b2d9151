"""Read and aggregate the rows that a run's processes write into its folder.

The trainer writes ``steps.jsonl`` and ``eval.jsonl``. After a rewind steps repeat: a repeated step replaces its earlier
row and all later rows, whose weights are abandoned.
The launcher writes ``queue.jsonl``, a row per second.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import Config

Row = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """Hold all rows of a run."""

    #: Steps of the trainer's current lineage, ascending, each once.
    steps: list[Row]
    #: Evaluations by ascending version, each (dataset, version) once.
    evals: list[Row]
    #: Queue rows by time.
    queue: list[Row]


#: Types of numeric fields; rows with other types are ignored.
_NUMBER = (int, float)


def read_rows(run_dir: Path) -> Rows:
    """Read the three files; a missing file has no rows."""
    steps: list[Row] = []
    for row in _read(run_dir / "steps.jsonl", {"step": _NUMBER}):
        while steps and steps[-1]["step"] >= row["step"]:
            steps.pop()
        steps.append(row)
    needed = {"version": _NUMBER, "dataset": (str,), "accuracy": _NUMBER}
    evals = {(row["version"], row["dataset"]): row for row in _read(run_dir / "eval.jsonl", needed)}
    return Rows(
        steps=steps,
        evals=[evals[key] for key in sorted(evals)],
        queue=_read(run_dir / "queue.jsonl", {"time_s": _NUMBER}),
    )


def _read(path: Path, needed: Mapping[str, tuple[type, ...]]) -> list[Row]:
    if not path.exists():
        return []
    rows, torn = [], 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and all(isinstance(row.get(key), types) for key, types in needed.items()):
            rows.append(row)
        else:
            torn += 1
    if torn:
        log.warning("%s: %d lines are torn (a writer was killed) and left out", path, torn)
    return rows


def of_steps(config: Config, rows: Rows) -> dict[str, Any]:
    """Return the part of ``summary.json`` on training (``penstock.console.launch.observer.summarize`` has its keys)."""
    steps = rows.steps
    samples = _sum(steps, "samples")
    busy_s = sum(_sum(steps, key) for key in ("wait_s", "step_s", "publish_s"))
    accuracies = headline(config, rows.evals)
    return {
        "steps": int(steps[-1]["step"]) if steps else 0,
        "samples": int(samples),
        "tokens": int(_sum(steps, "generated_tokens")),
        "accuracy_first": accuracies[0]["accuracy"] if accuracies else None,
        "accuracy_last": accuracies[-1]["accuracy"] if accuracies else None,
        "staleness_max": max((int(row["staleness_max"]) for row in _known(steps, "staleness_max")), default=None),
        "staleness_mean": _mean_over_tokens(steps, "staleness_mean"),
        "skipped_steps": int(_sum(steps, "skipped_steps")),
        "trainer_wait_share": ratio(_sum(steps, "wait_s"), busy_s),
    }


def headline(config: Config, evals: list[Row]) -> list[Row]:
    """Return the rows of the first dataset of ``data.eval``, or else of the first row's dataset."""
    first = config.data.eval[0].name if config.data.eval else (evals[0]["dataset"] if evals else None)
    return [row for row in evals if row["dataset"] == first]


def _sum(rows: Iterable[Row], key: str) -> float:
    return sum(float(row.get(key) or 0) for row in rows)


def _known(rows: Iterable[Row], key: str) -> list[Row]:
    return [row for row in rows if row.get(key) is not None]


def _mean_over_tokens(rows: Iterable[Row], key: str) -> float | None:
    """Return the mean over all loss tokens of a field that is a mean over loss tokens in each row."""
    known = _known(rows, key)
    weighted = sum(float(row[key]) * float(row.get("loss_tokens") or 0) for row in known)
    return ratio(weighted, _sum(known, "loss_tokens"))


def ratio(value: float, over: float) -> float | None:
    """Return ``value / over`` to six digits; None if ``over`` is 0."""
    return round(value / over, 6) if over else None
