"""What faults do to a real Redis: what is lost and what is not, and that it is whole again afterwards.

``CHAOS_REDIS_SERVER`` names another binary than the one that penstock would take.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import redis

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.workloads import Workload
from tests.chaos.nemesis import storage
from tests.chaos.nemesis.act import Ground
from tests.chaos.nemesis.battleground import battleground
from tests.chaos.nemesis.kinds import KINDS, chosen

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


class RedisAlone(Cluster):
    """A cluster of nothing but its Redis."""

    def _start_all(self) -> None:
        self._add_redis("redis")
        self.wait("Redis to answer", self.answers)


def settle(cluster: Cluster) -> None:
    cluster.wait("Redis to answer", lambda: cluster.ask(lambda client: client.ping()))


class Writer:
    """Writes 1, 2, 3, ... to keys of that name, and keeps the last that was acknowledged."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ended = threading.Event()
        self.last = 0
        self.refused: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Writer":
        self._thread.start()
        self._cluster.wait("the first writes", lambda: self.last > 10)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            while not self._ended.is_set():
                try:
                    self._cluster.client().set(number, bytes(100))
                    self.last = number
                    break
                except redis.RedisError as exc:
                    self.refused.add(type(exc).__name__)
                    time.sleep(0.01)

    def held(self) -> list[int]:
        """Numbers that Redis has."""
        return sorted(int(key) for key in self._cluster.client().scan_iter(count=10_000))


@pytest.fixture
def cluster(tmp_path: Path) -> RedisAlone:
    binary = os.environ.get("CHAOS_REDIS_SERVER")
    workload = Workload("redis alone", redis={"appendfsync": "always"})
    return RedisAlone(tmp_path, workload, redis_server=Path(binary) if binary else None)


@pytest.fixture
def ground(cluster: RedisAlone) -> Iterator[Ground]:
    with battleground(cluster, chosen(["redis"])) as ground:
        yield ground


def strike(ground: Ground, kind: str, **changed: object) -> None:
    facts = KINDS[kind].choose(ground, Random(1))
    assert facts is not None
    KINDS[kind].strike(ground, facts | changed)


def test_a_kill_each_second_loses_nothing_that_was_acknowledged(cluster: Cluster, ground: Ground) -> None:
    with Writer(cluster) as writer:
        strike(ground, "redis:kill_each_second", times=3, apart_s=0.6)
        last = writer.last
        cluster.wait("writes after it", lambda: writer.last > last)
    settle(cluster)

    assert writer.held()[: writer.last] == list(range(1, writer.last + 1))
    assert len(cluster.parts["redis"].exits) == 3


def test_a_cut_file_loses_the_last_writes_and_none_between(cluster: Cluster, ground: Ground) -> None:
    with Writer(cluster) as writer:
        strike(ground, "redis:aof_cut", window_s=0.5, share=0.3)
    settle(cluster)
    held = writer.held()

    lost = sorted(set(range(1, writer.last + 1)) - set(held))
    assert lost, "something was acknowledged and is gone"
    assert lost == list(range(lost[0], lost[-1] + 1)), "what is lost was written in one stretch"
    assert held[: lost[0] - 1] == list(range(1, lost[0]))


def test_a_full_server_refuses_and_has_room_again(
    cluster: Cluster, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cluster.client().config_get("maxmemory")

    with Writer(cluster) as writer:
        held = SimpleNamespace(
            sleep=lambda _: cluster.wait("a write to be refused", lambda: "OutOfMemoryError" in writer.refused)
        )
        monkeypatch.setattr(storage, "time", held)
        strike(ground, "redis:full", left_bytes=4096)
        last = writer.last
        cluster.wait("writes after it", lambda: writer.last > last)

    assert cluster.client().config_get("maxmemory") == before


@pytest.mark.parametrize("kind", ["redis:rewrite_killed", "redis:scripts_flushed", "redis:disconnected"])
def test_what_it_forgets_is_no_data(cluster: Cluster, ground: Ground, kind: str) -> None:
    with Writer(cluster) as writer:
        strike(ground, kind)
        last = writer.last
        cluster.wait("writes after it", lambda: writer.last > last)
    settle(cluster)

    assert writer.held()[: writer.last] == list(range(1, writer.last + 1))


def test_a_failover_to_a_replica_behind_loses_what_it_did_not_have(cluster: RedisAlone) -> None:
    with battleground(cluster, chosen(["sentinel"])) as ground:
        assert ground.failover is not None
        for before, after in (("redis", "replica"), ("replica", "redis")):
            assert ground.failover.primary == before
            client = cluster.client()
            client.set(f"had by {after}", 1)
            ground.failover._copies(after, before)
            port = cluster.redis_port
            ground.failover.fall_behind()
            client.set("late", 1)

            ground.failover.fail_over()

            assert ground.failover.primary == after
            assert cluster.redis_port != port
            assert cluster.client().exists(f"had by {after}")
            assert not cluster.client().exists("late")
        assert KINDS["kill:redis"].choose(ground, Random(1)) is None
