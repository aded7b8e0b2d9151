"""What a group's samples share, its images: stored once a lease, through kills, and freed once with the group."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.consumers.adapters.iterable import RolloutDataset
from penstock.consumers.trainer import Trainer
from penstock.model.pictures import Pictures
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.payloads import sides
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease
from penstock.protocol.waits import Waiting
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.redis.control import AsyncControl
from penstock.redis.server import RedisServer
from penstock.workers.jobs.commits import Commits
from tests.integration import parts, play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering
from tests.integration.worker_play import admit, all_in, metas, tended, until, working
from tests.integration.worker_process import Start, start
from tests.tiny_vision import asked, make_tiny_vision, png

__all__ = ["start"]

N = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that sees images."""
    return make_tiny_vision(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def seeing(config: Callable[..., Config], model: Path, tmp_path: Path) -> Config:
    """Of workers with it, and of a trainer of one group."""
    found = ModelConfig(path=str(model), dtype="float32")
    return config(
        model=found,
        rollout={"n": N},
        trainer={"batch_groups": 1},
        buffer={"lease_s": 1.0},
        debug={"save_batches": str(tmp_path / "batch-{rollout_id}.bin")},
    )


def shared(client: redis.Redis, keys: Keys) -> dict[str, int]:
    """Keys of side arrays -> seconds that each has to live; -1: for good."""
    found = client.scan_iter(match=keys.of("side:*").replace("{", "[{]"), count=1000)
    return {key.decode(): client.ttl(key) for key in found}


def is_committed(client: redis.Redis, keys: Keys, job: str, count: int) -> Callable[[], bool]:
    return lambda: int(client.hget(keys.group(job), "c") or 0) == count


async def test_I4_a_worker_killed_between_a_groups_samples_leaves_what_they_share_and_the_next_one_its_own(
    client: redis.Redis, keys: Keys, seeing: Config, model: Path, fake: FakeEngine, start: Start
) -> None:
    trainer = await asyncio.to_thread(Trainer(seeing).__enter__)
    await asyncio.to_thread(trainer.publish, weights(model))
    one = Job("d/0/0", N, prompt=asked("a", "b="), label="x", images=[png(1)])
    fake.held = (f"{one.id}/2",)
    admit(client, keys, [one])
    victim = start(seeing)
    await until(is_committed(client, keys, one.id, 2), "for two samples")
    first = shared(client, keys)
    assert len(first) == 2, "both samples' arrays lie under one key each"
    assert min(first.values()) > 0, "with a time to live, for nobody has the whole group"
    victim.signal(signal.SIGKILL)
    async with tended(client, keys):
        await until(all_in(client, keys, [one.id], "queued"), "for the lease to run out")
        fake.rest.set()
        async with working(seeing, "next"):
            await until(all_in(client, keys, [one.id], "ready"))
    assert shared(client, keys).keys() > first.keys()
    assert len(shared(client, keys)) == 4
    assert len({meta.token for meta in metas(client, keys, one.id)}) == 2

    with buffering(seeing):
        batch = await asyncio.to_thread(trainer.next, 100)
        assert set(shared(client, keys).values()) == {-1}, "those of both leases are permanent with the group"
        grids = [array.tolist() for array in batch.side(IMAGE_GRID) if array is not None]
        assert grids == [[[1, 4, 4]]] * N
        pixels = batch.side(PIXEL_VALUES)
        assert all(np.array_equal(array, pixels[0]) for array in pixels)
        # Recorded with it, and handed out by micro-batch, end to end.
        item = next(iter(RolloutDataset(Trainer.replay(str(seeing.debug.save_batches), seeing))))
        assert item[IMAGE_GRID].tolist() == [[1, 4, 4]] * N
        assert np.array_equal(item[PIXEL_VALUES].numpy(), np.concatenate(pixels))
        trainer.commit(batch)
        await asyncio.to_thread(trainer.publish, weights(model))
        trainer.state_dict()
        trainer.checkpointed()
        await until(lambda: play.counter(client, keys, "swept") == 1, "for the group to be freed")
    assert shared(client, keys) == {}
    assert audit(client, keys).ok
    await asyncio.to_thread(trainer.close)


def weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


async def test_I4_one_killed_before_it_committed_leaves_what_expires_by_itself(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts.make_config(redis_server.url, keys.run, tmp_path, rollout={"n": N}, trainer={"batch_groups": 1})
    trainer = await asyncio.to_thread(Trainer(made).__enter__)
    await asyncio.to_thread(parts.publish, trainer)
    parts.admit(client, keys, 1, n=N)
    stored = asyncio.Event()

    async def never(*_: Any) -> Any:
        """As far as who is killed gets: what is written is written, and nothing names it."""
        stored.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as death:
        death.setattr(Commits, "_commit", never)
        async with committing(made, client, keys) as commits:
            (held,) = play.lease(client, keys, version=1)
            write = commits.submit(held.job, held.token, answered(held), 1.0, "scaled")
            await stored.wait()
        write.cancel()
    first = shared(client, keys)
    assert len(first) == 1
    assert min(first.values()) > 0
    async with tended(client, keys, lease_ms=1000):
        await until(all_in(client, keys, [held.job], "queued"), "for the lease to run out")
    async with committing(made, client, keys) as commits:
        (again,) = play.lease(client, keys, version=1)
        assert (await commits.submit(again.job, again.token, answered(again), 1.0, "scaled")).outcome == "ready"
    with buffering(made):
        batch = await asyncio.to_thread(parts.step, trainer)
        assert [array.tolist() for array in batch.side(IMAGE_GRID) if array is not None] == [[[1, 2, 2]]] * N
        trainer.state_dict()
        trainer.checkpointed()
        await until(lambda: play.counter(client, keys, "swept") == 1, "for the group to be freed")
    left = shared(client, keys)
    assert left.keys() == first.keys()
    assert min(left.values()) > 0, "nobody frees it, and it is gone by itself"
    assert audit(client, keys).ok
    await asyncio.to_thread(trainer.close)


@asynccontextmanager
async def committing(made: Config, client: redis.Redis, keys: Keys) -> AsyncIterator[Commits]:
    """What a worker writes by."""
    control = await AsyncControl(str(made.redis.url)).open()
    commits = Commits(made, keys, control, Waiting(), "w1")
    try:
        yield commits
    finally:
        await commits.close()
        await control.close()


def answered(held: RawLease) -> list[Sample]:
    """The samples of a lease, with an image that they share."""
    job = Job.from_bytes(held.body)
    packed = {IMAGE_GRID: sides.packed(IMAGE_GRID, np.array([[1, 2, 2]]), f"{job.id}/0")}
    seen = Pictures(job.id, 9, frozenset({9}), [1], ["data:"], packed)
    samples = [parts.make_sample(job, k, [1], 2) for k in range(N)]
    for sample in samples:
        sample.pictures = seen
    return samples
