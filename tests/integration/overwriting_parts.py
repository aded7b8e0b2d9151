"""User code that overwrites whatever it is given, and code that ends its worker, named by import path in tests."""

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.records.job import Job
from penstock.records.sample import Sample


def _overwrite(sample: Sample) -> None:
    """Change every field in place, then replace it."""
    sample.job.metadata["nested"]["list"].append("changed")
    sample.job.sampling.clear()
    sample.turns.append("changed")
    for name in ("tokens", "logprobs", "generated", "loss_mask", "versions"):
        getattr(sample, name).clear()
    for name in Sample.__slots__:
        setattr(sample, name, None)


def overwrites(sample: Sample) -> float:
    _overwrite(sample)
    return 1.0


async def overwrites_in_the_loop(sample: Sample) -> float:
    _overwrite(sample)
    return 1.0


def deletes(sample: Sample) -> float:
    for name in Sample.__slots__:
        delattr(sample, name)
    return 1.0


def reads_metadata(sample: Sample) -> dict[str, Any]:
    """Report what an earlier sample of the same job would have changed."""
    found = {"score": 1.0, "seen": list(sample.job.metadata["nested"]["list"]), "tokens": len(sample.tokens)}
    _overwrite(sample)
    return found


def overwrites_group(samples: Sequence[Sample]) -> list[float]:
    for sample in samples:
        _overwrite(sample)
    return [2.0] * len(samples)


def hook_overwrites_metadata(sample: Sample) -> None:
    sample.job.metadata["nested"]["list"].append("changed")
    sample.job = None  # type: ignore[assignment]
    sample.seen = sample.pictures = 3


def hook_deletes(sample: Sample) -> None:
    for name in Sample.__slots__:
        delattr(sample, name)


class Overwrites:
    """An environment that overwrites job and sample, and ends the sample with its first turn."""

    async def reset(self, job: Job) -> None:
        job.metadata["nested"]["list"].append("changed")

    async def step(self, sample: Sample) -> None:
        _overwrite(sample)


class SetsReward:
    """An environment that scores its sample."""

    async def reset(self, job: Job) -> None: ...

    async def step(self, sample: Sample) -> None:
        sample.reward = 7.0
        sample.reward_info["from"] = "environment"


async def ends_the_worker(sample: Sample) -> float:
    """Cancel a task of the worker, which the worker does not survive."""
    if sample.job.label == "poison":
        (task,) = [one for one in asyncio.all_tasks() if one.get_name() == "presence"]
        task.cancel()
        await asyncio.Event().wait()
    return 1.0
