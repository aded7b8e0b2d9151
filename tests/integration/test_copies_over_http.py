"""folder_first: false and serving: who needs a version before its folder is there takes the trainer's copy over HTTP.

The disk writes nothing until the end of each test, so that what is loaded can have come in no other way.
"""

import asyncio
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.http import serving
from penstock.consumers.weights.http.serving import Serving
from penstock.protocol import scripts
from penstock.protocol.waits import read_waits
from penstock.records.causes import WeightsFetched
from penstock.records.keys import Keys
from penstock.records.publication import Copied
from penstock.redis.server import RedisServer
from penstock.weights.http.blobs import object_name
from penstock.weights.http.server import Rate
from penstock.workers.main import Worker
from penstock.workers.weights.fetch import nearby, swarm
from penstock.workers.weights.receive.arrival import Arrival
from tests.integration import worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering, kill
from tests.integration.sent_files import FromFiles
from tests.integration.test_missed_sends import Disk, step
from tests.integration.test_transfers import checksums, load
from tests.integration.worker_play import admit, job, until, working

pytestmark = pytest.mark.xdist_group("engine")

#: Jobs that are drawn all the while; the first one is done and makes the batch.
HELD = [f"d/0/{index}" for index in range(1, 4)]


class Gate:
    """Servers of this process send nothing until it is open."""

    def __init__(self) -> None:
        self.is_open, self.is_asked = threading.Event(), threading.Event()

    async def take(self, rate: Rate, num_bytes: int) -> None:
        self.is_asked.set()
        while True:
            if self.is_open.is_set():
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(Rate, "take", lambda rate, num_bytes: made.take(rate, num_bytes))
    yield made
    made.is_open.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.may_write.set()


class Loads(FakeEngine):
    """A fake engine that never ends ``HELD``, and what it loaded, by version."""

    def __init__(self) -> None:
        super().__init__()
        self.held = tuple(HELD)
        self.of: dict[str, list[dict[str, int]]] = defaultdict(list)
        self.read_as = self._note

    def _note(self, folder: str, version: str) -> None:
        self.of[version].append(checksums(Path(folder)))


class Rig:
    """What tests of this file are made of."""

    #: Of the trainer.
    disk: Disk

    def __init__(
        self, url: str, client: redis.Redis, keys: Keys, model: ModelConfig, folder: Path, models: list[Path]
    ) -> None:
        self.url, self.client, self.keys, self.folder = url, client, keys, folder
        self.models, self._model = models, model

    def config(self, engine: Loads, machine: str = "m", **trainer: Any) -> Config:
        settings = {"transport": "tests.integration.sent_files:ToFiles", "batch_groups": 1, "folder_first": False}
        return worker_play.make_config(
            self.url,
            self.keys,
            self._model,
            self.folder,
            engine={"url": engine.url},
            staleness={"mode": "async", "bound": 8},
            trainer=settings | {"transfer_timeout_s": 60.0} | trainer,
            serving={"enabled": True, "token": "t" * 32, "range_bytes": 64 * 1024, "folder": self.folder / machine},
        )

    @asynccontextmanager
    async def up(self, **trainer: Any) -> AsyncIterator[tuple[Trainer, Worker, Loads]]:
        """A trainer whose version 1 has its folder, a worker that has it, and a disk that writes no more."""
        admit(self.client, self.keys, [job(index) for index in range(8)])
        async with Loads().up() as engine:
            config = self.config(engine, **trainer)
            with buffering(config), Trainer(config) as publisher, self.disk.opened_at_the_end():
                await asyncio.to_thread(publisher.publish, load(self.models[1]))
                async with working(config) as worker:
                    await until(lambda: [(one.state, one.version) for one in publisher.workers()] == [("serving", 1)])
                    self.disk.may_write.clear()
                    yield publisher, worker, engine

    async def step(self, trainer: Trainer, version: int) -> None:
        """Publish the next version, which has the weights of the model of its number."""
        assert await step(trainer, self.models[version]) == version

    async def goes_on(self, successor: Trainer) -> int:
        """Another trainer goes on from version 1, and publishes the model of version 3; its version."""
        back = {"run": self.keys.run, "subscription": "actor", "batch": 0, "version": 1}
        await asyncio.to_thread(successor.load_state_dict, back)
        return await asyncio.to_thread(successor.publish, load(self.models[3]))

    def copied(self) -> Copied | None:
        data = self.client.get(self.keys.copied("policy"))
        return None if data is None else scripts.copied_of(data, "policy")

    def waits(self) -> list[WeightsFetched]:
        """The fetches that are waited for."""
        return [one.cause for one in read_waits(self.client, self.keys) if isinstance(one.cause, WeightsFetched)]

    def weights(self, version: int) -> dict[str, int]:
        return checksums(self.models[version])

    def has_no_folder(self) -> bool:
        """Whether none but that of version 1 was told of."""
        return scripts.read_all_whole(self.client, self.keys, "policy") == {}

    def charges(self) -> set[int]:
        """Of the jobs that are drawn."""
        return {int(self.client.hget(self.keys.group(name), "cr") or 0) for name in HELD}


