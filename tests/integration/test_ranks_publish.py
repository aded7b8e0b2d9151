"""Ranks that hold parts of the weights: while rank 0 waits no other sits in a collective, which has a time limit."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import DiskFull, ProtocolError, PublishError, WaitTimeout, WeightsNotFinite
from penstock.protocol.waits import read_waits
from penstock.records.causes import RankPublishing, RanksAbsent
from penstock.records.keys import Keys
from penstock.records.worker_causes import RoomOnDisk
from penstock.redis.server import RedisServer
from penstock.system.disk import until_room
from tests.integration.parts import PATIENCE_S, kill, make_config, until, until_waits
from tests.integration.shards_rank import meet, shards

OTHER = "trainer:actor/1"


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return make_config(redis_server.url, keys.run, tmp_path)


@pytest.fixture
def other(config: Config, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Rank 1, in a process group with this process."""
    file, store = tmp_path / "run.json", tmp_path / "store"
    file.write_text(with_patience(config, 3.0).model_dump_json())
    command = [sys.executable, "-m", "tests.integration.shards_rank", str(file), str(store), "3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        meet(str(store), 0)
        yield process
    finally:
        process.kill()
        process.communicate()
        if dist.is_initialized():
            dist.destroy_process_group()


def with_patience(config: Config, rank_timeout_s: float) -> Config:
    trainer = config.trainer.model_copy(update={"rank_timeout_s": rank_timeout_s})
    return config.model_copy(update={"trainer": trainer})


def waits_again(client: redis.Redis, keys: Keys, since_s: float) -> bool:
    """Rank 1 waits for rank 0, and began to after ``since_s``."""
    waited = ((one.since_s > since_s, one.who, one.cause) for one in read_waits(client, keys))
    return (True, OTHER, RankPublishing()) in waited


def waited_s(client: redis.Redis, keys: Keys, who: str) -> float:
    return max((time.time() - one.since_s for one in read_waits(client, keys) if one.who == who), default=0.0)


class Hold:
    """A call of rank 0 that begins when it may."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.may_go = call, threading.Event()

    def __call__(self, *args: Any) -> Any:
        assert self.may_go.wait(PATIENCE_S)
        return self._call(*args)


def test_T14_a_rank_waits_for_rank_0_by_name_and_outside_any_collective(
    config: Config, client: redis.Redis, keys: Keys, other: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other.stdout is not None
    with Trainer(config, dp_rank=0, dp_size=2) as trainer:
        session, done = trainer.session, []
        before, behind = Hold(session.progress.await_ranks), Hold(session.clock.claim)
        monkeypatch.setattr(session.progress, "await_ranks", before)
        monkeypatch.setattr(session.clock, "claim", behind)
        publishing = threading.Thread(target=lambda: done.append(trainer.publish(shards(0))))
        publishing.start()
        try:
            until(lambda: waits_again(client, keys, 0.0))
            gone_s = time.time()
            before.may_go.set()
            until(lambda: waits_again(client, keys, gone_s))
        finally:
            before.may_go.set()
            behind.may_go.set()
            publishing.join(PATIENCE_S)
        assert done == [1]
        assert other.stdout.readline() == "published 1\n"
        written = load_file(trainer.weights_dir / "v00000001" / "model.safetensors")["weight"]
        assert written.tolist() == [0.0, 1.0]

        with pytest.raises(PublishError, match="is not committed, or a version consumed it"):
            trainer.publish(shards(0))
        assert "Rank 0 could not publish: Version 2" in other.stdout.readline()
        kill(trainer, client)
        assert "has not renewed its lease for 3 s" in other.stdout.readline()


def test_T16_every_rank_has_the_verdict_of_rank_0_on_weights_that_are_not_finite(
    config: Config, other: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other.stdout is not None
    bad = shards(0)
    bad._shards["weight"].fill_(torch.nan)  # type: ignore[index]
    with Trainer(config, dp_rank=0, dp_size=2) as trainer:
        with pytest.raises(WeightsNotFinite, match="weight of the weights to publish hold NaN"):
            trainer.publish(bad)
        assert "failed Rank 0 could not publish: weight of the weights" in other.stdout.readline()

        assert trainer.publish(shards(0)) == 1
        assert other.stdout.readline() == "published 1\n"

        # A new version needs a batch that both ranks committed, which is not the subject here.
        monkeypatch.setattr(trainer.session.publisher, "_announce_again", lambda *_: 1)
        assert trainer.publish(bad) == 1
        assert other.stdout.readline() == "published 1\n"


def test_T14_a_rank_that_does_not_come_to_publish_is_named(config: Config) -> None:
    with (
        Trainer(with_patience(config, 0.2), dp_rank=0, dp_size=2) as trainer,
        pytest.raises(WaitTimeout, match=r"rank 1 did not come to publish in 0\.2 s"),
    ):
        trainer.publish(shards(0))


def test_an_order_that_no_rank_0_gives_is_refused_in_words(config: Config, client: redis.Redis, keys: Keys) -> None:
    """Whoever writes to Redis can put anything there: a version that is none must not become what publish returns."""
    with Trainer(config, dp_rank=0, dp_size=2) as trainer, Trainer(config, dp_rank=1, dp_size=2) as other:
        sub = trainer.session.subscriber
        orders = keys.orders(sub.name)
        for call, word in enumerate((b"done -7", b"done x", b"failed \xff", b"failed " + b"y" * 2**20), start=1):
            client.hset(orders, "o:0", f"{sub.owner} {call} ".encode() + word)
            with pytest.raises(ProtocolError, match="rank 0 of subscription 'actor' orders") as caught:
                other.publish(shards(1))
            assert len(str(caught.value)) < 500

        client.delete(orders)
        client.set(orders, "x")
        for rank, one in enumerate((trainer, other)):
            with pytest.raises(ProtocolError, match="A key in Redis is of another type"):
                one.publish(shards(rank))


def test_I8_a_rank_that_waits_for_room_on_a_disk_is_waited_for_and_not_taken_for_dead(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    """Rank 0 writes a version or a checkpoint: a full disk is waited for, with several ranks as with one."""
    has_room, met = threading.Event(), []

    def write() -> None:
        if not has_room.is_set():
            raise DiskFull("the checkpoint cannot be written: no space left on device.")

    with (
        Trainer(config, dp_rank=0, dp_size=2) as first,
        Trainer(with_patience(config, 3.0), dp_rank=1, dp_size=2) as other,
    ):

        def save() -> None:
            until_room(write, blocked_on=first.tell_wait)
            met.append(first.agree(None, word="first"))

        saving = threading.Thread(target=save)
        agreeing = threading.Thread(target=lambda: met.append(other.agree(None, word="second")))
        saving.start()
        try:
            until_waits(client, keys, "trainer:actor", RoomOnDisk)
            agreeing.start()
            until_waits(client, keys, OTHER, RanksAbsent, purpose="end", blocked={"rank 0": "room_on_disk"})
            until(lambda: waited_s(client, keys, OTHER) > 4.0 or not agreeing.is_alive())
            assert agreeing.is_alive()
        finally:
            has_room.set()
            saving.join(PATIENCE_S)
            agreeing.join(PATIENCE_S)
        assert met == [["first", "second"]] * 2
