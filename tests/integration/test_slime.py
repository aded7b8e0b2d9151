"""RolloutManager where slime has its own: what ``generate`` returns, and the rest of the facade that a loop calls.

With ``SLIME_SOURCE=/path/to/slime`` slime's own functions are run on the same output (tests/adapters/slime_ranks.py).
"""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from penstock import payloads
from penstock.config import Config
from penstock.consumers.adapters.rollout_manager import Box, RolloutManager
from penstock.errors import ConfigError, EngineError, WaitTimeout
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.payloads import sides
from penstock.protocol import scripts
from penstock.protocol.scripts import RawLease, run
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.adapters.slime_contract import check_share
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import Player, admit, buffering, make_config, make_sample
from tests.integration.worker_play import IDS, job, presence, publish, until, working
from tests.integration.worker_play import admit as admit_jobs

Make = Callable[..., Config]

#: Groups of a batch, answers of each, and micro-batches of all ranks.
GROUPS, N, MICRO_BATCHES = 3, 4, 16
#: Longest run of slime's ranks: each imports slime for seconds.
PROCESS_S = 240


# --- what generate returns ----------------------------------------------------------------------------------------


@pytest.fixture
def fed(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Iterator[Config]:
    trainer = {"batch_groups": GROUPS}
    config = make_config(redis_server.url, keys.run, tmp_path, trainer=trainer, rollout={"n": N})
    with buffering(config):
        yield config


def answer(client: redis.Redis, keys: Keys, lost: set[str]) -> None:
    """Samples of uneven length with routing of 256 experts and a teacher's logprobs; some payloads are lost."""
    rng = np.random.default_rng(5)
    worker = Player(client, keys)
    for held in worker.lease(GROUPS, version=worker.clock):
        records = []
        for k in range(N):
            sample = make_sample(Job.from_bytes(held.body), k, [worker.clock], int(rng.integers(1, 9)))
            sample.tokens[0] = 1 + int(held.job.rpartition("/")[2])
            length = len(sample.tokens)
            beside = {
                "routed_experts": rng.integers(0, 256, (length - 1, 2, 2)).astype(np.uint8),
                "teacher_logprobs": rng.normal(-1, 0.1, length - sample.prompt_length).astype(np.float32),
            }
            data, (meta,) = payloads.pack([sample], token=held.token, server="control")
            meta.sides = show(client, keys, held)
            for name, array in beside.items():
                packed = sides.pack(name, array, sample.id)
                meta.sides.append([name, len(packed), payloads.checksum_of(packed)])
                client.set(keys.side(sample.id, held.token, name), packed, ex=600)
            if sample.id not in lost:
                client.set(keys.payload(sample.id, held.token), data, nx=True, ex=600)
            records.append((k, worker.clock, meta.to_bytes()))
        assert run(client, scripts.commit(keys, held.job, held.token, records)).outcome == "ready"


def show(client: redis.Redis, keys: Keys, held: RawLease) -> list[Any]:
    """Give the group of a lease its images, which it shares; their entries in a sample's record. The last has none.

    Group i has i + 1 of them, and their patches hold i + 1, as the first token of its prompt.
    """
    number = int(held.job.rpartition("/")[2]) + 1
    if number == GROUPS:
        return []
    pixels = np.full((4 * number, 6), number, np.float32)
    grid = np.array([[1, 2, 2]] * number, np.int64)
    entries = []
    for name, array in ((PIXEL_VALUES, pixels), (IMAGE_GRID, grid)):
        one = sides.packed(name, array, f"{held.job}/0")
        entries.append(one.entry(name))
        client.set(sides.key_of(keys, held.job, 0, held.token, entries[-1]), one.data, ex=600)
    return entries


def rollout(config: Config, client: redis.Redis, keys: Keys, dp_size: int, lost: set[str]) -> list[Box]:
    """A rollout of three groups in micro-batches of one sample or two, as many as pipeline stages want."""
    with RolloutManager(config, max_samples=2) as manager:
        stages = {"vpp_size": 2, "microbatch_group_size_per_vp_stage": MICRO_BATCHES // dp_size}
        manager.set_train_parallel_config({"dp_size": dp_size, **stages})
        manager.load()
        manager.publish({"weight": torch.zeros(1)}, -1)
        admit(client, keys, GROUPS, n=N)
        answer(client, keys, lost)
        return manager.generate(0)


LOST = pytest.mark.parametrize("lost", [set(), {"d/0/0/1", "d/0/2/0"}], ids=["whole", "lost"])
RANKS = pytest.mark.parametrize("dp_size", [1, 2, 4])


@LOST
@RANKS
def test_T10_what_generate_returns_keeps_the_contract_with_slime(
    fed: Config, client: redis.Redis, keys: Keys, dp_size: int, lost: set[str]
) -> None:
    boxes = rollout(fed, client, keys, dp_size, lost)
    assert len(boxes) == dp_size
    bearing, silent = [], 0
    for box in boxes:
        data = box.inner
        check_share(data, GROUPS * N)
        assert {"rollout_routed_experts", "teacher_log_probs"} <= data.keys(), "on every rank alike"
        for tokens, images in zip(data["tokens"], data["multimodal_train_inputs"], strict=True):
            number = int(tokens[0])
            shapes = None if images is None else {key: tuple(tensor.shape) for key, tensor in images.items()}
            wanted = {PIXEL_VALUES: (4 * number, 6), IMAGE_GRID: (number, 3)}
            assert shapes == (wanted if number < GROUPS else None)
        for origin, place, mask in zip(box.lineage, data["partition"], data["loss_masks"], strict=True):
            assert (origin["job"], origin["k"]) == (f"d/0/{place // N}", place % N)
            if mask.any():
                bearing.append(f"{origin['job']}/{origin['k']}")
            silent += not mask.any()
    assert sorted(bearing) == sorted({f"d/0/{i}/{k}" for i in range(GROUPS) for k in range(N)} - lost)
    assert silent == MICRO_BATCHES - GROUPS * N + len(lost), "fillers, and samples whose payload is lost"


@LOST
@RANKS
@pytest.mark.skipif("SLIME_SOURCE" not in os.environ, reason="SLIME_SOURCE names no checkout of slime, and CI has none")
def test_T10_slimes_own_functions_take_what_generate_returns(
    fed: Config, client: redis.Redis, keys: Keys, tmp_path: Path, dp_size: int, lost: set[str]
) -> None:
    """process_rollout_data, the step to tensors on a device, routing replay and log_rollout_data, a process a rank."""
    boxes = rollout(fed, client, keys, dp_size, lost)
    shares, out = tmp_path / "shares.pt", tmp_path / "out.json"
    torch.save([box.inner | {"groups": GROUPS, "n": N} for box in boxes], shares)
    command = [sys.executable, "-m", "tests.adapters.slime_ranks", os.environ["SLIME_SOURCE"], str(shares), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(out.read_text())
    rewards = [float(k % 2) for _ in range(GROUPS) for k in range(N)]
    assert found["rollout"]["rollout/raw_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert found["rollout"]["rollout/rollout_log_probs"] == pytest.approx(-0.5 * (1 - len(lost) / (GROUPS * N)))
    assert found["passrate"]["passrate/pass@1"] == pytest.approx(0.5)


# --- engines ------------------------------------------------------------------------------------------------------


async def serving(client: redis.Redis, keys: Keys) -> None:
    await until(lambda: (presence(client, keys) or {}).get("state") == "serving", "for the worker to serve")


async def test_offload_and_onload_move_the_engines_memory_and_its_weights(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    fake.saves_memory = True
    made = config()
    with RolloutManager(made) as manager:
        async with working(made):
            await serving(client, keys)
            fake.controls.clear()
            await asyncio.to_thread(manager.offload)
            assert presence(client, keys)["offloaded"] == ["cuda_graph", "kv_cache", "weights"]
            assert "/release_memory_occupation" in fake.controls
            await asyncio.to_thread(manager.onload_weights)
            assert presence(client, keys)["offloaded"] == ["cuda_graph", "kv_cache"]
            publish(client, keys, publications[2])
            await asyncio.to_thread(manager.onload_kv)
            assert presence(client, keys)["offloaded"] == []
            await until(lambda: fake.version == "2", "for what was published meanwhile")
            assert fake.controls.count("/resume_memory_occupation") == 2
            await asyncio.to_thread(manager.offload)
            await asyncio.to_thread(manager.onload, ["weights"])
            assert presence(client, keys)["offloaded"] == ["cuda_graph", "kv_cache"]
            await asyncio.to_thread(manager.onload)
            assert presence(client, keys)["offloaded"] == []


async def test_a_pause_of_health_checks_reaches_every_worker_and_ends(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    made = config(engine={"health_interval_s": 0.05, "health_timeout_s": 0.5, "health_failures": 1})
    with RolloutManager(made) as manager:
        async with working(made) as worker:
            await serving(client, keys)
            await asyncio.to_thread(manager.health_monitoring_pause)
            assert presence(client, keys)["unwatched"]
            fake.is_away = True
            # Two looks of the worker at itself take twenty times as long as a check that would have failed.
            for _ in range(2):
                shown = presence(client, keys)["at"]
                await until(lambda shown=shown: presence(client, keys)["at"] > shown)
            assert not worker.services.engine_lost.is_set()
            await asyncio.to_thread(manager.health_monitoring_resume)
            assert not presence(client, keys)["unwatched"]
            await until(lambda: presence(client, keys)["state"] == "engine away", "for a check that counts")
            fake.is_away = False
            await serving(client, keys)


async def test_recover_starts_a_lost_engine_without_its_wait_and_returns_when_it_serves(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a worker waits by itself is longer than any test.
    patience = {"restart_wait_s": 3600.0, "crash_loop_failures": 2}
    made = config(engine=patience | {"health_interval_s": 0.1})
    with RolloutManager(made) as manager:
        async with working(made):
            await serving(client, keys)
            fake.behaviour = dict.fromkeys((0, *IDS.values()), "die")
            admit_jobs(client, keys, [job(0)])
            await until(lambda: presence(client, keys)["state"] == "crash loop", "for it to die of everything")
            manager.recover()  # before the first rollout there is nothing to recover
            monkeypatch.setattr(manager, "_next", 1)
            with pytest.raises(WaitTimeout, match=r"The engine of worker w\..* did not come back in 2 s"):
                await asyncio.to_thread(manager.recover, 2.0)
            fake.behaviour.clear()
            await asyncio.to_thread(manager.recover)
            assert presence(client, keys)["state"] == "serving"


async def test_weights_are_checked_by_the_engines_themselves(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    made = config()
    with RolloutManager(made) as manager:
        assert manager.check_weights("snapshot") == [], "nobody is there"
        async with working(made):
            await serving(client, keys)
            [told] = await asyncio.to_thread(manager.check_weights, "snapshot")
            assert (told["worker"], told["version"], fake.snapshot) == (presence(client, keys)["name"], 1, "mine")
            assert (await asyncio.to_thread(manager.check_weights, "compare"))[0]["success"]
            [told] = await asyncio.to_thread(manager.check_weights, "checksum")
            assert told["per_engine_checksum"] == "mine"
            fake.weights = "other"
            with pytest.raises(
                EngineError, match=r"worker w\..* at http.* did not compare its weights: .*tensors differ"
            ):
                await asyncio.to_thread(manager.check_weights, "compare")
            with pytest.raises(ConfigError, match=r"Worker w\..* serves version 1: after reset_tensors"):
                await asyncio.to_thread(manager.check_weights, "reset_tensors")
            with pytest.raises(ConfigError, match="no check of weights 'erase'"):
                await asyncio.to_thread(manager.check_weights, "erase")
    assert fake.weights == "other"


async def test_one_address_has_the_metrics_of_all_engines(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    def scrape(url: str) -> str:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())

    made = config(metrics={"port": 0})
    with RolloutManager(made) as manager:
        address = manager.get_metrics_router_addr()
        assert address == manager.get_metrics_router_addr()
        assert address.startswith("http://127.0.0.1:")
        async with working(made):
            await serving(client, keys)
            name = presence(client, keys)["name"]
            text = await asyncio.to_thread(scrape, f"{address}/engine_metrics")
        assert f'sglang:runs{{model="m",source="{fake.url}",worker="{name}"}} 0.0' in text
        assert "penstock_worker_slots{" in text, "and what the worker measures"
        assert scrape(f"{address}/engine_metrics").strip() == "", "nobody is there any more"


def test_generate_puts_shares_into_rays_store_where_the_process_has_joined_ray(
    fed: Config, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Any] = []

    class Ray:
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def put(value: Any) -> str:
            stored.append(value)
            return f"reference {len(stored)}"

    monkeypatch.setitem(sys.modules, "ray", Ray)
    boxes = rollout(fed, client, keys, 2, set())
    assert [box.inner for box in boxes] == ["reference 1", "reference 2"]
    assert all(len(box.lineage) == len(share["tokens"]) for box, share in zip(boxes, stored, strict=True))
