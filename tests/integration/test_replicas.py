"""T14: ranks and replicas in real processes train the same, say for whom they wait, and stop when they disagree."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError
from penstock.records.causes import RanksAbsent
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration.parts import PATIENCE_S, Player, admit, buffering, make_config, publish, until, until_waits

#: One process of a trainer: dp 1 x 2 replicas, or dp 2; it says in one line of JSON what it trained.
PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from penstock.consumers.trainer import Trainer
from penstock.config import Config
from penstock.errors import PenstockError
from penstock.payloads.store import PayloadStore

settings = json.loads(sys.argv[1])
rank, steps = settings["rank"], settings["steps"]
config = Config.model_validate(json.load(open(settings["config"])))
group = None
if settings["broadcast"]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method="file://" + settings["store"], rank=rank, world_size=2)
    group = dist.group.WORLD
asked, read = [], PayloadStore.read
PayloadStore.read = lambda store, names: (asked.append(len(names)), read(store, names))[1]
out = {"batches": [], "asked": asked}
try:
    with Trainer(config, replica=rank, num_replicas=2, replica_group=group, prefetch=settings["prefetch"]) as trainer:
        trainer.publish({"weight": torch.zeros(1)})
        for step in range(steps):
            batch = trainer.next(timeout=60)
            trainer.agree(batch, step=step + settings["ahead"])
            data = batch.arrays()
            out["batches"].append([batch.n, batch.digest, int(data["tokens"].sum()), len(batch)])
            trainer.commit(batch)
            trainer.publish({"weight": torch.ones(1)})
            if step + 1 == settings["stop_after"]:
                print("stops", flush=True)
                sys.stdin.read()
except PenstockError as exc:
    out["error"] = f"{type(exc).__name__}: {exc}"
print(json.dumps(out), flush=True)
if group:
    dist.destroy_process_group()  # left open, gloo aborts the interpreter's exit at times
"""


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    trainer = {"batch_groups": 3, "rank_timeout_s": 10.0}
    staleness = {"mode": "async", "bound": 20}
    return make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, trainer=trainer)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(
    started: list[subprocess.Popen[str]], config: Config, folder: Path, rank: int, **over: Any
) -> subprocess.Popen[str]:
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    settings = {
        "rank": rank, "steps": 2, "config": str(path), "store": str(folder / "store"), "broadcast": False,
        "prefetch": 0, "ahead": 0, "stop_after": 0, **over,
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process)
    return process


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def fill(client: redis.Redis, keys: Keys, groups: int) -> None:
    """So many groups under version 1, once that is published."""
    until(lambda: client.hget(keys.clock, "version:policy") == b"1", timeout_s=90)
    admit(client, keys, groups)
    Player(client, keys).work(groups, 1)


@pytest.mark.parametrize("prefetch", [1])
def test_T14_one_replica_reads_and_broadcasts_and_both_train_the_same(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path, started: list[Any], prefetch: int
) -> None:
    with buffering(config):
        replicas = [start(started, config, tmp_path, rank, broadcast=True, prefetch=prefetch) for rank in range(2)]
        fill(client, keys, 3 * (2 + prefetch))
        first, second = (told(process) for process in replicas)
        assert "error" not in first, first
        assert first["batches"] == second["batches"], "the whole share, on both"
        assert [batch[3] for batch in first["batches"]] == [6, 6]
        assert sum(first["asked"]) >= 12
        assert second["asked"] == []
    assert client.hget(keys.sub("actor"), "cursor") == b"2"


def test_T14_a_replica_that_is_killed_is_named_by_a_wait_and_an_error(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path, started: list[Any]
) -> None:
    with buffering(config):
        zero, one = (start(started, config, tmp_path, rank, stop_after=rank) for rank in range(2))
        fill(client, keys, 6)
        assert one.stdout.readline() == "stops\n"
        one.send_signal(signal.SIGKILL)
        one.wait()
        until_waits(
            client, keys, "trainer:actor", RanksAbsent, ranks=("rank 1 (dp_rank 0, replica 1)",), batch=2, step=1
        )
        found = told(zero)
        assert [batch[0] for batch in found["batches"]] == [1]
        assert "rank 1 (dp_rank 0, replica 1) to reach batch 2, step 1, dead or stuck" in found["error"]
    assert client.hget(keys.sub("actor"), "cursor") == b"1", "nothing was committed by half"


def test_T14_ranks_that_are_about_to_train_different_things_all_stop(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path, started: list[Any]
) -> None:
    with buffering(config):
        replicas = [start(started, config, tmp_path, rank, ahead=rank) for rank in range(2)]
        fill(client, keys, 6)
        for process in replicas:
            found = told(process)
            assert found["batches"] == []
            assert "about to train different batches (rank 0 (dp_rank 0, replica 0): batch 1" in found["error"]
            assert "step 0; rank 1 (dp_rank 0, replica 1): batch 1" in found["error"]


def test_T14_words_of_an_older_generation_are_not_heard(config: Config, client: redis.Redis, keys: Keys) -> None:
    """A rank that did not see the rewind stops; what it said before counts for nobody."""
    from penstock.errors import OwnershipLost, WaitTimeout

    wide = {"num_replicas": 2}
    with buffering(config), Trainer(config, replica=0, **wide) as zero, Trainer(config, replica=1, **wide) as one:
        publish(zero)
        admit(client, keys, 3)
        Player(client, keys).work(3, 1)
        old = [trainer.next(timeout=PATIENCE_S) for trainer in (zero, one)]
        with pytest.raises(WaitTimeout, match=r"rank 0 \(dp_rank 0, replica 0\) to reach batch 1"):
            one.agree(old[1], timeout=0.05)
        zero.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0})
        publish(zero)
        again = zero.next(timeout=PATIENCE_S)
        with pytest.raises(WaitTimeout, match=r"rank 1 \(dp_rank 0, replica 1\) to reach batch 1"):
            zero.agree(again, timeout=0.05)
        with pytest.raises(OwnershipLost):
            one.agree(old[1], timeout=5)


def test_a_group_that_does_not_fit_is_refused(config: Config, tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "alone"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="replica_group has 1 ranks with this process at 0, but this is re"):
            Trainer(config, replica=1, num_replicas=2, replica_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
