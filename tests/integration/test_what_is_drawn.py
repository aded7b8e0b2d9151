"""T6: a record says at what temperature, and of what kind, the engine's logprobs really are."""

import asyncio
import re
from collections.abc import Callable

import pytest
import redis

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.records.keys import Keys
from penstock.workers.main import Worker
from tests.integration.fake_engine import FIRST, FakeEngine
from tests.integration.worker_play import admit, all_in, job, metas, until, working

Make = Callable[..., Config]


@pytest.mark.parametrize("lane", ["train", "eval"])
async def test_T6_what_is_not_said_is_drawn_and_recorded_at_temperature_1(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, lane: str
) -> None:
    """A server's own default would otherwise slip in, and nobody would know."""
    jobs = admit(client, keys, [job(0, lane=lane)])
    # A section given here takes the place of a key, so that no temperature is left.
    made = config(rollout={"sampling": {"max_new_tokens": 6}, "eval_sampling": {}})
    async with working(made):
        await until(all_in(client, keys, jobs, "ready"))
    assert [sampling["temperature"] for sampling in fake.sampling] == [1.0, 1.0]
    assert {meta.temperature for meta in metas(client, keys, jobs[0])} == {1.0}


async def test_T7_a_server_that_draws_otherwise_than_it_is_asked_to_is_refused(config: Make, fake: FakeEngine) -> None:
    fake.told = {"preferred_sampling_params": {"temperature": 0.5}}
    with pytest.raises(ConfigError, match=r"has preferred-sampling-params enabled"):
        await asyncio.wait_for(Worker(config(), "w").run(), 60)


@pytest.mark.parametrize("kind", ["scaled", "original"])
async def test_T6_the_kind_of_logprobs_is_what_the_server_returns(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, kind: str
) -> None:
    """Nobody has said which; the shell of its owner may have had the variable."""
    fake.is_original = kind == "original"
    jobs = admit(client, keys, [job(0)])
    async with working(config()):
        await until(all_in(client, keys, jobs, "ready"))
    assert {meta.logprob_kind for meta in metas(client, keys, jobs[0])} == {kind}
    assert fake.proofs == 1


@pytest.mark.parametrize(("said", "advice"), [("scaled", "=0"), ("original", "=1")])
async def test_T6_a_server_that_returns_another_kind_than_is_said_is_refused(
    config: Make, fake: FakeEngine, said: str, advice: str
) -> None:
    fake.is_original = said == "scaled"
    with pytest.raises(ConfigError, match=re.escape(f"engine.logprob_kind is {said}")) as caught:
        await asyncio.wait_for(Worker(config(engine={"logprob_kind": said}), "w").run(), 60)
    assert advice in str(caught.value)
    assert fake.asked.total() == 0


@pytest.mark.parametrize(
    ("temperature", "kind"), [(1.0, "scaled"), (0.5, "scaled"), (1.0, "original")], ids=["same", "temperature", "kind"]
)
async def test_T6_a_prefix_that_was_drawn_otherwise_is_drawn_anew(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    temperature: float,
    kind: str,
) -> None:
    """A record has one temperature and one kind for all tokens: those of whoever ends the sample, with its own YAML."""
    fake.open.clear()
    jobs = admit(client, keys, [job(0)])
    async with working(config(), "one"):
        await until(lambda: fake.num_running == 2)
    assert len(client.keys(keys.partial("*"))) == 2

    fake.open.set()
    fake.is_original = kind == "original"
    with caplog.at_level("WARNING"):
        async with working(config(rollout={"sampling": {"max_new_tokens": 16, "temperature": temperature}}), "two"):
            await until(all_in(client, keys, jobs, "ready"))
    anew = (temperature, kind) != (1.0, "scaled")
    whole = len("a0=")
    assert [len(prompt) for prompt in fake.prompts] == [whole] * 2 + [whole if anew else whole + len(FIRST)] * 2
    found = {(meta.temperature, meta.logprob_kind) for meta in metas(client, keys, jobs[0])}
    assert found == {(temperature, kind)}
    said = [one.getMessage() for one in caplog.records if "starts over" in one.getMessage()]
    assert len(said) == anew, said
    assert all("sampled at temperature 1 (scaled logprobs)" in one for one in said)
