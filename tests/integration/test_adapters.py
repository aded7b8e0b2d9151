"""Adapters on a real buffer: slime's RolloutManager and the PyTorch dataset."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch
from torch.utils.data import DataLoader

from penstock.config import Config
from penstock.consumers.adapters.iterable import RolloutDataset
from penstock.consumers.adapters.rollout_manager import Box, RolloutManager
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.audit import audit
from penstock.records.causes import BatchNotCut
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import Player, admit, buffering, make_config, producing, until, until_waits

GROUPS = 2


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    staleness = {"mode": "async", "bound": 20}
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text("".join(f'{{"prompt": "e{i}", "label": "x"}}\n' for i in range(3)))
    data = {"eval": [{"name": "heldout", "path": str(held_out)}]}
    return make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, data=data)


@pytest.fixture
def buffer(config: Config) -> Iterator[None]:
    with buffering(config):
        yield


@pytest.fixture
def worker(client: redis.Redis, keys: Keys) -> Player:
    return Player(client, keys)


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1,), value)}


def fill(client: redis.Redis, keys: Keys, worker: Player, batches: int) -> None:
    admit(client, keys, batches * GROUPS)
    worker.work(batches * GROUPS, worker.clock)


def jobs_of(shares: list[Box]) -> set[str]:
    return {origin["job"] for share in shares for origin in share.lineage}


# --- RolloutManager -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("buffer")
def test_a_slime_shaped_loop_trains_every_group_once_over_a_restart(
    config: Config, client: redis.Redis, keys: Keys, worker: Player
) -> None:
    seen: list[set[str]] = []
    with RolloutManager(config, dp_size=2) as manager:
        assert manager.load(-1) == 0
        assert manager.publish(weights(), -1) == 1
        fill(client, keys, worker, 6)
        for rollout_id in range(3):
            shares = manager.generate(rollout_id)
            assert len(shares) == 2
            assert [len(share.inner["tokens"]) for share in shares] == [GROUPS, GROUPS]
            indices = sorted(i for share in shares for i in share.inner["sample_indices"])
            assert indices == list(range(rollout_id * 4, rollout_id * 4 + 4)), "samples are numbered through"
            seen.append(jobs_of(shares))
            if rollout_id == 1:
                manager.save(rollout_id)
            assert manager.publish(weights(rollout_id + 1), rollout_id) == rollout_id + 2
    # Rollout 2 was trained, but its weights were not saved: it comes again, the same one.
    with RolloutManager(config, dp_size=1) as manager:
        assert manager.load(1) == 2
        manager.publish(weights(2), 1)
        again = manager.generate(2)
        assert jobs_of(again) == seen[2]
        assert sorted(again[0].inner["sample_indices"]) == list(range(8, 12))
        for rollout_id in range(2, 6):
            seen[rollout_id:] = [jobs_of(manager.generate(rollout_id))]
            manager.publish(weights(rollout_id + 1), rollout_id)
            manager.save(rollout_id)
        assert sorted(job for jobs in seen for job in jobs) == sorted(f"d/0/{i}" for i in range(12))
        until(lambda: play.counter(client, keys, "retired") == 12)
        assert audit(client, keys).ok


@pytest.mark.usefixtures("buffer")
def test_a_rollout_generated_ahead_is_committed_only_when_it_is_named(
    config: Config, client: redis.Redis, keys: Keys, worker: Player, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutManager(config) as manager:
        manager.publish(weights(), -1)
        fill(client, keys, worker, 3)
        manager.generate(0)
        ahead = manager.generate(1)
        assert jobs_of(manager.generate(1)) == jobs_of(ahead), "asked twice, the same one"
        assert ahead[0].lineage[0]["train_version"] == 2, "it is trained after the publication of rollout 0"
        manager.publish(weights(1), 0)
        assert int(client.hget(keys.sub("actor"), "cursor") or 0) == 1
        manager.generate(2)
        manager.publish(weights(2), 1)
        assert int(client.hget(keys.sub("actor"), "cursor") or 0) == 2
    assert not [record for record in caplog.records if "only version" in record.message]


@pytest.mark.usefixtures("buffer")
def test_a_loop_that_lost_its_place_is_told_so(config: Config, client: redis.Redis, keys: Keys, worker: Player) -> None:
    with RolloutManager(config) as manager:
        manager.publish(weights(), -1)
        fill(client, keys, worker, 2)
        with pytest.raises(ProtocolError, match="Rollout 1 was asked for, but the next one"):
            manager.generate(1)
        with pytest.raises(ProtocolError, match="Rollout 0 was not generated yet"):
            manager.publish(weights(), 0)
        with pytest.raises(ProtocolError, match="Rollout 0 was not generated yet"):
            manager.save(0)
        manager.generate(0)
        manager.publish(weights(1), 0)
        with pytest.raises(ProtocolError, match=r"Rollout 0 was asked for, but the next one .* is 1"):
            manager.generate(0)
        with pytest.raises(ConfigError, match="rollout 7 was never saved"):
            manager.load(7)


def test_T6_a_loop_that_divides_by_another_temperature_than_the_run_draws_at_is_told_so(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"The run draws at temperature 1, and the trainer divides by 0\.7"):
        RolloutManager(config, temperature=0.7)


def test_T6_what_a_worker_drew_at_another_temperature_never_reaches_the_loop(
    config: Config, buffer: None, client: redis.Redis, keys: Keys, worker: Player
) -> None:
    with RolloutManager(config) as manager:
        manager.load()
        manager.publish(weights(), -1)
        admit(client, keys, GROUPS)
        for held in worker.lease(GROUPS, version=worker.clock):
            worker.answer(held, [worker.clock], temperature=0.5)
        with pytest.raises(
            ConfigError, match=r"sampled at temperature 0\.5, but the trainer's --rollout-temperature is 1"
        ):
            manager.generate(0)


def test_eval_returns_the_reward_of_the_last_publication(
    config: Config, client: redis.Redis, keys: Keys, worker: Player
) -> None:
    with buffering(config), producing(config), RolloutManager(config) as manager:
        with pytest.raises(ProtocolError, match="publish the first weights"):
            manager.eval(0)
        version = manager.publish(weights(), -1)
        until(lambda: client.xlen(keys.jobs("eval")) == 3)
        for held in play.lease(client, keys, most=3, version=version):
            assert held.job.startswith("heldout/")
            worker.answer(held, [version])
        assert manager.eval(0) == {"eval/heldout": 0.0}, "k is 0, and a sample's reward is k % 2"
        assert manager.get_num_rollout_per_epoch() == 1000 // GROUPS


@pytest.mark.parametrize(("size", "unit", "rollouts"), [(None, "groups", 12), (5, "groups", 5), (8, "tokens", None)])
def test_rollouts_of_an_epoch_are_counted_by_the_size_of_the_subscription(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, size: int, unit: str, rollouts: int
) -> None:
    trainer = {"subscription": {"size": size, "unit": unit}}
    client.hset(keys.source, "epoch_lines", 25)
    with RolloutManager(make_config(redis_server.url, keys.run, tmp_path, trainer=trainer)) as manager:
        if rollouts is not None:
            assert manager.get_num_rollout_per_epoch() == rollouts
            return
        with pytest.raises(ConfigError, match="not known for batches in tokens"):
            manager.get_num_rollout_per_epoch()


def test_eval_without_a_dataset_is_refused(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> None:
    with (
        RolloutManager(make_config(redis_server.url, keys.run, tmp_path)) as manager,
        pytest.raises(ConfigError, match=r"data\.eval is empty"),
    ):
        manager.eval(0)


# --- IterableDataset ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("buffer")
def test_a_dataset_yields_every_batch_in_micro_batches_and_commits_when_told(
    config: Config, client: redis.Redis, keys: Keys, worker: Player
) -> None:
    with Trainer(config) as trainer:
        trainer.publish(weights())
        fill(client, keys, worker, 3)
        data = RolloutDataset(trainer, max_samples=3, num_batches=3)
        seen: list[tuple[int, int, bool, int]] = []
        for item in DataLoader(data, batch_size=None):
            assert isinstance(item["tokens"], torch.Tensor)
            seen.append((item["batch"], item["micro"], item["last"], len(item["tokens"])))
            if item["last"]:
                assert int(client.hget(keys.sub("actor"), "cursor") or 0) == item["batch"] - 1
                data.commit(item["batch"])
                data.commit(item["batch"])
                trainer.publish(weights(item["batch"]))
        assert seen == [row for n in (1, 2, 3) for row in ((n, 0, False, 3), (n, 1, True, 1))]
        with pytest.raises(ProtocolError, match="Batch 4 was not handed out"):
            data.commit(4)


@pytest.mark.usefixtures("buffer")
def test_I5_what_a_dataset_handed_out_without_a_commit_comes_again(
    config: Config, client: redis.Redis, keys: Keys, worker: Player
) -> None:
    with Trainer(config) as trainer:
        trainer.publish(weights())
        fill(client, keys, worker, 2)
        first = next(iter(RolloutDataset(trainer)))
    with Trainer(config) as trainer:
        again = next(iter(RolloutDataset(trainer)))
        assert torch.equal(first["tokens"], again["tokens"])
        assert again["batch"] == 1


def test_T6_a_dataset_of_one_temperature_refuses_a_batch_of_another(
    config: Config, buffer: None, client: redis.Redis, keys: Keys, worker: Player
) -> None:
    with Trainer(config) as trainer:
        data = RolloutDataset(trainer, temperature=1.0)
        trainer.publish(weights())
        admit(client, keys, GROUPS)
        for held in worker.lease(GROUPS, version=worker.clock):
            worker.answer(held, [worker.clock], temperature=0.5)
        with pytest.raises(ConfigError, match=r"sampled at temperature 0\.5, but this loop's temperature is 1"):
            next(iter(data))


def test_a_dataset_refuses_worker_processes(config: Config) -> None:
    with Trainer(config) as trainer:
        loader = DataLoader(RolloutDataset(trainer), batch_size=None, num_workers=1)
        with pytest.raises(ConfigError, match="Set num_workers=0"):
            next(iter(loader))


@pytest.mark.usefixtures("buffer")
def test_I8_a_dataset_that_waits_says_what_for(config: Config, client: redis.Redis, keys: Keys) -> None:
    import threading

    with Trainer(config) as trainer:
        trainer.publish(weights())
        items = iter(RolloutDataset(trainer))
        thread = threading.Thread(target=lambda: next(items), daemon=True)
        thread.start()
        until_waits(client, keys, "trainer:actor", BatchNotCut, batch=1)
        fill(client, keys, Player(client, keys), 1)
        thread.join(30)
        assert not thread.is_alive()