@pytest.fixture
def rig(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    tmp_path: Path,
    models: list[Path],
    disk: Disk,
) -> Rig:
    made = Rig(redis_server.url, client, keys, model_config, tmp_path, models)
    made.disk = disk
    return made


def serving_of(trainer: Trainer) -> Serving:
    found = trainer.session.publications._serving
    assert found is not None
    return found


async def test_who_comes_late_takes_the_copy_and_the_folder_takes_its_place(rig: Rig) -> None:
    async with rig.up() as (trainer, _, _), Loads().up() as engine:
        await rig.step(trainer, 2)
        async with working(rig.config(engine, "other"), "late") as late:
            await until(lambda: late.updates.loaded is not None and late.updates.loaded.version == 2)
            assert engine.of["2"] == [rig.weights(2)]
            engine.version = "default"  # as after a restart
            late.services.lose_engine(1, "it died")
            await until(lambda: late.services.births == 2 and not late.services.engine_lost.is_set())
            assert (late.services.engine.version, len(engine.of["2"])) == (2, 2), "it is here"
            assert rig.has_no_folder()

            copied, offers = rig.copied(), serving_of(trainer)._offers
            assert copied is not None
            name = object_name(2, copied.index)
            offer = offers[name].offer
            rig.disk.may_write.set()
            await until(lambda: offers[name].needs == trainer.weights_dir / "v00000002")
            assert scripts.read_all_whole(rig.client, rig.keys, "policy")[2].index == copied.index, "the same bytes"
            assert offers[name].offer is offer, "which are not read again"
            assert len(engine.of["2"]) == 2, "nor loaded"


async def test_I9_an_engine_with_half_of_a_send_takes_the_copy_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(self: FromFiles, arrival: Arrival) -> str:
        await arrival.told()
        raise RuntimeError("the connection was cut")

    async with rig.up() as (trainer, worker, engine):
        await until(lambda: engine.num_running == 2 * len(HELD))
        monkeypatch.setattr(FromFiles, "receive", half)
        await rig.step(trainer, 2)
        assert trainer.publisher.last is not None
        assert trainer.publisher.last.failure
        await until(lambda: worker.services.engine.version == 2)
        assert engine.of["2"] == [rig.weights(2)]
        assert worker.services.tally.engine_restarts == 0
        assert rig.charges() == {0}
        assert rig.has_no_folder()


async def test_T1_a_trainer_that_is_taken_over_and_serves_on_has_no_second_copy(rig: Rig, gate: Gate) -> None:
    async with rig.up(transport="disk") as (trainer, worker, engine):
        await rig.step(trainer, 2)
        await until(gate.is_asked.is_set)
        kill(trainer, rig.client)
        rig.disk.may_write.set()
        with Trainer(rig.config(engine, transport="disk")) as successor:
            assert await rig.goes_on(successor) == 3
            gate.is_open.set()
            await until(lambda: worker.services.engine.version == 3)
            behind, control = trainer.session.publications.behind, trainer.session.subscriber.control
            assert not behind._announce_copy(control, Copied(2, "a" * 32)), "nobody is told of another one"
            assert engine.of["2"] in ([], [rig.weights(2)]), "nor was anything else loaded under this number"
            assert engine.of["3"] == [rig.weights(3)]
            assert rig.charges() == {0}
        assert worker.services.tally.engine_restarts == 0


