"""Modes end to end with producer, buffer and trainer, the worker's part played: what is trained at which version."""

from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.protocol.audit import audit, scan_groups
from penstock.protocol.scripts import RawLease
from penstock.records.causes import GateClosed
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    Player,
    admit,
    buffering,
    jobs_of,
    kill,
    make_config,
    producing,
    publish,
    step,
    until,
    until_waits,
)


def stock(client: redis.Redis, keys: Keys) -> int:
    """S of T3, from the groups: train groups neither given up by the trainer nor consumed by a published version."""
    through = int(client.hget(keys.sub("actor"), "through") or 0)
    held = 0
    for job in scan_groups(client, keys):
        state, uses, batch = client.hmget(keys.group(job), "st", "u:actor", "b:actor")
        unused = uses is None or (int(uses) > 0 and int(batch) > through)
        held += state in (b"queued", b"leased", b"delayed", b"ready") and unused
    return held


def versions_of(batch: Any) -> set[int]:
    return {version for row in batch.all_rows for version in (row.oldest, row.newest)}


# --- T5: sync and one_step ----------------------------------------------------------------------------------------


class StrictWorker(Player):
    """Applies weights as one_step's workers do: what was admitted under an older version ends under it first."""

    engine = 0

    def load(self) -> int:
        older = [int(v) for v in self.client.hkeys(self.keys.cohorts) if int(v) < self.clock]
        if self.engine == 0 or not older:
            self.engine = self.clock
        return self.engine

    def turn(self, most: int = 100) -> list[str]:
        """Lease what may be started and answer it, last come first."""
        held = self.lease(most, version=self.load())
        for one in reversed(held):
            self.answer(one, [self.engine])
        return [one.job for one in held]


def test_T5_sync_trains_whole_cohorts_at_the_version_they_were_drawn_with(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "sync", "bound": 0})
    worker = StrictWorker(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        for i in range(4):
            until(lambda: stock(client, keys) == 2, "a cohort to be admitted")
            assert sorted(worker.turn()) == [f"d/0/{2 * i}", f"d/0/{2 * i + 1}"]
            batch = step(trainer)
            assert jobs_of(batch) == [f"d/0/{2 * i}", f"d/0/{2 * i + 1}"]
            assert (batch.train_version, versions_of(batch)) == (i + 1, {i + 1})
            assert (batch.manifest.staleness_max, batch.manifest.staleness_mean) == (0, 0.0)


def test_T5_one_step_batch_i_is_cohort_i_of_one_version_with_lag_0_then_1(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "one_step", "bound": 1})
    worker = StrictWorker(client, keys)
    lags, drawn = [], []
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        for i in range(5):
            until(lambda: stock(client, keys) == 4, "two cohorts to be admitted")
            worker.turn()  # last come first: the younger cohort is complete before the older one
            batch = step(trainer)
            assert jobs_of(batch) == [f"d/0/{2 * i}", f"d/0/{2 * i + 1}"], "the i-th admitted cohort, complete"
            drawn.append(versions_of(batch))
            lags.append(batch.train_version - batch.all_rows[0].oldest)
    assert [len(one) for one in drawn] == [1] * 5, "one version per batch"
    assert lags == [0, 1, 1, 1, 1]


def test_T5_a_cohort_is_trained_without_the_member_that_was_buried_and_skipped_when_all_were(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "sync", "bound": 0})
    worker = StrictWorker(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        until(lambda: stock(client, keys) == 2)
        first, second = worker.lease(2, version=worker.load())
        bury(client, keys, first)
        worker.answer(second, [1])
        assert jobs_of(step(trainer)) == [second.job]
        until(lambda: client.xlen(keys.jobs("train")) == 2)
        for held in worker.lease(2, version=worker.load()):
            bury(client, keys, held)
        assert trainer.next_nowait() is None
        until(lambda: client.xlen(keys.jobs("train")) == 2, "the next cohort, behind the one that is buried")
        worker.turn()
        assert jobs_of(step(trainer)) == ["d/0/4", "d/0/5"]
        # A rewind forgets consumption, not what was skipped, or the gate would stay closed for ever.
        trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0})
        publish(trainer, 9)
        assert [jobs_of(step(trainer)) for _ in range(2)] == [[second.job], ["d/0/4", "d/0/5"]]
        until(lambda: client.xlen(keys.jobs("train")) == 2)
    assert audit(client, keys).ok


def bury(client: redis.Redis, keys: Keys, held: RawLease) -> None:
    fail = scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=0, retry_ms=1)
    assert scripts.run(client, fail) == "dead"


@pytest.mark.parametrize("mode", ["sync", "one_step"])
def test_T1_a_trainer_that_comes_back_trains_the_cohorts_that_were_drawn_before(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, mode: str
) -> None:
    """It publishes the restored weights once more: the number goes on, and nothing grows older by it."""
    bound = {"sync": 0, "one_step": 1}[mode]
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": mode, "bound": bound})
    worker = StrictWorker(client, keys)
    with buffering(config), producing(config):
        first = Trainer(config).__enter__()
        publish(first)
        until(lambda: stock(client, keys) == 2 * (1 + bound))
        worker.turn()
        step(first)
        state = first.state_dict()
        until(lambda: stock(client, keys) == 2 * (1 + bound))
        worker.turn()  # drawn, and not yet cut when the trainer dies
        kill(first, client)
        with Trainer(config) as second:
            second.load_state_dict(state)
            assert publish(second, 1) == 3
            batch = step(second)
            assert jobs_of(batch) == ["d/0/2", "d/0/3"]
            assert batch.train_version == 3
            assert batch.manifest.staleness_max == bound
            assert set(batch.padded()["staleness"][0].tolist()) == {-1, bound}
        assert client.hget(keys.sub("actor"), "drop:stale") is None


