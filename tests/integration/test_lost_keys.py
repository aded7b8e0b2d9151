"""No deleted key of docs/internals/protocol.md ends buffer, producer, worker or trainer with a raw error or a hang.

What blocks a part then is named by `penstock why`.
"""

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.console.cli.main import execute
from penstock.console.read.why import chains
from penstock.consumers.trainer import Trainer
from penstock.errors import PenstockError, QueueLost, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.protocol.snapshot import snapshot
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.call import loss
from penstock.redis.control import Control
from penstock.redis.refusals import KeysLost
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering, producing
from tests.integration.worker_play import until, working

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "protocol.md"
#: All keys of the run at once, as FLUSHALL deletes them.
EVERYTHING = "*"


def patterns() -> list[str]:
    """Names of the first table of the page, with * for what differs."""
    table = PAGE.read_text().partition("| key |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [re.sub(r"\b[A-Z]+\b", "*", name) for name in names]


class Run:
    """What the trainer of a run has come to."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys = client, keys
        self.batches = 0
        self.ended: PenstockError | None = None

    def train(self, config: Config, ended: threading.Event) -> None:
        try:
            with Trainer(config) as trainer:
                while not ended.is_set():
                    with contextlib.suppress(WaitTimeout):
                        trainer.commit(trainer.next(timeout=0.2))
                        trainer.tick()
                        self.batches += 1
        except PenstockError as exc:
            self.ended = exc

    def delete(self, pattern: str) -> int:
        found = list(self.client.scan_iter(self.keys.prefix.replace("{", "\\{") + pattern))
        return int(self.client.delete(*found)) if found else 0

    def causes(self) -> str:
        return " | ".join(link for chain in chains(snapshot(self.client, self.keys)) for link in chain.lines())


@contextlib.asynccontextmanager
async def living(client: redis.Redis, keys: Keys, config: Config) -> AsyncIterator[Run]:
    """Buffer, producer, worker and trainer of a run that trains; one that dies of a raw error fails the test."""
    found, ended = Run(client, keys), threading.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(buffering(config))
        stack.enter_context(producing(config))
        await stack.enter_async_context(working(config))
        training = asyncio.create_task(asyncio.to_thread(found.train, config, ended))
        try:
            await until(lambda: found.batches >= 2 or found.ended, "for batches")
            yield found
        finally:
            ended.set()
            await training


@pytest.fixture
def whole(config: Callable[..., Config], tmp_path: Path) -> Config:
    return config(
        data={"train": [{"name": "d", "path": str(tmp_path / "train.jsonl"), "shuffle": False}]},
        staleness={"mode": "async", "bound": 1},
        trainer={"batch_groups": 2},
        buffer={"lease_s": 2.0},
        reward={"function": "exact_match"},
    )


@pytest.mark.parametrize("pattern", [*patterns(), EVERYTHING])
async def test_a_key_that_is_deleted_ends_no_part_and_is_named_where_it_blocks_one(
    client: redis.Redis, keys: Keys, whole: Config, fake: FakeEngine, pattern: str
) -> None:
    async with living(client, keys, whole) as found:
        if not found.delete(pattern):
            return  # this run has no such key
        before = found.batches

        def settled() -> bool:
            return found.ended is not None or found.batches > before + 3 or "what Redis lost: " in found.causes()

        await until(settled, f"for progress or a cause without {pattern}", 30)
        audit(client, keys)
        assert execute(["why", "--run", keys.run, "--redis", str(whole.redis.url)]) in (0, 2)


async def test_parts_wait_for_a_stream_that_was_deleted_and_continue_when_it_is_back(
    client: redis.Redis, keys: Keys, whole: Config, fake: FakeEngine
) -> None:
    async with living(client, keys, whole) as found:
        with client.pipeline(transaction=True) as pipe:
            pipe.dump(keys.jobs("train"))
            pipe.delete(keys.jobs("train"))
            stream, _ = pipe.execute()
        await until(lambda: "what Redis lost: jobs:train" in found.causes(), "for the cause")
        assert "penstock run --fresh" in found.causes()
        assert "redis: it lost jobs:train" in audit(client, keys).differences
        client.restore(keys.jobs("train"), 0, stream)
        before = found.batches
        await until(lambda: found.batches > before + 3, "for batches")
        assert found.ended is None


async def test_parts_wait_while_redis_may_evict_keys(
    client: redis.Redis, keys: Keys, whole: Config, fake: FakeEngine
) -> None:
    async with living(client, keys, whole) as found:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            admitted = int(client.hget(keys.source, "train") or 0)
            await until(lambda: "maxmemory-policy noeviction: it is allkeys-lru" in found.causes(), "for the cause")
            await until(lambda: b"producer" in client.hkeys(keys.waits), "for the producer to wait")
            assert int(client.hget(keys.source, "train") or 0) <= admitted + 256, "nothing more is admitted"
        finally:
            client.config_set("maxmemory-policy", "noeviction")
        before = found.batches
        await until(lambda: found.batches > before + 3, "for batches")


def test_a_verb_that_needs_a_deleted_stream_changes_nothing_and_names_it(
    redis_server: RedisServer, client: redis.Redis, keys: Keys
) -> None:
    play.admit(client, keys, [play.job(i) for i in range(3)])
    (held,) = play.lease(client, keys, "w1", version=1)
    client.delete(keys.jobs("train"))
    mine = keys.prefix.replace("{", "\\{") + "*"
    before = {name: client.dump(name) for name in client.scan_iter(mine)}
    verbs = [
        lambda: play.admit(client, keys, [play.job(7)]),
        lambda: play.lease(client, keys, "w2", version=1),
        lambda: run(client, scripts.renew(keys, "w1", [(held.job, held.token)])),
        lambda: run(client, scripts.release(keys, held.job, held.token)),
        lambda: run(client, scripts.abandon(keys, "train", "w1", [])),
        lambda: scripts.ensure_lanes(client, keys),
    ]
    for verb in verbs:
        with pytest.raises(KeysLost, match=r"Redis lost jobs:train, queued:train|Redis lost jobs:train, "):
            verb()
    assert {name: client.dump(name) for name in before} == before
    with pytest.raises(QueueLost, match=r"Redis lost jobs:train.*begin anew with `penstock run --fresh`"):
        Control(redis_server.url, patience_s=0.0).call(scripts.renew(keys, "w1", [(held.job, held.token)]))


def test_a_group_of_a_stream_that_was_deleted_is_lost_and_a_run_that_is_not_begun_is_not(
    client: redis.Redis, keys: Keys
) -> None:
    assert not run(client, loss(Keys("none")))
    assert not run(client, loss(keys))
    play.admit(client, keys, [play.job(i) for i in range(3)])
    assert not run(client, loss(keys))
    client.xgroup_destroy(keys.jobs("train"), "workers")
    assert str(run(client, loss(keys))) == "jobs:train"
    assert snapshot(client, keys)["lanes"]["train"] == {"queued": 3, "leased": 0}
    assert not audit(client, keys).ok
    client.delete(keys.ready, keys.jobs("train"))
    assert str(run(client, loss(keys))) == "jobs:train, 3 of 3 admitted jobs"


def test_publications_that_were_deleted_are_lost_although_no_part_fails(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    play.subscribe(client, keys, model=play.MODEL)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    assert not run(client, loss(keys))
    client.delete(keys.weights(play.MODEL))
    assert str(run(client, loss(keys))) == f"weights:{play.MODEL}"


def test_a_run_of_which_redis_lost_everything_is_found_by_the_parts_that_are_present(
    client: redis.Redis, keys: Keys, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    client.delete(*client.scan_iter(keys.prefix.replace("{", "\\{") + "*"))
    target = ["--run", keys.run, "--redis", redis_server.url]
    assert execute(["why", *target]) == 2
    run(client, scripts.note(keys, keys.workers, "w.1", pack({"name": "w.1"})))
    capsys.readouterr()
    assert execute(["why", *target]) == 0
    assert "what Redis lost: schema, jobs:" in capsys.readouterr().out
    assert execute(["audit", *target]) == 1
    assert "redis: it lost schema, jobs:" in capsys.readouterr().out
