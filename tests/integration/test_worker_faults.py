"""A worker whose engine, reward, Redis or prompts misbehave: each ends in a named outcome, nothing in a wrong sample.

The worker is the real one, in this process; the engine is a fake that can be told to fail.
"""

import asyncio
import dataclasses
import os
import re
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as LostConnection

from penstock.config import Config
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.causes import NoPublication
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import (
    CodeCalled,
    CohortRunning,
    EngineSilent,
    RedisFull,
    VersionDraining,
    VersionRefused,
)
from penstock.workers.main import Worker
from penstock.workers.weights import loop
from penstock.workers.weights.select import View
from tests.integration import play, worker_parts
from tests.integration.fake_engine import EOS, FILLER, FIRST, FakeEngine
from tests.integration.parts import waits
from tests.integration.worker_play import (
    IDS,
    admit,
    all_in,
    is_blocked,
    job,
    letters,
    metas,
    presence,
    publish,
    read_group,
    states,
    tended,
    until,
    wait_of,
    working,
)

Make = Callable[..., Config]
PARTS = "tests.integration.worker_parts"


# --- the engine ---------------------------------------------------------------------------------------------------


async def test_samples_are_committed_with_what_the_engine_said(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(i, n=3) for i in range(4)])
    async with working(config()):
        await until(all_in(client, keys, jobs, "ready"))
    assert fake.num_batches > 0, "samples of a job that begin together are one request"
    for name in jobs:
        rows = read_group(client, keys, name)
        assert [meta.k for meta, _ in rows] == [0, 1, 2]
        for meta, payload in rows:
            assert payload.tokens[payload.prompt_length :].tolist() == [*FIRST, FILLER, FILLER, EOS]
            assert (meta.reward, meta.oldest, meta.newest, meta.status) == (6.0, 1, 1, "completed")
            assert meta.worker.startswith("w.")
    assert client.hlen(keys.workers) == 0, "a worker that leaves takes its presence along"
    play.assert_conserved(client, keys)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("500", "with 500"),
        ("garbage", "JSON|event"),
        ("short", "5 logprobs for 6 ids"),
        ("nan", "not a finite number"),
        ("hang", "within 0.3 s"),
    ],
)
async def test_an_engine_that_answers_wrong_is_tried_again_and_then_buried_by_name(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, behaviour: str, says: str, streams: bool
) -> None:
    fake.behaviour[IDS["z"]] = behaviour
    bad = admit(client, keys, [job(0, "z")])
    good = admit(client, keys, [job(1), job(2)])
    made = config(engine={"request_timeout_s": 0.3}, worker={"checkpoint_tokens": 1} if streams else {})
    async with working(made), tended(client, keys):
        await until(all_in(client, keys, good, "ready"))
        await until(all_in(client, keys, bad, "dead"))
    letter = letters(client, keys)[bad[0]]
    assert (letter["reason"], letter["attempts"], letter["crashes"]) == ("engine_error", "2", "0")
    assert re.search(says, letter["detail"])
    assert metas(client, keys, bad[0]) == []
    assert fake.loads == ["1"], "the engine was not restarted"
    play.assert_conserved(client, keys)


