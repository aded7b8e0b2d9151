"""The transport of one's own that docs/workers.md shows, as it stands there; and the folder whenever it fails."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.workers.main import Worker
from tests.integration import worker_play
from tests.integration.docs_blocks import ROOT, blocks
from tests.integration.fake_engine import FakeEngine
from tests.integration.saved import saved
from tests.integration.test_transfers import PATIENCE_S, checksums, expected, load
from tests.integration.worker_play import presence, until, working

#: One process runs them all: senders of the page share one place, /dev/shm.
pytestmark = pytest.mark.xdist_group("engine")

Make = Callable[..., Config]
#: A trainer that is killed between its decision on the second version and its word to the worker.
KILLED = """
import os, signal, sys, time
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.sender import Transfer
from tests.integration.test_transfers import load
with Trainer(sys.argv[1]) as trainer:
    again = {"run": trainer.config.run, "subscription": trainer.name, "batch": 0}
    trainer.load_state_dict(again)
    trainer.publish(load(sys.argv[2]))
    while [worker.state for worker in trainer.workers()] != ["serving"]:
        time.sleep(0.05)
    trainer.load_state_dict(again)
    Transfer.tell = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    trainer.publish(load(sys.argv[3]))
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's module, importable."""
    (found,) = [one for one in blocks() if one.key.startswith("docs/workers.md: # ram_files.py")]
    (tmp_path / "ram_files.py").write_text(found.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ram_files", raising=False)
    import ram_files

    return ram_files


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path, page: ModuleType) -> Make:
    def make(url: str, **trainer: Any) -> Config:
        settings = {"transport": "ram_files:ToRam", "bucket_bytes": 30_000, "batch_groups": 1}
        return worker_play.make_config(
            redis_server.url, keys, model_config, tmp_path, engine={"url": url}, trainer=settings | trainer
        )

    return make


@pytest.fixture
def shared_memory() -> Iterator[Callable[[], list[Path]]]:
    """Folders that senders of the page left there; those of a killed one go with the test."""

    def found() -> list[Path]:
        return list(Path("/dev/shm").glob("weights-*"))

    yield found
    for folder in found():
        shutil.rmtree(folder)


@asynccontextmanager
async def playing(config: Config) -> AsyncIterator[tuple[Worker, Trainer, Callable[[Path], Awaitable[str]]]]:
    """A worker, a trainer, and what publishes a model and waits until it is served; why it went by disk, or ''."""
    with Trainer(config) as trainer:

        async def publish(model: Path) -> str:
            again = {"run": config.run, "subscription": trainer.name, "batch": 0}
            await asyncio.to_thread(trainer.load_state_dict, again)
            version = await asyncio.wait_for(asyncio.to_thread(trainer.publish, load(model)), PATIENCE_S)
            engine, valves = worker.services.engine, worker.services.valves
            await until(lambda: engine.version == version and not valves.cause, limit_s=PATIENCE_S)
            sent = trainer.publisher.last
            assert sent is not None
            return sent.failure if sent.workers else "nobody"

        async with working(config) as worker:
            yield worker, trainer, publish


class Read:
    """What a fake engine read: folder and checksums of its tensors, of each load."""

    def __init__(self, fake: FakeEngine) -> None:
        self.folders: list[str] = []
        self.tensors: list[dict[str, int]] = []
        #: Beginning of the folders that it cannot read.
        self.refused = "nothing"
        fake.read = self.read

    def read(self, folder: str) -> str:
        if folder.startswith(self.refused):
            return "that cannot be read"
        self.folders.append(folder)
        self.tensors.append(checksums(Path(folder)))
        return ""


