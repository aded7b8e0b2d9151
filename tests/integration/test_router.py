"""A worker that feeds several engines through a real sglang-router: they come, go and die; nothing is lost (I4).

The truth is tried on real SGLang servers, the failures on fakes that can be told to fail, behind the real router.
"""

import asyncio
import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import redis
import torch

from penstock.config import Config, ModelConfig
from penstock.config.fleet import MemberConfig, RouterConfig
from penstock.consumers.scorer import Scorer
from penstock.errors import ConfigError, EngineError
from penstock.protocol.presence import EnginePresence
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.workers.jobs.prefixes import partial_from_bytes
from penstock.workers.router.engine import RoutedEngine
from penstock.workers.router.members import write_members
from penstock.workers.router.process import Router
from penstock.workers.router.supervised_engines import Member
from penstock.workers.sglang import server as servers
from tests.integration import oracle, play
from tests.integration.aborts import assert_an_abort_ends_its_own_request_only
from tests.integration.engine_fixtures import ENGINE_PYTHON, cpu_engine
from tests.integration.fake_engine import FakeEngine
from tests.integration.worker_play import (
    IDS,
    admit,
    all_in,
    job,
    letters,
    make_config,
    metas,
    presence,
    publish,
    read_group,
    states,
    tended,
    until,
    working,
)
from tests.tiny_model import publication_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG = {"max_new_tokens": 300, "ignore_eos": True}
#: No engine is done with it before its first prefix is seen here.
LONGER = LONG | {"max_new_tokens": 1500}
Make = Callable[..., Config]


@pytest.fixture
def routed(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Make:
    """Makes configurations of workers with a router before some engines."""
    cpu_engine()  # skips where there is no environment of the engine

    def make(*urls: str, **sections: Any) -> Config:
        router = {"engines": [{"url": url} for url in urls], "policy": "round_robin"}
        engine = {"python": ENGINE_PYTHON, "router": router, "start_timeout_s": 600.0} | sections.pop("engine", {})
        return make_config(redis_server.url, keys, model_config, tmp_path, engine=engine, **sections)

    return make


def engines(client: redis.Redis, keys: Keys) -> dict[str, str]:
    """State of each engine by its address, as the worker shows it."""
    return {one["url"]: one["state"] for one in presence(client, keys)["engines"] or []}


async def test_I9_engines_join_leave_and_die_under_load(
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    models: list[Path],
    publications: list[Publication],
    engine_url: str,
    routed: Make,
    tmp_path: Path,
) -> None:
    """One engine, a second is added, the first is taken out and added again, the second is killed.

    Tokens stream through the router, so prefixes are kept; scoring and abort pass it too.
    """
    settings = cpu_engine(**{"incremental-streaming-output": True})

    def make() -> servers.Server:
        return servers.spawn(settings, model_config, name="second", log_dir=tmp_path)

    async with aiohttp.ClientSession() as session, tended(client, keys, lease_ms=300_000):
        starting = asyncio.create_task(servers.start(make, session, settings.start_timeout_s))
        publish(client, keys, publications[1])
        jobs = admit(client, keys, [job(i, sampling=LONG) for i in range(6)])
        # Prefixes are kept out of the token streams, which pass the router too.
        # Crashes are counted below: no lease may run out because this process is starved.
        own = {"checkpoint_tokens": 16, "lease_s": 300.0, "heartbeat_s": 1.0}
        config = routed(engine_url, worker=own, rollout={"max_context_tokens": 2000})
        async with working(config) as worker:
            try:
                await until(lambda: engines(client, keys) == {engine_url: "serving"})
                second = await starting
                there = [MemberConfig(url=engine_url), MemberConfig(url=second.url)]

                # Added: it has version 1 before it is asked for anything.
                await say(client, keys, "--add", second.url)
                await until(lambda: engines(client, keys).get(second.url) == "serving")
                jobs += admit(client, keys, [job(i, sampling=LONG) for i in range(6, 14)])
                await until(lambda: worker.services.engine.num_running >= 4)
                publish(client, keys, publications[2])
                await until(lambda: worker.services.engine.version == 2)
                assert [one.version for one in presence_engines(worker)] == [2, 2]

                # Taken out: what runs there ends or goes on elsewhere.
                await say(client, keys, "--remove", engine_url)
                await until(lambda: list(engines(client, keys)) == [second.url])
                jobs += admit(client, keys, [job(i, sampling=LONG) for i in range(14, 18)])
                publish(client, keys, publications[3])
                await until(lambda: worker.services.engine.version == 3)
                write_members(client, keys, "w", there)
                await until(lambda: engines(client, keys).get(engine_url) == "serving")
                await until(all_in(client, keys, jobs, "ready"))

                await assert_scores_are_true(worker.config, models[3])
                await assert_an_abort_ends_its_own_request_only(worker.services.engine)

                # Killed: the jobs that it held are charged and go on elsewhere; the others see nothing.
                crashes = play.counter(client, keys, "crashes")
                # All that run have a prefix, so that the router has passed something of the second's answers on, and
                # cannot ask the first for them instead. Where it spares the second, as one whose health it doubts,
                # there are jobs until it has one.
                last: list[Job] = []
                router = worker.services.engine
                while (
                    not await num_run_by(session, second.url) or len(prefixes(client, keys, last)) < router.num_running
                ):
                    if all_in(client, keys, [one.id for one in last], "ready")():
                        added = [job(18 + len(last) + i, sampling=LONGER) for i in range(6)]
                        admit(client, keys, added)
                        last += added
                    await asyncio.sleep(0.01)
                more = [one.id for one in last]
                kept = prefixes(client, keys, last)
                os.kill(second.pid, signal.SIGKILL)
                await until(all_in(client, keys, more, "ready"))
                for name, tokens in kept.items():
                    group, _, k = name.rpartition("/")
                    _, payload = read_group(client, keys, group)[int(k)]
                    assert payload.tokens[: len(tokens)].tolist() == tokens, f"{name} was drawn anew"
                # Each once at most: how many of them it held depends on how evenly the router spread them.
                assert 0 < play.counter(client, keys, "crashes") - crashes <= len(more)
                assert engines(client, keys) == {engine_url: "serving", second.url: "joining"}
                assert worker.services.tally.engine_restarts == 0
                assert worker.services.tally.checkpoints > 0
            finally:
                await (await starting).stop()
    assert_true_records(client, keys, jobs, num_generated=300)
    assert_true_records(client, keys, more, num_generated=1500)
    assert {payload.versions.max() for name in more for _, payload in read_group(client, keys, name)} == {3}
    play.assert_conserved(client, keys)


def prefixes(client: redis.Redis, keys: Keys, jobs: list[Job]) -> dict[str, list[int]]:
    """Tokens so far of the samples of which a prefix is kept."""
    found = {}
    for one in jobs:
        for k in range(one.n):
            if data := client.get(keys.partial(f"{one.id}/{k}")):
                found[f"{one.id}/{k}"] = partial_from_bytes(data, one, k).tokens
    return found


async def assert_scores_are_true(config: Config, model: Path) -> None:
    """Scoring jobs through the router, on both engines: the oracle's logprobs, of the version that both have."""
    sequences = [[5, 6, 7, 8 + i, 9, 20, 33, 41 - i] for i in range(8)]
    with Scorer(config) as scorer:
        scores = await scorer.ascore(sequences, [3] * 8, timeout_s=60)
    for tokens, one in zip(sequences, scores, strict=True):
        assert one.version == 3
        logprobs = torch.log_softmax(oracle.load_model(model)(torch.tensor([tokens])).logits[0].detach(), -1)
        expected = [float(logprobs[place - 1, tokens[place]]) for place in range(3, len(tokens))]
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)


