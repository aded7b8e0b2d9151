"""A run of penstock for a benchmark: its configuration, its processes, and jobs admitted by hand."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.load import save_resolved
from penstock.protocol import scripts
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.control import Control

#: Dataset part of the ids of admitted jobs.
DATASET = "bench"
ADMIT = 256


def make_config(url: str, folder: Path, *, run: str = "bench", **sections: dict[str, Any]) -> Config:
    """A run whose gate and bound hold nothing back; ``sections`` are merged into it."""
    (folder / "none.jsonl").touch()
    values: dict[str, dict[str, Any]] = {
        "redis": {"url": url},
        "model": {"path": str(folder / "model")},
        "data": {"train": [{"name": DATASET, "path": str(folder / "none.jsonl")}]},
        "staleness": {"mode": "async", "bound": 4},
        "trainer": {"batches_per_version": 1_000_000},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Config.model_validate({"run": run, "directory": folder, **values})


def admit(control: Control, config: Config, jobs: Sequence[Job], position: int) -> None:
    """Admit jobs through the gate of the trainer's subscription, which has joined; ``position``: admitted before."""
    keys = Keys(config.run)
    revision = int(control.client.hget(keys.subs, "rev") or 0)
    for first in range(0, len(jobs), ADMIT):
        chunk = [(job, job.to_bytes()) for job in jobs[first : first + ADMIT]]
        done = control.call(
            scripts.admit(
                keys,
                chunk,
                lane="train",
                source="bench",
                position=position + first,
                model=config.model.name,
                gate=(revision, [config.trainer.name]),
            )
        )
        if done.outcome != "ok" or done.position != position + first + len(chunk):
            raise RuntimeError(f"admit answered {done}.")


@contextmanager
def part(config: Config, name: str, *arguments: str, command: Sequence[str] = ("penstock.cli",)) -> Iterator[int]:
    """``penstock NAME`` as a process, ended by SIGTERM; yields its pid. RuntimeError with its log when it died.

    Args:
        command: module in the place of penstock's command line, and its own arguments.
    """
    resolved = config.run_dir / "config.yaml"
    if not resolved.exists():
        resolved.parent.mkdir(parents=True, exist_ok=True)
        save_resolved(config, resolved)
    log = config.run_dir / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, name, "--config", str(resolved), *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        try:
            yield process.pid
        finally:
            died = process.poll()
            process.terminate()
            process.wait(timeout=60)
    if died is not None:
        raise RuntimeError(f"penstock {name} ended with {died}: {log.read_text(errors='replace')[-2000:]}")
