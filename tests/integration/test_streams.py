"""A producer of a stream: killed, doubled, set back, and at an end that it finds by reading."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.producer.main import Producer
from penstock.protocol.audit import audit
from penstock.records.causes import DataExhausted
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import PATIENCE_S, make_config, running, until, until_waits
from tests.integration.test_producer import admitted, drive
from tests.missing import module

NUM = 90


def streaming(url: str, keys: Keys, folder: Path, *, epochs: int | None = None, **sets: Any) -> Config:
    """Three shards of thirty prompts."""
    module("datasets")
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for shard in range(3):
        rows = [{"prompt": f"p{i}", "label": "x"} for i in range(30 * shard, 30 * shard + 30)]
        (data / f"train-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = [{"name": "d", "path": f"hf:{data}", "streaming": True, **sets}]
    if "weight" in sets:
        other = folder / "other.jsonl"
        other.write_text("".join(json.dumps({"prompt": f"q{i}", "label": "x"}) + "\n" for i in range(7)))
        train.append({"name": "o", "path": str(other), "weight": 1})
    config = make_config(url, keys.run, folder)
    return Config.model_validate({**config.model_dump(), "data": {"train": train, "epochs": epochs}})


def wanted(config: Config, positions: range) -> list[str]:
    """Ids of jobs by position, as somebody who read nothing yet says."""
    source = Producer(config).source
    return [f"{d.config.name}/{epoch}/{d.first + line}" for d, epoch, line in map(source.place, positions)]


def process(config: Config, folder: Path) -> "subprocess.Popen[bytes]":
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    code = "import json,sys; from penstock.config import Config; from penstock.producer.main import main; "
    run = code + "main(Config.model_validate(json.load(open(sys.argv[1]))))"
    return subprocess.Popen([sys.executable, "-c", run, str(path)], start_new_session=True)


def test_I4_a_killed_producer_of_a_mixture_with_a_stream_skips_and_doubles_nothing(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = streaming(redis_server.url, keys, tmp_path, weight=3)
    drive(client, keys, groups=150)
    victim = process(config, tmp_path)
    try:
        until(lambda: client.xlen(keys.jobs("train")) == 150)
        play.subscribe(client, keys, bound=0, gb=280)  # more to do in the instant of the kill
        victim.send_signal(signal.SIGKILL)
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()
    play.subscribe(client, keys, bound=0, gb=350)
    with running(Producer(config)), running(Producer(config)):
        until(lambda: client.xlen(keys.jobs("train")) == 350)
    jobs = admitted(client, keys)
    assert jobs == wanted(config, range(350))
    assert len(set(jobs)) == 350
    assert int(client.hget(keys.source, "lines:d") or 0) == NUM
    assert audit(client, keys).ok


def test_I4_a_position_that_goes_back_gives_the_very_same_lines(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """As after a failover to a replica that was behind: by one that went on, and by one that starts."""
    config = streaming(redis_server.url, keys, tmp_path)
    drive(client, keys, groups=NUM + 40)
    with running(producer := Producer(config)):
        until(lambda: client.xlen(keys.jobs("train")) == NUM + 40)
    first = admitted(client, keys)
    again = [producer._offers.at(position) for position in range(20, NUM + 40)]
    assert [getattr(one, "id", "") for one in again] == first[20:] == wanted(config, range(20, NUM + 40))


def test_data_ends_where_the_stream_does(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = streaming(redis_server.url, keys, tmp_path, epochs=1)
    drive(client, keys, groups=50)
    with running(Producer(config)):
        until(lambda: client.xlen(keys.jobs("train")) == 50)
    play.subscribe(client, keys, bound=0, gb=3 * NUM)
    with running(Producer(config)), running(Producer(config)):
        until_waits(client, keys, "producer", DataExhausted, prompts=NUM)
    assert sorted(admitted(client, keys)) == sorted(f"d/0/{i}" for i in range(NUM))
    assert client.hmget(keys.source, "train", "end", "epoch_lines", "lines:d") == [b"%d" % NUM] * 4
    more = streaming(redis_server.url, keys, tmp_path, epochs=2)
    with running(Producer(more)):
        until_waits(client, keys, "producer", DataExhausted, prompts=2 * NUM)
    assert admitted(client, keys) == wanted(config, range(2 * NUM))
    assert audit(client, keys).ok


def test_an_end_that_was_told_outlives_a_start_that_has_not_seen_it(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No producer takes the end of the data back because it has not read so far."""
    monkeypatch.setattr("penstock.producer.sources.hub.STREAM_WINDOW", 16)
    config = streaming(redis_server.url, keys, tmp_path, epochs=1)
    slow = Producer(config)
    slow._check_source()
    drive(client, keys, groups=2 * NUM)
    with running(Producer(config)):
        until_waits(client, keys, "producer", DataExhausted, prompts=NUM)
    slow._begin()
    assert slow.source.num_lines is None
    assert client.hget(keys.source, "end") == b"%d" % NUM
