"""End the ``summary.json`` of a run in what an example is to show: ``{measure, first, last, direction}``.

    python examples/judge/measure.py runs/judge/summary.json

Exits with 1 where the measure did not move that way.
"""

import json
import sys
from pathlib import Path


def measured(path: Path) -> bool:
    """Add the measure to a summary; whether it moved up."""
    summary = json.loads(path.read_text())
    first, last = summary["accuracy_first"], summary["accuracy_last"]
    summary |= {"measure": "judge's score of held-out answers", "first": first, "last": last, "direction": "up"}
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(path)
    print(f"judge's score of held-out answers: {first} -> {last}")
    return first is not None and last is not None and last > first


if __name__ == "__main__":
    sys.exit(0 if measured(Path(sys.argv[1])) else 1)
