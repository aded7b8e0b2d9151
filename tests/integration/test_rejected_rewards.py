"""The ledger's sum of the rewards of filtered groups is a number, whatever rewards are."""

import pytest
import redis

from penstock.protocol import scripts
from penstock.protocol.position import MOST_REWARD, Position, total_reward
from penstock.protocol.scripts import Judged, run
from penstock.records.keys import Keys
from tests.integration import play


@pytest.mark.parametrize(
    ("rewards", "total"),
    [
        ([1.5, 2.0], 3.5),
        ([1e300, 1e300], MOST_REWARD),
        ([6e307, 6e307, 6e307], MOST_REWARD),
        ([-1e308, -1e308], -MOST_REWARD),
        ([float("inf"), 1.0], MOST_REWARD),
    ],
)
def test_T11_a_sum_of_rewards_stays_a_number_that_is_read(
    client: redis.Redis, keys: Keys, rewards: list[float], total: float
) -> None:
    play.subscribe(client, keys)
    leader = play.lead(client, keys)
    play.admit(client, keys, [play.job(i) for i in range(len(rewards))])
    jobs = play.complete(client, keys, len(rewards))
    for job, reward in zip(jobs, rewards, strict=True):
        assert run(client, scripts.judge(keys, leader, "actor", [Judged(job, "flat", False, 2, reward)])) == 1
    position = Position.read(client.hgetall(keys.sub("actor")), "actor")
    assert position.rejected_reward == pytest.approx(total)
    assert position.disposed == position.dropped["filter/flat"] == len(rewards)


def test_T11_rewards_of_one_group_are_summed_to_a_number() -> None:
    assert total_reward([0.1] * 10) == 1.0
    assert total_reward([1e308] * 3) == MOST_REWARD
    assert total_reward([-1e308] * 3) == -MOST_REWARD
