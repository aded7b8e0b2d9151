"""``penstock worker`` ends in time whatever user code does to it, with all that it started, and jobs are not charged.

The worker is processes of its own, Redis is real, the engine is a fake.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import Make
from tests.integration.processes import kept_by, open_pidfds, wait_gone
from tests.integration.worker_play import admit, all_in, job, metas, presence, states, tended, until, working
from tests.integration.worker_process import Start, WorkerProcess, start

__all__ = ["start"]

PARTS = "tests.integration.harmful_parts"
#: ``penstock`` with a worker that has a second after its limit.
QUICK = "from penstock.system import keeper; keeper.KILL_S = 1.0; from penstock.console.cli.main import main; main()"
#: Longest wait for what must end.
END_S = 120.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rewards say what they did."""
    monkeypatch.setenv("PENSTOCK_TEST_FOLDER", str(tmp_path))
    return tmp_path


def _config(config: Make, reward: str, *, limit_s: float = 1.0, lease_s: float = 60.0) -> Config:
    worker: dict[str, Any] = {"rewards": [f"{PARTS}:{reward}"], "drain_timeout_s": limit_s, "lease_s": lease_s}
    return config(reward={"function": f"{PARTS}:good", "timeout_s": 500.0}, worker=worker)


def _pids(worker: WorkerProcess) -> list[int]:
    """The process that was started, its keeper and the one that works."""
    return [worker.process.pid, *kept_by(worker.process.pid)]


def _children(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("child-?"))]


async def _gone(worker: WorkerProcess, pidfds: dict[int, int]) -> int:
    """Wait for the end of all processes, whose pidfds were opened before they were signalled; the exit code."""
    code = await worker.exit_code()
    assert await asyncio.to_thread(wait_gone, pidfds, END_S) == []
    return code


@pytest.mark.parametrize("how", ["holds_the_gil", "stops_itself_again", "ignores_signals"])
async def test_a_worker_that_a_reward_blocks_is_killed_at_its_limit_and_its_jobs_go_back_uncharged(
    client: redis.Redis, keys: Keys, config: Make, start: Start, folder: Path, how: str
) -> None:
    settings = _config(config, "harms_once")
    jobs = admit(client, keys, [job(0, reward=f"{PARTS}:harms_once", label=how), *(job(i) for i in range(1, 3))])
    worker = start(settings, python=("-c", QUICK))
    await until((folder / "held").exists, f"for {worker.log}", 60)
    held = [name for name, state in zip(jobs, states(client, keys, jobs), strict=True) if state == "leased"]
    assert jobs[0] in held
    pidfds = open_pidfds(_pids(worker))
    worker.signal(signal.SIGTERM)
    assert await _gone(worker, pidfds) == -signal.SIGKILL, worker.text()

    assert "leased" not in states(client, keys, jobs), worker.text()
    assert states(client, keys, [jobs[0]]) == ["queued"]
    assert not client.hlen(keys.workers), "it shows itself no more"
    async with working(settings, "next"):
        await until(all_in(client, keys, jobs, "ready"))
    assert metas(client, keys, jobs[0])[0].worker.startswith("next.")
    assert [client.hmget(keys.group(name), "att", "cr") for name in jobs] == [[None, None]] * 3
    assert play.counter(client, keys, "reclaimed") == 0
    play.assert_conserved(client, keys)


async def test_a_second_signal_cuts_the_limit_of_a_blocked_worker(
    client: redis.Redis, keys: Keys, config: Make, start: Start, folder: Path
) -> None:
    jobs = admit(client, keys, [job(0, reward=f"{PARTS}:harms_once", label="holds_the_gil")])
    worker = start(_config(config, "harms_once", limit_s=1000.0), python=("-c", QUICK))
    await until((folder / "held").exists, f"for {worker.log}", 60)
    pidfds = open_pidfds(_pids(worker))
    worker.signal(signal.SIGTERM)
    worker.signal(signal.SIGINT)
    assert await _gone(worker, pidfds) == -signal.SIGKILL, worker.text()
    assert states(client, keys, jobs) == ["queued"]


async def test_a_worker_that_a_reward_stopped_is_continued_by_sigterm_and_drains(
    client: redis.Redis, keys: Keys, config: Make, start: Start, folder: Path
) -> None:
    jobs = admit(client, keys, [job(0, n=1, reward=f"{PARTS}:harms_once", label="stops_itself")])
    worker = start(_config(config, "harms_once", limit_s=1000.0))
    await until((folder / "held").exists, f"for {worker.log}", 60)
    pidfds = open_pidfds(_pids(worker))
    worker.signal(signal.SIGTERM)
    assert await _gone(worker, pidfds) == 0, worker.text()
    assert states(client, keys, jobs) == ["ready"]


async def test_children_of_a_reward_end_with_a_worker_that_drains(
    client: redis.Redis, keys: Keys, config: Make, start: Start, folder: Path
) -> None:
    jobs = admit(client, keys, [job(0, n=1, reward=f"{PARTS}:leaves_children")])
    worker = start(_config(config, "leaves_children"))
    await until(all_in(client, keys, jobs, "ready"), f"for {worker.log}", 60)
    pids = _children(folder)
    assert len(pids) == 3
    pidfds = open_pidfds(pids)
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0, worker.text()
    assert wait_gone(pidfds, 1) == []


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_kill_9_of_any_process_of_a_worker_ends_all_and_another_worker_finishes(
    client: redis.Redis, keys: Keys, config: Make, start: Start, folder: Path, fake: FakeEngine, victim: int
) -> None:
    settings = _config(config, "leaves_children", lease_s=2.0)
    first = admit(client, keys, [job(0, n=1, reward=f"{PARTS}:leaves_children")])
    worker = start(settings)
    await until(all_in(client, keys, first, "ready"), f"for {worker.log}", 60)
    fake.open.clear()
    jobs = admit(client, keys, [job(i) for i in range(1, 4)])
    await until(lambda: fake.num_running > 0)
    pids = _pids(worker)
    pidfds = open_pidfds([*pids, *_children(folder)])
    os.kill(pids[victim], signal.SIGKILL)
    assert await _gone(worker, pidfds) == -signal.SIGKILL
    fake.open.set()
    async with tended(client, keys), working(settings, "next"):
        await until(all_in(client, keys, jobs, "ready"))
    play.assert_conserved(client, keys)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_every_process_of_a_worker_counts_once(
    client: redis.Redis, keys: Keys, config: Make, start: Start, fake: FakeEngine, number: signal.Signals
) -> None:
    """Service managers signal all processes of a unit, terminals those of a process group."""
    fake.open.clear()
    jobs = admit(client, keys, [job(0)])
    worker = start(_config(config, "good", limit_s=1000.0))
    await until(lambda: fake.num_running == 2)
    assert presence(client, keys)["pid"] == worker.process.pid
    pidfds = open_pidfds(_pids(worker))
    for pid in pidfds:
        os.kill(pid, number)
    await until(lambda: presence(client, keys)["state"] == "draining")
    fake.open.set()
    assert await _gone(worker, pidfds) == 0, worker.text()
    assert (states(client, keys, jobs), play.counter(client, keys, "released")) == (["ready"], 0)
