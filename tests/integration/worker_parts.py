"""Rewards and environments of a user's own, named by import path in the tests of the worker."""

import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import ConversationEnvironment
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.jobs.environments import Observation

#: Times each sample was scored.
scored: Counter[str] = Counter()


def length(sample: Sample) -> float:
    """Number of generated tokens."""
    return float(sum(sample.generated))


def token_sum(sample: Sample) -> float:
    """A number that differs between answers, also between those of one length."""
    return float(sum(sample.tokens))


def raises(sample: Sample) -> float:
    scored[sample.id] += 1
    raise ArithmeticError("this reward was never any good")


def raises_for_the_second(sample: Sample) -> float:
    """The second answer of a job is scored at the second try only."""
    scored[sample.id] += 1
    if sample.k == 1 and scored[sample.id] == 1:
        raise ArithmeticError("not yet")
    return length(sample)


async def hangs(sample: Sample) -> float:
    scored[sample.id] += 1
    await asyncio.Event().wait()
    return 0.0


async def holds_the_loop(sample: Sample) -> float:
    """Computes on the event loop, as no reward should: until the test's file says that it may end."""
    _wait_for_the_test()
    return length(sample)


def _wait_for_the_test() -> None:
    go_on = Path(os.environ["PENSTOCK_TEST_GO_ON"])
    go_on.with_suffix(".began").touch()
    while not go_on.exists():
        time.sleep(0.01)


def not_a_number(sample: Sample) -> float:
    scored[sample.id] += 1
    return math.nan


def detailed(sample: Sample) -> dict[str, Any]:
    return {"score": length(sample), "turns": sample.num_turns, "label": sample.job.label}


class Echo:
    """Answers the first turn with its own first character, then lets it end."""

    async def reset(self, job: Job) -> None:
        self.turns = 0

    async def step(self, sample: Sample) -> Observation | None:
        self.turns += 1
        return Observation(text=f"<{sample.job.label}>") if self.turns == 1 else None


#: Let go of the environments that wait.
go_on = asyncio.Event()


class Waits(Echo):
    async def step(self, sample: Sample) -> Observation | None:
        scored[sample.id] += 1
        await go_on.wait()
        return await super().step(sample)


class Fails(Echo):
    async def step(self, sample: Sample) -> Observation | None:
        raise LookupError("the world is gone")


class Hangs(Echo):
    async def step(self, sample: Sample) -> Observation | None:
        await asyncio.Event().wait()
        return None


class Cancels(Echo):
    async def step(self, sample: Sample) -> Observation | None:
        raise asyncio.CancelledError


def says_much_of_the_first(sample: Sample) -> dict[str, Any]:
    """More beside the number than a record holds, for one job."""
    return {"score": 1.0, "log": "x" * (9 * 2**20 if sample.job.id == "d/0/0" else 9)}


#: What group rewards were given, in their order: (k, text, tokens, reward) of each sample.
groups: list[list[tuple[int, str, list[int], float | None]]] = []


def places(samples: Sequence[Sample]) -> list[Any]:
    """Tells samples apart, and says what it saw."""
    groups.append([(one.k, one.text, list(one.tokens), one.reward) for one in samples])
    return [{"score": 10.0 + one.k, "of": len(samples)} for one in samples]


def places_at_last(samples: Sequence[Sample]) -> list[Any]:
    """Raises at its first look at a group."""
    found = places(samples)
    if len(groups) == 1:
        raise ArithmeticError("not yet")
    return found


async def group_hangs(samples: Sequence[Sample]) -> list[float]:
    await asyncio.Event().wait()
    return []


def group_raises(samples: Sequence[Sample]) -> list[float]:
    raise ArithmeticError("this reward was never any good")


def group_exits(samples: Sequence[Sample]) -> list[float]:
    sys.exit(3)


def too_few(samples: Sequence[Sample]) -> list[float]:
    return [1.0]


def text_of_group(samples: Sequence[Sample]) -> str:
    return "12"


def group_of_nan(samples: Sequence[Sample]) -> list[float]:
    return [math.nan for _ in samples]


def says_too_much(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [{"score": 1.0, "log": "x" * 10**6} for _ in samples]


def waits_for_the_test(samples: Sequence[Sample]) -> list[float]:
    """Says that it began, and waits until the test's file says that it may end."""
    _wait_for_the_test()
    return [20.0 + one.k for one in samples]


def of_steps(sample: Sample) -> dict[str, Any]:
    """Two steps: the first token, and all behind it."""
    last = len(sample.tokens) - sample.prompt_length - 1
    return {"score": 1.0, "why": "steps", "step_rewards": [[0, 0.5], [last, 1.0]]}


def of_tokens(sample: Sample) -> dict[str, Any]:
    return {"score": 2.0, "token_rewards": [0.25] * (len(sample.tokens) - sample.prompt_length)}


def sets_steps(sample: Sample) -> None:
    """As ``hooks.sample``."""
    sample.reward = of_steps(sample)  # type: ignore[assignment]


class Doubting(ConversationEnvironment):
    """Asks twice, and rewards the length of the second answer."""

    async def run(self, job: Job) -> float:
        question = {"role": "user", "content": "go"}
        first = await self.ask([question])
        second = await self.ask([question, first.to_message(), {"role": "user", "content": "on"}])
        return float(len(second.content))
