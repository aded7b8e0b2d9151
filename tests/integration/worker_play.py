"""Workers in tests: their configuration, a run around them, and what they left in Redis."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis

from penstock import payloads
from penstock.config import Config, ModelConfig
from penstock.names import LANES
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.cause import Cause
from penstock.records.codec import unpack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample_meta import SampleMeta, iter_metas
from penstock.workers.main import Worker
from tests.integration import play
from tests.integration.parts import matches, waits
from tests.tiny_model import ALPHABET

#: Seconds after which tests take over what nobody renews: more than a process is ever starved of a core.
LEASE_S = 6.0
#: Longest wait for an event; only what never comes takes so long.
LIMIT_S = 400.0
PARTS = "tests.integration.worker_parts"
#: What jobs of tests may name of it.
NAMED = {
    "rewards": ("raises", "raises_for_the_second", "hangs", "not_a_number", "detailed"),
    "environments": ("Echo", "Fails", "Cancels", "Hangs", "Waits"),
}
#: Ids of the tiny model's characters, two special ones before them.
IDS = {character: index + 2 for index, character in enumerate(ALPHABET)}


def make_config(url: str, keys: Keys, model: ModelConfig, folder: Path, **sections: Any) -> Config:
    """A configuration that is quick to notice and to give up, but for what takes long on a starved machine too."""
    values: dict[str, Any] = {
        "run": keys.run,
        "directory": folder,
        "redis": {"url": url},
        "model": model.model_dump(),
        "data": {"train": [{"name": "d", "path": "none.jsonl"}]},
        "rollout": {"n": 2, "sampling": {"max_new_tokens": 16, "temperature": 1.0}, "max_context_tokens": 512},
        "reward": {"function": "tests.integration.worker_parts:length", "timeout_s": 60.0, "max_attempts": 1},
    }
    own = {kind: [f"{PARTS}:{name}" for name in names] for kind, names in NAMED.items()}
    worker = own | {"slots": 8, "lease_s": LEASE_S, "heartbeat_s": 0.2, "retry_s": 0.05, "max_attempts": 2}
    engine = {"health_interval_s": 0.2, "health_timeout_s": 5.0, "request_timeout_s": LIMIT_S}
    values["worker"] = worker | sections.pop("worker", {})
    values["engine"] = engine | sections.pop("engine", {})
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Config.model_validate(values)


def publish(client: redis.Redis, keys: Keys, publication: Publication) -> None:
    """Announce weights, as a trainer's publish does."""
    entry = f"{publication.version}-{publication.rev}"
    client.xadd(keys.weights("policy"), {"p": publication.to_bytes(), "g": 1, "t": 0}, id=entry)
    client.hset(keys.clock, scripts.version_field("policy"), publication.version)


def admit(client: redis.Redis, keys: Keys, jobs: list[Job], source: str = "train") -> list[str]:
    assert play.admit(client, keys, jobs, source=source).admitted == len(jobs)
    return [job.id for job in jobs]


def job(index: int, first: str = "a", n: int = 2, **over: Any) -> Job:
    return Job(**({"id": f"d/0/{index}", "n": n, "prompt": f"{first}{index}=", "label": "x"} | over))


@asynccontextmanager
async def working(config: Config, name: str = "w") -> AsyncIterator[Worker]:
    """A worker in this loop; it leaves at once when the block ends. A worker that died fails the test."""
    worker = Worker(config, name)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.hurry()
        await asyncio.wait_for(task, 120)


async def until(condition: Callable[[], Any], what: str = "", limit_s: float = LIMIT_S) -> Any:
    """Wait until ``condition`` is true; its value."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain {what}"
        await asyncio.sleep(0.01)
    return value


@asynccontextmanager
async def tended(client: redis.Redis, keys: Keys, lease_ms: int = int(LEASE_S * 1000)) -> AsyncIterator[None]:
    """Retries come due and leases run out, as the buffer's leader sees to."""

    async def tend() -> None:
        while True:
            with contextlib.suppress(redis.ConnectionError):
                run(client, scripts.due(keys))
                for lane in LANES:
                    run(client, scripts.reclaim(keys, lane, "tests", lease_ms))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(tend())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def states(client: redis.Redis, keys: Keys, jobs: list[str]) -> list[str]:
    return [play.state(client, keys, one) for one in jobs]


def all_in(client: redis.Redis, keys: Keys, jobs: list[str], state: str) -> Callable[[], bool]:
    return lambda: states(client, keys, jobs) == [state] * len(jobs)


def metas(client: redis.Redis, keys: Keys, name: str) -> list[SampleMeta]:
    """Records of a group's committed samples, in the order of k."""
    data = client.get(keys.meta(name)) or b""
    return sorted(iter_metas(data, name), key=lambda meta: meta.k)


def read_group(client: redis.Redis, keys: Keys, name: str) -> list[tuple[SampleMeta, payloads.Payload]]:
    """Every sample of a group whose tokens were drawn, its payload checked against its record (I7)."""
    rows = read_samples(client, keys, name)
    for meta, payload in rows:
        assert (len(payload), payload.prompt_length) == (meta.length, meta.prompt_length)
        assert int(payload.generated.sum()) == meta.num_generated
        drawn = payload.versions[payload.generated.astype(bool)]
        assert (meta.oldest, meta.newest) == (int(drawn.min()), int(drawn.max()))
        assert (payload.loss_mask == payload.generated).all()
        drawn_by_version = [(v, int((drawn == v).sum())) for v in sorted(set(drawn.tolist()))]
        assert sorted(map(tuple, meta.loss_by_version)) == drawn_by_version
    return rows


def read_samples(client: redis.Redis, keys: Keys, name: str) -> list[tuple[SampleMeta, payloads.Payload]]:
    """Every sample of a group, its payload with the checksum of its record."""
    found = []
    for meta in metas(client, keys, name):
        sample = f"{name}/{meta.k}"
        data = client.get(keys.payload(sample, meta.token))
        assert data is not None, f"no payload of {sample}"
        found.append((meta, payloads.decode(data, sample, meta.checksum)))
    return found


def letters(client: redis.Redis, keys: Keys) -> dict[str, dict[str, str]]:
    """Dead letters by job, without their bodies."""
    found = {}
    for _, fields in client.xrange(keys.dead):
        letter = {name.decode(): value.decode() for name, value in fields.items() if name != b"body"}
        found[letter["id"]] = letter
    return found


def wait_of(client: redis.Redis, keys: Keys, task: str) -> Cause | None:
    """What a task of the workers waits for, if anything."""
    return next((cause for who, cause in waits(client, keys).items() if who.endswith(":" + task)), None)


def is_blocked(client: redis.Redis, keys: Keys, task: str, kind: type[Cause], **fields: Any) -> bool:
    """Whether a task of the workers waits for such a cause, see ``parts.matches``."""
    return matches(wait_of(client, keys, task), kind, **fields)


def presence(client: redis.Redis, keys: Keys) -> dict[str, Any]:
    """Record of the one worker that is there; nothing but None in it before it has shown itself."""
    records = [unpack(raw, "presence") for raw in client.hvals(keys.workers)]
    return defaultdict(lambda: None, records[0] if records else {})
