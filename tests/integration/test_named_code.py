"""What a record in Redis names is imported only where the process's own configuration names it too.

The worker is a process of its own, Redis is real.
"""

import signal
from pathlib import Path

import pytest
import redis

from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, letters, metas, tended, until
from tests.integration.worker_process import Start, start

__all__ = ["start"]

WRITES = "tests.integration.writes_when_imported"


async def test_a_worker_imports_nothing_because_a_record_names_it(
    client: redis.Redis, keys: Keys, config: Make, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "imported"
    monkeypatch.setenv("PENSTOCK_TEST_IMPORTED", str(marker))
    rewards = [f"{WRITES}:reward", "os:system", "os:_exit", WRITES, "no.such.module:f", ":"]
    environments = [f"{WRITES}:Environment", "os:system", WRITES, "tests.integration.worker_parts:length"]
    forged = [job(i, reward=name) for i, name in enumerate(rewards)]
    forged += [job(i, environment=name) for i, name in enumerate(environments, len(forged))]
    bad = admit(client, keys, forged)
    good = admit(client, keys, [job(len(forged), environment="tests.integration.worker_parts:Echo")])
    worker = start(config())

    async with tended(client, keys, lease_ms=60_000):

        def settled() -> bool:
            ended = all_in(client, keys, bad, "dead")() and all_in(client, keys, good, "ready")()
            return worker.process.poll() is not None or marker.exists() or ended

        await until(settled, f"for {worker.log}")
    assert worker.process.poll() is None, worker.text()
    assert not marker.exists(), "a record had it imported"
    found = letters(client, keys)
    for one, key in zip(forged, ["rewards"] * len(rewards) + ["environments"] * len(environments), strict=True):
        letter, name = found[one.id], one.reward or one.environment
        assert (letter["reason"], letter["attempts"], letter["crashes"]) == ("refused", "1", "0"), letter
        assert f"job {one.id} names {key[:-1]} {name!r}" in letter["detail"]
        assert f"add it to worker.{key}" in letter["detail"]
    assert len(metas(client, keys, good[0])) == 2
    play.assert_conserved(client, keys)

    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0, worker.text()


async def test_a_worker_imports_what_its_configuration_names_for_jobs_of_others(
    client: redis.Redis, keys: Keys, config: Make, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "imported"
    monkeypatch.setenv("PENSTOCK_TEST_IMPORTED", str(marker))
    own = {"rewards": [f"{WRITES}:reward"], "environments": [f"{WRITES}:Environment"]}
    jobs = admit(client, keys, [job(0, reward=f"{WRITES}:reward"), job(1, environment=f"{WRITES}:Environment")])
    start(config(worker=own))

    async with tended(client, keys, lease_ms=60_000):
        await until(all_in(client, keys, jobs, "ready"))
    assert marker.exists()
    assert [meta.reward for meta in metas(client, keys, jobs[0])] == [1.0, 1.0]
    play.assert_conserved(client, keys)


async def test_a_worker_whose_own_names_cannot_be_imported_does_not_start(
    client: redis.Redis, keys: Keys, config: Make, start: Start
) -> None:
    for name, key in (("nowhere:f", "rewards"), ("nowhere:Env", "environments")):
        worker = start(config(worker={key: [name]}), key)
        assert await worker.exit_code() == 2
        assert "there is no module nowhere" in worker.text()
