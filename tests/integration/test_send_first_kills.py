"""folder_first: false, and a kill at any instant of it: of the trainer, of the worker, of the engine.

Whatever is killed where: no number names two sets of weights, engines come to what is published, no job is lost, and
none is charged for a transfer.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.records.keys import Keys
from tests.integration.saved import saved
from tests.integration.send_first_rig import (
    HELD,
    RUN,
    Fork,
    Rigs,
    fork,
    fork_trainer,
    make,
    up,
    zygote,
)
from tests.integration.send_first_trainer import POINTS, at
from tests.integration.sent_files import SENT
from tests.integration.test_transfers import PATIENCE_S, checksums, load
from tests.integration.worker_play import until, working

__all__ = ["fork", "fork_trainer", "make", "up", "zygote"]

pytestmark = pytest.mark.xdist_group("engine")


def versions(client: redis.Redis, keys: Keys) -> list[int]:
    return [int(entry.split(b"-")[0]) for entry, _ in client.xrange(keys.weights("policy"))]


@pytest.mark.parametrize("point", POINTS)
async def test_T1_I9_a_trainer_that_is_killed_leaves_what_the_next_one_goes_on_from(
    up: Rigs, fork_trainer: Fork, client: redis.Redis, keys: Keys, models: list[Path], point: str
) -> None:
    async with up() as rig, working(rig.config) as worker:
        engine = worker.services.engine
        killed = fork_trainer(rig.config, point)
        await until(lambda: killed.poll() is not None, limit_s=PATIENCE_S)
        assert killed.returncode == -signal.SIGKILL
        is_announced = point not in ("copied", "claimed")
        assert versions(client, keys) == ([1, 2] if is_announced else [1])
        assert sorted(scripts.read_all_whole(client, keys, "policy")) == ([2] if point == "whole" else [])
        assert engine.version <= (2 if is_announced else 1), "no engine has a version above the clock"
        client.delete(keys.owner(RUN))
        with Trainer(rig.config) as successor:
            back = {"run": rig.config.run, "subscription": RUN, "batch": 0, "version": 1}
            await asyncio.to_thread(successor.load_state_dict, back)
            version = await asyncio.to_thread(successor.publish, load(models[3]))
            assert version == (2 if point == "copied" else 3), "no number is used twice"
            await until(lambda: engine.version == version, limit_s=PATIENCE_S)
            assert rig.by_version[str(version)][-1] == checksums(models[3])
            assert rig.crashes() == dict.fromkeys(HELD, 0)
            await rig.all_end()
        assert worker.services.tally.engine_restarts == 0
        assert versions(client, keys)[-1] == version


class Stop:
    """A trainer's thread that stands still at a point until it may go on."""

    def __init__(self, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        owner, name, _ = POINTS[point]
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
        at(point, self._stand)

    def _stand(self) -> None:
        self.is_there.set()
        assert self.may_go_on.wait(PATIENCE_S)


@contextlib.contextmanager
def standing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Stop]]:
    """Has the trainer stand at a point; no more when the block ends, so that a test that fails ends, too."""
    stops: list[Stop] = []

    def stand(point: str) -> Stop:
        stops.append(Stop(point, monkeypatch))
        return stops[-1]

    try:
        yield stand
    finally:
        for stop in stops:
            stop.may_go_on.set()


async def publish_two(
    trainer: Trainer, models: list[Path], arm: Callable[[], Stop]
) -> tuple[Stop, "asyncio.Task[int]"]:
    """Version 1, then version 2 on its way, once the worker serves and ``arm`` was called."""
    await asyncio.to_thread(trainer.publish, load(models[1]))
    batch = await asyncio.to_thread(trainer.next, PATIENCE_S)
    trainer.commit(batch)
    await until(lambda: [(one.state, one.version) for one in trainer.workers()] == [("serving", 1)])
    return arm(), asyncio.create_task(asyncio.to_thread(trainer.publish, load(models[2])))


#: Where the trainer stands when an engine or a worker is killed.
STANDS = ["copied", "announced", "half sent", "sent", "folder written, nobody told", "whole"]


@pytest.mark.parametrize("point", STANDS)
async def test_T1_I9_an_engine_that_is_killed_comes_back_with_a_whole_version(
    up: Rigs, models: list[Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    async with up() as rig:
        fake = rig.fake
        with Trainer(rig.config) as trainer, standing(monkeypatch) as stand:
            async with working(rig.config) as worker:
                engine = worker.services.engine

                def arm() -> Stop:
                    if point == "half sent":
                        fake.dies_loading = SENT
                    return stand(point)

                stop, publishing = await publish_two(trainer, models, arm)
                await until(lambda: fake.num_running == 2 * len(HELD))
                await until(stop.is_there.is_set)
                if point == "half sent":
                    await until(lambda: fake.deaths == 1)
                else:
                    fake.die()
                await until(lambda: worker.services.births == 2 and not worker.services.engine_lost.is_set())
                is_whole = point in ("folder written, nobody told", "whole")
                assert engine.version in ((1, 2) if is_whole else (1,)), "what is whole, and nothing else"
                assert rig.by_version["1"][-1] == checksums(models[1])
                if point == "half sent":
                    assert rig.crashes() == dict.fromkeys(HELD, 0), "a transfer is nobody's fault"
                stop.may_go_on.set()
                assert await asyncio.wait_for(publishing, PATIENCE_S) == 2
                await until(lambda: engine.version == 2, limit_s=PATIENCE_S)
                assert rig.by_version["2"][-1] == checksums(models[2])
                assert max(rig.crashes().values()) <= 1
                await rig.all_end()


# A worker that is killed before or after these is killed as any other; tests/chaos does.
@pytest.mark.parametrize("point", STANDS[1:-1])
async def test_T1_I9_a_worker_that_is_killed_has_a_successor_with_a_whole_version(
    up: Rigs, fork: Fork, models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str
) -> None:
    async with up() as rig:
        with Trainer(rig.config) as trainer, standing(monkeypatch) as stand:
            path = saved(rig.config, tmp_path / "first.yaml")
            first = fork("penstock.cli", "worker", "--config", path, "--name", "first")
            stop, publishing = await publish_two(trainer, models, lambda: stand(point))
            await until(stop.is_there.is_set)
            first.kill()
            await until(lambda: first.poll() is not None)
            stop.may_go_on.set()
            assert await asyncio.wait_for(publishing, PATIENCE_S) == 2
            async with working(rig.config, "second") as worker:
                await until(lambda: worker.services.engine.version == 2, limit_s=PATIENCE_S)
                assert rig.by_version["2"][-1] == checksums(models[2])
                await rig.all_end()
                assert max(rig.crashes().values()) <= 1, "as of any worker that is killed"