async def test_T1_a_trainer_that_is_killed_while_its_copy_is_fetched_leaves_what_is_published_next(rig: Rig) -> None:
    admit(rig.client, rig.keys, [job(index) for index in range(8)])
    async with Loads().up() as engine:
        config = rig.config(engine, transport="disk")
        path = rig.folder / "run.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
        with buffering(config):
            async with working(config) as worker:
                told = [str(path), str(rig.models[1]), str(rig.models[2]), "copy fetched"]
                module = "tests.integration.send_first_trainer"
                killed = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *told)
                assert await killed.wait() == -signal.SIGKILL
                assert rig.copied() is not None
                assert rig.has_no_folder()
                rig.client.delete(rig.keys.owner("actor"))
                with Trainer(config) as successor:
                    assert await rig.goes_on(successor) == 3
                    await until(lambda: worker.services.engine.version == 3)
                assert engine.of == {"1": [rig.weights(1)], "3": [rig.weights(3)]}
                assert rig.charges() == {0}
                assert worker.services.tally.engine_restarts == 0


async def test_a_copy_whose_memory_is_taken_is_fetched_no_more(
    rig: Rig, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 is being written; 3 waits for that, and gives its memory to 4 while it is fetched."""
    monkeypatch.setattr(serving, "OFFER_EVERY_S", 0.1)
    async with rig.up(transport="disk") as (trainer, worker, engine):
        await rig.step(trainer, 2)
        await until(lambda: trainer.session.publications.behind.writer._writing is not None)
        await rig.step(trainer, 3)
        await until(lambda: any(one.is_copy and one.version == 3 for one in rig.waits()))
        shelf = serving_of(trainer).server.shelf
        (name,) = [name for name in shelf.names() if name.startswith("v00000003-")]
        await rig.step(trainer, 4)
        await until(lambda: name not in shelf.names())
        await until(lambda: rig.client.get(rig.keys.relay(f"policy:{name}")) is None)
        gate.is_open.set()
        await until(lambda: worker.services.engine.version == 4)
        assert engine.of.keys() == {"1", "4"}
        assert engine.of["4"] == [rig.weights(4)]
        assert rig.charges() == {0}


async def test_I9_who_is_killed_while_it_fetches_a_copy_has_a_successor_that_has_it(rig: Rig, gate: Gate) -> None:
    async with rig.up() as (trainer, _, _), Loads().up() as engine:
        await rig.step(trainer, 2)
        copied = await until(rig.copied)
        config = rig.config(engine, "other/fetched")
        told = [rig.url, rig.keys.run, str(rig.folder / "other"), "killed", "2", copied.index]
        killed = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.integration.fetch_parts", *told)
        await until(gate.is_asked.is_set)
        killed.kill()
        await killed.wait()
        for claim in rig.client.scan_iter(f"{rig.keys.prefix}relay_slot:*"):
            rig.client.delete(claim)  # what the dead one said runs out
        gate.is_open.set()
        async with working(config, "successor") as worker:
            await until(lambda: worker.services.engine.version == 2)
            assert engine.of["2"] == [rig.weights(2)]
            assert rig.has_no_folder()


async def test_I9_an_engine_that_dies_while_a_copy_is_fetched_comes_back_with_what_is_here(
    rig: Rig, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearby, "_is_seen", lambda publication: False)  # the trainer has a disk of its own
    monkeypatch.setattr(swarm, "GIVE_UP_S", float("inf"))
    gate.is_open.set()
    async with rig.up(transport="disk") as (trainer, worker, engine):
        gate.is_open.clear()
        gate.is_asked.clear()
        await rig.step(trainer, 2)
        await until(gate.is_asked.is_set)
        await until(lambda: any(one.is_copy and one.version == 2 and one.step != "offer" for one in rig.waits()))
        engine.version = "default"  # as after a restart
        worker.services.lose_engine(1, "it died")
        services = worker.services

        def is_back() -> bool:
            return services.births == 2 and not services.engine_lost.is_set()

        await until(lambda: is_back() or any(one.process == os.getpid() for one in rig.waits()))
        assert is_back(), "it waits for itself"
        assert (services.engine.version, engine.of.keys()) == (1, {"1"})
        gate.is_open.set()
        await until(lambda: services.engine.version == 2)
        assert engine.of["2"] == [rig.weights(2)]


async def test_a_copy_that_redis_forgot_is_told_of_again(rig: Rig) -> None:
    async with rig.up() as (trainer, _, _):
        await rig.step(trainer, 2)
        told = await until(rig.copied)
        rig.client.delete(rig.keys.copied("policy"))
        await until(lambda: trainer.session._keep_announced() or rig.copied() == told)
        rig.client.set(rig.keys.copied("policy"), Copied(1, "a" * 32).to_bytes())  # as after a failover
        await until(lambda: trainer.session._keep_announced() or rig.copied() == told)
