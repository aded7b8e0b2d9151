"""Groups that take too long, on a real Redis: waited for and told, trained without the rest, or dropped."""

import contextlib
from pathlib import Path

import pytest
import redis

from penstock.consumers.metrics.tally import Ledger
from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease, run
from penstock.records.causes import GroupsLate
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    Player,
    admit,
    buffering,
    jobs_of,
    make_config,
    producing,
    publish,
    step,
    until,
    until_waits,
)


def rollout(policy: str, **over: object) -> dict[str, object]:
    return {"n": 3, "group_timeout_s": 0.3, "on_group_timeout": policy, **over}


def begin(client: redis.Redis, keys: Keys, worker: Player, ks: list[int], *, cohorts: bool = False) -> RawLease:
    """A group with samples ``ks`` only, beside one that is complete before any buffer looks at its age."""
    admit(client, keys, 2, n=3, cohorts=cohorts)
    slow, fast = worker.lease(2, version=1)
    worker.answer(slow, [1], ks=ks)
    worker.answer(fast, [1])
    return slow


def test_T11_a_group_that_takes_too_long_is_trained_with_the_samples_it_has_and_they_are_its_n(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, rollout=rollout("train"))
    worker = Player(client, keys)
    with Trainer(config) as trainer, contextlib.ExitStack() as stack:
        publish(trainer)
        slow = begin(client, keys, worker, [0, 2])
        stack.enter_context(buffering(config))
        batch = step(trainer)
        assert [(row.job, row.k) for row in batch.all_rows] == [
            ("d/0/1", 0), ("d/0/1", 1), ("d/0/1", 2), ("d/0/0", 0), ("d/0/0", 2),
        ]  # fmt: skip
        assert batch.counts["samples"] == 5
        metrics = Ledger().metrics(batch.manifest)
        assert metrics == {"rollout/partial_groups": 1, "rollout/missing_samples": 1}
        assert batch.arrays()["tokens"].shape[0] == 5
        assert worker.answer(slow, [1], ks=[1]).outcome == "lost", "what comes later changes nothing (I3)"
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "swept") == 2)
    assert play.counter(client, keys, "missing") == 1
    assert audit(client, keys).ok


def test_T11_a_group_that_is_closed_early_is_given_its_reward_before_it_is_trained(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, rollout=rollout("train"))
    worker, other = Player(client, keys), Player(client, keys, "w2")
    with Trainer(config) as trainer, contextlib.ExitStack() as stack:
        publish(trainer)
        admit(client, keys, 2, n=3)
        slow, fast = worker.lease(2, version=1)
        worker.answer(slow, [1], ks=[1, 2], with_reward=True)
        worker.answer(fast, [1])
        stack.enter_context(buffering(config))
        until(lambda: play.state(client, keys, slow.job) == "queued", "it to be closed")
        assert worker.answer(slow, [1], ks=[0]).outcome == "lost"
        (again,) = other.lease(1, version=1)
        assert (again.job, again.awaits_reward, again.committed) == (slow.job, True, {1, 2})
        assert play.counter(client, keys, "shortened") == 1
        assert play.reward(client, keys, again, 0.25) == "ready"
        batch = step(trainer)
        rows = {(row.job, row.k): row.reward for row in batch.all_rows}
        assert {key: reward for key, reward in rows.items() if key[0] == slow.job} == {
            (slow.job, 1): 0.25, (slow.job, 2): 0.25,
        }  # fmt: skip
        assert len(rows) == 5
    assert play.counter(client, keys, "missing") == 1
    assert audit(client, keys).ok


def test_T11_a_group_of_one_sample_is_not_trained_it_is_waited_for_by_name(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, rollout=rollout("train"), trainer={"batch_groups": 1})
    worker = Player(client, keys)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 1, n=3)
        (held,) = worker.lease(1, version=1)
        worker.answer(held, [1], ks=[1])
        found = until_waits(client, keys, "buffer:late", GroupsLate)
        assert found == GroupsLate(1, 0.3, "d/0/0", committed=1, wanted=3, policy="train")
        worker.answer(held, [1], ks=[2])
        assert jobs_of(step(trainer)) == ["d/0/0"]
    assert audit(client, keys).ok


def test_I1_a_group_that_is_dropped_frees_its_place_and_its_worker_is_fenced(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """One is leased, one waits to be resumed, one for a retry: all of them are dropped, and refilled."""
    config = make_config(redis_server.url, keys.run, tmp_path, rollout=rollout("drop"))
    worker = Player(client, keys)
    with producing(config), Trainer(config) as trainer:
        publish(trainer)
        until(lambda: client.xlen(keys.jobs("train")) == 4)
        leased, resumed, delayed = worker.lease(3, version=1)
        for held in (leased, resumed, delayed):
            worker.answer(held, [1], ks=[0])
        assert run(client, scripts.release(keys, resumed.job, resumed.token))
        fail = scripts.fail(
            keys, delayed.job, delayed.token, "w1", reason="r", detail="", max_attempts=3, retry_ms=10**7
        )
        assert run(client, fail) == "delayed"
        with buffering(config):
            until(lambda: play.counter(client, keys, "timed_out") == 3)
            until(lambda: play.counter(client, keys, "admitted") == 7, "the gate to refill three places")
            assert worker.answer(leased, [1], ks=[1, 2]).outcome == "lost"
            assert run(client, scripts.renew(keys, "w1", [(leased.job, leased.token)])) == [leased.job]
        # Nothing takes too long from here on, however slow this machine is.
        with buffering(make_config(redis_server.url, keys.run, tmp_path, rollout={"n": 3})):
            for held in worker.lease(2, version=1):
                worker.answer(held, [1])
            batch = step(trainer)
            assert jobs_of(batch) == ["d/0/3", "d/0/4"]
            assert batch.manifest.ledger["dropped"] == {"timed_out": 3}, "T4: what favours short answers is told"
            until(lambda: play.counter(client, keys, "swept") == 3)
    assert play.counter(client, keys, "dropped") == 3
    assert audit(client, keys).ok


@pytest.mark.parametrize("policy", ["train", "drop"])
def test_a_cohort_goes_on_without_what_took_too_long(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, policy: str
) -> None:
    config = make_config(
        redis_server.url, keys.run, tmp_path, rollout=rollout(policy), staleness={"mode": "sync", "bound": 0}
    )
    with Trainer(config) as trainer:
        publish(trainer)
        begin(client, keys, Player(client, keys), [0, 1], cohorts=True)
        with buffering(config):
            jobs = jobs_of(step(trainer))
    assert jobs == (["d/0/0", "d/0/1"] if policy == "train" else ["d/0/1"])
    assert audit(client, keys).ok


def test_by_default_a_late_group_is_only_told_of(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, rollout={"n": 3, "group_timeout_s": 0.1})
    worker = Player(client, keys)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2, n=3)
        late, other = worker.lease(2, version=1)
        worker.answer(late, [1], ks=[0, 1])
        worker.answer(other, [1])
        until_waits(client, keys, "buffer:late", GroupsLate, policy="wait")
        worker.answer(late, [1], ks=[2])
        batch = step(trainer)
        assert batch.counts["samples"] == 6
        assert batch.manifest.num_partial_groups == 0
