"""Leaves a file where it is imported: no process of ours may do so because a record says so."""

import os
from pathlib import Path
from typing import Any

from penstock.records.job import Job

if "PENSTOCK_TEST_IMPORTED" in os.environ:
    Path(os.environ["PENSTOCK_TEST_IMPORTED"]).touch()


def reward(sample: Any) -> float:
    return 1.0


class Environment:
    async def reset(self, job: Job) -> None: ...

    async def step(self, sample: Any) -> None:
        return None
