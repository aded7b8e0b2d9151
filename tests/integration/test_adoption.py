"""A publication of the weights that an engine has: it takes the number, and nothing is verified, drained or loaded."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.records.keys import Keys
from penstock.records.publication import Publication
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import Make, config, fake
from tests.integration.worker_play import (
    admit,
    all_in,
    job,
    metas,
    presence,
    publish,
    read_group,
    tended,
    until,
    working,
)
from tests.tiny_model import publication_of

__all__ = ["config", "fake"]


@pytest.fixture
def two(publications: list[Publication], tmp_path: Path) -> list[Publication]:
    """Publications 2 and 3, of different weights, with their indexes."""
    found = []
    for version in (2, 3):
        folder = tmp_path / f"v{version}"
        shutil.copytree(publications[version].path, folder)
        found.append(publication_of(folder, version))
    return found


def spoil(publication: Publication) -> None:
    """Leave nothing in the folder that could be loaded, or verified."""
    for path in Path(publication.path).iterdir():
        path.unlink()


@pytest.mark.parametrize("apply", ["in_place", "abort", "drain"])
async def test_T12_a_tick_reaches_the_engine_without_a_load_while_requests_run(
    client: redis.Redis, keys: Keys, two: list[Publication], fake: FakeEngine, config: Make, apply: str
) -> None:
    publish(client, keys, two[0])
    async with working(config(worker={"apply": apply})) as worker:
        await until(lambda: worker.services.engine.version == 2)
        fake.open.clear()
        running = admit(client, keys, [job(0)])
        await until(lambda: fake.num_running == 2)
        spoil(two[0])
        fake.controls.clear()
        publish(client, keys, replace(two[0], version=3))
        await until(lambda: presence(client, keys)["version"] == 3)
        # What is admitted under the new version may begin here, while the others run.
        later = admit(client, keys, [job(1)])
        await until(lambda: fake.num_running == 4)
        assert set(fake.controls) == {"/update_weight_version"}
        fake.open.set()
        await until(all_in(client, keys, [*running, *later], "ready"))
        assert (fake.loads, fake.version, worker.services.engine.num_aborted) == (["2"], "3", 0)
        assert {(meta.oldest, meta.newest) for meta in metas(client, keys, later[0])} == {(3, 3)}
        for name in (*running, *later):
            read_group(client, keys, name)

        # Other weights are verified and loaded; the folder of these is gone, and they are refused.
        publish(client, keys, replace(two[1], version=4))
        await until(lambda: fake.loads == ["2", "4"])
        publish(client, keys, replace(two[0], version=5))
        await until(lambda: "cannot be read" in worker.updates.cannot_load)
        assert (fake.loads, worker.services.engine.version) == (["2", "4"], 4)


async def test_the_first_publication_of_a_restored_trainer_is_a_load_only_where_its_weights_differ(
    client: redis.Redis, keys: Keys, two: list[Publication], fake: FakeEngine, config: Make
) -> None:
    """It abandons what came behind the checkpoint; an engine that has none of that keeps its weights."""
    publish(client, keys, two[0])
    async with working(config()) as worker:
        await until(lambda: worker.services.engine.version == 2)
        publish(client, keys, replace(two[0], version=5, abandoned=[[3, 4]]))
        await until(lambda: worker.services.engine.version == 5)
        assert fake.loads == ["2"]
        assert worker.services.engine.abandoned == [[3, 4]]
        # T1: what runs under an abandoned version is not continued, whatever its weights.
        publish(client, keys, replace(two[0], version=6, abandoned=[[3, 5]]))
        await until(lambda: worker.services.engine.version == 6)
        assert fake.loads == ["2", "6"]


@pytest.mark.parametrize("apply", ["in_place", "drain"])
async def test_weights_of_somebody_else_are_never_given_a_number_of_ours(
    client: redis.Redis, keys: Keys, two: list[Publication], fake: FakeEngine, config: Make, apply: str
) -> None:
    publish(client, keys, two[0])
    async with tended(client, keys), working(config(worker={"apply": apply})) as worker:
        await until(lambda: worker.services.engine.version == 2)
        fake.version = "7"
        publish(client, keys, replace(two[0], version=3))
        await until(lambda: worker.services.engine.version == 3)
        assert fake.loads == ["2", "3"]
        assert worker.services.tally.engine_restarts == 1


@pytest.mark.parametrize("fails", ["refuses", "dies"])
async def test_a_server_that_does_not_take_the_number_loads_the_version(
    client: redis.Redis, keys: Keys, two: list[Publication], fake: FakeEngine, config: Make, fails: str
) -> None:
    publish(client, keys, two[0])
    async with tended(client, keys), working(config()) as worker:
        await until(lambda: worker.services.engine.version == 2)
        fake.fails_rename = fails
        publish(client, keys, replace(two[0], version=3))
        await until(lambda: worker.services.engine.version == 3)
        assert fake.loads == ["2", "3"]
        jobs = admit(client, keys, [job(0)])
        await until(all_in(client, keys, jobs, "ready"))
        assert {meta.newest for meta in metas(client, keys, jobs[0])} == {3}


async def test_a_worker_that_was_killed_while_it_took_a_number_loads_that_version(
    client: redis.Redis, keys: Keys, two: list[Publication], fake: FakeEngine, config: Make
) -> None:
    """Its server has the number already; nobody knows by that what its weights are."""
    publish(client, keys, two[0])
    async with working(config(), "first") as worker:
        await until(lambda: worker.services.engine.version == 2)
    fake.version = "3"
    publish(client, keys, replace(two[0], version=3))
    async with working(config(), "second") as worker:
        await until(lambda: worker.services.engine.version == 3)
        assert fake.loads == ["2", "3"]