async def say(client: redis.Redis, keys: Keys, *words: str) -> None:
    """``penstock fleet engines w ...`` on the run of the test."""
    port = client.connection_pool.connection_kwargs["port"]
    command = [sys.executable, "-m", "penstock.cli", "fleet", "engines", "w", *words, "--run", keys.run]
    process = await asyncio.create_subprocess_exec(
        *command, "--redis", f"redis://127.0.0.1:{port}/0", stdout=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0


async def num_run_by(session: aiohttp.ClientSession, url: str) -> int:
    """Requests that an engine runs."""
    async with session.get(f"{url}/v1/loads?include=core") as answer:
        return sum(one.get("num_running_reqs", 0) for one in (await answer.json())["loads"])


def presence_engines(worker: Any) -> list[EnginePresence]:
    return list(worker.services.engine.describe())


def assert_true_records(client: redis.Redis, keys: Keys, jobs: list[str], num_generated: int) -> None:
    """I7: whole answers, versions only forward."""
    for name in jobs:
        for meta, payload in read_group(client, keys, name):
            assert meta.num_generated == num_generated
            drawn = payload.versions[payload.generated.astype(bool)].tolist()
            assert drawn == sorted(drawn)
            assert set(drawn) <= {1, 2, 3}


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeEngine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine().up()) for _ in range(2)]


async def hold_at_both(client: redis.Redis, keys: Keys, fakes: list[FakeEngine]) -> list[str]:
    """Four jobs, half of whose eight samples are at each engine, and are answered once these are opened."""
    for fake in fakes:
        fake.open.clear()
    jobs = admit(client, keys, [job(i) for i in range(4)])
    await until(lambda: [fake.num_running for fake in fakes] == [4, 4])
    return jobs


