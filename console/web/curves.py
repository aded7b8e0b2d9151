"""The curves of a run: values by step, evaluation and second, thinned out for a screen."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from penstock.consumers.grpo.rows import Row, Rows

#: Most points of a line: of a longer one the minimum and the maximum of each interval are kept.
MAX_POINTS = 600
#: A gap between rows that counts as down time, in seconds: the queue's rows come every second.
DOWN_S = 30.0

Value = Callable[[Row], Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: its name, and a field of a row or a function of the row."""

    name: str
    value: str | Value

    def of(self, row: Row) -> float | None:
        """Return a finite number, or None."""
        try:
            return _number(row.get(self.value) if isinstance(self.value, str) else self.value(row))
        except (TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError):
            return None


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the same rows: ``steps``, ``evals`` or ``queue``. ``unit`` follows the title."""

    id: str
    title: str
    unit: str
    rows: str
    lines: tuple[Line, ...]
    #: Whether its axis includes 0.
    zero: bool = True


def _share(part: str, *others: str) -> Value:
    return lambda row: row[part] / (row[part] + sum(row[other] for other in others))


def _over(part: str, whole: str) -> Value:
    return lambda row: row[part] / row[whole]


def _alike(row: Row) -> float | None:
    """Return the share of groups whose samples all have the same reward, from which nothing is learned."""
    counts = [count for name, count in row.items() if name.startswith("rollout/zero_std/count_")]
    # Rows of a batch have no such count if no group is uniform.
    return math.fsum(counts) if counts or "rollout/truncated_ratio" in row else None


def _evaluations(what: str) -> Value:
    """Return the groups of lane eval in a state; nothing while there are no evaluations at all."""
    states = ("queued", "leased", "ready")
    return lambda row: row[f"eval_{what}"] if any(row[f"eval_{one}"] for one in states) else None


def _chart_of(id_: str, title: str, unit: str, *lines: tuple[str, str | Value], rows: str = "steps",
              zero: bool = True) -> Chart:  # fmt: skip
    return Chart(id_, title, unit, rows, tuple(Line(*line) for line in lines), zero)


CHARTS = (
    _chart_of("reward", "Reward", "mean of a batch", ("reward", "reward_mean"), zero=False),
    _chart_of("held-out", "Held-out reward", "mean", rows="evals"),
    _chart_of("staleness", "Staleness", "versions", ("mean", "staleness_mean"), ("max", "staleness_max")),
    _chart_of("length", "Answer length", "tokens", ("mean", _over("generated_tokens", "samples")),
              ("median", "rollout/response_len/median"), ("max", "rollout/response_len/max")),
    _chart_of("cut-off", "Truncated answers", "share", ("truncated", "rollout/truncated_ratio")),
    _chart_of("truncated", "Truncated held-out answers", "share", rows="evals"),
    _chart_of("alike", "Groups rewarded alike", "of a batch", ("groups", _alike)),
    _chart_of("entropy", "Entropy", "nats", ("entropy", "entropy")),
    _chart_of("loss", "Loss", "", ("loss", "loss"), zero=False),
    _chart_of("ratio", "Ratio of policies", "by token", ("1 %", "ratio_p01"), ("median", "ratio_p50"),
              ("99 %", "ratio_p99"), zero=False),
    _chart_of("clip", "Clipped tokens", "share", ("low", "clip_low_frac"), ("high", "clip_high_frac")),
    _chart_of("logprob", "Logprobs, engine against trainer", "mean difference", ("all", "logprob_diff_mean"),
              ("of the newest version", "logprob_diff_fresh_mean"), ("by rounding alone", "logprob_diff_floor")),
    _chart_of("grad", "Gradient norm", "", ("norm", "grad_norm")),
    _chart_of("masked", "Tokens that bear loss", "share", ("share", _over("loss_tokens", "generated_tokens"))),
    _chart_of("goodput", "Goodput", "tokens trained on, share of those generated",
              ("so far", _over("tokens_trained", "tokens_heard")), rows="queue"),
    _chart_of("tokens", "Throughput", "tokens/s", ("generated", "tokens_per_s"), rows="queue"),
    _chart_of("time", "Where a step goes", "s", ("waits", "wait_s"), ("trains", "step_s"), ("publishes", "publish_s")),
    _chart_of("wait", "Trainer's wait", "share of a step", ("waits", _share("wait_s", "step_s", "publish_s"))),
    _chart_of("depth", "Queue", "groups", ("queued", "queued"), ("leased", "leased"), ("ready", "ready"),
              ("dead", "dead"), rows="queue"),
    _chart_of("eval-depth", "Queue of evaluations", "groups",
              *((name, _evaluations(name)) for name in ("queued", "leased", "ready")), rows="queue"),
)  # fmt: skip


_SOURCES = ("steps", "evals", "queue")
#: Charts of evaluations, a line per dataset: field of each, and most lines.
_OF_EVALS = {"held-out": "accuracy", "truncated": "truncated_ratio"}
MAX_DATASETS = 8

Points = list[tuple[Row, float]]


def curves(rows: Rows, bound: int | None) -> list[dict[str, Any]]:
    """Return every chart with points: its lines by ``step`` and by ``up_s`` (uptime of the run in seconds).

    Args:
        bound: staleness bound, drawn across its chart.
    """
    kept = {name: [row for row in getattr(rows, name) if _number(row.get("time_s"))] for name in _SOURCES}
    up = Uptime([row["time_s"] for name in _SOURCES for row in kept[name]])
    steps = _steps_of(kept["steps"])
    made = [_chart(chart, kept[chart.rows], up, steps) for chart in CHARTS]
    return [{**chart, "bound": bound if chart["id"] == "staleness" else None} for chart in made if chart["lines"]]


class Uptime:
    """Convert times of rows to seconds of uptime: down time between two lives of a run is excluded.

    Args:
        times: times of all rows, in seconds, in any order.
    """

    def __init__(self, times: Iterable[float]) -> None:
        self._times = sorted(times)
        steps = (after - before if after - before < DOWN_S else 0.0 for before, after in pairwise(self._times))
        self._seconds = list(accumulate(steps, initial=0.0))

    def at(self, time_s: float) -> float:
        """Return the uptime at the time of a row."""
        return self._seconds[bisect_left(self._times, time_s)]


@dataclass(frozen=True, slots=True)
class _Steps:
    """Hold the number, the end time and the version of each step ([] if unknown)."""

    numbers: Sequence[float]
    times: Sequence[float]
    versions: Sequence[float]

    def at(self, row: Mapping[str, Any]) -> float:
        """Return the row's own step; for an evaluation the one that made its version; else the last that ended by then.

        An evaluation is placed at the mean version of its tokens, between two steps if that lies between two versions.
        A batch that comes again after a rewind keeps the version it was begun with, though others are made after it: so
        no evaluation is placed later than it was read.
        """
        own = _number(row.get("step"))
        if own is not None:
            return own
        end = bisect_right(self.times, row["time_s"])
        version = _number(row.get("mean_version"))
        version = _number(row.get("version")) if version is None else version
        if "dataset" not in row or version is None or not self.versions:
            return self._number(end)
        below = math.floor(version)
        before, after = (self._number(min(end, bisect_left(self.versions, one))) for one in (below, math.ceil(version)))
        return before + (version - below) * (after - before)

    def _number(self, count: int) -> float:
        """Return the number of the step that is the last of the first ``count``; 0 before the first."""
        return self.numbers[count - 1] if count else 0.0


def _steps_of(rows: Sequence[Row]) -> _Steps:
    versions = [version for row in rows if (version := _number(row.get("version"))) is not None]
    told = len(versions) == len(rows) and versions == sorted(versions)
    numbers = [_number(row["step"]) or 0.0 for row in rows]
    return _Steps(numbers, [float(row["time_s"]) for row in rows], versions if told else [])


def _chart(chart: Chart, rows: Sequence[Row], up: Uptime, steps: _Steps) -> dict[str, Any]:
    lines = dict(_by_dataset(_OF_EVALS[chart.id], rows) if chart.rows == "evals" else _by_line(chart.lines, rows))
    unit, datasets = chart.unit, {row["dataset"][:200] for row in rows} if chart.rows == "evals" else ()
    if len(datasets) > MAX_DATASETS:
        unit += f"; {len(lines)} of {len(datasets)} datasets, the others are on page Evaluation"
    drawn = [{"name": name, **_line_points(points, up, steps)} for name, points in lines.items() if points]
    return {
        "id": chart.id,
        "title": chart.title,
        "unit": unit,
        "rows": chart.rows,
        "zero": chart.zero,
        "lines": drawn,
    }


def _by_line(lines: Sequence[Line], rows: Sequence[Row]) -> Iterator[tuple[str, Points]]:
    for line in lines:
        values = ((row, line.of(row)) for row in rows)
        yield line.name, [(row, value) for row, value in values if value is not None]


def _by_dataset(field: str, rows: Sequence[Row]) -> Iterator[tuple[str, Points]]:
    found: dict[str, Points] = {}
    for row in rows:
        value = _number(row.get(field))
        name = row["dataset"][:200]
        if value is not None and (name in found or len(found) < MAX_DATASETS):
            found.setdefault(name, []).append((row, value))
    yield from found.items()


def _line_points(points: Points, up: Uptime, steps: _Steps) -> dict[str, list[float]]:
    kept = thinned(points)
    return {
        "step": [steps.at(row) for row, _ in kept],
        "up_s": [round(up.at(row["time_s"]), 1) for row, _ in kept],
        "value": [float(f"{value:.6g}") for _, value in kept],
    }


def thinned(points: Points, most: int = MAX_POINTS) -> Points:
    """Reduce to at most ``most`` points in order; peaks are kept."""
    if len(points) <= most:
        return points
    kept: Points = []
    stretches = most // 2
    for at in range(stretches):
        stretch = points[at * len(points) // stretches : (at + 1) * len(points) // stretches]
        values = [value for _, value in stretch]
        kept += [stretch[end] for end in sorted({values.index(min(values)), values.index(max(values))})]
    return kept


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
