"""folder_first: false, and a trainer that stands still (SIGSTOP) at a point of it, is taken over, and goes on.

What it writes, sends and says then is nobody's: its number names its weights alone, and its successor is not disturbed.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.workers.main import Worker
from tests.chaos.cluster.forked import Forked
from tests.integration.send_first_rig import HELD, RUN, Fork, Make, Rig, Rigs, fork, fork_trainer, make, up, zygote
from tests.integration.test_transfers import PATIENCE_S, checksums, load
from tests.integration.worker_play import until, working

__all__ = ["fork", "fork_trainer", "make", "up", "zygote"]

pytestmark = pytest.mark.xdist_group("engine")


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


PUSH = "tests.integration.pushed_files:Push"


@asynccontextmanager
async def taken_over(
    rig: Rig, zombie: Forked, worker: Worker, client: redis.Redis, keys: Keys, model: Path
) -> AsyncIterator[int]:
    """The version that the successor of a trainer that stops has published; the other went on then, and ended."""
    engine = worker.services.engine
    await until(lambda: is_stopped(zombie.pid), limit_s=PATIENCE_S)
    client.delete(keys.owner(RUN))
    with Trainer(rig.config) as successor:
        back = {"run": rig.config.run, "subscription": RUN, "batch": 0, "version": 1}
        await asyncio.to_thread(successor.load_state_dict, back)
        version = await asyncio.to_thread(successor.publish, load(model))
        await until(lambda: engine.version == version, limit_s=PATIENCE_S)
        os.kill(zombie.pid, signal.SIGCONT)
        await until(lambda: zombie.poll() is not None, limit_s=PATIENCE_S)
        assert engine.version == version
        yield version
        assert rig.crashes() == dict.fromkeys(HELD, 0)
        await rig.all_end()
        assert list(successor.weights_dir.glob(".*")) == []
    assert worker.services.tally.engine_restarts == 0


@pytest.mark.parametrize("point", ["decided", "held"])
async def test_T1_a_trainer_that_comes_back_in_its_send_writes_into_no_engine(
    make: Make, up: Rigs, fork_trainer: Fork, client: redis.Redis, keys: Keys, models: list[Path], point: str
) -> None:
    """Its worker has given it up by then, and the engine has another version, with requests in it."""
    async with up() as rig:
        rig.config = make(rig.fake.url, transport=PUSH)
        async with working(rig.config) as worker:
            zombie = fork_trainer(rig.config, point, "SIGSTOP")
            async with taken_over(rig, zombie, worker, client, keys, models[3]) as version:
                assert rig.fake.version == str(version)
                assert set(rig.by_version) == {"1", str(version)}, "nothing of the zombie's was written"


@pytest.mark.parametrize("point", ["claimed", "sent"])
async def test_T1_a_trainer_that_comes_back_after_it_was_taken_over_changes_nothing(
    up: Rigs, fork_trainer: Fork, client: redis.Redis, keys: Keys, models: list[Path], point: str
) -> None:
    async with up() as rig, working(rig.config) as worker:
        zombie = fork_trainer(rig.config, point, "SIGSTOP")
        async with taken_over(rig, zombie, worker, client, keys, models[3]) as version:
            assert scripts.read_all_whole(client, keys, "policy") == {}
            ((_, fields),) = client.xrevrange(keys.weights("policy"), count=1)
            newest = Publication.from_bytes(fields[b"p"])
            assert newest.version == version
            assert checksums(Path(newest.path)) == checksums(models[3])
