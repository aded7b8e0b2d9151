"""Rewards and an environment of a user's own, as the workloads name them (``tests.chaos.parts.tasks:NAME``)."""

import asyncio
import random
from collections.abc import Sequence

from penstock import Job, Observation, Sample


def parity(sample: Sample) -> float:
    """0 or 1, as the tokens have it: groups whose rewards are all the same are a third of those of two."""
    return float(sum(sample.tokens) % 3 == 0)


def raises(sample: Sample) -> float:
    """Of about a quarter of the answers it raises, whoever asks; another answer is drawn then."""
    if sum(sample.tokens) % 4 == 0:
        raise ArithmeticError("no reward for these tokens")
    return parity(sample)


async def places(samples: Sequence[Sample]) -> list[float]:
    """Takes a moment, so that faults find it; one try in six raises, whoever makes it."""
    await asyncio.sleep(random.uniform(0.0, 0.3))
    if random.random() < 1 / 6:
        raise ArithmeticError("no reward for this group now")
    order = sorted(samples, key=lambda one: (one.reward, one.text))
    return [float(order.index(one)) for one in samples]


class Echo:
    """Answers seven turns with the beginning of what was said, and lets the eighth be the last; it can be repeated."""

    replayable = True

    async def reset(self, job: Job) -> None:
        self.turns = 0

    async def step(self, sample: Sample) -> Observation | None:
        self.turns += 1
        return Observation(text=f"<{self.turns}{sample.turns[-1][:3]}>") if self.turns < 8 else None


class SavedEcho(Echo):
    """The same, from its snapshots."""

    replayable, repeatable = False, True

    async def snapshot(self) -> dict[str, int]:
        return {"turns": self.turns}

    async def restore(self, job: Job, state: dict[str, int]) -> None:
        self.turns = state["turns"]