async def test_every_third_request_fails_and_every_job_is_done(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    fake.fails_every = 3
    jobs = admit(client, keys, [job(i, n=2) for i in range(6)])
    async with working(config(worker={"max_attempts": 50})), tended(client, keys):
        await until(all_in(client, keys, jobs, "ready"))
    assert play.counter(client, keys, "failed:engine_error") > 0
    for name in jobs:
        read_group(client, keys, name)
    play.assert_conserved(client, keys)


async def test_I8_a_request_that_hangs_is_named_by_the_rate_of_others(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.sglang.controls.SHORTEST_S", 0.5)
    fake.behaviour[IDS["z"]] = "hang"
    good = admit(client, keys, [job(1)])
    async with working(config(engine={"request_timeout_s": 3600.0})) as worker:
        await until(all_in(client, keys, good, "ready"))
        admit(client, keys, [job(0, "z", n=1)])
        silent = partial(is_blocked, client, keys, "requests", EngineSilent, sample="d/0/0/0")
        await until(silent, "long before 120 s", 60)
        assert f"worker:{worker.name}:requests" in waits(client, keys)


async def test_a_request_that_the_engine_refuses_is_not_tried_again(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    fake.behaviour[IDS["z"]] = "400"
    bad = admit(client, keys, [job(0, "z")])
    good = admit(client, keys, [job(1)])
    async with working(config()), tended(client, keys):
        await until(all_in(client, keys, good, "ready"))
        await until(all_in(client, keys, bad, "dead"))
    letter = letters(client, keys)[bad[0]]
    assert (letter["reason"], letter["attempts"]) == ("refused", "1")
    assert "told to answer 400" in letter["detail"]


async def test_a_poison_job_is_buried_and_the_innocents_beside_it_finish(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    fake.behaviour[IDS["z"]] = "die"
    poison = admit(client, keys, [job(0, "z", n=1)])
    innocent = admit(client, keys, [job(i, n=1) for i in range(1, 6)])
    fake.open.clear()  # innocents are still running when it dies
    most_suspects = 0

    async with working(config(rollout={"n": 1})) as worker, tended(client, keys):

        def suspects() -> int:
            return sum(held.lease.lane == "suspect" for held in worker.held.values())

        def buried() -> bool:
            nonlocal most_suspects
            most_suspects = max(most_suspects, suspects())
            # An innocent suspect ends at once; else the poison behind it would never get its turn.
            if fake.deaths >= 2 and fake.num_running and suspects():
                fake.open.set()
            return states(client, keys, poison) == ["dead"]

        await until(buried)
        fake.open.set()
        await until(all_in(client, keys, innocent, "ready"))

    letter = letters(client, keys)[poison[0]]
    # One more where it was the first suspect of an engine that had finished nothing: that says nothing of the job.
    assert letter["reason"] == "crashed"
    assert letter["crashes"] in ("3", "4")
    assert list(letters(client, keys)) == poison
    assert fake.deaths == int(letter["crashes"])
    assert len(fake.victims[0]) > 1, "innocents were running beside it"
    assert most_suspects == 1
    assert play.counter(client, keys, "crashes") >= 3 + 2 * 5
    play.assert_conserved(client, keys)


async def test_I9_an_engine_that_comes_back_has_the_newest_weights_before_it_answers(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    fake.open.clear()
    jobs = admit(client, keys, [job(i) for i in range(2)])
    async with working(config()), tended(client, keys):
        await until(lambda: fake.num_running == 4)
        publish(client, keys, publications[2])
        await until(lambda: fake.version == "2")
        fake.die()
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
    assert fake.loads == ["1", "2", "2"]
    for name in jobs:
        assert [(meta.oldest, meta.newest) for meta in metas(client, keys, name)] == [(2, 2)] * 2
    assert play.counter(client, keys, "crashes") == 2
    play.assert_conserved(client, keys)


async def test_late_news_of_a_dead_engine_do_not_restart_its_successor(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0)])
    async with working(config()) as worker:
        await until(all_in(client, keys, jobs, "ready"))
        fake.die()
        birth = worker.services.births
        worker.services.lose_engine(birth)
        await until(lambda: worker.services.births == birth + 1)
        await until(lambda: not worker.services.engine_lost.is_set())
        worker.services.lose_engine(birth)
        assert not worker.services.engine_lost.is_set()


async def test_a_batch_in_flight_fails_when_its_engine_is_lost_and_the_server_still_runs(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    """As after failed health checks of an external server, which does not end the request itself."""
    fake.open.clear()
    jobs = admit(client, keys, [job(0, n=4)])
    async with working(config()) as worker, tended(client, keys):
        await until(lambda: fake.num_running == 4)
        birth = worker.services.births
        worker.services.lose_engine(birth)
        await until(lambda: worker.services.births == birth + 1)
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"), limit_s=60)
    assert fake.num_batches > 0


# --- jobs that can never work -------------------------------------------------------------------------------------


async def test_jobs_that_can_never_work_are_buried_at_once_and_others_go_on(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    refused = {
        "the prompt has 0 tokens": job(0, prompt=""),
        "the prompt has 600 tokens": job(1, prompt="z" * 600),
        "has neither prompt nor prompt_ids": job(2, prompt=None),
        "top_p": job(3, sampling={"top_p": 0.5}),
        "samples greedily": job(4, sampling={"temperature": 0}),
        "add it to worker.environments": job(5, environment="nowhere:Env"),
    }
    bad = admit(client, keys, list(refused.values()))
    for index, body in enumerate((b"\xc1", job(99).to_bytes(), dataclasses.replace(job(8), n="2").to_bytes()), 6):
        pairs = [(job(index), body)]
        call = scripts.admit(keys, pairs, lane="train", source="train", position=index, model="policy", gate=None)
        assert run(client, call).admitted == 1
        bad.append(f"d/0/{index}")
    good = admit(client, keys, [job(9)])
    async with working(config()):
        await until(all_in(client, keys, good, "ready"))
        await until(all_in(client, keys, bad, "dead"))
    found = letters(client, keys)
    assert {(letter["reason"], letter["attempts"]) for letter in found.values()} == {("refused", "1")}
    for says, name in zip(refused, bad, strict=False):
        assert says in found[name]["detail"]
    assert "not a record" in found[bad[6]]["detail"]
    assert "not written for this job" in found[bad[7]]["detail"]
    assert "has a field n that it cannot have" in found[bad[8]]["detail"]
    assert set(fake.asked) == {IDS["a"]}, "nothing of them reached the engine"
    ends = {kind: digits for kind, digits in client.hgetall(keys.ends).items() if kind.startswith(b"d:")}
    # Whatever they are refused for, where all of a dataset are the producer has to hear of it.
    assert b"".join(ends.values()).count(b"2") == len(refused), "all whose record could be read"
    play.assert_conserved(client, keys)


@pytest.mark.parametrize(
    ("name", "says"), [("Fails", "the world is gone"), ("Cancels", "was cancelled by its own code")]
)
async def test_an_environment_that_fails_ends_in_the_jobs_record(
    client: redis.Redis, keys: Keys, config: Make, name: str, says: str
) -> None:
    bad = admit(client, keys, [job(0, environment=f"{PARTS}:{name}")])
    async with working(config()), tended(client, keys):
        await until(all_in(client, keys, bad, "dead"))
    letter = letters(client, keys)[bad[0]]
    assert (letter["reason"], letter["attempts"]) == ("environment_raised", "2")
    assert says in letter["detail"]
    assert "Traceback" in letter["detail"]
    play.assert_conserved(client, keys)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reward": f"{PARTS}:hangs"}, f"reward {PARTS}:hangs of sample d/0/0/"),
        ({"environment": f"{PARTS}:Hangs"}, "step of environment tests.integration.worker_parts:Hangs"),
    ],
)
async def test_I8_code_of_the_users_that_hangs_is_waited_for_by_name(
    client: redis.Redis, keys: Keys, config: Make, given: dict[str, Any], words: str
) -> None:
    bad = admit(client, keys, [job(0, **given)])
    made = config(
        rollout={"environment_timeout_s": 600.0, "sampling": {"max_new_tokens": 16}}, reward={"timeout_s": 600.0}
    )
    async with working(made), tended(client, keys):
        told = await until(lambda: wait_of(client, keys, "code"))
        assert isinstance(told, CodeCalled)
        assert words in str(told)
        await until(lambda: is_blocked(client, keys, "code", CodeCalled, more=1))
    assert not wait_of(client, keys, "code"), "a worker that left waits for nothing"
    assert letters(client, keys).keys().isdisjoint(bad)
    play.assert_conserved(client, keys)


async def test_I8_an_environment_that_hangs_is_tried_again_and_then_buried_by_name(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    bad = admit(client, keys, [job(0, environment=f"{PARTS}:Hangs")])
    rollout = {"environment_timeout_s": 0.05, "sampling": {"max_new_tokens": 16}}
    async with working(config(rollout=rollout)), tended(client, keys):
        await until(all_in(client, keys, bad, "dead"))
    letter = letters(client, keys)[bad[0]]
    assert (letter["reason"], letter["attempts"]) == ("environment_timeout", "2")
    assert f"step of environment {PARTS}:Hangs did not answer" in letter["detail"]
    play.assert_conserved(client, keys)


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason", "says"),
    [
        ("raises", "reward_raised", "this reward was never any good"),
        ("hangs", "reward_timeout", "took longer than 0.2 s"),
        ("not_a_number", "reward_not_a_number", "not a finite number"),
    ],
)
async def test_T11_a_reward_without_a_number_is_delayed_then_dead_and_its_answer_is_not_drawn_again(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, function: str, reason: str, says: str
) -> None:
    bad = admit(client, keys, [job(0, reward=f"{PARTS}:{function}")])
    good = admit(client, keys, [job(1, "b")])
    async with working(config(reward={"timeout_s": 0.2})), tended(client, keys):
        await until(all_in(client, keys, good, "ready"))
        await until(all_in(client, keys, bad, "dead"))
    letter = letters(client, keys)[bad[0]]
    assert (letter["reason"], letter["attempts"], letter["id"]) == (reason, "2", bad[0])
    *trace, sentence = letter["detail"].splitlines()
    assert says in sentence
    assert ("Traceback" in "".join(trace)) == (function == "raises"), "of the user's code alone"
    assert "workers/" not in "".join(trace)
    assert worker_parts.scored == {f"{bad[0]}/0": 2, f"{bad[0]}/1": 2}
    assert fake.asked[IDS["a"]] == 2, "each answer was drawn once and scored twice"
    assert metas(client, keys, bad[0]) == []
    assert play.counter(client, keys, f"failed:{reason}") == 2
    play.assert_conserved(client, keys)


async def test_T11_siblings_of_a_failed_reward_are_kept(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0, n=4, reward=f"{PARTS}:raises_for_the_second")])
    fake.held = (f"{jobs[0]}/2:", f"{jobs[0]}/3:")
    async with working(config()), tended(client, keys):
        await until(lambda: [meta.k for meta in metas(client, keys, jobs[0])] == [0])
        await until(lambda: worker_parts.scored[f"{jobs[0]}/1"] == 1)
        fake.rest.set()
        await until(all_in(client, keys, jobs, "ready"))
    rows = read_group(client, keys, jobs[0])
    tokens = {meta.k: meta.token for meta, _ in rows}
    assert tokens[0] == tokens[2] == tokens[3] != tokens[1], "one lease committed the siblings, another one the rest"
    assert fake.asked[IDS["a"]] == 4, "they were let end, though one of them had failed"
    play.assert_conserved(client, keys)


# --- slots --------------------------------------------------------------------------------------------------------


async def test_never_more_samples_at_the_engine_than_slots_and_no_more_leased_than_fits(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(i, n=3) for i in range(12)])
    fake.open.clear()
    async with working(config(rollout={"n": 3})) as worker:
        await until(lambda: fake.num_running == 8)
        assert play.counter(client, keys, "admitted") == 12
        assert 8 <= worker.held.num_ungenerated <= 8 + 2, "one job may stick out, by less than its size"
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
    assert fake.peak == 8


