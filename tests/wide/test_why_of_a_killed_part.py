"""`penstock why` with real processes that really die: every chain ends in the part, or the person, that holds it up."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import redis
from transformers import AutoModelForCausalLM

from penstock.config import ModelConfig
from penstock.console.read.why import Chain, chains
from penstock.consumers.batch.batch import Batch
from penstock.consumers.trainer import Trainer
from penstock.errors import WaitTimeout
from penstock.protocol.snapshot import snapshot
from penstock.records.cause import Cause
from penstock.records.causes import GateClosed
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import LanePaused, NoPart, PartGone, PartStarting, TrainerGone
from penstock.redis.server import RedisServer
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import fake
from tests.integration.part_processes import StartPart, start_part
from tests.integration.parts import kill, matches
from tests.integration.worker_play import LIMIT_S, make_config, until

__all__ = ["fake", "start_part"]

HOST = socket.gethostname()


def chain_of(client: redis.Redis, keys: Keys, who: str) -> Chain | None:
    """The chain that a waiter is in, wherever it stands there."""
    found = chains(snapshot(client, keys))
    return next((chain for chain in found if any(link.who == who for link in chain.links)), None)


async def until_ends(client: redis.Redis, keys: Keys, who: str, kind: type[Cause], **fields: Any) -> Chain:
    def look() -> Chain | None:
        found = chain_of(client, keys, who)
        return found if found and matches(found.end, kind, **fields) else None

    return await until(look, f"{who} to end in {kind.name}, not {chain_of(client, keys, who)}", LIMIT_S)  # type: ignore[no-any-return]


def train(trainer: Trainer, batch: Batch, model: Any) -> None:
    trainer.commit(batch)
    trainer.publish(model, step=batch.n)


async def test_I8_why_ends_in_who_was_killed_or_paused_or_never_came(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    publications: list[Publication],
    tmp_path: Path,
    fake: FakeEngine,
    start_part: StartPart,
) -> None:
    prompts = tmp_path / "train.jsonl"
    prompts.write_text('{"prompt": "a=", "label": "x"}\n' * 100)
    config = make_config(
        redis_server.url,
        keys,
        model_config,
        tmp_path,
        engine={"url": fake.url},
        data={"train": [{"name": "d", "path": str(prompts), "shuffle": False}]},
        staleness={"mode": "async", "bound": 1},
        trainer={"batch_groups": 2, "keep_versions": 2},
        buffer={"lease_s": 2.0},
    )
    buffer, producer = start_part("buffer", config), start_part("producer", config)
    trainer = Trainer(config).__enter__()
    model = AutoModelForCausalLM.from_pretrained(publications[0].path)
    trainer.publish(model)
    came = asyncio.create_task(asyncio.to_thread(trainer.next, LIMIT_S))
    found = await until_ends(client, keys, "trainer:actor", NoPart, component="worker")
    assert [link.who for link in found.links][-2:] == ["trainer:actor", "buffer:actor"]

    buffer.kill()
    await until_ends(client, keys, "trainer:actor", PartStarting, host=HOST, pid=buffer.process.pid)
    await until_ends(client, keys, "trainer:actor", PartGone, component="buffer")
    start_part("buffer", config, "buffer2")

    client.sadd(keys.paused, "train")
    start_part("worker", config)
    await until_ends(client, keys, "trainer:actor", LanePaused, lane="train", by="")
    client.srem(keys.paused, "train")
    await asyncio.to_thread(train, trainer, await came, model)
    producer.kill()
    silent = {"component": "producer", "host": HOST, "pid": producer.process.pid}

    # What is left is trained, then the trainer waits in vain.
    while not ((found := chain_of(client, keys, "trainer:actor")) and matches(found.end, PartGone, **silent)):
        with contextlib.suppress(WaitTimeout):
            batch = await asyncio.to_thread(trainer.next, 1.0)
            await asyncio.to_thread(train, trainer, batch, model)

    start_part("producer", config, "producer2")
    await asyncio.to_thread(kill, trainer, client)
    found = await until_ends(client, keys, "producer", TrainerGone)
    assert isinstance(found.links[-1].cause, GateClosed)
