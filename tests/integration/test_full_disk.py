"""A disk without room, under Redis and under everything else: all wait, say for what, and go on when there is some."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig
from penstock.console.cli.main import execute
from penstock.consumers.trainer import Trainer
from penstock.protocol.audit import audit
from penstock.records.publication import Publication
from penstock.records.worker_causes import RedisDiskFull, RoomOnDisk
from penstock.redis.server import RedisServer
from tests.integration.parts import until, waits
from tests.integration.small_disk import SmallDisk, small_disk
from tests.integration.storage_parts import Parts, parts
from tests.integration.storage_rig import rig

__all__ = ["parts", "small_disk"]

Disks = Callable[[str, int], SmallDisk]
REFUSED = "its disk does not take them"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.timeout(600)
def test_I4_I8_a_full_disk_under_redis_is_waited_for_by_every_part_and_by_those_that_start_meanwhile(
    small_disk: Disks,
    parts: Parts,
    model_config: ModelConfig,
    publications: list[Publication],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = small_disk("redis", 64)
    with serving(disk.path) as server, rig(server, parts, model_config, publications[1], tmp_path) as run_:
        started = [parts.start(name, run_.config) for name in ("buffer", "producer", "worker")]
        died: list[BaseException] = []
        with Trainer(run_.config) as trainer:
            run_.publish(trainer)
            run_.train(trainer)

            def go_on() -> None:
                try:
                    run_.train(trainer, 4)
                except BaseException as exc:
                    died.append(exc)

            disk.fill()
            training = threading.Thread(target=go_on)
            training.start()
            for part in started:
                part.until_says(REFUSED)
            assert execute(["why", "--json", "--run", run_.keys.run, "--redis", server.url]) == 0
            assert RedisDiskFull().name in capsys.readouterr().out
            for part in started:
                part.restart()
            for part in started:
                part.until_says(REFUSED)
            parts.assert_alive()
            assert training.is_alive()
            disk.make_room()
            training.join(240)
            assert not died
            assert not training.is_alive(), f"waits: {waits(run_.client, run_.keys)}"
        parts.assert_alive()
        assert len(run_.trained) == len(set(run_.trained)) == 10
        assert audit(run_.client, run_.keys).ok


@pytest.mark.timeout(600)
def test_I8_a_full_disk_under_weights_checkpoints_and_logs_is_waited_for(
    small_disk: Disks, parts: Parts, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> None:
    disk = small_disk("disk", 48)
    logs = disk.path / "logs"
    logs.mkdir()
    with (
        serving(tmp_path / "redis") as server,
        rig(
            server,
            Parts(logs),
            model_config,
            publications[1],
            tmp_path,
            runs=disk.path / "runs",
            redis={"url": server.url},
            trainer={"batch_groups": 2, "keep_versions": 2, "steps": 12, "checkpoint_every": 1},
        ) as run_,
        contextlib.ExitStack() as stack,
    ):
        for name in ("buffer", "producer", "worker", "trainer"):
            stack.callback(run_.parts.start(name, run_.config).kill)
        trainer = run_.parts.started[-1]
        run_.until("published", 3)
        disk.fill()

        def told(who: str) -> Any:
            run_.parts.assert_alive()
            said = waits(run_.client, run_.keys)
            return next((one for name, one in said.items() if who in name and isinstance(one, RoomOnDisk)), None)

        until(lambda: told("trainer:"), "the trainer to wait for room", 120)
        # A part that starts meanwhile does not exit either; its log has no room, so this shows in what it does later.
        trainer.restart()
        disk.make_room()
        assert trainer.process is not None
        assert trainer.process.wait(240) == 0, trainer.text()[-3000:]
        rows = [json.loads(line) for line in (run_.config.run_dir / "steps.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == 12
        for part in run_.parts.started[:-1]:
            assert part.end() == 0, part.text()[-3000:]
        assert audit(run_.client, run_.keys).ok
