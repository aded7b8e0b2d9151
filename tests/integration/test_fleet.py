"""``penstock fleet up`` as a process: workers are kept up, added and drained, on this machine and on Ray.

The engines are fakes that run already, so that what is tried is the fleet: real processes that really die.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.metrics.gpu_load import numbered
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.system.stop import Stop
from penstock.workers.fleet import main as fleet_main
from penstock.workers.fleet.launcher import ProcessState, Spec, Status
from penstock.workers.fleet.main import Fleet
from penstock.workers.fleet.nodes import Node, Nodes
from penstock.workers.fleet.state import write_capacity, write_wanted
from penstock.workers.router.members import read_members
from tests.integration import play
from tests.integration.engine_fixtures import ENGINE_PYTHON
from tests.integration.fake_engine import FakeEngine
from tests.integration.fleet_play import (
    Start,
    answers,
    external,
    fakes,
    living,
    present,
    processes,
    records,
    shown,
    start,
)
from tests.integration.parts import served
from tests.integration.processes import open_pidfds, wait_gone
from tests.integration.worker_play import admit, all_in, job, make_config, publish, tended, until

__all__ = ["fakes", "start"]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.engine
async def test_I4_workers_of_a_local_fleet_are_kept_up_and_end_with_it(
    client: redis.Redis, keys: Keys, publications: list[Publication], fakes: list[FakeEngine], start: Start
) -> None:
    publish(client, keys, publications[1])
    urls = [fake.url for fake in fakes]
    models = [*external(*urls)["models"], {"name": "reward", "server_groups": [{"urls": urls}]}]
    fleet = start({"models": models}, engine={"python": ENGINE_PYTHON}, metrics={"port": 0})
    names = {"policy.rollout.0", "policy.rollout.1"}
    async with tended(client, keys):
        await until(lambda: present(client, keys) == names, fleet.text())
        jobs = admit(client, keys, [job(i) for i in range(8)])
        await until(all_in(client, keys, jobs, "ready"))
        assert {one["url"] for one in records(client, keys).values()} == {fake.url for fake in fakes}

        # A frozen model has one address.
        await until(lambda: "reward" in shown(client, keys)["endpoints"])
        await answers(shown(client, keys)["endpoints"]["reward"])

        # kill -9 of a worker that holds jobs: it comes back, and they are done.
        for fake in fakes:
            fake.open.clear()
        held = admit(client, keys, [job(i) for i in range(8, 12)])
        await until(all_in(client, keys, held, "leased"))
        pid = processes(client, keys)["policy.rollout.0"]["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: processes(client, keys)["policy.rollout.0"]["pid"] not in (0, pid))
        for fake in fakes:
            fake.open.set()
        await until(all_in(client, keys, held, "ready"))
        assert processes(client, keys)["policy.rollout.0"]["starts"] == 2
        assert "signal SIGKILL" in processes(client, keys)["policy.rollout.0"]["why"]
        told = {'penstock_fleet_process_starts_total{process="policy.rollout.0"} 2.0',
                'penstock_fleet_engines{group="policy.rollout"} 2.0'}  # fmt: skip
        await until(lambda: told <= served(client, keys, "fleet"), fleet.text())

        # SIGTERM: workers drain, nothing is left.
        alive = living(client, keys)
        pids = [one["pid"] for one in processes(client, keys).values()]
        gone = open_pidfds(pids)
        fleet.process.send_signal(signal.SIGTERM)
        await until(lambda: fleet.process.poll() is not None)
    assert fleet.process.returncode == 0, fleet.text()
    assert await asyncio.to_thread(wait_gone, gone, 10) == []
    assert not alive & set(client.hkeys(keys.workers)), "who drains takes its presence along"
    assert client.hget(keys.fleet, "state") is None
    play.assert_conserved(client, keys)


class Noted:
    """A process that is not there; what it is told is noted."""

    def __init__(self, name: str, notes: "Notes") -> None:
        self.name, self.notes = name, notes
        notes.states[name] = "running"

    def look(self) -> Status:
        return Status(ProcessState(self.notes.states[self.name]))

    def bounce(self) -> None:
        self.notes.told.append(("bounce", self.name))

    def terminate(self) -> None:
        self.notes.told.append(("terminate", self.name))

    def kill(self) -> None:
        del self.notes.states[self.name]
        self.notes.told.append(("kill", self.name))


class Notes(Nodes):
    """A launcher that starts nothing."""

    def __init__(self, *nodes: Node) -> None:
        super().__init__(list(nodes), (20000, 29999))
        self.states: dict[str, str] = {}
        self.told: list[tuple[str, str]] = []

    def start(self, spec: Spec) -> Noted:
        return Noted(spec.name, self)

    def close(self) -> None:
        pass


@pytest.fixture
def make_fleet(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Any:
    def make(launcher: Notes, *groups: dict[str, Any], autoscale: Any = None, **model: Any) -> Fleet:
        fleet = {"models": [{"name": "policy", "server_groups": list(groups)} | model], "autoscale": autoscale}
        config = make_config(redis_server.url, keys, model_config, tmp_path, fleet=fleet)
        made = Fleet(config, launcher, Stop())
        made.start_waiting()
        made.keep_up()
        return made

    return make


def show_worker(client: redis.Redis, keys: Keys, name: str, version: int, urls: dict[str, int] | None = None) -> None:
    engines = [{"url": url, "version": v} for url, v in (urls or {}).items()]
    client.hset(keys.workers, f"{name}.x", pack({"name": f"{name}.x", "version": version, "engines": engines}))


def test_those_with_the_oldest_weights_leave_first(client: redis.Redis, keys: Keys, make_fleet: Any) -> None:
    notes = Notes(Node("127.0.0.1", numbered(3)))
    fleet = make_fleet(notes, {"name": "r", "num_gpus": 3})
    for name, version in (("policy.r.0", 5), ("policy.r.1", 3), ("policy.r.2", 5)):
        show_worker(client, keys, name, version)
    fleet.scale("policy.r", 2)
    assert ("terminate", "policy.r.1") in notes.told
    assert "policy.r.1" in notes.states, "it drains"
    fleet.scale("policy.r", 2)
    assert [told for told in notes.told if told[0] == "terminate"] == [("terminate", "policy.r.1")]
    notes.states["policy.r.1"] = "ended"
    fleet.keep_up()
    assert ("kill", "policy.r.1") in notes.told
    assert [worker.name for worker in fleet.plan.workers] == ["policy.r.0", "policy.r.2"]

    # What it had is given to who comes next; more than there is, is refused by name.
    write_wanted(client, keys, "policy.r", 4)
    fleet.follow_and_show()
    fleet.start_waiting()
    assert {worker.name: worker.gpus for worker in fleet.plan.workers}["policy.r.1"] == (1,)
    assert "what is free is: 127.0.0.1 0 of 3" in shown(client, keys)["groups"]["policy.r"]["refused"]


def test_an_engine_behind_a_router_leaves_it_before_it_ends(client: redis.Redis, keys: Keys, make_fleet: Any) -> None:
    notes = Notes(Node("127.0.0.1", numbered(2)))
    fleet = make_fleet(notes, {"name": "r", "num_gpus": 2}, router={})
    first, second = (engine.url for engine in fleet.plan.engines)
    fleet.show_members()
    show_worker(client, keys, "policy.routed", 4, {first: 3, second: 4})
    fleet.scale("policy.r", 1)
    members = read_members(client, keys, "policy.routed")
    assert members is not None
    assert [member.url for member in members] == [second]
    fleet.keep_up()
    assert "policy.r.0.engine" in notes.states
    show_worker(client, keys, "policy.routed", 4, {second: 4})
    fleet.keep_up()
    assert "policy.r.0.engine" not in notes.states


def test_processes_of_one_engine_die_together(make_fleet: Any) -> None:
    notes = Notes(Node("10.0.0.1", numbered(2)), Node("10.0.0.2", numbered(2)))
    fleet = make_fleet(notes, {"name": "r", "num_gpus": 4, "num_gpus_per_engine": 4})
    assert sorted(notes.states) == ["policy.r.0", "policy.r.0.n0.engine", "policy.r.0.n1.engine"]
    notes.states["policy.r.0.n1.engine"] = "restarting"
    fleet.keep_up()
    assert notes.told == [("bounce", "policy.r.0.n0.engine")]


def test_the_autoscaler_sizes_the_group_until_somebody_else_does(
    client: redis.Redis, keys: Keys, make_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.fleet.autoscaler.UP_AFTER_S", 1e-6)
    notes = Notes(Node("127.0.0.1", numbered(3)))
    limits = {"min_workers": 1, "max_workers": 2}
    groups = [{"name": "r", "num_gpus": 1}]
    write_capacity(client, keys, 640.0)  # as an earlier fleet saw it
    fleet = make_fleet(notes, *groups, autoscale=limits)
    admit(client, keys, [job(i) for i in range(100)])
    fleet.follow_and_show()
    fleet.follow_and_show()
    fleet.start_waiting()
    assert sorted(notes.states) == ["policy.r.0", "policy.r.1"]
    known = shown(client, keys)["autoscale"]
    assert known.pop("terms")["backlog"] >= 2
    changes = [(one["before"], one["engines"], one["binds"]) for one in known.pop("decisions")]
    assert changes == [(1, 2, "max")], "told once, with its reason"
    assert known == {"group": "policy.r", "wanted": 2, "binds": "max", "engines": 2, "capacity_tokens_per_s": 640.0}
    write_wanted(client, keys, "policy.r", 3)
    fleet.follow_and_show()
    fleet.follow_and_show()
    assert len(fleet.plan.workers) == 3
    with pytest.raises(ConfigError, match=r"fleet\.autoscale scales one regular group of policy, and there are 2"):
        make_fleet(Notes(Node("h", numbered(2))), {"num_gpus": 1}, {"num_gpus": 1}, autoscale=limits)


def test_encoders_answer_before_anyone_is_told_of_them(make_fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answering: set[str] = set()
    monkeypatch.setattr(fleet_main, "answers", answering.__contains__)
    notes = Notes(Node("127.0.0.1", numbered(3)))
    groups = [{"name": name, "worker_type": name, "num_gpus": 1} for name in ("encoder", "prefill", "decode")]
    fleet = make_fleet(notes, *groups)
    assert sorted(notes.states) == ["policy.encoder.0.engine"]
    states = {one["name"]: one["state"] for one in fleet.record()["processes"]}
    assert states["policy.prefill.0.engine"] == "waiting for encoders"
    answering.update(engine.url for engine in fleet.plan.engines if engine.worker_type == "encoder")
    fleet.start_waiting()
    assert {f"policy.{name}.0.engine" for name in ("encoder", "prefill", "decode")} <= set(notes.states)
