"""Rewards of whole groups, in real workers: a second phase under the lease, in which nothing is drawn again."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import Make
from tests.integration.worker_parts import groups
from tests.integration.worker_play import admit, all_in, job, letters, metas, read_group, states, tended, until, working
from tests.integration.worker_process import Start, start

__all__ = ["start"]

PARTS = "tests.integration.worker_parts"


def of(name: str, **over: object) -> dict[str, object]:
    return {"group": f"{PARTS}:{name}", **over}


def numbers(client: redis.Redis, keys: Keys, name: str) -> list[float]:
    return [meta.reward for meta in metas(client, keys, name)]


async def test_a_group_reward_sees_all_samples_and_each_gets_its_number(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    async with working(config(reward=of("places"))) as worker:
        jobs = admit(client, keys, [job(0, n=3), job(1, n=1)])
        await until(all_in(client, keys, jobs, "ready"))
        tally = worker.services.tally
        await until(lambda: tally.committed_groups == tally.group_rewards == 2)
    assert sorted(len(seen) for seen in groups) == [1, 3]
    (seen,) = [seen for seen in groups if len(seen) == 3]
    assert [k for k, *_ in seen] == [0, 1, 2]
    rows = read_group(client, keys, "d/0/0")
    assert [list(payload.tokens) for _, payload in rows] == [tokens for _, _, tokens, _ in seen]
    assert [alone for *_, alone in seen] == [float(meta.num_generated) for meta, _ in rows]
    assert numbers(client, keys, "d/0/0") == [10.0, 11.0, 12.0]
    alone = [meta.reward_info for meta, _ in rows]
    assert alone == [{"of": 3, "sample_reward": float(meta.num_generated)} for meta, _ in rows]
    assert len(fake.prompts) == 4
    assert audit(client, keys).ok


@pytest.mark.parametrize("name", ["ranks", "shortest_right"])
async def test_group_rewards_by_name(client: redis.Redis, keys: Keys, config: Make, name: str) -> None:
    """All answers of the fake engine are alike: they share the mean of their places."""
    async with working(config(reward={"group": name})):
        jobs = admit(client, keys, [job(0, n=4)])
        await until(all_in(client, keys, jobs, "ready"))
    assert numbers(client, keys, "d/0/0") == [{"ranks": 0.5, "shortest_right": 0.75}[name]] * 4


async def test_evaluations_keep_the_reward_that_they_got_alone(client: redis.Redis, keys: Keys, config: Make) -> None:
    async with working(config(reward=of("places"))):
        one = job(0, n=2, lane=Lane.EVAL)
        play.admit(client, keys, [one], lane=Lane.EVAL, source="eval@1")
        await until(all_in(client, keys, [one.id], "ready"))
    assert groups == []
    assert all("sample_reward" not in meta.reward_info for meta in metas(client, keys, one.id))


async def test_a_try_that_failed_is_made_again_with_the_same_samples(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    """The second attempt reads the samples back from Redis and sees what the first one saw."""
    async with tended(client, keys), working(config(reward=of("places_at_last"))):
        jobs = admit(client, keys, [job(0, n=3)])
        await until(all_in(client, keys, jobs, "ready"))
    first, second = groups
    assert first == second
    assert first[0][1], "there is a text"
    assert numbers(client, keys, jobs[0]) == [10.0, 11.0, 12.0]
    assert len(fake.prompts) == 3, "nothing is drawn again"
    assert play.counter(client, keys, "failed:reward_raised") == 1
    assert audit(client, keys).ok


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("group_raises", "reward_raised", "group d/0/0: reward tests.integration.worker_parts:group_raises raised"),
        ("group_exits", "reward_raised", "raised SystemExit"),
        ("group_hangs", "reward_timeout", "took longer than 0.1 s"),
        ("too_few", "reward_not_a_number", "gave [1.0], not a list of 2 numbers"),
        ("text_of_group", "reward_not_a_number", "gave '12', not a list of 2 numbers"),
        ("group_of_nan", "reward_not_a_number", "gave nan, not a finite number"),
        ("says_too_much", "reward_too_large", "a sample's record holds"),
    ],
)
async def test_T11_a_group_reward_that_fails_has_a_name_and_buries_its_job_alone(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, name: str, outcome: str, words: str
) -> None:
    limit = {"timeout_s": 0.1} if name == "group_hangs" else {"timeout_s": 60.0}
    async with tended(client, keys), working(config(reward=of(name, **limit))) as worker:
        jobs = admit(client, keys, [job(0)])
        await until(all_in(client, keys, jobs, "dead"))
        assert worker.services.tally.failures == {outcome: 2}
    letter = letters(client, keys)[jobs[0]]
    assert letter["reason"] == outcome
    assert words in letter["detail"]
    assert len(fake.prompts) == 2, "the tries drew nothing anew"
    (kind,) = [field.decode() for field in client.hkeys(keys.ends) if field.startswith(b"d:")]
    assert kind.endswith(f"and {PARTS}:{name} of its group")
    assert audit(client, keys).ok


async def test_I4_a_worker_that_is_killed_in_the_second_phase_leaves_it_to_another(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("PENSTOCK_TEST_GO_ON", str(go_on))
    of_worker = config(reward=of("waits_for_the_test", timeout_s=600.0))
    first = start(of_worker, "first")
    jobs = admit(client, keys, [job(0, n=3)])
    began = go_on.with_suffix(".began")
    await until(began.exists, first.text())
    assert states(client, keys, jobs) == ["leased"]
    assert len(metas(client, keys, jobs[0])) == 3, "all of it is committed"
    first.signal(signal.SIGKILL)
    await first.exit_code()
    before = metas(client, keys, jobs[0])
    began.unlink()
    async with tended(client, keys):
        second = start(of_worker, "second")
        await until(began.exists, second.text())
        go_on.touch()
        await until(all_in(client, keys, jobs, "ready"))
        second.signal(signal.SIGTERM)
        assert await second.exit_code() == 0
    assert numbers(client, keys, jobs[0]) == [20.0, 21.0, 22.0]
    after = [replace(one, reward=0.0, reward_info={}) for one in metas(client, keys, jobs[0])]
    assert after == [replace(one, reward=0.0, reward_info={}) for one in before], "the samples of the first one"
    assert len(fake.prompts) == 3, "nothing is drawn again"
    assert play.counter(client, keys, "group_rewards") == 1
    assert play.counter(client, keys, "committed") == 3
    assert audit(client, keys).ok


async def test_a_worker_that_lost_its_lease_in_the_second_phase_writes_nothing(
    client: redis.Redis, keys: Keys, config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("PENSTOCK_TEST_GO_ON", str(go_on))
    async with working(config(reward=of("waits_for_the_test", timeout_s=600.0))) as worker:
        jobs = admit(client, keys, [job(0)])
        await until(go_on.with_suffix(".began").exists)
        token = client.hget(keys.group(jobs[0]), "tok").decode()
        client.sadd(keys.paused, *Lane)
        assert run(client, scripts.crash(keys, jobs[0], token, "other", "taken")) == "resume"
        await until(lambda: worker.services.tally.lost_leases == 1)
        assert states(client, keys, jobs) == ["queued"]
        assert play.counter(client, keys, "group_rewards") == 0
        client.delete(keys.paused)
        go_on.touch()
        await until(all_in(client, keys, jobs, "ready"))
    assert play.counter(client, keys, "group_rewards") == 1
    assert audit(client, keys).ok


async def test_an_engine_that_dies_in_the_second_phase_does_not_touch_it(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("PENSTOCK_TEST_GO_ON", str(go_on))
    async with working(config(reward=of("waits_for_the_test", timeout_s=600.0))) as worker:
        jobs = admit(client, keys, [job(0)])
        await until(go_on.with_suffix(".began").exists)
        fake.is_away = True
        await until(worker.services.engine_lost.is_set)
        go_on.touch()
        await until(all_in(client, keys, jobs, "ready"))
        fake.is_away = False
        await until(lambda: not worker.services.engine_lost.is_set())
    assert len(fake.prompts) == 2
    assert play.counter(client, keys, "crashes") == 0
    assert audit(client, keys).ok


async def test_a_worker_that_drains_hands_the_second_phase_back(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("PENSTOCK_TEST_GO_ON", str(go_on))
    of_worker = config(reward=of("waits_for_the_test", timeout_s=600.0))
    async with working(of_worker):
        jobs = admit(client, keys, [job(0)])
        await until(go_on.with_suffix(".began").exists)
    assert states(client, keys, jobs) == ["queued"]
    assert client.hget(keys.group(jobs[0]), "cr") is None, "at no charge"
    go_on.touch()
    async with working(of_worker):
        await until(all_in(client, keys, jobs, "ready"))
    assert len(fake.prompts) == 2
    assert audit(client, keys).ok


async def test_payloads_live_on_while_a_reward_is_tried_again(client: redis.Redis, keys: Keys, config: Make) -> None:
    async with tended(client, keys):
        async with working(config(reward=of("group_raises"))):
            jobs = admit(client, keys, [job(0)])
            await until(all_in(client, keys, jobs, "dead"))
        payloads = [keys.payload(f"{jobs[0]}/{meta.k}", meta.token) for meta in metas(client, keys, jobs[0])]
        for name in payloads:
            client.expire(name, 3600)
        assert run(client, scripts.requeue(keys, jobs[0], play.MODEL))
        async with working(config(reward=of("places"))):
            await until(all_in(client, keys, jobs, "ready"))
    assert all(client.ttl(name) > 3600 for name in payloads)


async def test_samples_that_are_gone_are_named_and_not_drawn_again(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    async with tended(client, keys):
        async with working(config(reward=of("group_raises"), worker={"max_attempts": 1})):
            jobs = admit(client, keys, [job(0)])
            await until(all_in(client, keys, jobs, "dead"))
        for meta in metas(client, keys, jobs[0]):
            client.delete(keys.payload(f"{jobs[0]}/{meta.k}", meta.token))
        assert run(client, scripts.requeue(keys, jobs[0], play.MODEL))
        async with working(config(reward=of("places"), worker={"max_attempts": 1})):
            await until(lambda: len(client.xrange(keys.dead)) == 1 and states(client, keys, jobs) == ["dead"])
    letter = letters(client, keys)[jobs[0]]
    assert letter["reason"] == "payload_error"
    assert "sample d/0/0/0: its payload on control is gone, and the reward of its group needs it." in letter["detail"]
    assert len(fake.prompts) == 2
    assert audit(client, keys).ok


async def test_a_group_that_waits_for_a_reward_is_refused_where_none_is_configured(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    async with tended(client, keys):
        async with working(config(reward=of("group_raises"), worker={"max_attempts": 1})):
            jobs = admit(client, keys, [job(0)])
            await until(all_in(client, keys, jobs, "dead"))
        assert run(client, scripts.requeue(keys, jobs[0], play.MODEL))
        async with working(config()):
            await until(all_in(client, keys, jobs, "dead"))
    letter = letters(client, keys)[jobs[0]]
    assert letter["reason"] == "refused"
    assert "reward.group of this worker's configuration names none" in letter["detail"]
    assert audit(client, keys).ok


async def test_groups_that_wait_for_their_reward_bound_what_a_worker_takes(
    client: redis.Redis, keys: Keys, config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go_on"
    monkeypatch.setenv("PENSTOCK_TEST_GO_ON", str(go_on))
    of_worker = config(reward=of("waits_for_the_test", timeout_s=600.0), worker={"slots": 2})
    async with working(of_worker) as worker:
        jobs = admit(client, keys, [job(i) for i in range(8)])
        await until(lambda: len(worker.held) >= 4 and worker.held.num_ungenerated == 0)
        assert worker.held.num_open == 8, "four times its slots"
        assert client.xlen(keys.jobs("train")) == 8
        go_on.touch()
        await until(all_in(client, keys, jobs, "ready"))
