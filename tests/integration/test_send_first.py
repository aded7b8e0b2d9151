"""folder_first: false, the trainer's side: announced and sent first, the folder behind it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file

from penstock.config import Config
from penstock.config.staleness import Mode, StalenessConfig
from penstock.consumers import clock
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.claim import claimed
from penstock.errors import DiskFull, ProtocolError, PublishError, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.presence import WorkerPresence
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import RoomOnDisk, WeightsUnwritten
from penstock.redis.server import RedisServer
from tests.integration.held_disk import Disk, disk
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    admit,
    buffering,
    kill,
    make_config,
    publish,
    step,
    until,
    until_waits,
)

__all__ = ["disk"]


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return make_config(
        redis_server.url,
        keys.run,
        tmp_path,
        staleness={"mode": "async", "bound": 20},
        trainer={"batch_groups": 1, "folder_first": False},
    )


@pytest.fixture
def trainer(config: Config, client: redis.Redis, keys: Keys, disk: Disk) -> Iterator[Trainer]:
    """A trainer that has published version 1, folder first, and eight groups for it."""
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 8)
        Player(client, keys).work(8, 1)
        yield trainer
        disk.may_write.set()


def newest(client: redis.Redis, keys: Keys) -> Publication:
    ((_, fields),) = client.xrevrange(keys.weights("policy"), count=1)
    return Publication.from_bytes(fields[b"p"])


def folders(trainer: Trainer) -> list[int]:
    return clock.versions_in(trainer.weights_dir)


def told(client: redis.Redis, keys: Keys) -> list[int]:
    return sorted(scripts.read_all_whole(client, keys, "policy"))


def test_T16_a_version_is_announced_before_its_folder_which_has_the_weights_of_that_moment(
    trainer: Trainer, client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    assert newest(client, keys).is_whole, "the first one"
    disk.may_write.clear()
    batch = trainer.next(PATIENCE_S)
    trainer.commit(batch)
    weights = {"weight": torch.full((1,), 7.0)}
    assert trainer.publish(weights) == 2
    weights["weight"].fill_(8.0)  # the next step

    said = newest(client, keys)
    assert (said.version, said.path, said.index) == (2, "", "")
    assert said.layout
    assert (trainer.version, folders(trainer), told(client, keys)) == (2, [1], [])
    assert claimed(trainer.weights_dir) == 2
    disk.may_write.set()
    until(lambda: told(client, keys) == [2])
    whole = scripts.read_whole(client, keys, said)
    assert whole is not None
    assert float(load_file(Path(whole.path) / "model.safetensors")["weight"]) == 7.0


def test_the_newest_has_its_folder_and_what_lies_between_is_skipped(
    trainer: Trainer, client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    disk.may_write.clear()
    step(trainer)
    until(lambda: disk.begun == [1, 2])
    for _ in range(3):
        step(trainer)
    disk.may_write.set()
    until(lambda: told(client, keys) == [2, 5])
    assert folders(trainer) == [2, 5]
    found = [float(load_file(trainer.weights_dir / f"v{v:08d}/model.safetensors")["weight"]) for v in (2, 5)]
    assert found == [1.0, 4.0], "each as it was published"


def test_T13_T18_who_needs_a_folder_waits_for_it_by_name(
    trainer: Trainer, client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    disk.may_write.clear()
    step(trainer)
    done: list[Any] = []
    waiting = threading.Thread(target=lambda: done.append(trainer.pin(2, "evaluation")))
    waiting.start()
    until_waits(client, keys, "trainer:actor", WeightsUnwritten, version=2)
    assert not done
    disk.may_write.set()
    waiting.join(PATIENCE_S)
    assert done == [trainer.weights_dir / "v00000002"]
    trainer.commit(trainer.next(PATIENCE_S))
    assert trainer.tick() == 3
    assert newest(client, keys).path == str(trainer.weights_dir / "v00000002")


def test_a_folder_that_cannot_be_written_is_said_and_the_next_version_is_folder_first(
    trainer: Trainer, client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    disk.failure = PublishError("the disk is broken.")
    step(trainer)
    until(lambda: trainer.session.publisher.writer.owes)
    with pytest.raises(PublishError, match=r"Version 2 is announced and has no folder, because .*the disk is broken"):
        trainer.session._keep_announced()
    with pytest.raises(PublishError, match="Version 2 is announced"):
        trainer.tick()
    disk.spared = 3
    trainer.commit(trainer.next(PATIENCE_S))
    assert publish(trainer, 2) == 3
    assert newest(client, keys).is_whole
    trainer.session._keep_announced()


def test_a_folder_that_redis_forgot_is_told_of_again(
    trainer: Trainer, client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    step(trainer)
    until(lambda: told(client, keys) == [2])
    client.delete(keys.whole("policy"))
    until(lambda: trainer.session._keep_announced() or told(client, keys) == [2])


def test_a_disk_without_room_for_the_claim_is_waited_for_by_name(
    trainer: Trainer, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is announced meanwhile."""
    has_room = threading.Event()
    claim = trainer.session.clock.claim

    def claims(version: int) -> None:
        if not has_room.is_set():
            raise DiskFull("version 2 cannot be claimed: no space left on device.")
        claim(version)

    monkeypatch.setattr(trainer.session.clock, "claim", claims)
    trainer.commit(trainer.next(PATIENCE_S))
    publishing = threading.Thread(target=lambda: publish(trainer, 2))
    publishing.start()
    try:
        until_waits(client, keys, "trainer:actor", RoomOnDisk, error="version 2 cannot be claimed")
        assert newest(client, keys).version == 1
    finally:
        has_room.set()
        publishing.join(PATIENCE_S)
    assert newest(client, keys).version == 2


