"""A run on a Redis of its own: buffer, producer and worker as processes, a fake engine, the trainer in the test."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import safetensors.torch

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration import play, worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import until
from tests.integration.storage_parts import Parts


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that belongs to this test alone."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def fake_in_a_thread() -> Iterator[FakeEngine]:
    """A fake engine in a loop of its own, for tests that block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake engine", daemon=True)
    thread.start()
    context = FakeEngine().up()
    fake = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class Rig:
    """What a test needs of such a run."""

    def __init__(self, server: RedisServer, config: Config, parts: Parts, publication: Publication) -> None:
        self.server, self.config, self.parts = server, config, parts
        self.keys = Keys(config.run)
        self.client: redis.Redis = connect(server.url)
        self._weights = safetensors.torch.load_file(Path(publication.path) / "model.safetensors")
        self.trained: list[str] = []
        self.fake: FakeEngine

    def publish(self, trainer: Trainer, step: int = 0) -> None:
        """Publish weights that differ from those before: engines adopt equal ones without a load."""
        name, tensor = next(iter(self._weights.items()))
        self._weights = {**self._weights, name: tensor + 1e-3}
        trainer.publish(self._weights, step=step)

    def train(self, trainer: Trainer, batches: int = 1) -> None:
        """Train so many batches in thought, each committed, published and behind a checkpoint."""
        for _ in range(batches):
            batch = trainer.next(timeout=120)
            self.trained += dict.fromkeys(row.job for row in batch.all_rows)
            trainer.commit(batch)
            self.publish(trainer, batch.n)
            trainer.state_dict()
            trainer.checkpointed()

    def counter(self, name: str) -> int:
        return play.counter(self.client, self.keys, name)

    def until(self, name: str, least: int) -> None:
        """Wait until a counter of the run is so high, with all parts alive."""

        def there() -> bool:
            self.parts.assert_alive()
            return self.counter(name) >= least

        until(there, f"{name} at {least}", timeout_s=400)


@contextlib.contextmanager
def rig(
    server: RedisServer,
    parts: Parts,
    model: ModelConfig,
    publication: Publication,
    folder: Path,
    runs: Path | None = None,
    **sections: Any,
) -> Iterator[Rig]:
    """A run of groups of 2, 2 groups a batch, bound 4; nothing is started but the fake engine.

    Leases outlive a machine that is busy.
    """
    prompts = folder / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"a{i}=", "label": "x"}) + "\n" for i in range(400)))
    with fake_in_a_thread() as fake:
        values: dict[str, Any] = {
            "data": {"train": [{"name": "d", "path": str(prompts), "shuffle": False}]},
            "staleness": {"mode": "async", "bound": 4},
            "trainer": {"batch_groups": 2, "keep_versions": 2},
            "worker": {"lease_s": 30.0, "heartbeat_s": 1.0},
            "engine": {"url": fake.url},
            "buffer": {"lease_s": 5.0},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section
        keys = Keys("storage")
        config = worker_play.make_config(server.url, keys, model, runs or folder / "runs", **values)
        made = Rig(server, config, parts, publication)
        made.fake = fake
        try:
            yield made
        finally:
            made.client.close()
