"""``reward.own_process``: rewards that harm their process fail alone, and nothing of them outlives the worker.

The worker is a process of its own, Redis is real, the engine is a fake.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, letters, metas, tended, until
from tests.integration.worker_process import Start, start

__all__ = ["start"]

PARTS = "tests.integration.harmful_parts"
TWICE = "ended its process twice: it "
#: Reward -> what the dead letter says.
HARMFUL = {
    "kills_itself": TWICE + "ended by signal SIGKILL",
    "stops_itself": TWICE + "ended by signal SIGSTOP",
    "closes_files": TWICE + "ended by exit code",
    "limits_files": "PermissionError: other rewards share this process",
    "limits_recursion": "PermissionError: other rewards share this process",
}


def _config(config: Make, names: list[str], **over: Any) -> Config:
    reward = {"function": f"{PARTS}:good", "own_process": True, "timeout_s": 60.0} | over
    own = {"rewards": [f"{PARTS}:{name}" for name in names], "max_attempts": 1, "slots": 64, "drain_timeout_s": 2.0}
    return config(reward=reward, worker=own)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_reward_that_harms_its_process_fails_alone_and_no_other_job_is_charged(
    client: redis.Redis, keys: Keys, config: Make, start: Start
) -> None:
    names = [*HARMFUL, "good", "good_in_the_loop"]
    bad = [job(i, reward=f"{PARTS}:{name}", n=1) for i, name in enumerate(HARMFUL)]
    good = [job(100 + i, reward=f"{PARTS}:{name}") for i, name in enumerate(("good", "good_in_the_loop") * 8)]
    admit(client, keys, [*good[:8], *bad, *good[8:]])
    worker = start(_config(config, names))
    async with tended(client, keys, lease_ms=60_000):

        def settled() -> bool:
            done = all_in(client, keys, [one.id for one in good], "ready")()
            return worker.process.poll() is not None or (
                done and all_in(client, keys, [one.id for one in bad], "dead")()
            )

        await until(settled, f"for {worker.log}", 120)
    assert worker.process.poll() is None, worker.text()
    found = letters(client, keys)
    for one, (name, says) in zip(bad, HARMFUL.items(), strict=True):
        letter = found[one.id]
        assert (letter["reason"], letter["attempts"], letter["crashes"]) == ("reward_raised", "1", "0"), (name, letter)
        assert says in letter["detail"], letter["detail"]
    for one in good:
        assert [meta.reward for meta in metas(client, keys, one.id)] == [6.0] * one.n
        assert client.hmget(keys.group(one.id), "att", "cr") == [None, None], "only the harmful ones are charged"
    play.assert_conserved(client, keys)
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0, worker.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_of_a_reward_outlives_its_worker(
    client: redis.Redis, keys: Keys, config: Make, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:  # fmt: skip
    monkeypatch.setenv("PENSTOCK_TEST_FOLDER", str(tmp_path))
    one = job(0, n=1, reward=f"{PARTS}:starts_children")
    admit(client, keys, [one])
    worker = start(_config(config, ["starts_children"], timeout_s=500.0))
    await until((tmp_path / "children").exists, f"for {worker.log}", 60)
    await until((tmp_path / "held").exists, f"for {worker.log}", 60)
    pids = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    assert all(map(_is_alive, pids))
    assert os.getpid() not in pids
    worker.signal(number)
    code = await worker.exit_code()
    assert code == (0 if number == signal.SIGTERM else -number), worker.text()
    await until(lambda: not any(map(_is_alive, pids)), f"for {pids} to end", 60)
    if number == signal.SIGTERM:
        assert (play.state(client, keys, one.id), client.hget(keys.group(one.id), "att")) == ("queued", None)
    play.assert_conserved(client, keys)


async def test_a_reward_that_holds_the_interpreters_lock_is_killed_and_its_neighbours_are_not_charged(
    client: redis.Redis, keys: Keys, config: Make, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_FOLDER", str(tmp_path))
    bad = job(0, n=1, reward=f"{PARTS}:holds_the_gil")
    good = [job(i) for i in range(1, 5)]
    admit(client, keys, [bad, *good])
    worker = start(_config(config, ["holds_the_gil"], timeout_s=5.0))
    async with tended(client, keys, lease_ms=60_000):
        await until(all_in(client, keys, [bad.id], "dead"), f"for {worker.log}", 120)
        await until(all_in(client, keys, [one.id for one in good], "ready"), f"for {worker.log}", 60)
    detail = letters(client, keys)[bad.id]["detail"]
    assert "ended its process twice: it answered nothing for 15 s and was killed" in detail
    assert [client.hget(keys.group(one.id), "att") for one in good] == [None] * 4
    play.assert_conserved(client, keys)
