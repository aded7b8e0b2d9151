"""Draw what a run of an example learned: reward of its batches, and scores of its held-out prompts, by step.

python examples/picture.py runs/NAME examples/NAME/NAME.png
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def draw(run: Path, picture: Path) -> None:
    """Draw the folder of a run into a PNG."""
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(7, 3), dpi=80, layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in steps], [row["reward_mean"] for row in steps], label="reward of a batch")
    for name, scores in scores_of(run).items():
        axes.plot([version - 1 for version, _ in scores], [score for _, score in scores], marker="o", label=name)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(picture)


def scores_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (version, score) of each evaluation, by held-out data set."""
    scores: dict[str, list[tuple[int, float]]] = {}
    for line in (run / "eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        scores.setdefault(row["dataset"], []).append((row["version"], row["accuracy"]))
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw what a run of an example learned.")
    parser.add_argument("run", type=Path, help="folder of the run: runs/NAME")
    parser.add_argument("picture", type=Path, help="PNG to write")
    asked = parser.parse_args()
    draw(asked.run, asked.picture)