async def test_an_idle_worker_takes_a_job_when_it_comes_and_a_full_one_when_a_slot_is_free(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next look: looks are an hour apart here."""
    first = admit(client, keys, [job(0)])
    async with working(config()):
        await until(all_in(client, keys, first, "ready"))
        monkeypatch.setattr("penstock.workers.jobs.intake.WAKE_S", 3600.0)
        monkeypatch.setattr("penstock.workers.jobs.intake.ROOM_CHECK_S", 3600.0)
        for i in range(1, 4):
            await until(lambda: any(one["cmd"] == "blpop" and "b" in one["flags"] for one in client.client_list()))
            fake.open.clear()
            jobs = admit(client, keys, [job(20 * i + k) for k in range(12)])
            await until(lambda: fake.num_running == 8)
            fake.open.set()
            await until(all_in(client, keys, jobs, "ready"))


async def test_workers_share_by_pulling(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    jobs = admit(client, keys, [job(i) for i in range(40)])
    async with FakeEngine().up() as slow:
        slow.open.clear()
        slow_config = config(engine={"url": slow.url})
        async with working(slow_config, "slow"):
            await until(lambda: slow.num_running == 8)
            async with working(config(), "fast"):
                await until(lambda: states(client, keys, jobs).count("ready") == 36)
                slow.open.set()
                await until(all_in(client, keys, jobs, "ready"))
    by = Counter(meta.worker.split(".")[0] for name in jobs for meta in metas(client, keys, name))
    assert by == {"slow": 8, "fast": 72}
    play.assert_conserved(client, keys)


# --- Redis --------------------------------------------------------------------------------------------------------


def with_newest(read: Callable[..., Awaitable[View]], newest: Publication) -> Callable[..., Awaitable[View]]:
    """Views in which a publication is announced."""

    async def announced(*args: Any) -> View:
        view = await read(*args)
        return dataclasses.replace(view, published=(newest, *view.published))

    return announced


async def test_a_full_redis_is_waited_for_with_the_samples_in_hand(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    jobs = admit(client, keys, [job(i) for i in range(8)])
    fake.open.clear()
    async with working(config()) as worker:
        await until(lambda: fake.num_running == 8)
        client.config_set("maxmemory", 1)
        try:
            fake.open.set()
            await until(lambda: is_blocked(client, keys, "commit", RedisFull))
            views = worker.updates._views  # a full Redis takes no announcement
            views.read = with_newest(views.read, publications[2])  # type: ignore[method-assign]
            await until(lambda: fake.version == "2")
            await until(lambda: presence(client, keys)["held"] == 8)
            assert metas(client, keys, jobs[0]) == []
        finally:
            client.config_set("maxmemory", 0)
        await until(all_in(client, keys, jobs, "ready"))
        await until(lambda: wait_of(client, keys, "commit") is None)
    assert fake.asked[IDS["a"]] == 16, "no answer was drawn twice"
    for name in jobs:
        read_group(client, keys, name)
    play.assert_conserved(client, keys)


async def test_nothing_is_committed_above_85_percent_of_maxmemory(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0)])
    fake.open.clear()
    async with working(config()):
        await until(lambda: fake.num_running == 2)
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.9))
        try:
            fake.open.set()
            await until(lambda: is_blocked(client, keys, "commit", RedisFull))
            assert metas(client, keys, jobs[0]) == []
        finally:
            client.config_set("maxmemory", 0)
        await until(all_in(client, keys, jobs, "ready"))


async def test_a_worker_that_leaves_a_full_redis_hands_its_jobs_back(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.jobs.held_job.SETTLE_S", 0.2)
    jobs = admit(client, keys, [job(i) for i in range(2)])
    fake.open.clear()
    try:
        async with working(config()):
            await until(lambda: fake.num_running == 4)
            client.config_set("maxmemory", 1)
            fake.open.set()
            await until(lambda: is_blocked(client, keys, "commit", RedisFull))
    finally:
        client.config_set("maxmemory", 0)
    assert states(client, keys, jobs) == ["queued"] * 2
    assert play.counter(client, keys, "crashes") == 0
    play.assert_conserved(client, keys)


async def test_a_lost_reply_of_a_lease_is_swept(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    lease = scripts.script("lease")
    async with working(config()) as worker:
        await until(lambda: fake.version == "1")
        execute, lost, asked = worker.control.client.execute_command, [], []

        async def lose_a_reply(*args: Any, **options: Any) -> Any:
            is_lease = args[1] in (lease.sha, lease.text)
            asked.extend([True] * is_lease)
            answer = await execute(*args, **options)
            if is_lease and answer and not lost:
                lost.append(answer)
                raise LostConnection("the reply was lost")
            return answer

        worker.control.client.execute_command = lose_a_reply
        await until(lambda: asked, "the call that was under way to have ended")
        jobs = admit(client, keys, [job(i) for i in range(3)])
        await until(all_in(client, keys, jobs, "ready"))
    assert len(lost[0]) == 3
    assert play.counter(client, keys, "released") == 3
    assert play.counter(client, keys, "crashes") == 0
    play.assert_conserved(client, keys)


async def test_I3_a_lease_that_was_taken_over_stops_its_samples_and_writes_nothing(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0)])
    fake.open.clear()
    async with working(config()) as worker:
        await until(lambda: fake.num_running == 2)
        held = worker.held[jobs[0]]
        run(client, scripts.release(keys, jobs[0], held.lease.token))
        client.sadd(keys.paused, "resume")
        await until(lambda: not worker.held)
        assert fake.num_running == 0, "the engine was asked to stop"
        assert worker.services.tally.lost_leases == 1
        assert list(client.scan_iter(match=keys.of("p*").replace("{", "[{]"))) == [keys.paused.encode()]
        client.srem(keys.paused, "resume")
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
    assert {meta.token for meta in metas(client, keys, jobs[0])} != {held.lease.token}
    play.assert_conserved(client, keys)


async def test_a_job_leased_anew_ends_the_lease_before_it(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0)])
    fake.open.clear()
    async with working(config(worker={"heartbeat_s": 50, "lease_s": 100})) as worker:
        await until(lambda: fake.num_running == 2)
        before = worker.held[jobs[0]]
        run(client, scripts.release(keys, jobs[0], before.lease.token))
        await until(lambda: worker.held.get(jobs[0]) not in (None, before))
        await until(lambda: before.task.done() and fake.num_running == 2)
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
    play.assert_conserved(client, keys)


# --- leaving ------------------------------------------------------------------------------------------------------


async def test_drain_lets_samples_end_within_its_time(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(i) for i in range(8)])
    fake.open.clear()
    async with working(config()) as worker:
        await until(lambda: fake.num_running == 8)
        worker.drain()
        await until(lambda: presence(client, keys)["state"] == "draining")
        fake.open.set()
        await until(lambda: states(client, keys, jobs).count("ready") == 4)
    assert states(client, keys, jobs).count("queued") == 4, "nothing new was leased"
    assert play.counter(client, keys, "released") == 0


@pytest.mark.parametrize("hurries", [False, True])
async def test_what_is_not_done_in_time_is_handed_back_with_its_prefix(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication], hurries: bool
) -> None:
    jobs = admit(client, keys, [job(0)])
    fake.open.clear()
    async with working(config(worker={"drain_timeout_s": 1000 if hurries else 0.1})) as worker:
        await until(lambda: fake.num_running == 2)
        (worker.hurry if hurries else worker.drain)()
        await until(lambda: states(client, keys, jobs) == ["queued"])
    assert play.counter(client, keys, "crashes") == play.counter(client, keys, "failed") == 0
    publish(client, keys, publications[2])
    fake.open.set()
    fake.prompts.clear()
    async with working(config(), "next"):
        await until(all_in(client, keys, jobs, "ready"))
    prompt = [IDS["a"], IDS["0"], IDS["="]]
    assert fake.prompts == [prompt + FIRST] * 2
    for meta, payload in read_group(client, keys, jobs[0]):
        assert payload.tokens.tolist()[:6] == prompt + FIRST
        assert payload.versions.tolist() == [-1] * 3 + [1] * 3 + [2] * 6
        assert meta.num_aborts == 1
    play.assert_conserved(client, keys)


async def test_a_defect_takes_the_worker_down_and_its_jobs_go_back_uncharged(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = admit(client, keys, [job(0)])
    fake.open.clear()
    worker = Worker(config(), "w")
    working_on = asyncio.create_task(worker.run())
    await until(lambda: fake.num_running == 2)

    def broken() -> dict[str, Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(worker.presence, "presence", broken)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(working_on, 60)
    assert states(client, keys, jobs) == ["queued"]
    assert play.counter(client, keys, "crashes") == 0
    play.assert_conserved(client, keys)


# --- weights ------------------------------------------------------------------------------------------------------


async def test_I9_nothing_is_leased_before_a_publication(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    made = config()
    client.delete(keys.weights("policy"))
    jobs = admit(client, keys, [job(0)])
    async with working(made):
        await until(lambda: is_blocked(client, keys, "intake", NoPublication))
        await until(lambda: presence(client, keys)["state"] == "no weights")
        assert states(client, keys, jobs) == ["queued"]
        publish(client, keys, publications[1])
        await until(all_in(client, keys, jobs, "ready"))
    assert fake.loads == ["1"]


def broken(publication: Publication, folder: Path) -> Publication:
    """Copy a publication to ``folder`` and change a byte of its weights."""
    shutil.copytree(publication.path, folder)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return dataclasses.replace(publication, path=str(folder))


async def test_a_broken_publication_is_named_and_the_old_version_goes_on(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "RETRY_S", 0.05)
    os.mkfifo(tmp_path / "weights.index")
    async with working(config()):
        jobs = admit(client, keys, [job(0)])
        await until(all_in(client, keys, jobs, "ready"))
        client.xadd(keys.weights("policy"), {"p": broken(publications[2], tmp_path / "broken").to_bytes()}, id="2-0")
        await until(lambda: is_blocked(client, keys, "weights", VersionRefused, error="checksum differs"))
        await until(lambda: presence(client, keys)["state"] == "cannot load")
        nowhere = dataclasses.replace(publications[2], rev=1, path="/" + "x" * 5000)
        client.xadd(keys.weights("policy"), {"p": nowhere.to_bytes()}, id="2-1")
        await until(lambda: is_blocked(client, keys, "weights", VersionRefused, error="there is no folder"))
        fifo = dataclasses.replace(publications[2], rev=2, path=str(tmp_path), index="a" * 32)
        client.xadd(keys.weights("policy"), {"p": fifo.to_bytes()}, id="2-2")
        await until(lambda: is_blocked(client, keys, "weights", VersionRefused, error="no plain file"))
        jobs += admit(client, keys, [job(1)])
        await until(all_in(client, keys, jobs, "ready"))
        publish(client, keys, publications[3])
        await until(lambda: presence(client, keys)["version"] == 3)
        await until(lambda: wait_of(client, keys, "weights") is None)
        await until(lambda: presence(client, keys)["why"] == "")
    assert fake.loads == ["1", "3"]
    assert metas(client, keys, jobs[1])[0].newest == 1


async def test_a_publication_that_is_gone_because_there_is_a_newer_one_is_passed_over(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with working(config()) as worker:
        await until(lambda: fake.version == "1")
        verify = worker.services.engine.verify

        async def verify_late(publication: Publication) -> None:
            if publication.version == 2:
                publish(client, keys, publications[3])
            await verify(publication)

        monkeypatch.setattr(worker.services.engine, "verify", verify_late)
        publish(client, keys, dataclasses.replace(publications[2], path=str(tmp_path / "gone")))
        await until(lambda: fake.version == "3")
    assert fake.loads == ["1", "3"]
    assert "is not loaded" not in caplog.text


async def test_an_unreadable_record_of_a_publication_is_left_out(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    async with working(config()):
        await until(lambda: fake.version == "1")
        client.xadd(keys.weights("policy"), {"p": b"\xc1"}, id="2-0")
        await until(lambda: "not a record" in (presence(client, keys)["why"] or ""))
        publish(client, keys, publications[3])
        await until(lambda: fake.version == "3")


async def test_T12_where_the_newest_cannot_be_loaded_after_a_restart_the_old_serves_what_it_may(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication], tmp_path: Path
) -> None:
    fake.open.clear()
    old = admit(client, keys, [job(0)])
    folder = Path(shutil.copytree(publications[2].path, tmp_path / "second"))
    async with working(config()) as worker, tended(client, keys):
        await until(lambda: fake.num_running == 2)
        publish(client, keys, dataclasses.replace(publications[2], path=str(folder)))
        await until(lambda: fake.version == "2")
        new = admit(client, keys, [job(1, "b")])
        await until(lambda: fake.num_running == 4)
        (folder / "model.safetensors").unlink()
        fake.open.set()
        worker.updates.loaded = publications[1]
        fake.die()
        await until(all_in(client, keys, old, "ready"))
        assert fake.version == "1"
        assert states(client, keys, new) == ["queued"], "admitted at version 2, not drawn with 1"
        await until(lambda: is_blocked(client, keys, "weights", VersionRefused, version=2))
        publish(client, keys, publications[3])
        await until(all_in(client, keys, new, "ready"))
    assert fake.loads == ["1", "2", "1", "3"]
    assert [meta.oldest for meta in metas(client, keys, new[0])] == [3, 3]
    play.assert_conserved(client, keys)


async def test_T12_jobs_held_through_a_restart_with_older_weights_are_handed_back(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    """They wait for a slot while the engine dies, so they are not charged, and must not start on what comes back."""
    client.hset(keys.clock, "version:policy", 2)
    client.delete(keys.weights("policy"))
    client.xadd(keys.weights("policy"), {"p": publications[2].to_bytes()}, id="2-0")
    fake.open.clear()
    jobs = admit(client, keys, [job(0, n=8), job(1, n=8)])
    async with working(config(rollout={"n": 4})) as worker:
        await until(lambda: fake.num_running == 8)
        client.sadd(keys.paused, "resume", "suspect")
        client.delete(keys.weights("policy"))
        worker.updates.loaded = None
        fake.die()
        await until(lambda: fake.deaths == 1 and not worker.held)
        await until(lambda: not worker.services.engine_lost.is_set())
        assert fake.num_running == 0
        assert fake.asked.total() == 8
        assert states(client, keys, jobs) == ["queued"] * 2
        assert (play.counter(client, keys, "crashes"), play.counter(client, keys, "released")) == (1, 1)
    play.assert_conserved(client, keys)


@pytest.mark.parametrize("policy", ["in_place", "abort", "drain"])
async def test_an_engine_that_dies_while_weights_are_applied_comes_back_with_the_newest(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication], policy: str
) -> None:
    jobs = admit(client, keys, [job(i) for i in range(6)])
    fake.open.clear()
    async with working(config(worker={"apply": policy})), tended(client, keys):
        await until(lambda: fake.num_running == 8)
        publish(client, keys, publications[2])
        if policy == "drain":
            await until(lambda: is_blocked(client, keys, "intake", VersionDraining, version=2))
        fake.die()
        publish(client, keys, publications[3])
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
        await until(lambda: fake.version == "3")
    assert fake.loads == sorted(fake.loads), "versions never go back"
    play.assert_conserved(client, keys)


async def test_an_engine_that_dies_while_a_drain_waits_for_an_environment_comes_back(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    """The drain waits for a sample that waits for the engine, which must not wait for the drain."""
    jobs = admit(client, keys, [job(0, environment=f"{PARTS}:Waits")])
    worker_parts.go_on = asyncio.Event()
    async with working(config(worker={"apply": "drain"})) as worker, tended(client, keys):
        await until(lambda: worker_parts.scored.total() == 2)
        publish(client, keys, publications[2])
        await until(lambda: worker.services.valves.samples.cause)
        fake.die()
        worker.services.lose_engine(worker.services.births)
        worker_parts.go_on.set()
        await until(all_in(client, keys, jobs, "ready"))
    assert fake.loads == ["1", "2"]
    assert play.counter(client, keys, "crashes") == 0, "nothing of it was at the engine"


async def test_one_step_waits_for_the_cohort_wherever_it_runs(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    jobs = admit(client, keys, [job(0), job(1)])
    elsewhere = play.lease(client, keys, "another", version=1)[0]
    made = config(staleness={"mode": "one_step"})
    async with working(made):
        await until(lambda: states(client, keys, jobs) == ["leased", "ready"])
        publish(client, keys, publications[2])
        await until(lambda: is_blocked(client, keys, "weights", CohortRunning, cohort=1))
        assert fake.version == "1"
        play.commit(client, keys, elsewhere, [0, 1])
        await until(lambda: fake.version == "2")


async def test_T1_one_step_does_not_finish_a_cohort_under_a_version_that_was_abandoned(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    jobs = admit(client, keys, [job(0), job(1)])
    play.lease(client, keys, "another", version=1)
    async with working(config(staleness={"mode": "one_step"})):
        await until(lambda: states(client, keys, jobs) == ["leased", "ready"])
        publish(client, keys, dataclasses.replace(publications[2], abandoned=[[1, 1]]))
        await until(lambda: fake.version == "2")
    assert states(client, keys, jobs)[0] == "leased", "its cohort had not ended"


# --- being seen ---------------------------------------------------------------------------------------------------


async def test_presence_and_metrics_tell_what_it_does(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0), job(1, sampling={"top_p": 0.5})])
    async with working(config(metrics={"port": 0})) as worker:
        await until(lambda: states(client, keys, jobs) == ["ready", "dead"])
        await until(lambda: presence(client, keys)["samples"] == 2)
        record = presence(client, keys)
        assert (record["state"], record["version"], record["slots"], record["failed"]) == ("serving", 1, 8, 1)
        assert (record["generated_tokens"], record["groups"], record["held"], record["running"]) == (12, 1, 0, 0)
        assert record["url"] == fake.url
        assert worker.metrics is not None
        text = await asyncio.to_thread(fetch, worker.metrics.url)
    for line in (
        "penstock_worker_generated_tokens_total 12.0",
        "penstock_worker_committed_samples_total 2.0",
        'penstock_worker_failed_jobs_total{reason="refused"} 1.0',
        "penstock_worker_committed_tokens_total 12.0",
        "penstock_worker_weight_version 1.0",
        "penstock_worker_slots 8.0",
    ):
        assert line in text.splitlines()


def fetch(url: str) -> str:
    from urllib.request import urlopen

    assert url.startswith("http://127.0.0.1:")
    with urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
