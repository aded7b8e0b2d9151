"""User code receives copies: whatever it overwrites, the worker commits what the engine generated.

The worker is a process of its own, Redis is real, the engine is a fake.
"""

import signal
from typing import Any

import pytest
import redis

from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_engine import EOS, FILLER, FIRST
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, letters, read_group, tended, until
from tests.integration.worker_process import Start, start

__all__ = ["start"]

PARTS = "tests.integration.overwriting_parts"
METADATA = {"nested": {"list": ["as admitted"]}}


async def _settled(client: redis.Redis, keys: Keys, worker: Any, ready: list[str], dead: list[str]) -> None:
    def is_settled() -> bool:
        done = all_in(client, keys, ready, "ready")() and all_in(client, keys, dead, "dead")()
        return worker.process.poll() is not None or done

    async with tended(client, keys, lease_ms=60_000):
        await until(is_settled, f"for {worker.log}", 60)
    assert worker.process.poll() is None, worker.text()


async def test_user_code_that_overwrites_its_sample_changes_nothing_of_the_workers_own(
    client: redis.Redis, keys: Keys, config: Make, start: Start
) -> None:
    rewards = [f"{PARTS}:{name}" for name in ("overwrites", "overwrites_in_the_loop", "deletes", "reads_metadata")]
    environments = [f"{PARTS}:Overwrites", f"{PARTS}:SetsReward"]
    jobs = [job(i, reward=name, metadata=METADATA) for i, name in enumerate(rewards)]
    jobs += [job(i, environment=name, metadata=METADATA) for i, name in enumerate(environments, len(jobs))]
    admit(client, keys, jobs)
    own = {"rewards": rewards, "environments": environments}
    worker = start(
        config(reward={"function": f"{PARTS}:reads_metadata", "group": f"{PARTS}:overwrites_group"}, worker=own)
    )
    await _settled(client, keys, worker, [one.id for one in jobs], [])
    for one in jobs:
        for meta, payload in read_group(client, keys, one.id):
            assert payload.tokens[payload.prompt_length :].tolist() == [*FIRST, FILLER, FILLER, EOS]
            assert (meta.reward, meta.status) == (2.0, "completed")
            alone = 7.0 if one.environment == environments[1] else 1.0
            assert meta.reward_info["sample_reward"] == alone
            assert meta.reward_info.get("seen", ["as admitted"]) == ["as admitted"]
    assert meta.reward_info["from"] == "environment"
    play.assert_conserved(client, keys)
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0, worker.text()


@pytest.mark.parametrize(("hook", "outcome"), [("hook_overwrites_metadata", ""), ("hook_deletes", "hook_unproven")])
async def test_a_sample_hook_that_overwrites_its_sample_ends_no_worker(
    client: redis.Redis, keys: Keys, config: Make, start: Start, hook: str, outcome: str
) -> None:
    one = job(0, metadata=METADATA)
    admit(client, keys, [one])
    worker = start(config(reward={"function": f"{PARTS}:reads_metadata"}, hooks={"sample": [f"{PARTS}:{hook}"]}))
    await _settled(client, keys, worker, [] if outcome else [one.id], [one.id] if outcome else [])
    if outcome:
        assert letters(client, keys)[one.id]["reason"] == outcome
    else:
        infos = [meta.reward_info for meta, _ in read_group(client, keys, one.id)]
        assert [info["seen"] for info in infos] == [["as admitted"]] * 2
    play.assert_conserved(client, keys)


async def test_a_job_under_which_three_workers_died_of_an_error_is_charged(
    client: redis.Redis, keys: Keys, config: Make, start: Start
) -> None:
    poison = job(0, label="poison")
    innocent = job(1)
    admit(client, keys, [poison, innocent])
    made = config(reward={"function": f"{PARTS}:ends_the_worker"})
    crashes = []
    async with tended(client, keys, lease_ms=60_000):
        while not all_in(client, keys, [poison.id], "dead")():
            assert len(crashes) < 4, "the third death is a charge of two crashes, the fourth buries"
            worker = start(made, f"w{len(crashes)}")
            assert await worker.exit_code() != 0, worker.text()
            crashes.append(int(client.hget(keys.group(poison.id), "cr") or 0))
        worker = start(made, "last")
        await until(all_in(client, keys, [innocent.id], "ready"), f"for {worker.log}", 60)
    assert crashes == [0, 0, 2, 3]
    letter = letters(client, keys)[poison.id]
    assert letter["reason"] == "crashed"
    assert "its worker died of an error 4 times while it ran" in letter["detail"]
    play.assert_conserved(client, keys)
