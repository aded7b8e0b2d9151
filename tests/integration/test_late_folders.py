"""What a worker does while the newest publication has no folder yet: records alone, no trainer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file

from penstock.config import Config
from penstock.consumers.weights.write import write_weights
from penstock.records.keys import Keys
from penstock.records.publication import Publication, Whole
from penstock.records.worker_causes import WeightsUnwritten
from tests.integration.fake_engine import FakeEngine
from tests.integration.worker_play import admit, all_in, is_blocked, job, publish, until, working

Make = Callable[..., Config]


def bare(publication: Publication, version: int, **over: Any) -> Publication:
    """It is announced, and its folder is still to come."""
    return replace(publication, version=version, path="", index="", **over)


def write(client: redis.Redis, keys: Keys, folder: Path, model: Path, version: int) -> None:
    """The folder of a version comes, and is told of."""
    written = write_weights(load_file(model / "model.safetensors"), model, folder, version)
    told = Whole(version, str(written.path), written.index_digest)
    client.hset(keys.whole("policy"), str(version), told.to_bytes())


@pytest.mark.parametrize(
    ("newest", "abandoned", "starts_with"),
    [(3, [], 1), (5, [], 1), (6, [], 0), (3, [[1, 2]], 0)],
    ids=["the one before", "the last that the bound allows", "older than the bound", "abandoned"],
)
async def test_I9_T1_an_engine_starts_with_what_is_whole_or_waits_by_name(
    config: Make,
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    models: list[Path],
    fake: FakeEngine,
    tmp_path: Path,
    newest: int,
    abandoned: list[list[int]],
    starts_with: int,
) -> None:
    publish(client, keys, bare(publications[2], 2))
    publish(client, keys, bare(publications[3], newest, abandoned=abandoned))
    made = config(staleness={"mode": "async", "bound": 4})
    async with working(made) as worker:
        engine = worker.services.engine
        if starts_with:
            await until(lambda: engine.version == starts_with)
            jobs = admit(client, keys, [job(0)])
            # It was admitted under the newest version.
            await until(lambda: is_blocked(client, keys, "weights", WeightsUnwritten, version=newest))
            assert all_in(client, keys, jobs, "queued")()
        else:
            await until(lambda: is_blocked(client, keys, "weights", WeightsUnwritten, version=newest))
            jobs = admit(client, keys, [job(0)])
            assert (fake.loads, engine.version) == ([], -1), "it works on nothing"
        write(client, keys, tmp_path / "weights", models[3], newest)
        await until(all_in(client, keys, jobs, "ready"))
        assert engine.version == newest
        assert fake.loads == ([str(starts_with)] if starts_with else []) + [str(newest)]


async def test_a_newer_version_is_not_kept_waiting_by_the_folder_of_one_before(
    config: Make, client: redis.Redis, keys: Keys, publications: list[Publication], fake: FakeEngine
) -> None:
    async with working(config(staleness={"mode": "async", "bound": 4})) as worker:
        await until(lambda: worker.services.engine.version == 1)
        publish(client, keys, bare(publications[2], 2))
        await until(lambda: is_blocked(client, keys, "weights", WeightsUnwritten, version=2))
        publish(client, keys, replace(publications[3], version=3))
        await until(lambda: worker.services.engine.version == 3)
        assert fake.loads == ["1", "3"]


async def test_a_folder_that_comes_for_what_is_loaded_is_no_revision(
    config: Make,
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    models: list[Path],
    fake: FakeEngine,
    tmp_path: Path,
) -> None:
    async with working(config(staleness={"mode": "async", "bound": 4})) as worker:
        engine = worker.services.engine
        await until(lambda: engine.version == 1)
        publish(client, keys, bare(publications[2], 2))
        write(client, keys, tmp_path / "weights", models[2], 2)
        await until(lambda: engine.version == 2)
        publish(client, keys, replace(publications[3], version=3))
        await until(lambda: engine.version == 3)
        assert fake.loads == ["1", "2", "3"]