# --- T2: the version a batch is trained at ------------------------------------------------------------------------


def async_config(url: str, keys: Keys, folder: Path, **over: Any) -> Config:
    trainer = {"batch_groups": 1, **over.pop("trainer", {})}
    return make_config(url, keys.run, folder, staleness={"mode": "async", "bound": 8, **over}, trainer=trainer)


def test_T2_a_late_cut_is_trained_at_the_clock_and_keeps_its_version_when_it_comes_again(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = async_config(redis_server.url, keys, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        seen = [step(trainer) for _ in range(3)]
        assert [batch.train_version for batch in seen] == [1, 2, 3]
        assert [batch.manifest.staleness_max for batch in seen] == [0, 1, 2]
        trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 1})
        assert publish(trainer, 1) == 5
        again = [trainer.next(timeout=60)]
        trainer.commit(again[0])
        publish(trainer, 2)
        again.append(step(trainer))
        assert [batch.digest for batch in again] == [batch.digest for batch in seen[1:]]
        fresh = step(trainer)
        assert fresh.train_version == 7, "two versions behind the restored one, numbers never go back"
        assert fresh.manifest.staleness_max == 3, (
            "v3 and v4 were abandoned, v5 held the weights of v2 again: v2, v6, v7"
        )


def test_T2_a_batch_that_is_cut_ahead_counts_its_way_to_the_trainer(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = async_config(redis_server.url, keys, tmp_path)
    with buffering(config), Trainer(config, prefetch=2) as trainer:
        publish(trainer)
        admit(client, keys, 5)
        Player(client, keys).work(5, 1)
        first = trainer.next(timeout=60)
        until(lambda: client.xlen(keys.batches("actor")) == 3, "two batches to be cut ahead")
        assert trainer.version == 1
        trainer.commit(first)
        publish(trainer, 1)
        rest = [step(trainer) for _ in range(4)]
        assert [batch.train_version for batch in (first, *rest)] == [1, 2, 3, 4, 5]
        assert [batch.manifest.staleness_max for batch in (first, *rest)] == [0, 1, 2, 3, 4]


def test_T2_several_batches_per_version_share_it_also_after_a_checkpoint_between_them(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = async_config(redis_server.url, keys, tmp_path, trainer={"batches_per_version": 2})

    def train(trainer: Trainer, until_n: int) -> list[int]:
        versions, n = [], 0
        while n < until_n:
            batch = trainer.next(timeout=60)
            n = batch.n
            trainer.commit(batch)
            versions.append(batch.train_version)
            if n % 2 == 0:
                publish(trainer, n)
        return versions

    with buffering(config), Trainer(config, prefetch=1) as trainer:
        publish(trainer)
        admit(client, keys, 9)
        Player(client, keys).work(9, 1)
        assert train(trainer, 3) == [1, 1, 2]
        until(lambda: client.xlen(keys.batches("actor")) == 4)
        trainer.load_state_dict(trainer.state_dict())
        publish(trainer, 3)  # version 3, behind batch 3
        assert train(trainer, 8) == [2, 4, 4, 5, 5], "batch 4 was cut ahead before; a version ends at an even batch"


# --- T3: the gate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("one_step", 1), ("async", 0), ("async", 3)])
def test_T3_the_gate_holds_the_stock_at_one_version_more_than_the_bound(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, mode: str, bound: int
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": mode, "bound": bound})
    worker = StrictWorker(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        for _ in range(3):
            until(lambda: stock(client, keys) == (1 + bound) * 2)
            until_waits(client, keys, "producer", GateClosed, subscription="actor")
            assert stock(client, keys) == (1 + bound) * 2
            worker.turn()
            step(trainer)
        trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0})
        publish(trainer)
        assert stock(client, keys) > (1 + bound) * 2, "what a rewind gives back is stock again"
        admitted = play.counter(client, keys, "seq:train")
        for _ in range(2):
            step(trainer)
            assert play.counter(client, keys, "seq:train") == admitted, "nothing is admitted for what comes again"
    assert audit(client, keys).ok


def test_T3_the_gate_follows_a_batch_size_that_changes(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    worker = StrictWorker(client, keys)
    with buffering(config), producing(config):
        with Trainer(config, batch_groups=4) as trainer:
            publish(trainer)
            until(lambda: stock(client, keys) == 8)
        with Trainer(config, batch_groups=1) as trainer:
            worker.turn()
            step(trainer)
            until_waits(client, keys, "producer", GateClosed)
            assert stock(client, keys) == 7, "more is there than a smaller batch allows: nothing is admitted"
        with Trainer(config, batch_groups=6) as trainer:
            until(lambda: stock(client, keys) == 12)


def test_T3_a_subscription_that_comes_late_counts_what_it_can_still_see(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    worker = StrictWorker(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        for _ in range(3):
            until(lambda: stock(client, keys) == 4)
            worker.turn()
            step(trainer)
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "swept") == 6)
        until(lambda: stock(client, keys) == 4)
        with Trainer(config, name="other", batch_groups=4):
            # 8 places at its gate, of which what is there takes 4, and what is gone takes none.
            for _ in range(2):
                worker.turn()
                step(trainer)
                until(lambda: stock(client, keys) == 4, "the gate to open")
            until_waits(client, keys, "producer", GateClosed)
            worker.turn()
            step(trainer)
            until_waits(client, keys, "producer", GateClosed, subscription="other")
