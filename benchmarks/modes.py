"""Seconds to the same held-out accuracy in modes sync, one_step and async, on answers with a long tail of lengths.

Three real runs (``penstock run``), one after the other, that differ in ``staleness.mode`` alone: same first policy,
same prompts, same batch, same seed, one SGLang server. The task is ``benchmarks/tail_task.py``: most answers have
about 10 tokens, one prompt in eight takes 36 to 116. A sync step waits for its longest answer with nothing else to do;
one_step trains meanwhile; async generates on.

The clock runs from the first publication to the publication of the first version whose held-out accuracy reaches the
target. Each run goes on for as many seeds as asked; the median counts.

    python -m benchmarks.modes --json FILE
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
import yaml

from benchmarks import tail_task
from benchmarks.common import Report, execute, median, of_known, versions
from benchmarks.engine import serving

MODES: dict[str, dict[str, Any]] = {
    "sync": {"staleness": {"mode": "sync"}, "worker": {"apply": "drain"}},
    "one_step": {"staleness": {"mode": "one_step"}, "worker": {"apply": "drain"}},
    "async": {"staleness": {"mode": "async", "bound": 4}, "worker": {"apply": "in_place"}},
}
RUN_TIMEOUT_S = 400.0

#: What the table shows of each mode: column -> heading.
COLUMNS = {
    "mode": "mode",
    "seconds": "seconds",
    "steps": "steps",
    "step_s": "s/step",
    "tokens_per_s": "tokens/s",
    "trainer_busy": "trainer busy",
    "staleness_mean": "staleness",
    "length_mean": "tokens/answer",
    "accuracy": "accuracy",
}


def make_config(mode: str, folder: Path, task: Path, seed: int, accuracy: float, engine: str) -> Path:
    """The run's YAML."""
    values: dict[str, Any] = {
        "run": f"{mode}-{seed}",
        "directory": str(folder),
        "seed": seed,
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {
            "train": [{"name": "tail", "path": str(task / "train.jsonl")}],
            "eval": [{"name": "heldout", "path": str(task / "heldout.jsonl")}],
            "eval_every": 3,
        },
        "rollout": {
            "n": 8,
            "sampling": {"max_new_tokens": tail_task.MAX_NEW_TOKENS, "temperature": 1.0},
            "eval_sampling": {"temperature": 1.0},
        },
        "engine": {"url": engine},
        "reward": {"function": "benchmarks.tail_task:score"},
        "trainer": {
            "batch_groups": 32,
            "steps": 60,
            "lr": 2e-4,
            "warmup_steps": 5,
            "max_tokens": 4096,
            "stop_at_accuracy": accuracy,
        },
    }
    for section, change in MODES[mode].items():
        values[section] = values.get(section, {}) | change
    values["worker"]["slots"] = 64
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{mode}-{seed}.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def run(config: Path) -> None:
    """``penstock run`` to its end; SystemExit with the end of its output when it fails."""
    log = config.with_suffix(".log")
    command = [sys.executable, "-m", "penstock.cli", "run", str(config), "--fresh"]
    with log.open("wb") as out:
        code = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            check=False,
        ).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{log.read_text(errors='replace')[-2000:]}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, read from its folder."""

    #: From the first publication to that of the first version at the target; None where it was not reached.
    seconds: float | None
    #: Optimizer steps until then, or in all.
    steps: int
    accuracy: float
    step_s: float
    tokens_per_s: float
    #: Share of the time in which the trainer did not wait for a batch.
    trainer_busy: float
    #: Mean of the steps that had a loss token; None if none had.
    staleness_mean: float | None
    length_mean: float


def read(folder: Path, target: float) -> Outcome:
    """What a run's folder says. Steps may stand twice after a restart; the last one counts."""
    rows = {row["step"]: row for row in read_lines(folder / "steps.jsonl")}
    steps = [rows[step] for step in sorted(rows)]
    first = steps[0]
    began_s = first["time_s"] - first["wait_s"] - first["step_s"] - first["publish_s"]
    # Version v + 1 is published at the end of step v.
    published_s = {1: began_s} | {row["step"] + 1: row["time_s"] for row in steps}
    evaluated = {row["version"]: row["accuracy"] for row in read_lines(folder / "eval.jsonl")}
    good = [version for version, accuracy in sorted(evaluated.items()) if accuracy >= target]
    used = steps[: good[0] - 1] if good else steps
    total_s = used[-1]["time_s"] - began_s
    tokens = sum(row["generated_tokens"] for row in used)
    return Outcome(
        seconds=published_s[good[0]] - began_s if good else None,
        steps=len(used),
        accuracy=max(evaluated.values()),
        step_s=total_s / len(used),
        tokens_per_s=tokens / total_s,
        trainer_busy=1 - sum(row["wait_s"] for row in used) / total_s,
        staleness_mean=of_known(fmean, (row["staleness_mean"] for row in used)),
        length_mean=tokens / sum(row["samples"] for row in used),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    accuracy: Annotated[float, typer.Option(help="Held-out accuracy to reach.")] = 0.7,
    seeds: Annotated[int, typer.Option(help="Runs of each mode.")] = 1,
    folder: Annotated[Path, typer.Option(help="Where the task and the runs are kept.")] = Path("runs/bench"),
    engine_python: Annotated[str, typer.Option(help="Interpreter that has sglang.")] = ".engine/bin/python",
) -> None:
    """Seconds to the same accuracy in sync, one_step and async, side by side."""
    task, runs = (folder / "tail_task").absolute(), (folder / "modes").absolute()
    tail_task.prepare(task)
    outcomes: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
    with serving(task / "model", device="cpu", python=engine_python) as engine:
        for seed in range(seeds):
            for mode in MODES:
                run(make_config(mode, runs, task, seed, accuracy, engine.url))
                outcomes[mode].append(read(runs / f"{mode}-{seed}", accuracy))
    report(outcomes, accuracy, engine.sglang).finish(json_file)


