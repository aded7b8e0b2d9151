"""Two real buffer processes: when the leader dies or freezes the other one leads, and a leader that wakes is fenced."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from penstock.records.worker_causes import LeaseHeld
from penstock.redis.server import RedisServer
from tests.integration.parts import Player, admit, jobs_of, make_config, publish, step, until, until_waits
from tests.integration.test_buffer_kills import spawn


@contextlib.contextmanager
def two_buffers(
    config: Config, client: redis.Redis, keys: Keys, folder: Path, *point: str
) -> Iterator[tuple["subprocess.Popen[bytes]", "subprocess.Popen[bytes]"]]:
    """(leader, standby)"""
    processes = []
    try:
        for name in ("first", "second"):
            (folder / name).mkdir()
            processes.append(spawn(config, folder / name, *(point if name == "first" else ())))
            until(lambda: client.exists(keys.leader))
        until_waits(client, keys, "buffer:standby", LeaseHeld)
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def epoch(client: redis.Redis, keys: Keys) -> int:
    return int(client.hget(keys.leader, "epoch") or 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_I3_I5_a_standby_leads_when_the_leader_dies_or_freezes_and_one_that_wakes_changes_nothing(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, number: signal.Signals
) -> None:
    config = make_config(
        redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 8}, buffer={"lease_s": 1.0}
    )
    worker = Player(client, keys)
    with Trainer(config) as trainer, two_buffers(config, client, keys, tmp_path) as (leader, _):
        publish(trainer)
        admit(client, keys, 12)
        worker.work(4, 1)
        trained = jobs_of(step(trainer))
        before = epoch(client, keys)
        # In its way: a batch that was asked for, which the leader may be cutting just now.
        trainer.session.subscriber.ask(2)
        os.kill(leader.pid, number)
        worker.work(4, 1)
        trained += [*jobs_of(step(trainer)), *jobs_of(step(trainer))]
        worker.work(4, 1)
        trained += jobs_of(step(trainer))
        assert epoch(client, keys) == before + 1
        if number == signal.SIGSTOP:
            os.kill(leader.pid, signal.SIGCONT)
            until_waits(client, keys, "buffer:standby", LeaseHeld)
            assert epoch(client, keys) == before + 1, "it leads no more"
        trained += [*jobs_of(step(trainer)), *jobs_of(step(trainer))]
    assert sorted(trained) == sorted(f"d/0/{i}" for i in range(12)), "each exactly once"
    assert audit(client, keys).ok


def test_I5_a_leader_that_freezes_between_its_plan_and_its_cut_cuts_nothing_when_it_wakes(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """It stops itself right before it sends the cut of batch 1; by the time it goes on that batch is another's."""
    config = make_config(
        redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 8}, buffer={"lease_s": 1.0}
    )
    with Trainer(config) as trainer, two_buffers(config, client, keys, tmp_path, "freeze", "cut") as (leader, _):
        publish(trainer)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        trained = jobs_of(step(trainer))
        assert Path(f"/proc/{leader.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "frozen in its way"
        os.kill(leader.pid, signal.SIGCONT)
        until_waits(client, keys, "buffer:standby", LeaseHeld)
        trained += jobs_of(step(trainer))
        assert client.xlen(keys.batches("actor")) == 2
    assert sorted(trained) == [f"d/0/{i}" for i in range(4)]
    assert audit(client, keys).ok
