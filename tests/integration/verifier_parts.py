"""Rewards that verifiers run in tests. Where they stop and go is told by files: they run in other processes."""

import asyncio
import math
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from penstock.records.sample import Sample


def length(sample: Sample) -> float:
    return float(sum(sample.generated))


async def alength(sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(len(sample.text))


def seen(sample: Sample) -> dict[str, Any]:
    """All that a reward may look at."""
    job = sample.job
    return {"score": 1, "id": sample.id, "label": job.label, "metadata": job.metadata, "prompt": job.prompt,
            "text": sample.text, "turns": sample.turns, "tokens": sample.tokens, "versions": sample.versions,
            "masks": [sample.generated, sample.loss_mask], "status": sample.status}  # fmt: skip


def detailed(sample: Sample) -> dict[str, Any]:
    return {"score": np.float32(0.5), "parts": np.array([1, 2]), "pair": (1, "2"), "what": {1: {3}}, "nan": math.nan}


def fraction(sample: Sample) -> Any:
    return Fraction(1, 4)


def numpy_bool(sample: Sample) -> Any:
    return np.bool_(True)


def keyless(sample: Sample) -> dict[str, Any]:
    return {"acc": 1}


def not_a_number(sample: Sample) -> float:
    return math.nan


def text(sample: Sample) -> Any:
    return "1.0"


def raises(sample: Sample) -> float:
    raise ArithmeticError("this reward was never any good")


def asks_to_end(sample: Sample) -> float:
    raise SystemExit(3)


def large(sample: Sample) -> dict[str, Any]:
    return {"score": 1, "much": "x" * 5_000_000}


def hungry(sample: Sample) -> float:
    return float(len(bytearray(2 * 1024**3)))


def callback(job: Any, *_: Any) -> None:
    """What a forged rq job would have called; makes the file that it names."""
    Path(job.args[0]).touch()


def _note(sample: Sample) -> Path:
    """Who checks: (process, its parent), a line for each try."""
    folder = Path(sample.job.metadata["folder"])
    with (folder / "tries").open("a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    return folder


def waits(sample: Sample) -> float:
    """Until the file `go` is there."""
    folder = _note(sample)
    while not (folder / "go").exists():
        time.sleep(0.01)
    return 7.0


def hangs(sample: Sample) -> float:
    """Where no exception reaches: everything is swallowed."""
    _note(sample)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue
