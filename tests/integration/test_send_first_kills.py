"""folder_first: false, and a kill at any instant of it: of the trainer, of the worker, of the engine.

Whatever is killed where: no number names two sets of weights, engines come to what is published, no job is lost, and
none is charged for a transfer.
"""

import asyncio
import contextlib
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from consumers.trainer import Trainer
from penstock.config import Config, ModelConfig
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering
from tests.integration.send_first_trainer import POINTS, at
from tests.integration.sent_files import SENT
from tests.integration.test_transfers import PATIENCE_S, checksums, load
from tests.integration.worker_play import admit, job, until, working
from tests.integration.worker_process import Start, start

__all__ = ["start"]

pytestmark = pytest.mark.xdist_group("engine")

#: Jobs that are drawn when version 2 is published; the first is done by then.
HELD = [f"d/0/{index}" for index in range(1, 4)]
RUN = "actor"


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Callable[..., Config]:
    def make(url: str, **trainer: Any) -> Config:
        settings = {
            "transport": "tests.integration.sent_files:ToFiles",
            "batch_groups": 1,
            "folder_first": False,
            "transfer_timeout_s": 3.0,
        }
        return worker_play.make_config(
            redis_server.url,
            keys,
            model_config,
            tmp_path,
            engine={"url": url},
            staleness={"mode": "async", "bound": 4},
            trainer=settings | trainer,
        )

    return make


@asynccontextmanager
async def served() -> AsyncIterator[tuple[FakeEngine, dict[str, list[dict[str, int]]]]]:
    """A fake engine that holds answers of ``HELD``; and what it loaded, by version."""
    async with FakeEngine().up() as fake:
        fake.held = tuple(HELD)
        by_version: dict[str, list[dict[str, int]]] = defaultdict(list)

        def read(folder: str, version: str) -> str:
            by_version[version].append(checksums(Path(folder)))
            return ""

        fake.read_as = read
        yield fake, by_version


def crashes(client: redis.Redis, keys: Keys) -> dict[str, int]:
    """Charges of the held jobs."""
    return {name: int(client.hget(keys.group(name), "cr") or 0) for name in HELD}


def none_is_lost(client: redis.Redis, keys: Keys) -> None:
    report = audit(client, keys)
    assert report.ok, report.differences


def versions(client: redis.Redis, keys: Keys) -> list[int]:
    return [int(entry.split(b"-")[0]) for entry, _ in client.xrange(keys.weights("policy"))]


async def all_end(client: redis.Redis, keys: Keys) -> None:
    """Every held job is drawn to its end, or was given up as one of an abandoned version."""

    def ended() -> bool:
        return all(client.hget(keys.group(name), "st") in (b"ready", b"retiring", None) for name in HELD)

    await until(ended, "for the jobs to end", limit_s=PATIENCE_S)


def one_content_each(by_version: dict[str, list[dict[str, int]]]) -> None:
    for version, found in by_version.items():
        assert all(one == found[0] for one in found), f"T1: version {version} names two sets of weights"


@pytest.mark.parametrize("point", POINTS)
async def test_T1_I9_a_trainer_that_is_killed_leaves_what_the_next_one_goes_on_from(
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
                killed = await asyncio.create_subprocess_exec(*command, str(models[1]), str(models[2]), point)
                assert await asyncio.wait_for(killed.wait(), PATIENCE_S) == -signal.SIGKILL
                is_announced = point not in ("copied", "claimed")
                assert versions(client, keys) == ([1, 2] if is_announced else [1])
                assert sorted(scripts.read_all_whole(client, keys, "policy")) == ([2] if point == "whole" else [])
                assert engine.version <= (2 if is_announced else 1), "no engine has a version above the clock"
                client.delete(keys.owner(RUN))
                with Trainer(config) as successor:
                    back = {"run": config.run, "subscription": RUN, "batch": 0, "version": 1}
                    await asyncio.to_thread(successor.load_state_dict, back)
                    version = await asyncio.to_thread(successor.publish, load(models[3]))
                    assert version == (2 if point == "copied" else 3), "no number is used twice"
                    await until(lambda: engine.version == version, limit_s=PATIENCE_S)
                    assert by_version[str(version)][-1] == checksums(models[3])
                    assert crashes(client, keys) == dict.fromkeys(HELD, 0)
                    fake.let_go()
                    await all_end(client, keys)
                assert worker.services.tally.engine_restarts == 0
        assert versions(client, keys)[-1] == version
        one_content_each(by_version)
        none_is_lost(client, keys)


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


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Stop]]:
    made: list[Stop] = []

    def stand(point: str) -> Stop:
        made.append(Stop(point, monkeypatch))
        return made[-1]

    yield stand
    for stop in made:
        stop.may_go_on.set()


