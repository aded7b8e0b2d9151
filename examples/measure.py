"""End the ``summary.json`` of a run in what an example shows: ``{measure, first, last, direction}``.

    python examples/measure.py NAME runs/NAME/summary.json

Exits with 1 where the measure did not move that way, for each of the held-out data sets if there are several.
"""

import argparse
import json
import sys
from pathlib import Path

#: What is measured on held-out prompts, by the name of an example; all of them go up.
MEASURES = {
    "agent": "score of held-out episodes",
    "code": "held-out programs that pass their tests",
    "digits": "held-out accuracy",
    "distillation": "held-out accuracy",
    "judge": "judge's score of held-out answers",
    "ranking": "held-out accuracy",
    "steps": "held-out accuracy",
    "tools": "held-out products, calculated with a tool",
    "vision": "held-out accuracy",
}


def measured(name: str, path: Path) -> bool:
    """Add the measure to a summary; whether it moved up."""
    summary = json.loads(path.read_text())
    first, last = summary["accuracy_first"], summary["accuracy_last"]
    summary |= {"measure": MEASURES[name], "first": first, "last": last, "direction": "up"}
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(path)
    print(f"{name}: {MEASURES[name]}: {first} -> {last}")
    moved = [first is not None and last is not None and last > first]
    for dataset, scores in scores_of(path.with_name("eval.jsonl")).items():
        print(f"{name}: {dataset}: {scores[0]} -> {scores[-1]}")
        moved.append(scores[-1] > scores[0])
    return all(moved)


def scores_of(path: Path) -> dict[str, list[float]]:
    """Return the scores of each held-out data set, in the order of its evaluations."""
    scores: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        scores.setdefault(row["dataset"], []).append(row["accuracy"])
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="End a summary in what an example shows.")
    parser.add_argument("name", choices=MEASURES, help="of the example")
    parser.add_argument("summary", type=Path, help="runs/NAME/summary.json")
    asked = parser.parse_args()
    sys.exit(0 if measured(asked.name, asked.summary) else 1)
