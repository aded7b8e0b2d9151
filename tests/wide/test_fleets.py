"""Fleets of real engines, and fleets on Ray."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import ModelConfig
from penstock.config.fleet import NodeConfig
from penstock.errors import ConfigError
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from tests.integration import play
from tests.integration.engine_fixtures import cpu_engine
from tests.integration.fake_engine import FakeEngine
from tests.integration.fleet_play import (
    Start,
    external,
    fakes,
    living,
    present,
    processes,
    records,
    shown,
    start,
)
from tests.integration.processes import descendants, open_pidfds, wait_gone
from tests.integration.worker_play import admit, all_in, job, make_config, publish, read_group, tended, until
from tests.missing import module

__all__ = ["fakes", "start"]

pytestmark = pytest.mark.timeout(600)

LONG = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_a_fleet_of_real_engines_grows_and_shrinks_under_load(
    client: redis.Redis, keys: Keys, publications: list[Publication], start: Start
) -> None:
    settings = cpu_engine().model_dump(mode="json", exclude_defaults=True)
    model = {"name": "policy", "router": {}, "server_groups": [{"name": "rollout", "num_engines": 1}]}
    fleet = start({"models": [model]}, engine=settings)
    publish(client, keys, publications[1])
    async with tended(client, keys):
        jobs = admit(client, keys, [job(i, sampling=LONG) for i in range(12)])
        await until(lambda: behind_router(client, keys) == ["serving"])
        say("scale", "2", keys, client)
        await until(lambda: behind_router(client, keys) == ["serving"] * 2)
        await until(all_in(client, keys, jobs, "ready"))

        # kill -9 of the process that keeps an engine: the engine ends with it, and is the first to leave.
        publish(client, keys, publications[2])
        await until(lambda: {one["version"] for one in records(client, keys)["policy.routed"]["engines"]} == {2})
        more = admit(client, keys, [job(i, sampling=LONG) for i in range(12, 36)])
        killed = processes(client, keys)["policy.rollout.0.engine"]["pid"]
        first = records(client, keys)["policy.routed"]["engines"][0]["url"]
        served_by = engine_at(first)
        gone = open_pidfds([killed, served_by, *descendants(served_by)])
        os.kill(killed, signal.SIGKILL)
        assert await asyncio.to_thread(wait_gone, gone, 30) == []
        await until(lambda: processes(client, keys)["policy.rollout.0.engine"]["starts"] == 2)
        await until(lambda: behind_router(client, keys) == ["joining", "serving"])
        say("scale", "1", keys, client)
        await until(lambda: behind_router(client, keys) == ["serving"])
        await until(lambda: "policy.rollout.0.engine" not in processes(client, keys))
        await until(all_in(client, keys, more, "ready"))
        await until(lambda: shown(client, keys)["groups"]["policy.rollout"]["engines"] == 1)
        versions = {v for name in jobs + more for _, p in read_group(client, keys, name) for v in p.versions.tolist()}
        assert versions == {-1, 1, 2}
        fleet.process.send_signal(signal.SIGTERM)
        await until(lambda: fleet.process.poll() is not None)
    assert fleet.process.returncode == 0, fleet.text()
    play.assert_conserved(client, keys)


def say(*arguments: Any) -> None:
    """``penstock fleet ...`` on the run of the test."""
    *words, keys, client = arguments
    port = client.connection_pool.connection_kwargs["port"]
    command = [sys.executable, "-m", "penstock.cli", "fleet", *words, "--run", keys.run]
    subprocess.run([*command, "--redis", f"redis://127.0.0.1:{port}/0"], check=True, stdout=subprocess.DEVNULL)


def engine_at(url: str) -> int:
    """Pid of the server that was started for an address."""
    port = url.rsplit(":", 1)[1]
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            # Its keeper has the same words behind its own.
            if words[1:3] == [b"-m", b"sglang.launch_server"] and words[words.index(b"--port") + 1] == port.encode():
                return int(entry.name)
    raise AssertionError(f"nothing was started for {url}")


def behind_router(client: redis.Redis, keys: Keys) -> list[str]:
    """States of the engines behind the router of the fleet's worker."""
    return [one["state"] for one in records(client, keys).get("policy.routed", {}).get("engines", [])]


async def test_ray_brings_a_killed_actor_back_and_the_queue_goes_on(
    client: redis.Redis, keys: Keys, publications: list[Publication], fakes: list[FakeEngine], start: Start
) -> None:
    module("ray")
    publish(client, keys, publications[1])
    fleet = start(external(fakes[0].url, launcher="ray"))
    async with tended(client, keys):
        await until(lambda: present(client, keys) == {"policy.rollout.0"})
        fakes[0].open.clear()
        jobs = admit(client, keys, [job(i) for i in range(4)])
        await until(all_in(client, keys, jobs, "leased"))
        worker = processes(client, keys)["policy.rollout.0"]["pid"]
        actor = parent_of(worker)
        niceness = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (worker, fleet.process.pid)]
        assert niceness[0] == niceness[1], "an engine is no background work, though Ray's workers are"
        gone = open_pidfds([worker])
        os.kill(actor, signal.SIGKILL)
        assert await asyncio.to_thread(wait_gone, gone, 30) == [], "a worker never outlives its actor"
        fakes[0].open.set()
        await until(all_in(client, keys, jobs, "ready"), fleet.text())
        await until(lambda: processes(client, keys)["policy.rollout.0"]["state"] == "running")
        assert processes(client, keys)["policy.rollout.0"]["pid"] not in (0, worker)
        alive = living(client, keys)
        fleet.process.send_signal(signal.SIGTERM)
        await until(lambda: fleet.process.poll() is not None)
    assert fleet.process.returncode == 0, fleet.text()
    assert not alive & set(client.hkeys(keys.workers)), "who drains takes its presence along"
    play.assert_conserved(client, keys)


