"""folder_first: false, and a trainer that stands still (SIGSTOP) at a point of it, is taken over, and goes on.

What it writes, sends and says then is nobody's: its number names its weights alone, and its successor is not disturbed.
"""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import yaml

from consumers.trainer import Trainer
from penstock.config import Config
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from tests.integration.parts import buffering
from tests.integration.test_send_first_kills import (
    HELD,
    RUN,
    all_end,
    crashes,
    make,
    none_is_lost,
    one_content_each,
    served,
)
from tests.integration.test_transfers import PATIENCE_S, checksums, load
from tests.integration.worker_play import admit, job, until, working

__all__ = ["make"]

pytestmark = pytest.mark.xdist_group("engine")


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("point", ["claimed", "sent"])
async def test_T1_a_trainer_that_comes_back_after_it_was_taken_over_changes_nothing(
    make: Callable[..., Config], client: redis.Redis, keys: Keys, models: list[Path], tmp_path: Path, point: str
) -> None:
    async with served() as (fake, by_version):
        config = make(fake.url)
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
        admit(client, keys, [job(0), *(job(index) for index in range(1, 4))])
        with buffering(config):
            async with working(config) as worker:
                engine = worker.services.engine
                command = [sys.executable, "-m", "tests.integration.send_first_trainer", str(path)]
                command += [str(models[1]), str(models[2]), point, "SIGSTOP"]
                zombie = await asyncio.create_subprocess_exec(*command)
                try:
                    await until(lambda: is_stopped(zombie.pid), limit_s=PATIENCE_S)
                    client.delete(keys.owner(RUN))
                    with Trainer(config) as successor:
                        back = {"run": config.run, "subscription": RUN, "batch": 0, "version": 1}
                        await asyncio.to_thread(successor.load_state_dict, back)
                        version = await asyncio.to_thread(successor.publish, load(models[3]))
                        await until(lambda: engine.version == version, limit_s=PATIENCE_S)
                        zombie.send_signal(signal.SIGCONT)
                        await asyncio.wait_for(zombie.wait(), PATIENCE_S)
                        assert engine.version == version
                        assert scripts.read_all_whole(client, keys, "policy") == {}
                        ((_, fields),) = client.xrevrange(keys.weights("policy"), count=1)
                        newest = Publication.from_bytes(fields[b"p"])
                        assert newest.version == version
                        assert checksums(Path(newest.path)) == checksums(models[3])
                        assert crashes(client, keys) == dict.fromkeys(HELD, 0)
                        fake.let_go()
                        await all_end(client, keys)
                        assert list(successor.weights_dir.glob(".*")) == []
                    assert worker.services.tally.engine_restarts == 0
                finally:
                    if zombie.returncode is None:
                        zombie.kill()
                        await zombie.wait()
        one_content_each(by_version)
        none_is_lost(client, keys)
