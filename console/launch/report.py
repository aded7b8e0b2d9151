"""What a run leaves behind: ``summary.json`` and ``run.png``, from the rows that its parts wrote.

``steps.jsonl`` and ``eval.jsonl`` are the trainer's; after a rewind rows repeat, and the last one counts.
``queue.jsonl`` is the launcher's, a row per second.
"""

import json
import logging
import platform
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.config import Config

Row = dict[str, Any]
#: A run that wrote no row for so long was down: the queue's come every second.
DOWN_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of a run."""

    #: By step, ascending, each step once.
    steps: list[Row]
    #: By version, ascending, each (dataset, version) once.
    evals: list[Row]
    #: By time.
    queue: list[Row]


def read_rows(run_dir: Path) -> Rows:
    """Read the three files; an absent one has no rows."""
    steps = {row["step"]: row for row in _read(run_dir / "steps.jsonl", {"step": _NUMBER})}
    needed = {"version": _NUMBER, "dataset": (str,), "accuracy": _NUMBER}
    evals = {(row["version"], row["dataset"]): row for row in _read(run_dir / "eval.jsonl", needed)}
    return Rows(
        steps=[steps[step] for step in sorted(steps)],
        evals=[evals[key] for key in sorted(evals)],
        queue=_read(run_dir / "queue.jsonl", {"time_s": _NUMBER}),
    )


#: Types that a field must be of for its row to count.
_NUMBER = (int, float)


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


def summarize(
    config: Config,
    rows: Rows,
    *,
    snapshot: dict[str, Any],
    audit: Any,
    seconds: float,
    setup: dict[str, str],
) -> dict[str, Any]:
    """The content of ``summary.json``.

    ``samples`` and ``tokens`` (generated ones) are those trained on, ``tokens_per_s`` is tokens over all seconds of
    the run, ``staleness_mean`` the mean over samples, accuracies those of the first dataset under ``data.eval``.

    Args:
        snapshot: the last one (``penstock.protocol.snapshot``).
        audit: an AuditReport.
        seconds: time that the run was being worked on.
        setup: versions, among them ``sglang``.
    """
    steps = rows.steps
    samples = _sum(steps, "samples")
    tokens = _sum(steps, "generated_tokens")
    counters = snapshot.get("counters") or {}
    updates = int(counters.get("weight_updates") or 0)
    busy_s = sum(_sum(steps, key) for key in ("wait_s", "step_s", "publish_s"))
    accuracies = headline(config, rows.evals)
    return {
        "run": config.run,
        "engine": {"name": "sglang", "version": setup.get("sglang", "unknown")},
        "mode": config.staleness.mode,
        "bound": config.staleness.bound,
        "steps": int(steps[-1]["step"]) if steps else 0,
        "samples": int(samples),
        "tokens": int(tokens),
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 3) if seconds > 0 else 0.0,
        "accuracy_first": accuracies[0]["accuracy"] if accuracies else None,
        "accuracy_last": accuracies[-1]["accuracy"] if accuracies else None,
        "staleness_max": max((int(row.get("staleness_max") or 0) for row in steps), default=0),
        "staleness_mean": _mean(steps, "staleness_mean", samples),
        "lost": int(audit.lost),
        "duplicated": int(audit.duplicated),
        "audit": "ok" if audit.ok else "; ".join(audit.differences),
        "weight_updates": updates,
        "weight_update_pause_s_mean": _ratio(float(counters.get("weight_pause_us") or 0) / 1e6, updates),
        "skipped_steps": int(_sum(steps, "skipped_steps")),
        "trainer_wait_share": _ratio(_sum(steps, "wait_s"), busy_s),
        "setup": setup,
    }


def headline(config: Config, evals: list[Row]) -> list[Row]:
    """Rows of the first dataset under ``data.eval``, or of whichever there is."""
    first = config.data.eval[0].name if config.data.eval else (evals[0]["dataset"] if evals else None)
    return [row for row in evals if row["dataset"] == first]


def setup_versions(redis_version: str, engine_version: str) -> dict[str, str]:
    """Versions that the run was made with."""
    return {
        "python": platform.python_version(),
        "redis": redis_version,
        "torch": _installed("torch"),
        "sglang": engine_version,
        "penstock": __version__,
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def write_summary(summary: dict[str, Any], path: Path) -> None:
    """Replace ``path`` at once."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(path)


