"""Parts that lose their Redis in the midst of their own start wait for it, as they do later on."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, QueueRefused, QueueUnavailable
from penstock.records.keys import Keys
from penstock.redis.control import Control
from penstock.redis.server import RedisServer
from tests.integration.cut_proxy import CutProxy
from tests.integration.part_processes import StartPart, start_part
from tests.integration.parts import waits
from tests.integration.worker_play import until

__all__ = ["start_part"]

#: The first connection finds that Redis answers; these are lost.
LOST = range(2, 6)


async def test_I4_parts_whose_redis_is_gone_while_they_start_wait_for_it(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    config: Callable[..., Config],
    tmp_path: Path,
    start_part: StartPart,
) -> None:
    """A failover, or a cut network, while a part imports what it needs: it had ended with exit code 2."""
    prompts = tmp_path / "train.jsonl"
    prompts.write_text('{"prompt": "1=", "label": "x"}\n')
    signs: dict[str, Callable[[], Any]] = {
        "buffer": lambda: client.exists(keys.leader),
        "producer": lambda: "producer" in waits(client, keys),
        "worker": lambda: client.hlen(keys.workers),
        "trainer": lambda: client.exists(keys.owner("actor")),
    }
    with contextlib.ExitStack() as stack:
        proxies, started = {}, {}
        for part in signs:
            proxies[part] = stack.enter_context(CutProxy(redis_server.url, LOST).up())
            made = config(redis={"url": proxies[part].url}, data={"train": [{"name": "d", "path": str(prompts)}]})
            started[part] = start_part(part, made)
        for part, sign in signs.items():
            await until(lambda sign=sign, part=part: sign() or started[part].process.poll() is not None, part)
            assert started[part].process.poll() is None, f"{part}: {started[part].text()}"
            assert proxies[part].count > max(LOST), "its start met the cut"


def test_who_joins_while_redis_is_gone_waits_for_it_and_keeps_what_it_has_taken(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Callable[..., Config]
) -> None:
    with CutProxy(redis_server.url).up() as proxy:
        proxy.cut()
        healer = threading.Timer(1.0, proxy.heal)
        healer.start()
        with Trainer(config(redis={"url": proxy.url})) as trainer:
            assert client.get(keys.owner("actor")), "it waited, and has it"
            trainer.session.subscriber.ownership.check()
        healer.join()


def test_a_server_that_waiting_would_not_change_is_refused_at_once(redis_server: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(QueueUnavailable, match="No Redis answers"):
        Control("redis://127.0.0.1:1/0", patience_s=0)
    guarded = RedisServer(tmp_path / "guarded", password="hush-4711")
    guarded.start()
    try:
        with pytest.raises(QueueRefused, match="refuses the password"):
            Control(guarded.url.replace("hush-4711", "wrong-4711"))
        with guarded_client(guarded) as client:
            assert client.ping()
    finally:
        guarded.stop()
    evicting = RedisServer(tmp_path / "evicting")
    evicting.start()
    try:
        with redis.Redis.from_url(evicting.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match="evicts keys"):
            Control(evicting.url)
    finally:
        evicting.stop()


def guarded_client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)
