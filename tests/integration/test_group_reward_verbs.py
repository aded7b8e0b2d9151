"""The second phase of a group, by verbs: nothing is drawn again, and one lease writes its reward (I3, I4)."""

from dataclasses import replace

import pytest
import redis

from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.gate import read_rooms
from penstock.protocol.scripts import RawLease, run
from penstock.records.keys import Keys
from penstock.records.sample_meta import iter_metas
from tests.integration import play


def committed(client: redis.Redis, keys: Keys, ks: range = range(2)) -> RawLease:
    """A job whose samples ``ks`` are committed, and whose group's reward is to come."""
    play.admit(client, keys, [play.job(0)])
    (held,) = play.lease(client, keys)
    done = play.commit(client, keys, held, ks, with_reward=True)
    assert done.outcome == ("reward" if len(ks) == 2 else "ok")
    return held


def rewards(client: redis.Redis, keys: Keys, job: str) -> list[float]:
    return [one.reward for one in iter_metas(client.get(keys.meta(job)) or b"", job)]


def test_a_group_is_ready_when_its_reward_is_written_and_not_before(client: redis.Redis, keys: Keys) -> None:
    held = committed(client, keys)
    assert play.state(client, keys, held.job) == "leased"
    assert client.zcard(keys.ready) == 0
    assert client.zscore(keys.inflight, held.job) is not None, "the bound counts it as running"
    assert run(client, scripts.renew(keys, "w1", [(held.job, held.token)])) == []
    assert audit(client, keys).ok
    assert play.commit(client, keys, held, [1], with_reward=True).outcome == "reward", "its reply was lost"

    assert play.reward(client, keys, held, 0.5) == "ready"
    assert play.state(client, keys, held.job) == "ready"
    assert rewards(client, keys, held.job) == [0.5, 0.5]
    assert client.zcard(keys.inflight) == client.xlen(keys.jobs("train")) == 0
    assert play.commit(client, keys, held, [1], with_reward=True).outcome == "ready"
    play.assert_conserved(client, keys)
    assert audit(client, keys).ok


def test_I3_a_reward_is_written_once_and_by_the_holder_of_the_lease(client: redis.Redis, keys: Keys) -> None:
    old = committed(client, keys)
    assert run(client, scripts.crash(keys, old.job, old.token, "w1", "killed")) == "resume"
    assert play.reward(client, keys, old, 1.0) == "lost"
    (new,) = play.lease(client, keys, "w2")
    assert (new.awaits_reward, new.committed) == (True, {0, 1}), "nothing is drawn again"
    assert play.reward(client, keys, old, 2.0) == "lost"
    assert play.reward(client, keys, new, 3.0) == "ready"
    assert play.reward(client, keys, new, 4.0) == "ready", "its reply was lost; nothing is written twice"
    assert play.reward(client, keys, old, 5.0) == "lost"
    assert rewards(client, keys, new.job) == [3.0, 3.0]
    assert play.counter(client, keys, "group_rewards") == 1
    play.assert_conserved(client, keys)


def test_a_reward_needs_all_samples_and_a_group_that_waits_for_one(client: redis.Redis, keys: Keys) -> None:
    held = committed(client, keys, range(1))
    assert play.reward(client, keys, held) == "missing"
    assert play.state(client, keys, held.job) == "leased"
    assert play.commit(client, keys, held, [1]).outcome == "reward", "it was told so with its first sample"
    play.admit(client, keys, [play.job(1)])
    (plain,) = play.lease(client, keys)
    assert not plain.awaits_reward
    assert play.reward(client, keys, plain) == "missing"


def test_T3_gate_cohorts_and_drains_count_it_as_running(client: redis.Redis, keys: Keys) -> None:
    revision = play.subscribe(client, keys, bound=0, gb=1)
    play.admit(client, keys, [play.job(0)], gate=(revision, ["actor"]))
    client.zadd(keys.unfinished("train"), {"d/0/0": 1})
    client.hset(keys.group("d/0/0"), "co", 1)
    (held,) = play.lease(client, keys)
    play.commit(client, keys, held, [0, 1], with_reward=True)
    assert read_rooms(client, keys, [["actor"]])["actor"].taken == 1
    assert client.zcard(keys.unfinished("train")) == 1
    assert client.hgetall(keys.cohorts) == {b"0": b"1"}
    play.reward(client, keys, held)
    assert client.zcard(keys.unfinished("train")) == 0
    assert client.hgetall(keys.cohorts) == {}
    assert read_rooms(client, keys, [["actor"]])["actor"].taken == 1, "it is stock now"


@pytest.mark.parametrize("state", ["leased", "queued", "delayed", "suspect"])
def test_closing_a_group_early_queues_its_reward(client: redis.Redis, keys: Keys, state: str) -> None:
    """Of three samples the second and third are there: who leases it next draws nothing."""
    play.admit(client, keys, [play.job(0, n=3)])
    (held,) = play.lease(client, keys)
    play.commit(client, keys, held, [1, 2], with_reward=True)
    leader = play.lead(client, keys)
    job = held.job
    for _ in range({"queued": 1, "suspect": 2}.get(state, 0)):
        run(client, scripts.crash(keys, job, held.token, "w1", ""))
        if state == "suspect":
            (held,) = play.lease(client, keys)
    if state == "delayed":
        call = scripts.fail(keys, job, held.token, "w1", reason="r", detail="", max_attempts=9, retry_ms=10**7)
        assert run(client, call) == "delayed"
    assert run(client, scripts.shorten(keys, leader, job)) == 2
    assert play.state(client, keys, job) == "queued"
    assert play.reward(client, keys, held) == "lost"
    assert run(client, scripts.shorten(keys, leader, job)) == 0, "there is nothing left to close"
    assert client.zscore(keys.inflight, job) is not None
    assert sum(int(many) for many in client.hvals(keys.cohorts)) == 1
    assert audit(client, keys).ok

    (new,) = play.lease(client, keys, "w2")
    assert new.lane == ("suspect" if state == "suspect" else "resume")
    assert (new.awaits_reward, new.committed) == (True, {1, 2})
    assert play.reward(client, keys, new, 7.0) == "ready"
    assert client.hmget(keys.group(job), "n", "w", "c") == [b"2", b"3", b"2"]
    assert client.hgetall(keys.cohorts) == {}
    play.assert_conserved(client, keys)
    assert audit(client, keys).ok


def test_I10_tokens_of_a_group_that_waits_for_its_reward_are_held(client: redis.Redis, keys: Keys) -> None:
    held = committed(client, keys)
    assert play.drawn_to_train(client, keys).held == 4
    call = scripts.fail(keys, held.job, held.token, "w1", reason="reward_raised", detail="", max_attempts=1, retry_ms=1)
    assert run(client, call) == "dead"
    assert play.drawn_to_train(client, keys).accounts["buried"] == 4
    assert run(client, scripts.requeue(keys, held.job, play.MODEL))
    (new,) = play.lease(client, keys)
    assert new.awaits_reward, "a group that is dug up begins with its reward"
    assert play.reward(client, keys, new) == "ready"
    assert play.drawn_to_train(client, keys).held == 4
    assert audit(client, keys).ok


def test_records_are_those_of_the_samples_but_for_the_rewards(client: redis.Redis, keys: Keys) -> None:
    held = committed(client, keys)
    before = list(iter_metas(client.get(keys.meta(held.job)), held.job))
    play.reward(client, keys, held, 2.5)
    after = list(iter_metas(client.get(keys.meta(held.job)), held.job))
    assert after == [replace(one, reward=2.5) for one in before]
