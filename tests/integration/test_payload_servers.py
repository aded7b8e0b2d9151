"""Payload servers that join and leave while a run goes on: what lies on one is found until it is trained and freed."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import safetensors.torch

from penstock.config import Config, ModelConfig, RedisConfig
from penstock.console.cli.main import execute
from penstock.consumers.trainer import Trainer
from penstock.errors import ProtocolError, WaitTimeout
from penstock.payloads import servers as payload_servers
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration import worker_play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering, producing, waits
from tests.integration.worker_play import working


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Two payload servers."""
    with contextlib.ExitStack() as stack:
        made = [RedisServer(tmp_path / name) for name in ("p1", "p2")]
        for server in made:
            server.start()
            stack.callback(server.stop)
        yield made


def payloads_on(server: RedisServer, keys: Keys) -> int:
    with connect(server.url) as store:
        return len(list(store.scan_iter(match=keys.of("payload:*").replace("{", "[{]"))))


class Training:
    """A trainer that trains as many batches as it is told to."""

    def __init__(self, config: Config, weights: dict[str, object]) -> None:
        self.config, self.weights = config, weights
        self.servers: Counter[str] = Counter()
        self.jobs: list[str] = []

    def train(self, trainer: Trainer, batches: int) -> None:
        for _ in range(batches):
            try:
                batch = trainer.next(timeout=60)
            except WaitTimeout as exc:
                exc.add_note(f"waits: {waits(trainer.session.subscriber.control.client, trainer.keys)}")
                raise
            assert batch.lost == []
            self.servers.update(row.server for row in batch.all_rows)
            self.jobs += dict.fromkeys(row.job for row in batch.all_rows)
            trainer.commit(batch)
            trainer.publish(self.weights, step=batch.n)
        trainer.state_dict()
        trainer.checkpointed()


async def test_I4_a_server_is_added_and_another_drained_under_load_and_nothing_is_lost(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    stores: list[RedisServer],
    model_config: ModelConfig,
    publications: list[Publication],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = stores
    weights = safetensors.torch.load_file(Path(publications[1].path) / "model.safetensors")
    target = ["--run", keys.run, "--redis", redis_server.url]
    async with FakeEngine().up() as fake:
        config = worker_play.make_config(
            redis_server.url,
            keys,
            model_config,
            tmp_path,
            engine={"url": fake.url},
            redis={"payload_servers": {"p1": first.url}},
            data={"train": [{"name": "d", "path": str(tmp_path / "train.jsonl"), "shuffle": False}]},
            staleness={"mode": "async", "bound": 2},
            trainer={"batch_groups": 4},
            # No lease is lost on a slow machine: what it wrote would be left behind for its time to live.
            worker={"lease_s": 60.0},
        )
        training = Training(config, weights)
        with buffering(config), producing(config), Trainer(config) as trainer:
            trainer.publish(weights)
            async with working(config):
                await asyncio.to_thread(training.train, trainer, 2)
                assert training.servers == {"p1": 16}

                assert execute(["payloads", "add", "p2", second.url, *target]) == 0
                # Its share by rendezvous hash, from when the worker has seen it.
                while not training.servers["p2"]:
                    await asyncio.to_thread(training.train, trainer, 1)

                draining = asyncio.create_task(asyncio.to_thread(execute, ["payloads", "drain", "p1", *target]))
                while not draining.done():
                    await asyncio.to_thread(training.train, trainer, 1)
                assert await draining == 0
                assert payloads_on(first, keys) == 0
                first.kill()
                before = training.servers["p1"]
                await asyncio.to_thread(training.train, trainer, 4)
                assert training.servers["p1"] == before, "nothing needs it any more"
    said = capsys.readouterr().out
    assert "Payload server p1 is empty and may be stopped." in said
    assert len(training.jobs) == len(set(training.jobs))
    assert execute(["payloads", "ls", "--json", *target]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["p1"]["state"], rows["p2"]["state"]) == ("drained", "live")
    assert rows["p2"]["answers"] == "yes"
    assert rows["p1"]["answers"] != "yes"
    assert audit(client, keys).ok


def test_a_server_of_the_configuration_that_was_drained_stays_so_when_a_part_starts_again(
    client: redis.Redis, keys: Keys
) -> None:
    config = RedisConfig(url="redis://h:1", payload_servers={"p1": "redis://h:2"})
    for _ in range(2):
        for call in payload_servers.seeds(keys, config):
            run(client, call)
        assert payload_servers.read(client, keys).live == ["p1"]
    payload_servers.set_state(client, keys, "p1", payload_servers.ServerState.DRAINED)
    for call in payload_servers.seeds(keys, config):
        run(client, call)
    assert payload_servers.read(client, keys).live == []
    payload_servers.add(client, keys, "p1", "redis://h:2")
    assert payload_servers.read(client, keys).live == ["p1"], "taken back"


def test_mistakes_with_payload_servers_are_sentences(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--run", keys.run, "--redis", redis_server.url]

    def says(*arguments: str) -> str:
        assert execute(["payloads", *arguments, *target]) == 2
        return capsys.readouterr().err

    assert "is not the address of a Redis" in says("add", "p1", "http://h:1")
    assert "No Redis answers at" in says("add", "p1", "redis://127.0.0.1:1/0")
    assert "takes payloads while no server is live" in says("add", "control", redis_server.url)
    assert "is not a name" in says("add", "a b", redis_server.url)
    assert "The run has no payload server 'p1' (known: none)" in says("drain", "p1")
    payload_servers.add(client, keys, "p1", "redis://elsewhere:1/0")
    assert "is at another address, where payloads may lie" in says("add", "p1", redis_server.url)
    with pytest.raises(ProtocolError, match=r"'p9', which neither .* \(known: control, p1\)"):
        payload_servers.read(client, keys).url("p9", RedisConfig(url="redis://h:1"))
    client.hset(keys.servers, "s:bad", b"\xc1")
    assert payload_servers.read(client, keys).live == ["p1"], "one that cannot be read is left out"
