"""Report a finished run: ``summary.json`` and ``run.png``, from the rows that its parts wrote."""

import json
import platform
from bisect import bisect_left
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.consumers.grpo.rows import Row, Rows, headline, of_steps, ratio
from penstock.names import __version__
from penstock.protocol.tokens import ledgers_of, of_training

#: A gap between rows that counts as down time, in seconds: the queue's rows come every second.
DOWN_S = 30.0


def summarize(
    config: Config,
    rows: Rows,
    *,
    snapshot: dict[str, Any],
    audit: Any,
    seconds: float,
    setup: dict[str, str],
) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    ``samples`` and ``tokens`` (generated ones) are those trained on, ``tokens_per_s`` is tokens over all seconds of
    the run, ``staleness_mean`` the mean over loss tokens, accuracies those of the first dataset under ``data.eval``.
    ``tokens_drawn`` counts tokens that workers reported for training, ``tokens_by_account`` splits them by outcome
    (I10), and ``goodput`` is the share that was trained on; ``tokens_unreported_at_most`` bounds the tokens that were
    generated but not reported, because an engine or worker was lost before.

    Args:
        snapshot: the last one (``penstock.protocol.snapshot``).
        audit: an AuditReport.
        seconds: time during which the run was up.
        setup: versions, including ``sglang``.
    """
    trained = of_steps(config, rows)
    counters = snapshot.get("counters") or {}
    updates = int(counters.get("weight_updates") or 0)
    drawn = of_training(ledgers_of(snapshot))
    return {
        "run": config.run,
        "engine": {"name": "sglang", "version": setup.get("sglang", "unknown")},
        "mode": config.staleness.mode,
        "bound": config.staleness.bound,
        **{key: trained[key] for key in ("steps", "samples", "tokens")},
        "seconds": round(seconds, 3),
        "tokens_per_s": round(trained["tokens"] / seconds, 3) if seconds > 0 else None,
        **{key: trained[key] for key in ("accuracy_first", "accuracy_last", "staleness_max", "staleness_mean")},
        "lost": int(audit.lost),
        "duplicated": int(audit.duplicated),
        "audit": "ok" if audit.ok else "; ".join(audit.differences),
        "weight_updates": updates,
        "weight_update_pause_s_mean": ratio(float(counters.get("weight_pause_us") or 0) / 1e6, updates),
        **{key: trained[key] for key in ("skipped_steps", "trainer_wait_share")},
        "goodput": ratio(drawn.trained, drawn.heard),
        "tokens_drawn": drawn.heard,
        "tokens_unreported_at_most": drawn.unheard * config.rollout.max_context_tokens,
        "tokens_by_account": {**drawn.accounts, "undecided": drawn.held},
        "setup": setup,
    }


def setup_versions(redis_version: str, engine_version: str) -> dict[str, str]:
    """Return the versions of the software used by the run."""
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
    """Replace ``path`` atomically."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(path)


def draw(config: Config, rows: Rows, path: Path) -> None:
    """Plot reward with held-out accuracy, staleness and queue depth over time, as a PNG. Takes about a second."""
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
    """Convert times of rows to seconds of uptime: down time between two lives of a run is excluded.

    Args:
        times: times of all rows, in seconds, in any order; the queue's rows come every second while a run is up.
    """

    def __init__(self, times: Iterable[float]) -> None:
        self._times = sorted(times)
        pairs = zip(self._times, self._times[1:], strict=False)
        steps = (after - before if after - before < DOWN_S else 0.0 for before, after in pairs)
        self._seconds = list(accumulate(steps, initial=0.0))
        #: Uptimes at which one life ended and the next began.
        self.breaks = [
            self._seconds[at] for at in range(1, len(self._times)) if self._times[at] - self._times[at - 1] >= DOWN_S
        ]

    def at(self, time_s: float) -> float:
        """Return the uptime at the time of a row."""
        return self._seconds[bisect_left(self._times, time_s)]


def _line(axes: Any, rows: list[Row], key: str, up: Uptime, **style: Any) -> None:
    points = [(up.at(row["time_s"]), row[key]) for row in rows if row.get("time_s") and row.get(key) is not None]
    if points:
        axes.plot(*zip(*sorted(points), strict=True), linewidth=1.5, markersize=4, **style)
