"""A sample under several leases (lease_tokens), what of it bears loss then, and environments that do not answer."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import RolloutConfig
from penstock.errors import EnvironmentTimeout
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.engine import Segment
from penstock.workers.jobs.environments import Observation
from penstock.workers.jobs.prefixes import partial_from_bytes, partial_to_bytes
from tests.unit.workers.jobs.test_generate import EOS, JOB, ROLLOUT, Echo, ScriptedEngine, make, segment

THREE = ROLLOUT.model_copy(update={"lease_tokens": 3})


def handed_on(sample: Sample) -> Sample:
    return partial_from_bytes(partial_to_bytes(sample), sample.job, sample.k)


async def test_a_sample_that_used_up_its_lease_goes_on_under_the_next() -> None:
    engine = ScriptedEngine(segment("uvw", "length", 1))
    first = await make(engine, rollout=THREE)
    assert (first.status, first.num_aborts, first.turns) == ("aborted", 0, [])
    assert [sampling["max_new_tokens"] for _, sampling in engine.asked] == [3]

    engine = ScriptedEngine(segment("xy", "abort", 2), segment("z", "length", 3))
    second = await make(engine, rollout=THREE, partial=handed_on(first))
    assert second.status == "aborted"
    assert [sampling["max_new_tokens"] for _, sampling in engine.asked] == [3, 1]

    engine = ScriptedEngine(segment("a", "stop", 3, eos=True))
    third = await make(engine, rollout=THREE, partial=handed_on(second))
    assert (third.status, third.text) == ("completed", "uvwxyza")
    assert third.versions == [-1] * 3 + [1] * 3 + [2] * 2 + [3] * 3
    assert third.loss_mask == third.generated


async def test_the_turns_own_end_is_an_end() -> None:
    rollout = ROLLOUT.model_copy(update={"lease_tokens": 10})
    sample = await make(ScriptedEngine(segment("uvwxyzuvwx", "length")), rollout=rollout)
    assert (sample.status, sample.finish_reason) == ("truncated", "length")


async def test_T8_a_stop_at_the_last_token_of_a_lease_is_a_stop() -> None:
    """Before 0.5.20 the engine says length of a last token whatever it is."""
    sample = await make(ScriptedEngine(segment("uv", "length", eos=True)), rollout=THREE)
    assert (sample.status, sample.tokens[-1]) == ("completed", EOS)


async def test_behind_its_first_turn_a_sample_keeps_its_lease() -> None:
    engine = ScriptedEngine(segment("uv", "stop"), segment("wxyz", "stop"))
    sample = await make(engine, rollout=THREE, environment=Echo())
    assert sample.status == "completed"
    assert [sampling["max_new_tokens"] for _, sampling in engine.asked] == [3, 10]


async def test_T1_a_sample_is_not_gone_on_with_behind_versions_that_were_abandoned() -> None:
    """A rewind came while it was aborted: its group would be dropped, so it is drawn anew."""
    engine = ScriptedEngine(segment("uv", "abort", 2), segment("x", "stop", 4, eos=True))

    async def rewound() -> Segment:
        engine.abandoned = ((3, 3),)
        engine.answers.insert(0, other)
        return segment("w", "abort", 3)

    async def again() -> Segment:
        return segment("xyz", "abort", 4)

    engine.answers.insert(1, rewound)
    other = again
    sample = await make(engine)
    assert [ids for ids, _ in engine.asked] == [[1, 2, 3], [1, 2, 3, 21, 22], [1, 2, 3], [1, 2, 3, 24, 25, 26]]
    assert [sampling["max_new_tokens"] for _, sampling in engine.asked] == [10, 8, 10, 7]
    assert sample.versions == [-1] * 3 + [4] * 5


async def test_T1_versions_beside_the_abandoned_ones_are_gone_on_from() -> None:
    engine = ScriptedEngine(segment("uv", "abort", 2), segment("x", "stop", 5))
    engine.abandoned = ((3, 4), (0, 1))
    sample = await make(engine)
    assert sample.versions == [-1] * 3 + [2, 2, 5]


class Stuck(Echo):
    """Answers nobody; ``deaf``: not even a cancellation."""

    def __init__(self, where: str, *, deaf: bool = False) -> None:
        super().__init__()
        self.where, self.deaf = where, deaf

    async def hang(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self.deaf:
                    raise
                self.deaf = False

    async def reset(self, job: Job) -> None:
        if self.where == "reset":
            await self.hang()

    async def step(self, sample: Sample) -> Observation | None:
        await self.hang()
        return None


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("deaf", [False, True])
async def test_I8_an_environment_that_hangs_ends_by_name(where: str, deaf: bool) -> None:
    rollout = ROLLOUT.model_copy(update={"environment_timeout_s": 0.01})
    job = replace(JOB, environment="my.tools:Stuck")
    options: dict[str, Any] = {"rollout": rollout, "environment": Stuck(where, deaf=deaf)}
    engine = ScriptedEngine(segment("uv", "stop"))
    with pytest.raises(EnvironmentTimeout, match=f"{where} of environment my.tools:Stuck did not answer within"):
        await make(engine, job, **options)
    # The deaf one is cancelled once more, so that it does not outlive the test.
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def test_T17_prefixes_that_would_lose_their_routing_are_not_handed_on() -> None:
    with pytest.raises(ValidationError, match="the routed_experts of sides do not go with them"):
        RolloutConfig(lease_tokens=3, sides=["routed_experts"])
