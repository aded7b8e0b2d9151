"""Compare runs of the instruct example with the same training by TRL: held-out scores, and one picture.

    for seed in 0 1 2; do
        python -m penstock.cli run examples/instruct/gpu.yaml --run=instruct-$seed --seed=$seed
        python -m benchmarks.instruct_trl --out trl-$seed.jsonl --seed $seed
    done
    python -m benchmarks.instruct runs/instruct-? --trl trl-?.jsonl --json FILE --picture FILE.png

Reads the folders of finished runs and the rows of ``benchmarks.instruct_trl``. Blocks briefly.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, versions
from benchmarks.options import JsonFile

#: Highest logprob difference between trainer and engine, as a multiple of its floor at the start.
MAX_DIFFERENCE = 1.2
#: Steps at the start over which the floor is the mean, and at the end with which it is compared.
FLOOR_STEPS = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """The held-out scores of one training: one point per evaluation."""

    name: str
    steps: list[int]
    scores: list[float]
    #: Seconds of training up to each evaluation.
    seconds: list[float]
    #: KL to the first policy at the end, in nats per token.
    kl: float
    #: Difference of logprobs between engine and trainer: mean of the last steps over that of the first.
    difference: float | None = None

    @property
    def gain(self) -> float:
        return self.scores[-1] - self.scores[0]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_penstock(folder: Path) -> Curve:
    """Return the curve of a run in its folder."""
    steps, evals = rows_of(folder / "steps.jsonl"), rows_of(folder / "eval.jsonl")
    begin_s = steps[0]["time_s"] - steps[0]["step_s"]
    step_of = {row["version"]: row for row in steps}
    at = [step_of.get(row["version"] - 1) for row in evals]
    differences = [row["logprob_diff_mean"] for row in steps]
    first, last = differences[:FLOOR_STEPS], differences[-FLOOR_STEPS:]
    return Curve(
        folder.name,
        [0 if one is None else one["step"] for one in at],
        [row["accuracy"] for row in evals],
        [0.0 if one is None else one["time_s"] - begin_s for one in at],
        steps[-1].get("ref_kl", 0.0),
        sum(last) / len(last) / (sum(first) / len(first)),
    )


def of_trl(path: Path) -> Curve:
    """Return the curve of the rows of ``benchmarks.instruct_trl``."""
    rows = rows_of(path)
    columns = {name: [row[name] for row in rows] for name in ("step", "score", "seconds")}
    return Curve(path.stem, columns["step"], columns["score"], columns["seconds"], rows[-1]["kl"])


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Draw the scores of all trainings over steps and over time, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, unit in zip(figure.subplots(1, 2, sharey=True), ("steps", "seconds"), strict=True):
        for (system, some), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=False):
            for number, curve in enumerate(some):
                label = f"{system}, {len(some)} seeds" if number == 0 else None
                axes.plot(getattr(curve, unit), curve.scores, marker="o", markersize=3, color=color, label=label)
        axes.set_xlabel({"steps": "optimizer steps", "seconds": "time of training (s)"}[unit])
        axes.set_ylabel("held-out score")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path)


def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs of the example.")],
    trl: Annotated[list[Path], typer.Option(help="Rows of benchmarks.instruct_trl; one file per seed.")] = [],  # noqa: B006
    picture: Annotated[Path | None, typer.Option(help="PNG with the curves.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare held-out scores."""
    curves = {"penstock": [of_penstock(one) for one in runs], "TRL": [of_trl(one) for one in trl]}
    rows = [
        {
            "system": system, "name": one.name, "first": one.scores[0], "last": one.scores[-1], "gain": one.gain,
            "kl": one.kl, "seconds": one.seconds[-1], "difference": one.difference,
        }
        for system, some in curves.items() for one in some
    ]  # fmt: skip
    finals = [one.scores[-1] for one in curves["penstock"]]
    mean_gain = sum(one.gain for one in curves["penstock"]) / len(finals)
    lowest = min((one.scores[-1] for one in curves["TRL"]), default=None)
    report = Report(
        "A real model that learns to follow instructions",
        {
            "name": "training", "first": "first score", "last": "final score", "gain": "gain", "kl": "KL (nats)",
            "seconds": "s", "difference": "logprob difference",
        },
        rows,
        {
            "held_out_gain": mean_gain,
            "held_out_final": sum(finals) / len(finals),
            "lowest_trl_final": lowest,
            "logprob_difference": max(one.difference or 0.0 for one in curves["penstock"]),
        },
        versions(),
        {"curves": {system: [[one.name, one.steps, one.scores, one.seconds] for one in some]
                    for system, some in curves.items()}},
        [f"The logprob difference is a multiple of its floor at the start; at most {MAX_DIFFERENCE} is expected."],
    )  # fmt: skip
    report.finish(json_file)
    if picture is not None:
        draw(curves, picture)


if __name__ == "__main__":
    execute(main)
