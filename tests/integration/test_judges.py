"""A judge that is killed under its questions: samples keep what was drawn, and are scored once."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.records.keys import Keys
from penstock.records.worker_causes import ServiceCalled
from tests.integration import judged, play
from tests.integration.fake_engine import FakeEngine
from tests.integration.worker_play import admit, all_in, is_blocked, job, metas, tended, until, working

Make = Callable[..., Config]

NUM_JOBS = 3


class JudgeProcess:
    """A judge; ``silent`` hears questions and answers none; ``how`` else as of ``judged``."""

    def __init__(self, port: int, heard: Path, *, silent: bool = False, how: str = "answers") -> None:
        how = "silent" if silent else how
        self.process = subprocess.Popen(
            [sys.executable, judged.__file__, str(port), str(heard), how], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_PAUSE_S", 0.2)


async def test_a_judge_that_is_away_costs_no_try_and_is_waited_for_by_name(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    heard.touch()
    gone = JudgeProcess(0, heard)
    gone.kill()
    judge = {"name": "length", "url": f"http://127.0.0.1:{gone.port}", "max_attempts": 1}
    reward = {"function": "tests.integration.judged:longest", "judges": [judge], "timeout_s": 600.0}
    names = admit(client, keys, [job(i) for i in range(NUM_JOBS)])
    back: JudgeProcess | None = None
    try:
        async with tended(client, keys), working(config(reward=reward)):
            await until(lambda: is_blocked(client, keys, "reward.judges.length", ServiceCalled, error=" "))
            back = JudgeProcess(gone.port, heard)
            await until(all_in(client, keys, names, "ready"))
    finally:
        if back is not None:
            back.kill()
    assert all(int(client.hget(keys.group(name), "att") or 0) == 0 for name in names), "nobody is charged"
    assert len(fake.prompts) == 2 * NUM_JOBS, "nothing is drawn again"
    play.assert_conserved(client, keys)


async def test_I2_a_judge_killed_under_its_questions_has_no_sample_scored_twice_or_drawn_again(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    tmp_path: Path,
) -> None:
    heard = tmp_path / "heard"
    heard.touch()
    first = JudgeProcess(0, heard, silent=True)
    url = f"http://127.0.0.1:{first.port}"
    judge = {"name": "length", "url": url, "max_attempts": 100, "timeout_s": 600.0}
    reward = {"function": "tests.integration.judged:longest", "judges": [judge], "timeout_s": 600.0}
    made = config(reward=reward)
    names = admit(client, keys, [job(i) for i in range(NUM_JOBS)])
    second: JudgeProcess | None = None
    try:
        async with tended(client, keys), working(made):
            await until(lambda: len(heard.read_bytes().splitlines()) == 2 * NUM_JOBS)
            drawn = len(fake.prompts)
            first.kill()
            second = JudgeProcess(first.port, heard)
            await until(all_in(client, keys, names, "ready"))
    finally:
        first.kill()
        if second is not None:
            second.kill()
    for name in names:
        samples = metas(client, keys, name)
        assert [meta.k for meta in samples] == [0, 1], "each is committed once"
        assert all(meta.reward > 0 for meta in samples)
    assert len(fake.prompts) == drawn, "nothing is drawn again"
    play.assert_conserved(client, keys)