async def test_I9_a_restarted_engine_is_taken_out_until_it_has_the_weights(
    client: redis.Redis, keys: Keys, publications: list[Publication], fakes: list[FakeEngine], routed: Make
) -> None:
    one, two = fakes
    publish(client, keys, publications[1])
    async with tended(client, keys), working(routed(one.url, two.url)) as worker:
        await until(lambda: list(engines(client, keys).values()) == ["serving"] * 2)
        assert one.loads == two.loads == ["1"]

        # Held at both; one dies with them: those are charged, the others are not, and the engine is not restarted.
        jobs = await hold_at_both(client, keys, fakes)
        two.refuses_loads = "not now"
        two.die()
        await until(lambda: engines(client, keys)[two.url] == "joining")
        await until(lambda: "not now" in str(presence_engines(worker)))
        one.open.set()
        two.open.set()
        await until(all_in(client, keys, jobs, "ready"))
        assert len(two.prompts) == 4, "nothing reaches an engine without weights"
        assert worker.services.tally.engine_restarts == 0

        # It loads what is current, and serves again.
        publish(client, keys, publications[2])
        await until(lambda: worker.services.engine.version == 2)
        two.refuses_loads = ""
        await until(lambda: engines(client, keys)[two.url] == "serving")
        assert two.loads == ["1", "2"]
        # Nobody tells when it is restarted while it is idle.
        two.version = "default"
        await until(lambda: two.loads == ["1", "2", "2"])
        await until(lambda: [one.state for one in presence_engines(worker)] == ["serving"] * 2)

        # Taken out and wanted again while it leaves: it is back in the end.
        two.open.clear()
        held = admit(client, keys, [job(i) for i in range(4, 8)])
        await until(lambda: two.num_running > 0)
        write_members(client, keys, "w", [MemberConfig(url=one.url)])
        await until(lambda: engines(client, keys)[two.url] == "leaving")
        write_members(client, keys, "w", [MemberConfig(url=fake.url) for fake in fakes])
        two.open.set()
        await until(lambda: engines(client, keys).get(two.url) == "serving")
        await until(all_in(client, keys, held, "ready"))

        # One that refuses an update that another takes is out; both: the update is.
        two.refuses_loads = "wrong shape"
        publish(client, keys, publications[3])
        await until(lambda: worker.services.engine.version == 3)
        await until(lambda: engines(client, keys)[two.url] == "joining")
        one.refuses_loads = "wrong shape"
        publish(client, keys, publications[4])
        await until(lambda: "wrong shape" in presence(client, keys)["why"])
        assert worker.services.engine.version == 3
    play.assert_conserved(client, keys)


async def test_engines_behind_a_router_take_the_number_of_a_version_whose_weights_they_have(
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    fakes: list[FakeEngine],
    routed: Make,
    tmp_path: Path,
) -> None:
    one, two = fakes
    shutil.copytree(publications[2].path, tmp_path / "v2")
    second = publication_of(tmp_path / "v2", 2)
    publish(client, keys, second)
    drain = {"apply": "drain"}
    async with tended(client, keys), working(routed(one.url, two.url, worker=drain)) as worker:
        await until(lambda: list(engines(client, keys).values()) == ["serving"] * 2)
        jobs = await hold_at_both(client, keys, fakes)
        publish(client, keys, dataclasses.replace(second, version=3))
        await until(lambda: presence(client, keys)["version"] == 3)
        assert (one.version, two.version, one.loads, two.loads) == ("3", "3", ["2"], ["2"])
        assert [fake.num_running for fake in fakes] == [4, 4]

        # One that cannot is taken out before anything is sent under that number, and comes back with the weights.
        two.fails_rename = "refuses"
        publish(client, keys, dataclasses.replace(second, version=4))
        await until(lambda: presence(client, keys)["version"] == 4)
        one.open.set()
        two.open.set()
        await until(lambda: list(engines(client, keys).values()) == ["serving"] * 2)
        assert (one.version, two.version, one.loads, two.loads) == ("4", "4", ["2"], ["2", "4"])

        # One that has weights of somebody else is found out.
        two.version = "7"
        publish(client, keys, dataclasses.replace(second, version=5))
        await until(lambda: worker.services.engine.version == 5)
        await until(lambda: two.loads == ["2", "4", "5"])
        await until(all_in(client, keys, jobs, "ready"))
        assert worker.services.tally.engine_restarts == 0
    play.assert_conserved(client, keys)