def test_ray_says_what_is_missing_for_a_place(
    keys: Keys, model_config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = module("ray")
    from ray.util.placement_group import placement_group

    from penstock.workers.fleet.launcher import Slot
    from penstock.workers.fleet.ray_fleet import RayLauncher

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        others = placement_group([{"GPU": 1}])
        assert others.wait(30)
        monkeypatch.setattr("penstock.workers.fleet.ray_fleet.PLACEMENT_S", 1.0)
        fleet = external("http://127.0.0.1:9")
        config = make_config("redis://127.0.0.1:9", keys, model_config, tmp_path, fleet=fleet)
        launcher = RayLauncher(config)
        (node,) = launcher.hosts
        assert launcher.take("policy.r.1", 1, None, None) == [Slot(node, (0,))]
        launcher.release("policy.r.1")
        with pytest.raises(ConfigError, match=r"needs 2 GPUs, .* found none within 1 s: .* 1 of them are free"):
            launcher.take("policy.r.0", 2, node, None)
        first = launcher.ports("policy.r.0", node)
        assert launcher.ports("policy.r.1", node) > first
        launcher._range = (20_000, 20_005)
        launcher._ports.clear()
        with pytest.raises(ConfigError, match=r"fleet\.ports .* is too small"):
            launcher.ports("policy.r.2", node)
        launcher.close()
        nowhere = config.fleet.model_copy(update={"nodes": [NodeConfig(host="10.9.9.9")]})
        launcher = RayLauncher(config.model_copy(update={"fleet": nowhere}))
        with pytest.raises(ConfigError, match=r"fleet\.nodes names 10\.9\.9\.9, and Ray's nodes are"):
            launcher.take("policy.r.0", 1, None, None)
    finally:
        ray.shutdown()


async def test_ray_places_an_engine_over_two_hosts(
    keys: Keys, model_config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = module("ray")
    from ray.cluster_utils import Cluster

    from penstock.workers.fleet.launcher import Spec
    from penstock.workers.fleet.plan import Plan
    from penstock.workers.fleet.ray_fleet import RayLauncher

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = {"num_gpus": 2, "num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_gpus=2, num_cpus=1, node_ip_address="127.0.0.2")
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        group = {"name": "r", "num_gpus": 4, "num_gpus_per_engine": 4}
        fleet = {"models": [{"name": "policy", "server_groups": [group]}]}
        config = make_config("redis://127.0.0.1:9", keys, model_config, tmp_path, fleet=fleet)
        launcher = RayLauncher(config)
        laid_out = Plan(config, launcher)
        first, second = laid_out.engines
        assert {first.host, second.host} == set(launcher.hosts)
        assert first.url == f"http://{first.host}:{first.ports['http']}"
        where = ["--dist-init-addr", f"{first.host}:{first.ports['dist_init']}", "--nnodes", "2", "--node-rank", "1"]
        assert second.command[-6:] == tuple(where)
        with pytest.raises(ConfigError, match="cannot be divided over nodes of 2"):
            launcher.take("policy.r.1", 3, None, None)
        laid_out.remove(first.owner)
        on_second = [launcher.take(f"policy.r.{index}", 1, "127.0.0.2", None)[0].host for index in range(2)]
        assert on_second == ["127.0.0.2"] * 2

        # A server runs in the bundle of its engine, with a GPU of Ray's choice; elsewhere it would be unreachable.
        code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(1000)"
        command, log = (sys.executable, "-c", code), tmp_path / "engine.log"
        spec = Spec("e", "engine", "127.0.0.2", str(log), command, gpus=(0,), engine="policy.r.1")
        server = launcher.start(spec)
        await until(lambda: server.look().state == "running" and log.read_text().strip() in ("0", "1"))
        gone = open_pidfds([server.look().pid])
        server.kill()
        assert wait_gone(gone, 10) == []
        # A worker's engine gets the GPU of Ray's choice by inheritance.
        worker = launcher.start(replace(spec, command=(), arguments=("http.server", "0")))
        await until(lambda: worker.look().state == "running")
        assert visible_gpus_of(worker.look().pid) in ("0", "1")
        worker.kill()
        moved = launcher.start(replace(spec, host=cluster.head_node.node_ip_address))
        await until(lambda: "moved from" in moved.look().why)
        moved.kill()
        launcher.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def visible_gpus_of(pid: int) -> str:
    variables = (one.partition("=") for one in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return next((value for name, _, value in variables if name == "CUDA_VISIBLE_DEVICES"), "")
