"""A producer whose prompts have images: what it sends to Redis and keeps of them is bounded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.producer.main import Producer
from penstock.records.causes import GateClosed
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import make_config, running, until, until_waits
from tests.integration.test_producer import admitted, drive
from tests.tiny_vision import make_tiny_vision, png

NUM = 24
#: Tokens of an image's side: a file of 0.9 MB.
SIDE = 20


def seeing(url: str, keys: Keys, folder: Path) -> Config:
    """A run of ``NUM`` prompts, each with an image of its own."""
    lines = []
    for i in range(NUM):
        (folder / f"{i}.png").write_bytes(png(i, SIDE, SIDE))
        content = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "a"}]
        lines.append(json.dumps({"prompt": [{"role": "user", "content": content}], "label": "x"}) + "\n")
    (folder / "d.jsonl").write_text("".join(lines))
    train = [{"name": "d", "path": str(folder / "d.jsonl"), "apply_chat_template": True, "shuffle": False}]
    model = make_tiny_vision(folder / "model")
    return make_config(url, keys.run, folder, data={"train": train}, model={"path": str(model)})


def test_I8_images_that_the_gate_does_not_let_in_take_no_room_in_redis(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """All that one verb might offer would not fit, nor be worth sending twice a second."""
    config = seeing(redis_server.url, keys, tmp_path)
    before = client.info("memory")["used_memory"]
    client.config_set("maxmemory", before + 64 * 1024 * 1024)
    try:
        drive(client, keys, groups=NUM)
        with running(producer := Producer(config)):
            until(lambda: client.xlen(keys.jobs("train")) == NUM)
            until_waits(client, keys, "producer", GateClosed)
            sent = client.info("stats")["total_net_input_bytes"]
            assert producer._step()
            assert client.info("stats")["total_net_input_bytes"] - sent < 2 * len(png(0, SIDE, SIDE))
    finally:
        client.config_set("maxmemory", 0)
    assert admitted(client, keys) == [f"d/0/{i}" for i in range(NUM)]
    play.assert_conserved(client, keys)


def test_images_of_few_prompts_are_kept(
    redis_server: RedisServer, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are offered again, not those of 256 prompts."""
    (dataset,) = Producer(seeing(redis_server.url, keys, tmp_path)).source.datasets
    read = dataset._read
    monkeypatch.setattr(dataset, "_read", lambda line: replace(read(line), images=[bytes(4 * 1024 * 1024)]))
    for line in [*range(NUM), *range(NUM)]:
        assert dataset[line].index == line
    assert dataset[NUM - 1] is dataset[NUM - 1]
    assert sum(one.num_bytes for one in dataset._kept.values()) <= 32 * 1024 * 1024