async def test_nothing_is_sent_after_a_cut_stream_before_all_engines_were_looked_at(
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    fakes: list[FakeEngine],
    routed: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream does not tell which engine cut it; what is sent too early is charged for the same death again."""
    one, two = fakes
    looks = asyncio.Event()
    publish(client, keys, publications[1])
    async with tended(client, keys), working(routed(one.url, two.url, worker={"checkpoint_tokens": 2})) as worker:
        await until(lambda: list(engines(client, keys).values()) == ["serving"] * 2)
        jobs = await hold_at_both(client, keys, fakes)
        engine = worker.services.engine
        assert isinstance(engine, RoutedEngine)
        check = engine.check_member

        async def checks_late(member: Member) -> None:
            await looks.wait()
            await check(member)

        monkeypatch.setattr(engine, "check_member", checks_late)
        two.refuses_loads = "not now"
        two.die()
        await until(lambda: play.counter(client, keys, "crashes") > 0)
        await until(lambda: worker.services.num_running == 8)
        assert len(one.prompts) == len(two.prompts) == 4, "those of the dead one wait"
        assert not engine.routable.is_set()
        one.open.set()
        two.open.set()
        looks.set()
        await until(all_in(client, keys, jobs, "ready"))
        assert len(two.prompts) == 4
    play.assert_conserved(client, keys)


async def test_the_router_is_killed_and_its_samples_go_on(
    client: redis.Redis, keys: Keys, publications: list[Publication], fakes: list[FakeEngine], routed: Make
) -> None:
    one, two = fakes
    publish(client, keys, publications[1])
    async with working(routed(one.url, two.url)) as worker:
        await until(lambda: list(engines(client, keys).values()) == ["serving"] * 2)
        jobs = await hold_at_both(client, keys, fakes)
        engine = worker.services.engine
        assert isinstance(engine, RoutedEngine)
        os.kill(before := engine.router_pid, signal.SIGKILL)
        await until(lambda: engine.router_pid not in (0, before))
        one.open.set()
        two.open.set()
        await until(all_in(client, keys, jobs, "ready"))
        assert (play.counter(client, keys, "crashes"), worker.services.tally.failed_jobs) == (0, 0)
        assert one.loads == two.loads == ["1"], "the engines were there all the time"
    play.assert_conserved(client, keys)


async def test_all_engines_away_is_one_lost_engine_and_charges_nobody_who_was_not_there(
    client: redis.Redis, keys: Keys, publications: list[Publication], routed: Make
) -> None:
    publish(client, keys, publications[1])
    async with AsyncExitStack() as stack, tended(client, keys):
        fake = await stack.enter_async_context(FakeEngine().up())
        url, port = fake.url, int(fake.url.rsplit(":", 1)[1])
        async with working(routed(url)) as worker:
            await until(lambda: list(engines(client, keys).values()) == ["serving"])
            await stack.aclose()
            await until(lambda: presence(client, keys)["state"] == "engine away")
            jobs = admit(client, keys, [job(i) for i in range(4)])
            assert states(client, keys, jobs) == ["queued"] * 4
            async with FakeEngine().up(port) as again:
                await until(all_in(client, keys, jobs, "ready"))
                assert again.loads == ["1"]
            assert play.counter(client, keys, "crashes") == 0
            assert worker.services.tally.failed_jobs == 0
    assert {meta.newest for name in jobs for meta in metas(client, keys, name)} == {1}
    play.assert_conserved(client, keys)


async def test_what_the_router_would_drop_is_refused_by_name(
    client: redis.Redis, keys: Keys, publications: list[Publication], fakes: list[FakeEngine], routed: Make
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sampling: sglang-router silently drops stop_regex"):
        async with working(routed(fakes[0].url, rollout={"sampling": {"max_new_tokens": 4, "stop_regex": "a"}})):
            pass
    publish(client, keys, publications[1])
    bad = admit(client, keys, [job(0, "z", sampling={"stop_regex": "a"})])
    good = admit(client, keys, [job(1, sampling={"spaces_between_special_tokens": True, "stop": ["q"]})])
    async with working(routed(fakes[0].url)):
        await until(all_in(client, keys, good, "ready"))
        await until(all_in(client, keys, bad, "dead"))
    assert "would silently drop sampling_params.stop_regex" in letters(client, keys)[bad[0]]["detail"]
    assert IDS["z"] not in fakes[0].asked


async def test_a_router_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**over: Any) -> Router:
        config = RouterConfig.model_validate({"engines": [{"url": "http://127.0.0.1:9"}]} | over)
        return Router(config, ENGINE_PYTHON, name="r", log_dir=tmp_path)

    cpu_engine()
    with pytest.raises(ConfigError, match=r"router\.args has an unknown or invalid argument"):
        await make(args={"polcy": "x"}).start()
    with pytest.raises(ConfigError, match=r"router\.args\.policy cannot be set"):
        await make(args={"policy": "x"}).start()
    monkeypatch.setattr("penstock.workers.router.process.START_S", 0.01)
    with pytest.raises(EngineError, match=r"did not answer within 0\.01 s"):
        await make().start()
