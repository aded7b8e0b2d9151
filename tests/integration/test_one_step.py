"""T5 in one_step: whichever engine draws jobs of a cohort, and whenever it came, they are drawn under one version."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.protocol.memory_control import MemoryWish, wish
from penstock.protocol.scripts import run, version_field
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import CohortRunning, VersionDraining
from penstock.workers.weights import loop
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import matches, waits
from tests.integration.test_late_folders import bare, write
from tests.integration.worker_play import (
    admit,
    all_in,
    is_blocked,
    job,
    metas,
    presence,
    publish,
    states,
    tended,
    until,
    working,
)

Make = Callable[..., Config]
ONE_STEP = {"mode": "one_step"}


def drawn(client: redis.Redis, keys: Keys, jobs: list[str]) -> list[set[int]]:
    """Versions of each group's tokens."""
    return [{version for meta in metas(client, keys, one) for version in (meta.oldest, meta.newest)} for one in jobs]


async def waits_for_cohort(client: redis.Redis, keys: Keys, version: int) -> None:
    await until(lambda: is_blocked(client, keys, "weights", CohortRunning, cohort=version))


async def test_T5_an_engine_that_comes_late_begins_with_what_the_running_cohort_is_drawn_under(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    jobs = admit(client, keys, [job(0), job(1)])
    fake.held = (jobs[0],)
    async with working(config(staleness=ONE_STEP, worker={"slots": 2})):
        await until(lambda: fake.num_running == 2)  # no slot for the second job
        publish(client, keys, publications[2])
        await waits_for_cohort(client, keys, 1)
        late = FakeEngine()
        async with late.up(), working(config(engine={"url": late.url}, staleness=ONE_STEP), "late"):
            await until(lambda: states(client, keys, jobs) == ["leased", "ready"])
            assert late.loads == ["1"]
            fake.let_go()
            await until(lambda: late.loads == fake.loads == ["1", "2"], "for the newest, when the cohort has ended")
    assert drawn(client, keys, jobs) == [{1}, {1}]


async def test_T5_an_engine_that_died_goes_on_with_what_its_cohort_is_drawn_under(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hiccup of the disk does not keep it from that."""
    monkeypatch.setattr(loop, "RETRY_S", 0.0)
    jobs = admit(client, keys, [job(0), job(1)])
    fake.held = (jobs[1],)
    async with working(config(staleness=ONE_STEP)), tended(client, keys):
        await until(lambda: states(client, keys, jobs) == ["ready", "leased"])
        publish(client, keys, publications[2])
        await waits_for_cohort(client, keys, 1)
        refuses(fake, publications[1], times=1)
        fake.die()
        fake.let_go()
        await until(lambda: fake.loads == ["1", "1", "2"])
    assert drawn(client, keys, jobs) == [{1}, {1}]


async def test_T5_an_engine_whose_memory_comes_back_goes_on_with_what_its_cohort_is_drawn_under(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    """Weights come back first, and nothing newer is loaded before the rest is there."""
    fake.saves_memory = True

    async def offload(*tags: str) -> None:
        run(client, wish(keys, "policy", MemoryWish(offloaded=list(tags))))
        await until(lambda: presence(client, keys)["offloaded"] == list(tags))

    async with working(config(staleness=ONE_STEP)):
        await until(lambda: fake.loads == ["1"])
        await offload("cuda_graph", "kv_cache", "weights")
        jobs = admit(client, keys, [job(0)])
        publish(client, keys, publications[2])
        await offload("cuda_graph", "kv_cache")
        assert fake.loads == ["1", "1"]
        await offload()
        await until(lambda: fake.loads == ["1", "1", "2"])
    assert drawn(client, keys, jobs) == [{1}]


@pytest.mark.parametrize(("hiccups", "version"), [(loop.TRIES - 1, 2), (loop.TRIES, 3)], ids=["a hiccup", "broken"])
async def test_T5_a_cohort_behind_the_one_that_runs_has_its_version_too(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    monkeypatch: pytest.MonkeyPatch,
    hiccups: int,
    version: int,
) -> None:
    """A version that cannot be loaded is tried again, and then passed over; records of others' are left out."""
    monkeypatch.setattr(loop, "RETRY_S", 0.0)
    for key in (keys.loading("policy"), keys.workers, keys.cohorts):
        client.hset(key, "x", "no record")
    jobs = admit(client, keys, [job(0)])
    fake.held = (jobs[0],)
    async with working(config(staleness=ONE_STEP)):
        await until(lambda: fake.num_running == 2)
        client.hset(keys.clock, version_field("policy"), 2)
        jobs += admit(client, keys, [job(1)])
        refuses(fake, publications[2], times=hiccups)
        with client.pipeline() as at_once:
            publish(at_once, keys, publications[2])
            publish(at_once, keys, publications[3])
            at_once.execute()
        await waits_for_cohort(client, keys, 1)
        fake.let_go()
        await until(all_in(client, keys, jobs, "ready"))
    assert drawn(client, keys, jobs) == [{1}, {version}]


def refuses(fake: FakeEngine, publication: Publication, *, times: int) -> None:
    """The engine cannot read a folder so many times."""
    failures = ["Input/output error"] * times
    fake.read = lambda folder: failures.pop() if failures and Path(folder) == Path(publication.path) else ""


@asynccontextmanager
async def drawn_without_folder(
    client: redis.Redis, keys: Keys, config: Config, fake: FakeEngine, models: list[Path], folder: Path
) -> AsyncIterator[list[str]]:
    """An engine draws one of two jobs of cohort 2, with no slot for the other; version 2 has no folder any more."""
    publish(client, keys, bare(Publication("policy", 2, "disk", ""), 2))
    write(client, keys, folder, models[2], 2)
    jobs = admit(client, keys, [job(0), job(1)])
    fake.held = tuple(jobs)
    async with working(config, "first"):
        await until(lambda: fake.num_running == 2)
        client.hdel(keys.whole("policy"), "2")
        yield jobs


@pytest.mark.parametrize("ends", ["cohort", "engine"])
async def test_T5_an_engine_that_comes_late_waits_for_a_cohort_whose_version_has_no_folder(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    models: list[Path],
    tmp_path: Path,
    ends: str,
) -> None:
    """It was sent, say, and the disk had no room for its folder. An engine that is gone is not waited for."""
    first = config(staleness=ONE_STEP, worker={"slots": 2})
    async with (
        drawn_without_folder(client, keys, first, fake, models, tmp_path / "weights") as jobs,
        tended(client, keys),
    ):
        publish(client, keys, publications[3])
        late = FakeEngine()
        async with late.up(), working(config(engine={"url": late.url}, staleness=ONE_STEP), "late"):
            await until(lambda: late.loads or waits_for_cohort_2(client, keys, "late"))
            assert late.loads == []
            assert states(client, keys, jobs) == ["leased", "queued"]
            if ends == "engine":
                fake.is_away = True
                fake.die()
                await until(lambda: late.loads == ["3"])
            fake.let_go()
            await until(all_in(client, keys, jobs, "ready"))
            await until(lambda: late.loads == ["3"])
    assert drawn(client, keys, jobs) == ([{2}, {2}] if ends == "cohort" else [{3}, {3}])


def waits_for_cohort_2(client: redis.Redis, keys: Keys, worker: str) -> bool:
    return any(worker in who and matches(one, CohortRunning, cohort=2) for who, one in waits(client, keys).items())


async def test_T5_an_engine_that_comes_late_takes_no_version_behind_what_the_cohort_is_drawn_under(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    models: list[Path],
    tmp_path: Path,
) -> None:
    """Nobody could draw cohort 2 under its own version when it was begun; the folder of that came later."""
    publish(client, keys, bare(publications[2], 2))
    jobs = admit(client, keys, [job(0), job(1)])
    publish(client, keys, publications[3])
    fake.held = tuple(jobs)
    async with working(config(staleness=ONE_STEP, worker={"slots": 2})):
        await until(lambda: fake.num_running == 2)
        assert fake.loads[-1] == "3"
        write(client, keys, tmp_path / "weights", models[2], 2)
        late = FakeEngine()
        async with late.up(), working(config(engine={"url": late.url}, staleness=ONE_STEP), "late"):
            await until(lambda: states(client, keys, jobs) == ["leased", "ready"])
            assert late.loads == ["3"]
            fake.let_go()
            await until(all_in(client, keys, jobs, "ready"))
    assert drawn(client, keys, jobs) == [{3}, {3}]


async def test_T1_T5_nothing_is_drawn_under_a_version_that_is_abandoned_while_its_cohort_runs(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    """The trainer went back to an earlier checkpoint while an engine waited for a cohort to end."""
    jobs = admit(client, keys, [job(0), job(1), job(2)])
    fake.held = (jobs[0],)
    async with working(config(staleness=ONE_STEP, worker={"slots": 2})):
        await until(lambda: fake.num_running == 2)
        publish(client, keys, publications[2])
        await waits_for_cohort(client, keys, 1)
        publish(client, keys, replace(publications[3], abandoned=[[1, 2]]))
        await until(lambda: is_blocked(client, keys, "intake", VersionDraining))
        fake.let_go()
        await until(all_in(client, keys, jobs, "ready"))
    assert drawn(client, keys, jobs)[1:] == [{3}, {3}]
    assert fake.loads == ["1", "3"]