@contextlib.contextmanager
def let_go(stops: list[Stop]) -> Iterator[list[Stop]]:
    """A test that fails ends: the trainer's threads stand no more."""
    try:
        yield stops
    finally:
        for stop in stops:
            stop.may_go_on.set()


async def publish_two(trainer: Trainer, models: list[Path], arm: Callable[[], None]) -> "asyncio.Task[int]":
    """Version 1, then version 2 on its way, once the worker serves and ``arm`` was called."""
    await asyncio.to_thread(trainer.publish, load(models[1]))
    batch = await asyncio.to_thread(trainer.next, PATIENCE_S)
    trainer.commit(batch)
    await until(lambda: [(one.state, one.version) for one in trainer.workers()] == [("serving", 1)])
    arm()
    return asyncio.create_task(asyncio.to_thread(trainer.publish, load(models[2])))


#: Where the trainer stands when an engine or a worker is killed.
STANDS = ["copied", "announced", "half sent", "sent", "folder written, nobody told", "whole"]


@pytest.mark.parametrize("point", STANDS)
async def test_T1_I9_an_engine_that_is_killed_comes_back_with_a_whole_version(
    make: Callable[..., Config],
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    stand: Callable[[str], Stop],
    point: str,
) -> None:
    async with served() as (fake, by_version):
        config = make(fake.url)
        admit(client, keys, [job(0), *(job(index) for index in range(1, 4))])
        with buffering(config), Trainer(config) as trainer, contextlib.ExitStack() as ends:
            async with working(config) as worker:
                engine = worker.services.engine
                stops = ends.enter_context(let_go([]))

                def arm() -> None:
                    stops.append(stand(point))
                    if point == "half sent":
                        fake.dies_loading = SENT

                publishing = await publish_two(trainer, models, arm)
                (stop,) = stops
                await until(lambda: fake.num_running == 2 * len(HELD))
                await until(stop.is_there.is_set)
                if point == "half sent":
                    await until(lambda: fake.deaths == 1)
                else:
                    fake.die()
                await until(lambda: worker.services.births == 2 and not worker.services.engine_lost.is_set())
                is_whole = point in ("folder written, nobody told", "whole")
                assert engine.version in ((1, 2) if is_whole else (1,)), "what is whole, and nothing else"
                assert by_version["1"][-1] == checksums(models[1])
                if point == "half sent":
                    assert crashes(client, keys) == dict.fromkeys(HELD, 0), "a transfer is nobody's fault"
                stop.may_go_on.set()
                assert await asyncio.wait_for(publishing, PATIENCE_S) == 2
                await until(lambda: engine.version == 2, limit_s=PATIENCE_S)
                assert by_version["2"][-1] == checksums(models[2])
                assert max(crashes(client, keys).values()) <= 1
                fake.let_go()
                await all_end(client, keys)
        one_content_each(by_version)
        none_is_lost(client, keys)


@pytest.mark.parametrize("point", STANDS)
async def test_T1_I9_a_worker_that_is_killed_has_a_successor_with_a_whole_version(
    make: Callable[..., Config],
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    stand: Callable[[str], Stop],
    start: Start,
    point: str,
) -> None:
    async with served() as (fake, by_version):
        config = make(fake.url)
        admit(client, keys, [job(0), *(job(index) for index in range(1, 4))])
        with buffering(config), Trainer(config) as trainer, let_go([]) as stops:
            first = start(config, "first")
            publishing = await publish_two(trainer, models, lambda: stops.append(stand(point)))
            (stop,) = stops
            await until(stop.is_there.is_set)
            first.signal(signal.SIGKILL)
            await first.exit_code()
            stop.may_go_on.set()
            assert await asyncio.wait_for(publishing, PATIENCE_S) == 2
            async with working(config, "second") as worker:
                await until(lambda: worker.services.engine.version == 2, limit_s=PATIENCE_S)
                assert by_version["2"][-1] == checksums(models[2])
                fake.let_go()
                await all_end(client, keys)
                assert max(crashes(client, keys).values()) <= 1, "as of any worker that is killed"
        one_content_each(by_version)
        none_is_lost(client, keys)
