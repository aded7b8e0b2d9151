"""Weights by checkpoint-engine: the servers, the sockets that engines are told, and the folder whenever it fails.

A stand-in takes the place of the package (tests/stand_ins), and fake engines that of SGLang: what is handed to both is
real, up to the memory of a GPU. tests/gpu/test_checkpoint_engine.py has the rest.
"""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights import copies
from penstock.consumers.weights.copies import Arena
from penstock.consumers.weights.shared_memory import SharedMemory
from penstock.consumers.weights.sources import as_source
from penstock.consumers.weights.transfer import Transfer
from penstock.consumers.weights.transports.checkpoint_engine import CheckpointEngine, ParameterServers
from penstock.records.codec import unpack
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from penstock.system.checksum import bytes_xxh3
from tests.integration import worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.held_disk import Disk, disk
from tests.integration.parts import buffering
from tests.integration.test_transfers import PATIENCE_S, checksums, load
from tests.integration.worker_play import admit, all_in, job, until, working
from tests.stand_ins.checkpoint_engine.ps import HOLD, receive

__all__ = ["disk"]

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
    monkeypatch.setenv(HOLD, str(tmp_path / "hold"))
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    monkeypatch.setattr(
        "penstock.consumers.weights.transports.checkpoint_engine.gpu_ids",
        lambda indices: [GPUS[index] for index in indices],
    )

    def make(url: str, *, bound: int = 1, **trainer: Any) -> Config:
        settings = {
            "transport": "checkpoint_engine",
            "device": "cuda",
            "parameter_server_gpus": [0, 1],
            "bucket_bytes": 60_000,  # two files or more
            "transfer_timeout_s": 30.0,
            "batch_groups": 1,
        }
        return worker_play.make_config(
            redis_server.url,
            keys,
            model_config,
            tmp_path,
            engine={"url": url},
            staleness={"bound": bound},
            trainer=settings | trainer,
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
            loaded = [lambda w=worker: (w.services.engine.version, w.services.valves.cause) for worker in workers]
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
        assert "the trainer aborted this update" in engines.failures[0]
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


class Held:
    """Servers wait in the next checkpoint that they register until ``let_go``."""

    def __init__(self, start: Path) -> None:
        self._fifos = [Path(f"{start}.{rank}") for rank, _ in enumerate(GPUS)]
        #: Ranks that went on.
        self.went: list[int] = []
        for fifo in self._fifos:
            os.mkfifo(fifo)

    def let_go(self) -> None:
        """Returns at once; each goes on when it is there."""
        threading.Thread(target=self._let_go, daemon=True).start()

    def _let_go(self) -> None:
        for rank, fifo in enumerate(self._fifos):
            with fifo.open("wb"):
                fifo.unlink()
                self.went.append(rank)


async def step(trainer: Trainer, model: Any) -> int:
    trainer.commit(await asyncio.to_thread(trainer.next, PATIENCE_S))
    return await asyncio.to_thread(trainer.publish, model)


@pytest.mark.timeout(600)
async def test_T16_parameter_servers_load_the_copy_while_the_disk_is_held_up(
    make: Make,
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    engines: Engines,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 50_000)
    monkeypatch.setattr("penstock.consumers.weights.publisher.READY_S", PATIENCE_S)
    one, two = engines.fakes
    settings = {"bound": 8, "transfer_timeout_s": 120.0}
    config = make(one.url, **settings)
    admit(client, keys, [job(index) for index in range(8)])
    with buffering(config), Trainer(config) as trainer, disk.opened_at_the_end():
        await asyncio.to_thread(trainer.publish, load(models[1]))
        async with working(config, "one") as first, working(make(two.url, **settings), "two") as second:

            async def serve(version: int) -> None:
                shown = [("serving", version)] * 2
                await until(lambda: [(worker.state, worker.version) for worker in trainer.workers()] == shown)

            def sent() -> str:
                """Why the last version went by disk, or ''."""
                last = trainer.publisher.last
                assert last is not None
                return last.failure if len(last.workers) == 2 else "nobody"

            await serve(1)
            disk.may_write.clear()
            model, folders = load(models[2]), [trainer.weights_dir / f"v0000000{version}" for version in range(5)]
            assert await step(trainer, model) == 2
            for parameter in model.parameters():
                parameter.data.zero_()
            assert sent() == ""
            assert [got["2"] for got in engines.got] == [checksums(models[2])] * 2
            await serve(2)

            # A server is killed that has its share: the version goes by its folder, when that is there.
            servers, loads = parameter_servers(trainer), [len(fake.loads) for fake in engines.fakes]
            loaded = servers.loaded

            def killed_then(timeout_s: float) -> None:
                loaded(timeout_s)
                os.kill(servers.pids[1], signal.SIGKILL)

            with monkeypatch.context() as patch:
                patch.setattr(servers, "loaded", killed_then)
                assert await step(trainer, load(models[3])) == 3
            assert "parameter server 0 of checkpoint-engine" in sent()
            assert [len(fake.loads) for fake in engines.fakes] == loads
            assert not folders[2].exists()
            disk.may_write.set()
            await serve(3)
            assert [checksums(folder) for folder in folders[2:4]] == [checksums(model) for model in models[2:4]]
            assert [len(fake.loads) for fake in engines.fakes] == [count + 1 for count in loads]

            # New servers; the next version goes through them again.
            assert await step(trainer, load(models[4])) == 4
            assert sent() == ""
            assert [got["4"] for got in engines.got] == [checksums(models[4])] * 2
            await asyncio.to_thread(trainer.session.publications.settle)
            assert checksums(folders[4]) == checksums(models[4])

            # Nobody takes a version that the servers still load: its memory waits for them.
            held, before_take = Held(tmp_path / "hold"), []
            servers, behind = parameter_servers(trainer), trainer.session.publications.behind
            leave, take = servers.leave_copies, behind.take
            with monkeypatch.context() as patch:
                patch.setattr(Transfer, "await_workers", lambda self, expected: None)
                assert await step(trainer, load(models[3])) == 5
                patch.undo()
                patch.setattr(servers, "leave_copies", lambda timeout_s: (held.let_go(), leave(timeout_s)))
                patch.setattr(behind, "take", lambda source: (before_take.extend(held.went), take(source))[1])
                await serve(5)
                assert await step(trainer, load(models[1])) == 6
            assert before_take == [0, 1]
            assert sent() == ""
            assert [got["6"] for got in engines.got] == [checksums(models[1])] * 2
            assert [worker.services.tally.engine_restarts for worker in (first, second)] == [0, 0]


@pytest.mark.timeout(300)
def test_memory_of_a_copy_is_not_taken_again_while_a_server_reads_it(
    make: Make, tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("http://127.0.0.1:1")
    held = Held(tmp_path / "hold")
    memory = SharedMemory()
    arena, servers = Arena(memory), ParameterServers(GPUS, 60_000, [memory])
    try:
        # Others were killed since the last version: new ones are started.
        servers.begin("0", tmp_path)
        for server in servers._servers:
            server.process.kill()
            server.process.wait(PATIENCE_S)
        servers.begin_copy("1", arena.take(as_source(load(models[1])), {}))
        held.let_go()
        servers.leave_copies(PATIENCE_S)
        assert held.went == [0, 1]
        processes = [server.process for server in servers._servers]
        assert len(processes) == 2

        # They have what was there, not what is there now.
        later = arena.take(as_source(load(models[2])), {})
        handles = servers.update(PATIENCE_S)
        got: list[dict[str, int]] = []

        def take(gpu: str) -> None:
            got.append({name: bytes_xxh3(data) for name, data in receive(handles[gpu]).items()})

        threads = [threading.Thread(target=take, args=(gpu,)) for gpu in GPUS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        servers.finish(PATIENCE_S)
        assert got == [checksums(models[1])] * 2

        # One that stands still is ended before the memory is taken.
        processes[1].send_signal(signal.SIGSTOP)
        servers.begin_copy("2", later)
        servers.leave_copies(0.1)
        assert servers.pids == []
        assert [process.wait(PATIENCE_S) for process in processes] == [-signal.SIGKILL] * 2
    finally:
        servers.abandon()
        memory.close()
