"""A run of folder_first: false for tests that kill, stop and hold up its parts: set up, and what is always true."""

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.chaos.cluster.forked import Forked, Zygote
from tests.integration import worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering
from tests.integration.saved import saved
from tests.integration.test_transfers import PATIENCE_S, checksums
from tests.integration.worker_play import admit, job, until

#: Jobs that are drawn when version 2 is published; the first is done by then.
HELD = [f"d/0/{index}" for index in range(1, 4)]
RUN = "actor"
#: What the processes of these tests import, which takes them more than all else that they do.
IMPORTS = (
    "penstock.console.cli.main", "penstock.workers.main", "penstock.consumers.weights.publisher",
    "penstock.consumers.weights.checkpoint_writer",
    "transformers.models.auto.tokenization_auto", "tests.integration.sent_files", "tests.integration.test_transfers",
    "tests.integration.worker_parts",
)  # fmt: skip

Make = Callable[..., Config]


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Make:
    def make(url: str, **trainer: Any) -> Config:
        settings = {
            "transport": "tests.integration.sent_files:ToFiles",
            "batch_groups": 1,
            "folder_first": False,
            "transfer_timeout_s": 5.0,
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


@dataclass
class Rig:
    """A buffer, and a fake engine that holds answers of ``HELD``; workers and trainers are the test's."""

    client: redis.Redis
    keys: Keys
    fake: FakeEngine
    config: Config
    #: What the engine loaded, by version.
    by_version: dict[str, list[dict[str, int]]] = field(default_factory=lambda: defaultdict(list))

    def crashes(self) -> dict[str, int]:
        """Charges of the held jobs."""
        return {name: int(self.client.hget(self.keys.group(name), "cr") or 0) for name in HELD}

    async def all_end(self) -> None:
        """Let the held jobs go: each is drawn to its end, or was given up as one of an abandoned version."""
        self.fake.let_go()

        def ended() -> bool:
            states = [self.client.hget(self.keys.group(name), "st") for name in HELD]
            return all(state in (b"ready", b"retiring", None) for state in states)

        await until(ended, "for the jobs to end", limit_s=PATIENCE_S)

    def check(self) -> None:
        """T1, and no job is lost."""
        for version, found in self.by_version.items():
            assert all(one == found[0] for one in found), f"T1: version {version} names two sets of weights"
        report = audit(self.client, self.keys)
        assert report.ok, report.differences


Rigs = Callable[[], AbstractAsyncContextManager[Rig]]


@pytest.fixture
def up(make: Make, client: redis.Redis, keys: Keys) -> Rigs:
    """``async with up() as rig``: checked when the block ends."""

    @asynccontextmanager
    async def up() -> AsyncIterator[Rig]:
        async with FakeEngine().up() as fake:
            rig = Rig(client, keys, fake, make(fake.url))
            fake.held = tuple(HELD)

            def read(folder: str, version: str) -> str:
                rig.by_version[version].append(checksums(Path(folder)))
                return ""

            fake.read_as = read
            admit(client, keys, [job(index) for index in range(4)])
            with buffering(rig.config):
                yield rig
            rig.check()

    return up


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    # A child would be without the threads that numpy's library starts.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    zygote = Zygote(Path.cwd(), environment, tmp_path_factory.mktemp("zygote") / "zygote.log", IMPORTS)
    yield zygote
    zygote.end()


Fork = Callable[..., Forked]


@pytest.fixture
def fork(zygote: Zygote, tmp_path: Path) -> Iterator[Fork]:
    """``fork(MODULE, ...)``: the process of ``python -m MODULE ...``, killed at the end of the test."""
    started: list[Forked] = []
    log = tmp_path / "forked.log"

    def fork(*argv: str | Path) -> Forked:
        started.append(zygote.fork(list(map(str, argv)), os.environ, log))
        return started[-1]

    yield fork
    for one in started:
        with suppress(ProcessLookupError):
            one.kill()
        one.wait()
    print(log.read_text() if log.exists() else "")  # shown where the test failed


@pytest.fixture
def fork_trainer(fork: Fork, models: list[Path], tmp_path: Path) -> Callable[..., Forked]:
    """A process that publishes versions 1 and 2, and gets a signal at a point of the second (send_first_trainer.py)."""

    def fork_trainer(config: Config, point: str, how: str = "SIGKILL") -> Forked:
        path = saved(config, tmp_path / "run.yaml")
        return fork("tests.integration.send_first_trainer", path, models[1], models[2], point, how)

    return fork_trainer
