"""A user's rewards and environments at their worst, named by import path in the tests of what they may not do."""

import asyncio
import os
import sys
from typing import Any

import numpy as np

from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.jobs.environments import Observation

#: A lone surrogate: no UTF-8 holds it.
LONE = "a\ud800b"


def length(sample: Sample) -> float:
    return float(sum(sample.generated))


def unwritable(sample: Sample) -> float:
    raise ValueError(LONE)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


async def unprintable(sample: Sample) -> float:
    raise Unprintable


class Own(BaseException):
    pass


def own_base_exception(sample: Sample) -> float:
    raise Own("of its own")


def interrupts(sample: Sample) -> float:
    raise KeyboardInterrupt


def exits_at_once(sample: Sample) -> float:
    os._exit(0)


async def exits_at_once_in_the_loop(sample: Sample) -> float:
    os._exit(0)


def exits(sample: Sample) -> float:
    sys.exit(3)


async def exits_in_the_loop(sample: Sample) -> float:
    await asyncio.sleep(0)
    sys.exit(3)


async def cancels_itself(sample: Sample) -> float:
    raise asyncio.CancelledError


async def swallows(sample: Sample) -> float:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def spoils(sample: Sample) -> float:
    sample.tokens[-1] = 2**70
    sample.generated[-1] = "x"  # type: ignore[call-overload]
    raise ArithmeticError("and spoils its sample")


def too_much(sample: Sample) -> Any:
    return 10**400


def beyond_float32(sample: Sample) -> Any:
    return 1e39


def nothing(sample: Sample) -> Any:
    return None


class Nasty(float):
    def __float__(self) -> float:
        raise Own("when it is read")


def nasty(sample: Sample) -> Any:
    return Nasty(1.0)


def odd_info(sample: Sample) -> Any:
    cyclic: dict[str, Any] = {"score": 1.0, "text": LONE, LONE: 10**400, "big": 10**5000, "bytes": b"x"}
    cyclic |= {"self": cyclic, "array": np.arange(3), "set": {1}, "nasty": Unprintable()}
    return cyclic


class Base:
    async def reset(self, job: Job) -> None: ...

    async def step(self, sample: Sample) -> Any:
        return None


class NotMade(Base):
    def __init__(self) -> None:
        sys.exit(4)


class Exits(Base):
    async def step(self, sample: Sample) -> Any:
        sys.exit(5)


class ExitsAtOnce(Base):
    async def reset(self, job: Job) -> None:
        os._exit(0)


class Unwritable(Base):
    async def step(self, sample: Sample) -> Any:
        raise ValueError(LONE)


class Answers(Base):
    async def step(self, sample: Sample) -> Any:
        return "a text"


class OddTokens(Base):
    async def step(self, sample: Sample) -> Any:
        return Observation(tokens=[3, 2**70])


class Loses(Base):
    """Raises what a worker's own parts raise."""

    async def step(self, sample: Sample) -> Any:
        from penstock.errors import LeaseLost

        raise LeaseLost("not yours to say")


class Spoils(Base):
    async def step(self, sample: Sample) -> Any:
        sample.tokens[-1] = "x"  # type: ignore[call-overload]
        raise LookupError("and spoils its sample")


#: Keeps tasks alive that nobody waits for.
_behind: list[Any] = []


async def exits_behind(sample: Sample) -> float:
    """What it leaves running wants to end the process."""

    async def work() -> None:
        await asyncio.sleep(0.05)
        sys.exit(3)

    _behind.append(asyncio.create_task(work()))
    return length(sample)


async def interrupts_behind(sample: Sample) -> float:
    async def work() -> None:
        await asyncio.sleep(0.05)
        raise KeyboardInterrupt

    _behind.append(asyncio.create_task(work()))
    return length(sample)


async def exits_by_a_callback(sample: Sample) -> float:
    asyncio.get_running_loop().call_later(0.05, sys.exit, 3)
    return length(sample)


async def stops_the_loop(sample: Sample) -> float:
    asyncio.get_running_loop().stop()
    return length(sample)


async def forks(sample: Sample) -> float:
    """A child that is to become another program, which is not there."""
    if os.fork() == 0:
        os.execvp("no-such-program-of-anybody", ["x"])
    return length(sample)


def forks_in_a_thread(sample: Sample) -> float:
    os.fork()
    return length(sample)


def entangled(sample: Sample) -> Any:
    """Few objects, and more ways through them than anybody can walk."""
    node: list[Any] = []
    node.extend([node] * 8)
    return {"score": length(sample), "node": node}


def wide(sample: Sample) -> Any:
    return {"score": length(sample), "node": list(range(2_000_000))}


def doubled(sample: Sample) -> Any:
    node: list[Any] = []
    for _ in range(64):
        node = [node, node]
    return node


def addresses(sample: Sample) -> float:
    raise ValueError("://:" * 60_000)


def says_much(sample: Sample) -> float:
    raise ValueError("x" * 20_000_000)