async def test_T16_the_transport_of_the_page_brings_the_weights_or_the_folder_does(
    make: Make,
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    page: ModuleType,
    shared_memory: Callable[[], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeEngine().up() as fake, playing(make(fake.url, transfer_timeout_s=2.0)) as (worker, trainer, publish):
        read = Read(fake)
        await publish(models[1])
        await until(lambda: presence(client, keys)["state"] == "serving")

        def served(model: Path, *folders: str) -> None:
            """From the last of these folders, after the others were tried."""
            assert read.tensors[-1] == checksums(model)
            assert len(read.folders) == len(folders)
            assert all(map(str.startswith, read.folders, folders))
            assert fake.version == str(worker.services.engine.version)
            assert not shared_memory(), "the sender leaves nothing behind"
            read.folders.clear()

        folder, ram = str(trainer.weights_dir), "/dev/shm/weights-"
        read.folders.clear()
        fake.controls.clear()
        assert await publish(models[2]) == ""
        served(models[2], ram)
        assert fake.controls == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]

        read.refused = "/dev/shm"
        assert "did not take the weights: that cannot be read" in await publish(models[3])
        served(models[3], folder)
        read.refused = "nothing"

        with monkeypatch.context() as patch:
            patch.setattr("safetensors.torch.save_file", fails_at_the_second(OSError("No space left on device")))
            assert "No space left on device" in await publish(models[4])
        served(models[4], folder)

        for call, seed in (("prepare", 0), ("receive", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(page.FromRam, call, raises)
                assert "its receiver raised ZeroDivisionError" in await publish(models[seed])
            served(models[seed], folder)

        assert await publish(models[2]) == ""
        served(models[2], ram)
        assert worker.services.tally.engine_restarts == 0


def fails_at_the_second(failure: Exception) -> Callable[..., None]:
    calls = iter([None, failure])

    def save_file(*_: Any) -> None:
        if (raised := next(calls)) is not None:
            raise raised

    return save_file


async def raises(*_: Any) -> str:
    raise ZeroDivisionError


@pytest.mark.usefixtures("shared_memory")
async def test_T16_a_trainer_that_is_killed_in_the_middle_leaves_the_folder(
    make: Make, models: list[Path], tmp_path: Path
) -> None:
    async with FakeEngine().up() as fake:
        read, config = Read(fake), make(fake.url, transfer_timeout_s=1.0)
        path = saved(config, tmp_path / "run.yaml")
        async with working(config) as worker:
            command = [sys.executable, "-c", KILLED, str(path), str(models[1]), str(models[2])]
            environment = dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
            killed = await asyncio.create_subprocess_exec(*command, env=environment)
            assert await killed.wait() == -signal.SIGKILL
            await until(lambda: worker.services.engine.version == 2, limit_s=PATIENCE_S)
            assert read.folders[-1] == str(config.run_dir / "weights" / "v00000002")
            assert read.tensors[-1] == checksums(models[2])
            assert worker.services.tally.engine_restarts == 0


async def test_a_record_that_names_other_code_is_refused_and_said(
    make: Make, client: redis.Redis, keys: Keys, models: list[Path]
) -> None:
    async with FakeEngine().up() as fake, playing(make(fake.url)) as (_, _, publish):
        await publish(models[1])
        other = Publication(model="policy", version=9, transport="subprocess:Popen", path=str(models[2]))
        worker_play.publish(client, keys, other)
        await until(lambda: presence(client, keys)["state"] == "cannot load")
        why = presence(client, keys)["why"]
        assert "is by 'subprocess:Popen', and this worker's trainer.transport is ram_files:ToRam" in why
        assert fake.version == "1"


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_T16_a_real_engine_serves_what_the_transport_of_the_page_brings(
    make: Make, client: redis.Redis, keys: Keys, models: list[Path], engine_url: str
) -> None:
    prompt = [5, 6, 7, 8, 9, 20, 33]
    async with playing(make(engine_url, transfer_timeout_s=20.0)) as (worker, _, publish):
        await publish(models[1])
        await until(lambda: presence(client, keys)["state"] == "serving", limit_s=PATIENCE_S)
        for seed in (2, 3):
            assert await publish(models[seed]) == ""
            logprobs = (await worker.services.engine.score(prompt, 3)).logprobs
            assert max(abs(a - b) for a, b in zip(logprobs, expected(models[seed], prompt), strict=True)) < 1e-4
