"""folder_first: false, and a worker that missed a send while the disk is slower than a step: it takes the next one."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.consumers.trainer import Trainer
from penstock.records.keys import Keys
from penstock.records.worker_causes import WeightsUnwritten
from tests.integration import worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.held_disk import Disk, disk
from tests.integration.parts import buffering
from tests.integration.send_first_rig import Make, make
from tests.integration.sent_files import ToFiles
from tests.integration.test_transfers import PATIENCE_S, load
from tests.integration.worker_play import admit, job, until, working

__all__ = ["disk", "make"]

pytestmark = pytest.mark.xdist_group("engine")


async def step(trainer: Trainer, model: Path) -> int:
    trainer.commit(await asyncio.to_thread(trainer.next, PATIENCE_S))
    return await asyncio.to_thread(trainer.publish, load(model))


async def test_a_worker_that_missed_a_send_takes_the_next_one(
    make: Make,
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeEngine().up() as fake:
        config = make(fake.url)
        admit(client, keys, [job(index) for index in range(4)])
        with buffering(config), Trainer(config) as trainer, disk.opened_at_the_end():
            await asyncio.to_thread(trainer.publish, load(models[1]))
            async with working(config) as worker:
                has = worker.services.engine
                await until(lambda: [(one.state, one.version) for one in trainer.workers()] == [("serving", 1)])
                disk.may_write.clear()
                with monkeypatch.context() as broken:
                    broken.setattr(ToFiles, "send", lambda self, transfer: 1 / 0)
                    assert await step(trainer, models[2]) == 2
                assert trainer.publisher.last is not None
                assert trainer.publisher.last.failure
                await until(lambda: worker_play.is_blocked(client, keys, "weights", WeightsUnwritten, version=2))
                assert has.version == 1
                assert await step(trainer, models[3]) == 3
                assert trainer.publisher.last.workers == (worker.services.worker,), "it is sent to, not left behind"
                await until(lambda: has.version == 3, limit_s=10)


async def test_a_worker_that_came_late_takes_the_next_send(
    make: Make, client: redis.Redis, keys: Keys, models: list[Path], disk: Disk
) -> None:
    async with FakeEngine().up() as fake, FakeEngine().up() as other:
        config = make(fake.url)
        admit(client, keys, [job(index) for index in range(4)])
        with buffering(config), Trainer(config) as trainer, disk.opened_at_the_end():
            await asyncio.to_thread(trainer.publish, load(models[1]))
            async with working(config) as worker:
                await until(lambda: [(one.state, one.version) for one in trainer.workers()] == [("serving", 1)])
                disk.may_write.clear()
                assert await step(trainer, models[2]) == 2
                await until(lambda: worker.services.engine.version == 2)
                async with working(make(other.url), "late") as late:
                    has = late.services.engine
                    await until(lambda: sorted(one.version for one in trainer.workers()) == [1, 2])
                    await until(lambda: worker_play.is_blocked(client, keys, "weights", WeightsUnwritten, version=2))
                    assert await step(trainer, models[3]) == 3
                    await until(lambda: has.version == 3, limit_s=10)


async def test_what_is_whole_is_loaded_where_the_newest_is_not(
    make: Make, client: redis.Redis, keys: Keys, models: list[Path], disk: Disk
) -> None:
    """Nothing is sent, and the disk is slower than a step: who waits for folders is not left with the first one."""
    async with FakeEngine().up() as fake:
        config = make(fake.url, transport="disk")
        admit(client, keys, [job(index) for index in range(4)])
        with buffering(config), Trainer(config) as trainer, disk.opened_at_the_end():
            await asyncio.to_thread(trainer.publish, load(models[1]))
            async with working(config) as worker:
                has = worker.services.engine
                await until(lambda: has.version == 1)
                disk.may_write.clear()
                assert await step(trainer, models[2]) == 2
                writer = trainer.publisher.writer
                await until(lambda: writer._writing is not None)
                assert await step(trainer, models[3]) == 3
                await until(lambda: worker_play.is_blocked(client, keys, "weights", WeightsUnwritten, version=3))
                real, held = writer._announce, threading.Event()

                def tell(control: Any, told: Any) -> None:
                    real(control, told)
                    if told.version == 2:
                        disk.may_write.clear()
                    held.set()

                writer._announce = tell  # type: ignore[method-assign]
                disk.may_write.set()
                await until(held.is_set)
                await until(lambda: has.version == 2, limit_s=10)
                disk.may_write.set()
                await until(lambda: has.version == 3, limit_s=10)
