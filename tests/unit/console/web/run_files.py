"""The files that a run leaves, for tests of the page."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.system.run_folder import RunFolder, RunRecord

CONFIG = "run: demo\nstaleness: {bound: 4}\ntrainer: {steps: 50, lr: 0.001}\nredis: {url: 'redis://:secret@h:1/0'}\n"


def lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step(number: int, **other: Any) -> dict[str, Any]:
    row = {"step": number, "version": number, "samples": 10, "generated_tokens": 100, "loss_tokens": 50}
    row |= {"reward_mean": number / 10, "staleness_max": 2, "staleness_mean": 1.0, "time_s": 1000.0 + number}
    return row | {"wait_s": 1.0, "step_s": 2.0, "publish_s": 1.0} | other


def make_run(
    directory: Path, name: str = "demo", *, state: Any = "finished", num_steps: int = 5, **record: Any
) -> Path:
    """A run that is over, in ``directory``."""
    folder = directory / name
    folder.mkdir(parents=True)
    lines(folder / "steps.jsonl", (step(number) for number in range(1, num_steps + 1)))
    held = ({"dataset": "held", "version": v, "accuracy": v / 10, "time_s": 1000.5 + v} for v in (0, 3))
    lines(folder / "eval.jsonl", held)
    queued = ({"time_s": 1000.0 + t, "queued": 5 + t, "leased": 2, "ready": 1, "tokens_per_s": 7.0} for t in range(4))
    lines(folder / "queue.jsonl", queued)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "summary.json").write_text(json.dumps({"samples": 50, "tokens_per_s": 12.5, "audit": "ok"}))
    RunFolder(folder).write(RunRecord(state, 1000.0, 60.0, **record))
    return folder