def report(outcomes: dict[str, list[Outcome]], accuracy: float, sglang: str) -> Report:
    """Medians over the seeds; a mode that missed the target in any run has no seconds."""
    rows = [{"mode": mode} | _medians(runs) for mode, runs in outcomes.items()]
    return Report(
        title=f"seconds to a held-out accuracy of {accuracy:g}; answers of up to {tail_task.MAX_NEW_TOKENS} tokens",
        columns=COLUMNS,
        rows=rows,
        keys={"seconds": {row["mode"]: row["seconds"] for row in rows}},
        versions=versions(sglang=sglang),
        notes=limits(rows),
    )


def _medians(runs: list[Outcome]) -> dict[str, Any]:
    seconds = [one.seconds for one in runs if one.seconds is not None]
    names = ("steps", "step_s", "tokens_per_s", "trainer_busy", "staleness_mean", "length_mean", "accuracy")
    return {
        "seconds": median(seconds) if len(seconds) == len(runs) else None,
        **{name: of_known(median, (getattr(one, name) for one in runs)) for name in names},
        "rounds": [one.seconds for one in runs],
    }


def limits(rows: list[dict[str, Any]]) -> list[str]:
    """What holds each mode back, from its own figures."""
    cores = len(os.sched_getaffinity(0))
    busy = {row["mode"]: row["trainer_busy"] for row in rows}
    notes = [
        f"The trainer computes in {share:.0%} of the time in {mode}, and waits for a batch else."
        for mode, share in busy.items()
    ]
    if cores <= 2:
        notes.append(
            f"Engine, worker, Redis, buffer and trainer share {cores} cores: what overlaps also competes for them, "
            "which it would not with the engine on a GPU."
        )
    return notes


if __name__ == "__main__":
    execute(main)
