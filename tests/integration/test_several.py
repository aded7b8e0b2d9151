"""Several trainers on one buffer, each a real process: joined, stalled, killed (-9) and rewound while groups come.

actor + critic   two roles on one manifest, values and returns written back
judge            a copy: sees every group beside them, and drives nothing
left, right      a pool: divide the groups among them
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import several_trainer
from tests.integration.parts import Player, admit, buffering, make_config, until

#: Name of a process -> its subscription, role, what differs in the subscription, checkpoint every so many batches.
SEATS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "actor": ("actor", "actor", {}, 2),
    "critic": ("actor", "critic", {}, 1),
    "judge": ("judge", "", {"driving": False}, 1),
    "left": ("left", "", {"driving": False, "share": "pool"}, 1),
    "right": ("right", "", {"driving": False, "share": "pool"}, 1),
}
LIMIT_S = 400.0


class Fleet:
    """The trainers' processes; one that ends with ``AGAIN`` is started again, as a supervisor would."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        sub, role, subscription, every = SEATS[name]
        settings = {
            "config": self.config.model_dump(mode="json"), "name": sub, "role": role, "subscription": subscription,
            "roles": ["actor", "critic"] if role else [], "every": every, "folder": str(self.folder / name),
            "stop": str(self.folder / "stop"),
        }  # fmt: skip
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(settings))
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.several_trainer", str(path)],
            stderr=log,
        )

    def kill(self, name: str) -> None:
        process = self.processes[name]
        assert process.poll() is None, f"{name} ended before it could be killed: {self.log(name)}"
        process.kill()
        process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-2000:]

    def supervise(self) -> None:
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code == several_trainer.AGAIN:
                self.start(name)
            elif code is not None and code != -signal.SIGKILL:
                assert code == 0, f"{name} ended with {code}: {self.log(name)}"

    def seen(self, name: str) -> list[str]:
        """Jobs in the newest checkpoint of a process."""
        for _, path in several_trainer.checkpoints(self.folder / name):
            try:
                return list(json.loads(path.read_text())["jobs"])
            except FileNotFoundError:
                continue
        return []

    def until_seen(self, count: int, *names: str) -> None:
        """Wait until each of ``names`` has ``count`` groups in a checkpoint."""

        def there() -> bool:
            self.supervise()
            return all(len(self.seen(name)) >= count for name in names)

        until(there, f"{count} groups in the checkpoints of {names}", LIMIT_S)

    def stop(self) -> None:
        (self.folder / "stop").touch()
        for name, process in self.processes.items():
            assert process.wait(LIMIT_S) == 0, f"{name}: {self.log(name)}"


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    staleness = {"mode": "async", "bound": 100}
    return make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, trainer={"batch_groups": 2})


@pytest.fixture
def fleet(config: Config, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(config, tmp_path)
    yield fleet
    for process in fleet.processes.values():
        process.kill()
        process.wait()


def test_I5_each_group_reaches_each_subscription_as_often_as_asked_whatever_happens_to_the_trainers(
    config: Config, client: redis.Redis, keys: Keys, fleet: Fleet
) -> None:
    worker = Player(client, keys)

    def feed(groups: int) -> None:
        admit(client, keys, groups)
        worker.work(groups, worker.clock)

    with buffering(config):
        for name in SEATS:
            fleet.start(name)
        until(lambda: client.hget(keys.clock, "version:policy") == b"1", "the first version", LIMIT_S)
        until(lambda: all(client.exists(keys.sub(name)) for name in ("judge", "left", "right")), "all joined", LIMIT_S)

        feed(8)
        fleet.until_seen(8, "actor", "critic", "judge")
        fleet.kill("critic")  # a role dies: the other waits for it by name, and goes on with it
        feed(4)
        until(lambda: (client.hget(keys.sub("actor"), "cut") or b"0") >= b"5", "the actor to take the next batch")
        fleet.start("critic")
        fleet.until_seen(12, "actor", "critic", "judge")

        os.kill(fleet.processes["judge"].pid, signal.SIGSTOP)  # stalled: nobody waits for it
        fleet.kill("left")
        feed(4)
        fleet.until_seen(16, "actor", "critic")
        assert len(fleet.seen("judge")) == 12
        os.kill(fleet.processes["judge"].pid, signal.SIGCONT)
        fleet.start("left")

        feed(2)  # batch 9, which the actor's next checkpoint would hold
        until(lambda: client.hget(keys.sub("actor"), "cursor") == b"9", "batch 9", LIMIT_S)
        fleet.until_seen(18, "critic")
        until(lambda: worker.clock == 10, "its publication", LIMIT_S)
        fleet.kill("actor")  # it rewinds to batch 8, and the critic, which has batch 9 in a file, with it
        fleet.start("actor")
        until(lambda: worker.clock > 10, "the first publication after the rewind", LIMIT_S)
        feed(6)
        fleet.until_seen(24, "actor", "critic", "judge")
        until(lambda: len(fleet.seen("left")) + len(fleet.seen("right")) >= 24, "the pool", LIMIT_S)
        fleet.stop()
        until(lambda: client.hget(keys.counters, "retired") == b"24", "every group is retired", LIMIT_S)

    every = [f"d/0/{i}" for i in range(24)]
    assert sorted(fleet.seen("actor")) == sorted(every)
    assert fleet.seen("critic") == fleet.seen("actor"), "one manifest: the same groups in the same order"
    assert sorted(fleet.seen("judge")) == sorted(every)
    assert sorted(fleet.seen("left") + fleet.seen("right")) == sorted(every), "divided, none twice"
    assert "Restore role critic from a checkpoint" in fleet.log("critic")
    assert "went back to batch 8" in fleet.log("critic")
    assert audit(client, keys).ok
    assert not list(client.scan_iter(match=keys.of("column:*")))
