"""The choice at the staleness bound: wait, mask or drop, on answers with a long tail of lengths.

Three real runs (``penstock run``) of equally many steps, one after the other on one SGLang server, that differ in
``staleness.on_expiry`` alone. The task is ``benchmarks/tail_task.py``: most answers have about 10 tokens, one prompt
in eight takes 36 to 116. At bound 1 a long answer is often older than the bound when it is done.

    python -m benchmarks.on_expiry --json FILE [--steps 40 --seeds 3]
"""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks import modes, tail_task
from benchmarks.common import Report, execute, median, of_known, redis_server, versions
from benchmarks.engine import serving
from benchmarks.watch import Fate, Watch

CHOICES = ("wait", "mask", "drop")

#: Column -> heading.
COLUMNS = {
    "on_expiry": "on_expiry",
    "seconds_per_step": "s/step",
    "lost_share": "tokens lost",
    "length_ratio": "trained/generated length",
    "accuracy": "accuracy",
    "staleness_mean": "staleness",
    "trainer_busy": "trainer busy",
    "generated_length": "tokens/answer",
}
KEYS = ("seconds_per_step", "lost_share", "length_ratio", "accuracy")


def make_config(
    choice: str, folder: Path, task: Path, *, redis: str, engine: str, seed: int, steps: int, groups: int, bound: int
) -> Path:
    """The run's YAML."""
    name = f"{choice}-{seed}"
    values: dict[str, Any] = {
        "run": name,
        "directory": str(folder),
        "seed": seed,
        "redis": {"url": redis},
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {
            "train": [{"name": "tail", "path": str(task / "train.jsonl")}],
            "eval": [{"name": "heldout", "path": str(task / "heldout.jsonl")}],
        },
        "rollout": {
            "n": 8,
            "sampling": {"max_new_tokens": tail_task.MAX_NEW_TOKENS, "temperature": 1.0},
            "eval_sampling": {"temperature": 1.0},
        },
        "staleness": {"mode": "async", "bound": bound, "on_expiry": choice},
        "engine": {"url": engine},
        "worker": {"apply": "in_place", "slots": 64},
        "reward": {"function": "benchmarks.tail_task:score"},
        "trainer": {"batch_groups": groups, "steps": steps, "lr": 2e-4, "warmup_steps": 5, "max_tokens": 4096},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def outcome(folder: Path, fate: Fate) -> dict[str, float | None]:
    """Figures of one run."""
    found = modes.read(folder, target=2.0)  # never reached, so all steps count
    evaluated = {row["version"]: row["accuracy"] for row in modes.read_lines(folder / "eval.jsonl")}
    return {
        "seconds_per_step": found.step_s,
        "lost_share": fate.lost_share,
        "length_ratio": fate.length_ratio,
        "accuracy": evaluated[max(evaluated)],
        "staleness_mean": found.staleness_mean,
        "trainer_busy": found.trainer_busy,
        "generated_length": fate.generated.mean,
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 10,
    groups: Annotated[int, typer.Option(help="Groups of 8 per batch.")] = 12,
    bound: Annotated[int, typer.Option(help="Most versions between drawing and training.")] = 1,
    seeds: Annotated[int, typer.Option(help="Runs of each choice.")] = 1,
    folder: Annotated[Path, typer.Option(help="Where the task and the runs are kept.")] = Path("runs/bench"),
    engine_python: Annotated[str, typer.Option(help="Interpreter that has sglang.")] = ".engine/bin/python",
) -> None:
    """Seconds per step, tokens lost, length bias and accuracy of wait, mask and drop, side by side."""
    task, runs = (folder / "tail_task").absolute(), (folder / "on_expiry").absolute()
    tail_task.prepare(task)
    found: dict[str, list[dict[str, float | None]]] = {choice: [] for choice in CHOICES}
    with redis_server() as redis, serving(task / "model", device="cpu", python=engine_python) as engine:
        for seed in range(seeds):
            for choice in CHOICES:
                sizes = {"seed": seed, "steps": steps, "groups": groups, "bound": bound}
                config = make_config(choice, runs, task, redis=redis, engine=engine.url, **sizes)
                name = f"{choice}-{seed}"
                with Watch(redis, name) as watch:
                    modes.run(config)
                found[choice].append(outcome(runs / name, watch.fate()))
    report(found, bound=bound, steps=steps, sglang=engine.sglang).finish(json_file)


def report(found: dict[str, list[dict[str, float | None]]], *, bound: int, steps: int, sglang: str) -> Report:
    """Medians over the seeds."""
    rows: list[dict[str, Any]] = [
        {"on_expiry": choice} | {name: of_known(median, (one[name] for one in runs)) for name in runs[0]}
        for choice, runs in found.items()
    ]
    return Report(
        title=f"what is too old at bound {bound}; {steps} steps, answers of up to {tail_task.MAX_NEW_TOKENS} tokens",
        columns=COLUMNS,
        rows=rows,
        keys={row["on_expiry"]: {name: row[name] for name in KEYS} for row in rows},
        versions=versions(sglang=sglang),
        notes=[
            "Tokens lost: share of the generated ones that never bore loss, groups that still wait left out.",
            "Accuracy: of the last version, on 128 held-out prompts drawn once each (standard error about 0.04).",
        ],
    )


if __name__ == "__main__":
    execute(main)
