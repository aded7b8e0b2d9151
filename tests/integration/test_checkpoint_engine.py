"""Weights by checkpoint-engine: the servers, the sockets that engines are told, and the folder whenever it fails.

A stand-in takes the place of the package (tests/stand_ins), and fake engines that of SGLang: what is handed to both is
real, up to the memory of a GPU. tests/gpu/test_checkpoint_engine.py has the rest.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from consumers.trainer import Trainer
from consumers.weights.transports.checkpoint_engine import CheckpointEngine, ParameterServers
from penstock.config import Config, ModelConfig
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import unpack
from penstock.redis.server import RedisServer
from penstock.system.checksum import bytes_xxh3
from tests.integration import worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.test_transfers import PATIENCE_S, checksums, load
from tests.integration.worker_play import admit, all_in, job, until, working
from tests.stand_ins.checkpoint_engine.ps import receive

GPUS = ["GPU-0f0f0f0f-1111", "GPU-0f0f0f0f-2222"]
STAND_INS = Path(__file__).parents[1] / "stand_ins"
Make = Callable[..., Config]


class Engines:
    """A fake engine on each GPU, and what each got at its socket, by version."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self.fakes = engines
        self.got: list[dict[str, dict[str, int]]] = [{} for _ in engines]
        self.failures: list[str] = []
        #: GPU of an engine that cannot take an update by itself.
        self.broken = ""
        #: Called when the first engine is at its socket.
        self.meanwhile: Callable[[], None] = lambda: None
        for index, fake in enumerate(engines):
            fake.take = lambda handles, index=index: self.take(index, handles)  # type: ignore[misc]

    def take(self, index: int, handles: dict[str, str]) -> str:
        gpu, version = GPUS[index], self.fakes[index].handles[-1]["weight_version"]
        if gpu == self.broken:
            return "IPC weight update failed: no module named checkpoint_engine"
        if index == 0:
            self.meanwhile()
        try:
            tensors = receive(handles[gpu])
        except RuntimeError as exc:
            self.failures.append(str(exc))
            return str(exc)
        self.got[index][version] = {name: bytes_xxh3(data) for name, data in tensors.items()}
        return ""


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        yield Engines([await stack.enter_async_context(FakeEngine().up()) for _ in GPUS])


@pytest.fixture
def make(
    redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Make:
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setattr(
        "consumers.weights.transports.checkpoint_engine.gpu_ids", lambda indices: [GPUS[index] for index in indices]
    )

    def make(url: str, **trainer: Any) -> Config:
        settings = {
            "transport": "checkpoint_engine",
            "device": "cuda",
            "parameter_server_gpus": [0, 1],
            "bucket_bytes": 60_000,  # two files or more
            "transfer_timeout_s": 30.0,
            "batch_groups": 1,
        }
        return worker_play.make_config(
            redis_server.url, keys, model_config, tmp_path, engine={"url": url}, trainer=settings | trainer
        )

    return make


def shown(client: redis.Redis, keys: Keys) -> list[str]:
    return [unpack(raw, "presence")["state"] for raw in client.hvals(keys.workers)]


async def publish(trainer: Trainer, folder: Path) -> int:
    again = {"run": trainer.config.run, "subscription": trainer.name, "batch": 0}
    await asyncio.to_thread(trainer.load_state_dict, again)
    return await asyncio.wait_for(asyncio.to_thread(trainer.publish, load(folder)), PATIENCE_S)


def parameter_servers(trainer: Trainer) -> ParameterServers:
    sender = trainer.publisher.sender
    assert isinstance(sender, CheckpointEngine)
    return sender.servers


@pytest.mark.timeout(600)
async def test_T16_parameter_servers_hand_the_weights_to_engines_or_the_folder_does(
    make: Make, client: redis.Redis, keys: Keys, models: list[Path], engines: Engines
) -> None:
    one, two = engines.fakes
    config = make(one.url, transfer_timeout_s=15.0)
    async with AsyncExitStack() as stack:
        trainer = stack.enter_context(Trainer(config))
        workers = [await stack.enter_async_context(working(make(one.url), "one"))]
        workers.append(await stack.enter_async_context(working(make(two.url), "two")))

        async def published(seed: int) -> str:
            """Publish; why it went by disk, or ''. Both engines serve it in the end."""
            version = await publish(trainer, models[seed])
            loaded = [lambda w=worker: (w.services.engine.version, w.services.valves.reason) for worker in workers]
            await until(lambda: [one() for one in loaded] == [(version, None)] * 2, limit_s=PATIENCE_S)
            sent = trainer.publisher.last
            assert sent is not None
            assert [fake.version for fake in engines.fakes] == [str(version)] * 2
            return sent.failure if len(sent.workers) == 2 else "nobody"

        # Before they serve nobody waits for them, but they may be quick enough.
        await published(1)
        await until(lambda: shown(client, keys) == ["serving"] * 2)
        jobs = admit(client, keys, [job(i) for i in range(4)])
        await until(all_in(client, keys, jobs, "ready"), limit_s=PATIENCE_S)

        # Both take all tensors of a version at the sockets of their GPUs, held still; the folder stays whole.
        for fake in engines.fakes:
            fake.controls.clear()
        assert await published(2) == ""
        pids = parameter_servers(trainer).pids
        for fake, got in zip(engines.fakes, engines.got, strict=True):
            assert got["2"] == checksums(models[2])
            body = fake.handles[-1]
            assert body == {"zmq_handles": body["zmq_handles"], "flush_cache": False, "weight_version": "2"}
            assert list(body["zmq_handles"]) == GPUS
            assert fake.controls == ["/pause_generation", "/update_weights_from_ipc", "/continue_generation"]
        folder = trainer.weights_dir / "v00000002"
        assert len(list(folder.glob("*.safetensors"))) > 1, "each server has a share"
        assert checksums(folder) == checksums(models[2])

        # One engine refuses: the other, which waits in the middle of the update, is let go, and loads the folder.
        engines.broken = GPUS[1]
        loads = [len(fake.loads) for fake in engines.fakes]
        assert "no module named checkpoint_engine" in await published(3)
        assert [len(fake.loads) for fake in engines.fakes] == [count + 1 for count in loads]
        assert len(engines.failures) == 1
        assert "the trainer gave this update up" in engines.failures[0]
        engines.broken = ""

        # New servers; the next version goes through them again, whatever became of the last.
        assert await published(4) == ""
        assert not set(parameter_servers(trainer).pids) & set(pids)
        assert [got["4"] for got in engines.got] == [checksums(models[4])] * 2

        # A server that hangs, with both engines at their sockets: time-out, then the folder.
        engines.meanwhile = lambda: os.kill(parameter_servers(trainer).pids[1], signal.SIGSTOP)
        trainer.publisher.config = make(one.url, transfer_timeout_s=4.0)
        assert "did not answer in time" in await published(5)
        assert len(engines.failures) == 3
        assert all(worker.services.tally.engine_restarts == 0 for worker in workers)
