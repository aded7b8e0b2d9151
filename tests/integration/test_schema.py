"""A run of another schema is refused by every part and command, and left as it is."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.buffer.main import Buffer
from penstock.config import Config, ModelConfig
from penstock.console.cli.target import Target
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.history.recorder import Recorder
from penstock.consumers.scorer import Scorer
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError
from penstock.names import LANES
from penstock.producer.main import Producer
from penstock.protocol.scripts import check_schema, ensure_lanes, run, subscribe
from penstock.records.keys import GROUP, Keys
from penstock.redis.server import RedisServer
from penstock.workers.main import Worker
from penstock.workers.rewards.pool.pool import Verifiers
from tests.integration import play
from tests.integration.worker_play import make_config

OURS = 3

PARTS: dict[str, Callable[[Config], object]] = {
    "producer": lambda config: Producer(config).run(),
    "buffer": lambda config: Buffer(config).run(),
    "worker": lambda config: asyncio.run(Worker(config, "w").run()),
    "recorder": lambda config: Recorder(config).run(),
    "verifiers": lambda config: Verifiers(config, "v").run(),
    "trainer": lambda config: Trainer(config).__enter__(),
    "requests": lambda config: Requests(config).__enter__(),
    "scorer": lambda config: Scorer(config),
    "command": lambda config: Target(config.run, config.redis.url, Path()),
}


def contents(client: redis.Redis, keys: Keys) -> dict[bytes, Any]:
    return {key: client.dump(key) for key in client.scan_iter(f"{keys.prefix}*")}


@pytest.mark.parametrize("noted", [None, OURS + 1])
@pytest.mark.parametrize("part", PARTS)
def test_a_run_of_another_schema_is_refused_and_left_alone(
    part: str,
    noted: int | None,
    redis_server: RedisServer,
    client: redis.Redis,
    model_config: ModelConfig,
    tmp_path: Path,
) -> None:
    keys = Keys(f"before-{part}-{noted}")
    for lane in LANES:
        client.xgroup_create(keys.jobs(lane), GROUP, "0", mkstream=True)
    if noted is not None:
        client.set(keys.schema, noted)
    before = contents(client, keys)
    (tmp_path / "none.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 8)
    data = {"train": [{"name": "d", "path": str(tmp_path / "none.jsonl")}]}
    config = make_config(redis_server.url, keys, model_config, tmp_path, data=data)

    found = f"schema {noted}" if noted else "no schema"
    with pytest.raises(ConfigError, match=f"{found}, and this penstock's of schema {OURS}.*--fresh"):
        PARTS[part](config)

    assert contents(client, keys) == before


UNREADABLE = [b"nonsense", b"1.9", b"", b"1 ", b"01", b"-1", b"1e0", b"9" * 400, ["1"]]


@pytest.mark.parametrize("noted", UNREADABLE)
def test_a_schema_that_is_no_number_is_refused_by_a_sentence_and_left_alone(
    noted: bytes | list[str], client: redis.Redis
) -> None:
    keys = Keys(f"unreadable-{UNREADABLE.index(noted)}")
    if isinstance(noted, bytes):
        client.set(keys.schema, noted)
    else:
        client.rpush(keys.schema, *noted)
    before = contents(client, keys)

    with pytest.raises(ConfigError, match=f"{keys.schema} in Redis is no number.*--fresh"):
        run(client, check_schema(keys))
    with pytest.raises(ConfigError, match="is no number"):
        ensure_lanes(client, keys)

    assert contents(client, keys) == before


FIRST: dict[str, Callable[[redis.Redis, Keys], object]] = {
    "a part starts": ensure_lanes,
    "somebody admits": lambda client, keys: play.admit(client, keys, [play.job(0)]),
    "a trainer subscribes": lambda client, keys: run(client, subscribe(keys, "actor", {"size": 2})),
}


@pytest.mark.parametrize("first", FIRST)
def test_the_first_write_of_a_run_notes_its_schema(first: str, client: redis.Redis) -> None:
    keys = Keys(f"begins-{list(FIRST).index(first)}")
    run(client, check_schema(keys))
    assert not client.exists(keys.schema)
    for _ in range(2):
        FIRST[first](client, keys)
        run(client, check_schema(keys))
    assert client.get(keys.schema) == b"%d" % OURS
