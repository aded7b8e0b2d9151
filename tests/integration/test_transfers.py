"""Weights without the disk: sharded trainers, real engines, members that die in the middle."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from xxhash import xxh3_64_intdigest

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import oracle, worker_play
from tests.integration.saved import saved
from tests.integration.worker_play import presence, until, working
from tests.tiny_model import make_tiny_mixture, make_tiny_model

PATIENCE_S = 400.0
#: Several buckets for the tiny model.
BUCKET_BYTES = 30_000


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def checksums(folder: Path) -> dict[str, int]:
    """Checksum of every tensor of an unsharded model."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: xxh3_64_intdigest(tensor.contiguous().numpy().tobytes()) for name, tensor in tensors.items()}


@contextmanager
def member(redis_server: RedisServer, keys: Keys, name: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A receiver of ours where an engine would be."""
    command = [sys.executable, "-m", "tests.integration.transfer_member", redis_server.url, keys.run, name]
    process = subprocess.Popen([*command, *map(str, arguments)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Callable[..., Config]:
    def make(path: Path | None = None, **sections: Any) -> Config:
        trainer = {"transport": "gloo", "bucket_bytes": BUCKET_BYTES, "transfer_timeout_s": 20.0, "batch_groups": 1}
        sections["trainer"] = trainer | sections.pop("trainer", {})
        model = model_config.model_copy(update={"path": str(path or model_config.path)})
        return worker_play.make_config(redis_server.url, keys, model, tmp_path, **sections)

    return make


def received(client: redis.Redis, keys: Keys, name: str, version: int) -> dict[str, int]:
    raw = client.get(keys.of(f"received:{name}:{version}"))
    return json.loads(raw) if raw else {}


@pytest.mark.parametrize("make_model", [make_tiny_model, make_tiny_mixture])
async def test_T16_shards_of_two_ranks_arrive_as_the_unsharded_model(
    make: Callable[..., Config],
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    make_model: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    """FSDP2, then tensor-parallel, through the process group: the checksums of every tensor, the same group twice."""
    model = make_model(tmp_path / "model")
    config = make(model)
    file = saved(config, tmp_path / "run.yaml")
    with member(redis_server, keys, "m", 2, -1, "SIGKILL"):
        await until(lambda: client.hexists(keys.workers, "m"), limit_s=PATIENCE_S)
        command = [sys.executable, "-m", "tests.integration.sharded_trainer", str(file), str(tmp_path / "store")]
        ranks = [
            await asyncio.create_subprocess_exec(*command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
            for rank in range(2)
        ]
        try:
            ends = await asyncio.wait_for(asyncio.gather(*(rank.wait() for rank in ranks)), 4 * PATIENCE_S)
        finally:
            # Where one has died, the other waits for it.
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
        assert ends == [0, 0]
        await until(lambda: received(client, keys, "m", 2), limit_s=PATIENCE_S)
    assert received(client, keys, "m", 1) == checksums(model)
    assert received(client, keys, "m", 2) == checksums(model)
    assert len(client.xrange(keys.transfers("policy"))) == 2


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
async def test_T16_a_member_that_dies_in_the_middle_does_not_hold_the_trainer(
    make: Callable[..., Config],
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    how: str,
) -> None:
    config = make(trainer={"transfer_timeout_s": 5.0})
    with member(redis_server, keys, "m", 1, 2, how):
        await until(lambda: client.hexists(keys.workers, "m"), limit_s=PATIENCE_S)
        with Trainer(config) as trainer:
            version = await asyncio.wait_for(asyncio.to_thread(trainer.publish, load(models[1])), PATIENCE_S)
            sent = trainer.publisher.last
            assert sent is not None
            assert sent.workers == ("m",)
            assert "group" in sent.failure
            assert checksums(trainer.weights_dir / f"v{version:08d}") == checksums(models[1])
    assert client.hget(keys.clock, "version:policy") == b"1"


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_T16_a_real_engine_takes_buckets_and_the_folder_when_a_member_dies(
    make: Callable[..., Config],
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    engine_url: str,
) -> None:
    """By group, by the same group again, by a new group beside a member that dies in it, by the folder; by group."""
    config = make(engine={"url": engine_url})
    prompt = [5, 6, 7, 8, 9, 20, 33]

    with Trainer(config) as trainer:

        async def publish(seed: int) -> str:
            again = {"run": config.run, "subscription": trainer.name, "batch": 0}
            await asyncio.to_thread(trainer.load_state_dict, again)
            version = await asyncio.to_thread(trainer.publish, load(models[seed]))
            engine = worker.services.engine
            await until(lambda: engine.version == version and not worker.services.valves.cause, limit_s=PATIENCE_S)
            logprobs = (await engine.score(prompt, 3)).logprobs
            assert max(abs(a - b) for a, b in zip(logprobs, expected(models[seed], prompt), strict=True)) < 1e-4
            sent = trainer.publisher.last
            assert sent is not None
            return sent.failure if len(sent.workers) else "nobody"

        async with working(config) as worker:
            await until(lambda: presence(client, keys)["state"] == "no weights", limit_s=PATIENCE_S)
            # Before it serves nobody waits for it, but it may be quick enough.
            assert await publish(1) in ("", "nobody")
            await until(lambda: presence(client, keys)["state"] == "serving")
            assert await publish(2) == ""
            group = worker.updates.transfers.receiver("gloo").standing
            assert group
            assert await publish(3) == ""
            assert worker.updates.transfers.receiver("gloo").standing == group
            with member(redis_server, keys, "m", 1, 2, "SIGKILL"):
                await until(lambda: client.hexists(keys.workers, "m"), limit_s=PATIENCE_S)
                assert await publish(4) != ""
            client.hdel(keys.workers, "m")
            assert await publish(5) == ""
            assert worker.services.tally.engine_restarts == 0


def expected(folder: Path, tokens: list[int]) -> list[float]:
    logits = oracle.load_model(folder)(torch.tensor([tokens])).logits[0].detach()
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[place - 1, tokens[place]]) for place in range(3, len(tokens))]