def test_T1_a_number_is_claimed_before_it_is_announced(
    trainer: Trainer, client: redis.Redis, keys: Keys, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies between the claim and the announcement: the next one takes the number above it."""
    trainer.commit(trainer.next(PATIENCE_S))

    def dies(publication: Publication) -> int:
        raise SystemExit

    monkeypatch.setattr(trainer.session.clock, "announce", dies)
    with pytest.raises(SystemExit):
        publish(trainer, 2)
    assert (trainer.version, claimed(trainer.weights_dir)) == (1, 2)
    kill(trainer, client)
    with Trainer(config) as successor:
        successor.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0, "version": 1})
        assert publish(successor) == 3
        said = newest(client, keys)
        assert said.is_whole, "a trainer's first publication is folder first"
        assert said.abandons(2)


def test_T1_the_next_number_is_above_what_a_worker_is_about_to_load(
    trainer: Trainer, client: redis.Redis, keys: Keys
) -> None:
    """Redis forgot publication 5, the worker that was told of it has not shown it yet."""
    client.hset(keys.loading("policy"), "w.1", pack({"versions": [5], "at": 0.0}))
    trainer.commit(trainer.next(PATIENCE_S))
    assert publish(trainer, 2) == 6


def test_what_is_left_is_written_at_the_end(
    config: Config, client: redis.Redis, keys: Keys, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with buffering(config):
        with Trainer(config) as trainer:
            publish(trainer)
            admit(client, keys, 1)
            Player(client, keys).work(1, 1)
            disk.may_write.clear()
            step(trainer)
            until(lambda: disk.begun == [1, 2])
            writer = trainer.session.publisher.writer
            join = writer.close
            monkeypatch.setattr(writer, "close", lambda: (disk.may_write.set(), join()))
            assert told(client, keys) == []
        assert told(client, keys) == [2]
        assert folders(trainer) == [1, 2]


def test_a_folder_that_failed_is_tried_again_where_nothing_can_be_published(
    trainer: Trainer, client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    """A trainer that waits for a batch has nothing new to publish: the words must not be its end."""
    for _ in range(7):
        step(trainer)
    trainer.session.settle()
    disk.failure = PublishError("the disk is broken.")
    step(trainer)
    until(lambda: disk.begun[-1] == 9)
    with pytest.raises(PublishError, match="Version 9 is announced and has no folder"):
        trainer.next(PATIENCE_S)
    with pytest.raises(PublishError):
        publish(trainer)
    disk.failure = None
    with pytest.raises((PublishError, WaitTimeout)):
        trainer.next(0.5)
    until(lambda: 9 in folders(trainer))
    with pytest.raises(WaitTimeout):
        trainer.next(0.5)
    assert 9 in told(client, keys)


def test_a_full_disk_is_waited_for_when_a_number_is_claimed(
    trainer: Trainer, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = clock.claim, []

    def full(folder: Path, version: int) -> None:
        tries.append(version)
        if len(tries) == 1:
            raise DiskFull(f"{folder} is full.")
        real(folder, version)

    monkeypatch.setattr(clock, "claim", full)
    trainer.commit(trainer.next(PATIENCE_S))
    assert publish(trainer, 2) == 2
    assert tries == [2, 2]


def test_a_pin_that_came_to_nothing_is_taken_back(
    trainer: Trainer, client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    disk.failure = PublishError("the disk is broken.")
    step(trainer)
    with pytest.raises(PublishError, match="has no folder"):
        trainer.pin(2, "evaluation")
    assert client.hgetall(keys.pins("policy")) == {}


def test_T1_a_tick_claims_its_number_too(trainer: Trainer) -> None:
    trainer.commit(trainer.next(PATIENCE_S))
    assert trainer.tick() == 2
    assert claimed(trainer.weights_dir) == 2


def test_the_end_waits_for_the_folder_by_name(config: Config, client: redis.Redis, keys: Keys, disk: Disk) -> None:
    with buffering(config):
        trainer = Trainer(config).__enter__()
        publish(trainer)
        admit(client, keys, 1)
        Player(client, keys).work(1, 1)
        disk.may_write.clear()
        step(trainer)
        closing = threading.Thread(target=trainer.close)
        closing.start()
        try:
            until_waits(client, keys, "trainer:actor", WeightsUnwritten, version=2)
        finally:
            disk.may_write.set()
            closing.join(PATIENCE_S)
        assert told(client, keys) == [2]


def test_T1_what_redis_forgot_is_given_to_nobody_else(
    trainer: Trainer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    """A failover loses the last second: announcement and ``whole``; then trainer and workers are gone too."""
    trainer.commit(trainer.next(PATIENCE_S))
    before = {key: client.dump(key) for key in client.scan_iter(f"{keys.prefix}*")}
    assert publish(trainer, 2) == 2
    until(lambda: told(client, keys) == [2])
    for folder in trainer.weights_dir.glob("v00000002"):
        folder.rename(folder.with_name("elsewhere"))  # nor does its folder say so
    client.delete(*client.scan_iter(f"{keys.prefix}*"))
    for key, value in before.items():
        client.restore(key, 0, value, replace=True)  # a heartbeat may have written it again
    assert trainer.version == 1
    with pytest.raises(ProtocolError, match="lost acknowledged writes"):
        trainer.session._keep_announced()
    kill(trainer, client)
    with Trainer(config) as successor:
        successor.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0, "version": 1})
        assert publish(successor) == 3
        assert newest(client, keys).abandons(2)


def test_T5_nobody_is_waited_for_while_a_cohort_of_before_is_drawn(
    trainer: Trainer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    """The worker itself has nothing to draw; another one has, and until that has ended nobody loads."""
    shown = WorkerPresence(name="w.1", at=time.time(), version=1, state="serving", ranks=1, layout="l", slots=8)
    client.hset(keys.workers, "w.1", pack(shown.to_record()))
    new = Publication("policy", 2, "gloo", "", layout="l")
    publisher = trainer.publisher
    assert publisher._ready(new, 1) == {"w.1"}
    publisher.config = config.model_copy(update={"staleness": StalenessConfig(mode=Mode.ONE_STEP)})
    assert publisher._ready(new, 1) == {"w.1"}
    client.hset(keys.cohorts, 1, 2)
    assert publisher._ready(new, 1) == set()
    client.hset(keys.workers, "w.1", b"")
    client.hdel(keys.workers, "w.1")