def draw(config: Config, rows: Rows, path: Path) -> None:
    """Draw reward with held-out accuracy, staleness and queue depth over time, as a PNG. Takes about a second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Without pyplot: no global state, no display.
    figure = Figure(figsize=(9, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    reward, staleness, queue = figure.subplots(3, 1, sharex=True)
    up = Uptime([row["time_s"] for row in [*rows.steps, *rows.evals, *rows.queue] if row.get("time_s")])

    _line(reward, rows.steps, "reward_mean", up, color="tab:blue", label="reward (batch mean)")
    accuracies = headline(config, rows.evals)
    _line(reward, accuracies, "accuracy", up, color="tab:orange", marker="o", label="held-out accuracy")
    reward.set_ylabel("reward")
    bound = config.staleness.bound
    _line(staleness, rows.steps, "staleness_max", up, color="tab:red", drawstyle="steps-post", label="max")
    _line(staleness, rows.steps, "staleness_mean", up, color="tab:blue", label="mean")
    staleness.axhline(bound, color="0.4", linestyle="--", linewidth=1, label=f"bound {bound}")
    staleness.set_ylabel("staleness (versions)")
    staleness.set_ylim(bottom=0)
    staleness.yaxis.set_major_locator(MaxNLocator(integer=True))
    for key, color in (("queued", "tab:blue"), ("leased", "tab:green"), ("ready", "tab:orange")):
        _line(queue, rows.queue, key, up, color=color, label=key)
    queue.set_ylabel("queue depth (groups)")
    queue.set_ylim(bottom=0)
    queue.set_xlabel("time (s)" + (", without that between its lives" if up.breaks else ""))
    figure.suptitle(f"{config.run}: {config.staleness.mode}, bound {bound}")
    for axes in (reward, staleness, queue):
        axes.grid(alpha=0.3)
        for at in up.breaks:
            axes.axvline(at, color="0.6", linestyle=":", linewidth=1)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path)


class Uptime:
    """Seconds that a run was up, of its rows' times: what it was down between two lives is left out.

    Args:
        times: of all rows, in seconds, in any order; the queue's come every second while a run is up.
    """

    def __init__(self, times: Iterable[float]) -> None:
        self._times = sorted(times)
        pairs = zip(self._times, self._times[1:], strict=False)
        steps = (after - before if after - before < DOWN_S else 0.0 for before, after in pairs)
        self._seconds = list(accumulate(steps, initial=0.0))
        #: Where one life ended and the next began.
        self.breaks = [
            self._seconds[at] for at in range(1, len(self._times)) if self._times[at] - self._times[at - 1] >= DOWN_S
        ]

    def at(self, time_s: float) -> float:
        """Seconds that it had been up at the time of a row."""
        return self._seconds[bisect_left(self._times, time_s)]


def _line(axes: Any, rows: list[Row], key: str, up: Uptime, **style: Any) -> None:
    points = [(up.at(row["time_s"]), row[key]) for row in rows if row.get("time_s") and row.get(key) is not None]
    if points:
        axes.plot(*zip(*sorted(points), strict=True), linewidth=1.5, markersize=4, **style)


def _sum(rows: Iterable[Row], key: str) -> float:
    return sum(float(row.get(key) or 0) for row in rows)


def _mean(rows: Iterable[Row], key: str, weight: float) -> float:
    return _ratio(sum(float(row.get(key) or 0) * float(row.get("samples") or 0) for row in rows), weight)


def _ratio(value: float, over: float) -> float:
    return round(value / over, 6) if over else 0.0
