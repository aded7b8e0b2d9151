"""Rewards of steps on their way from a reward to the sample's side array, in a real worker; the engine is a fake."""

from typing import Any

import pytest
import redis

from penstock.names import STEP_REWARDS
from penstock.payloads import sides
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, letters, metas, tended, until, working

PARTS = "tests.integration.worker_parts"
WANTED = {"sides": [STEP_REWARDS]}


def steps_of(client: redis.Redis, keys: Keys, name: str, k: int) -> Any:
    meta = metas(client, keys, name)[k]
    ((side, num_bytes, checksum),) = meta.sides
    assert side == STEP_REWARDS
    data = client.get(keys.side(f"{name}/{k}", meta.token, side))
    assert data is not None
    assert len(data) == num_bytes
    return sides.unpack(side, data, f"{name}/{k}", checksum).tolist()


@pytest.mark.parametrize(
    ("sections", "number", "found"),
    [
        ({"reward": {"function": f"{PARTS}:of_steps"}}, 1.0, [[0, 0.5], [5, 1.0]]),
        ({"reward": {"function": f"{PARTS}:of_tokens"}}, 2.0, [[at, 0.25] for at in range(6)]),
        (
            {"reward": {"function": "exact_match", "parts": {f"{PARTS}:of_steps": 1.0, f"{PARTS}:of_tokens": 2.0}}},
            5.0,
            [[0, 1.0], [1, 0.5], [2, 0.5], [3, 0.5], [4, 0.5], [5, 1.5]],
        ),
        ({"hooks": {"sample": [f"{PARTS}:sets_steps"]}}, 1.0, [[0, 0.5], [5, 1.0]]),
    ],
    ids=["steps", "tokens", "parts", "set by a hook"],
)
async def test_rewards_of_steps_lie_beside_the_sample(
    client: redis.Redis, keys: Keys, config: Make, sections: dict[str, Any], number: float, found: list[Any]
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(rollout=WANTED, **sections)):
        await until(all_in(client, keys, jobs, "ready"))

    for k, meta in enumerate(metas(client, keys, jobs[0])):
        assert meta.reward == number
        assert STEP_REWARDS not in str(meta.reward_info)
        assert "token_rewards" not in str(meta.reward_info)
        assert steps_of(client, keys, jobs[0], k) == found
    play.assert_conserved(client, keys)


async def test_T17_a_reward_that_says_nothing_of_steps_fails_where_they_are_asked_for(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(rollout=WANTED)), tended(client, keys):
        await until(all_in(client, keys, jobs, "dead"))

    letter = letters(client, keys)[jobs[0]]
    assert letter["reason"] == "payload_error"
    assert "rollout.sides asks for step_rewards, and the sample has none" in letter["detail"]
    play.assert_conserved(client, keys)
