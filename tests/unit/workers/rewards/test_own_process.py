"""``reward.own_process``: what runs in the process of rewards, and what comes back from it."""

import asyncio
import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import RewardConfig
from penstock.errors import RewardError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.text import user_trace_of
from penstock.workers.rewards.child import client
from penstock.workers.rewards.child.client import RewardProcess
from penstock.workers.rewards.judges import Judges
from penstock.workers.rewards.score import Rewards

HERE = "tests.unit.workers.rewards.test_own_process"


def where(sample: Sample) -> dict[str, Any]:
    return {"score": 1.0, "pid": os.getpid(), "tokens": sample.tokens, "logprobs": sample.logprobs}


async def judged(sample: Sample, judges: Judges) -> dict[str, Any]:
    return {"score": float(len(judges)), "pid": os.getpid()}


def slime(args: Any, sample: Any) -> float:
    return float(args.weight * sample.response_length)


def raises(sample: Sample) -> float:
    raise ArithmeticError("of its own")


def ends_its_process(sample: Sample) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


async def never_ends(sample: Sample) -> float:
    await asyncio.Event().wait()
    return 0.0


@asynccontextmanager
async def rewards(name: str, **over: Any) -> AsyncIterator[Rewards]:
    made = Rewards(RewardConfig(function=f"{HERE}:{name}", own_process=True, **over), args=Namespace(weight=2))
    try:
        yield made
    finally:
        await made.close()


def sample() -> Sample:
    made = Sample(Job("d/0/0", 1, prompt="p", metadata={"bytes": b"x"}), 0, prompt_length=1)
    made.append([3])
    made.append([4, 5], version=1, logprobs=[-0.5, -0.25])
    return made


async def test_a_reward_runs_in_another_process_with_the_sample_as_it_was_generated() -> None:
    async with rewards("where") as made:
        one, two = sample(), sample()
        await made.score(one)
        await made.score(two)
    assert one.reward == 1.0
    assert (one.reward_info["tokens"], one.reward_info["logprobs"]) == ([3, 4, 5], [0.0, -0.5, -0.25])
    assert one.reward_info["pid"] == two.reward_info["pid"] != os.getpid()


async def test_a_reward_that_asks_judges_stays_in_the_worker() -> None:
    async with rewards("judged", judges=[{"name": "taste", "url": "http://127.0.0.1:1"}]) as made:
        one = sample()
        await made.score(one)
    assert (one.reward, one.reward_info["pid"]) == (1.0, os.getpid())


async def test_a_reward_of_slimes_signature_receives_args() -> None:
    async with rewards("slime") as made:
        one = sample()
        await made.score(one)
    assert one.reward == 4.0


async def test_T11_a_reward_that_raises_is_a_failure_with_its_traceback() -> None:
    async with rewards("raises") as made:
        with pytest.raises(RewardError, match=r"reward .*:raises raised ArithmeticError: of its own") as caught:
            await made.score(sample())
    assert caught.value.outcome == "reward_raised"
    first, *trace, sentence = user_trace_of(caught.value).splitlines()
    assert (first, sentence) == ("Traceback (most recent call last):", str(caught.value))
    assert "raise ArithmeticError" in "".join(trace)
    assert "workers/rewards/c" not in "".join(trace)


def test_own_process_is_refused_beside_the_verifier_pool() -> None:
    with pytest.raises(ValidationError, match=r"own_process: true has no effect with pool\.kind rq"):
        RewardConfig(own_process=True, pool={"kind": "rq"})


async def test_a_reward_cancelled_while_its_process_ends_delays_no_other() -> None:
    process = RewardProcess(Namespace(), timeout_s=3600.0, key="score")
    ends, waits, works = (process.asking(f"{HERE}:{name}") for name in ("ends_its_process", "never_ends", "where"))
    await works(sample())
    child = process._child
    assert child is not None
    ending = asyncio.create_task(ends(sample()))
    while not child.ended:  # noqa: ASYNC110
        await asyncio.sleep(0)
    # Sent while the process ends, so that it runs again alone.
    cancelled = asyncio.create_task(waits(sample()))
    while process._child is child or not (process._child and process._child.answers()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.wait({cancelled})

    assert (await asyncio.wait_for(works(sample()), 60))["score"] == 1.0
    await asyncio.wait({ending})
    await process.close()


async def test_a_reward_whose_module_ends_its_process_on_import_fails() -> None:
    process = RewardProcess(Namespace(), timeout_s=3600.0, key="score")
    ask = process.asking("tests.unit.workers.rewards.dies_on_import:reward")
    with pytest.raises(RewardError, match="ended its process twice: it ended by signal SIGKILL"):
        await asyncio.wait_for(ask(sample()), 60)
    await process.close()


async def test_a_reward_whose_module_is_never_imported_fails_and_others_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "START_S", 0.1)
    process = RewardProcess(Namespace(), timeout_s=3600.0, key="score")
    ask = process.asking("tests.unit.workers.rewards.hangs_on_import:reward")
    asked = [asyncio.create_task(ask(sample())) for _ in range(2)]
    done, _ = await asyncio.wait(asked, timeout=60)
    assert len(done) == 2
    for one in done:
        with pytest.raises(RewardError, match=r"did not import its functions within 0\.1 s and was killed"):
            one.result()
    await process.close()
