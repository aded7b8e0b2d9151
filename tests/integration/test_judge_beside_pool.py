"""A judge beside a verifier pool of rq workers: both give their rewards, and neither waits for the other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.protocol import snapshot
from penstock.records.keys import Keys
from penstock.records.worker_causes import ServiceCalled
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import Make
from tests.integration.test_judges import JudgeProcess
from tests.integration.test_verifiers import Pool, start, until
from tests.integration.worker_play import admit, all_in, is_blocked, job, metas, states, tended, working

__all__ = ["start"]

JUDGED, POOLED, SEEN = (
    "tests.integration.judged:longest",
    "tests.integration.verifier_parts:length",
    "tests.integration.verifier_parts:seen",
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_PAUSE_S", 0.2)


async def test_T11_a_judge_and_the_pool_give_their_rewards_in_one_run(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    start: Callable[[Config], Pool],
    tmp_path: Path,
) -> None:
    """Jobs of both, of the judge and of the pool alone; the judge is away until the pool has done what it can."""
    heard = tmp_path / "heard"
    heard.touch()
    gone = JudgeProcess(0, heard)
    gone.kill()
    judge = {"name": "length", "url": f"http://127.0.0.1:{gone.port}", "max_attempts": 1}
    reward = {
        "function": "exact_match",
        "parts": {JUDGED: 1.0, POOLED: 100.0},
        "judges": [judge],
        "pool": {"kind": "rq"},
        "timeout_s": 600.0,
    }
    made = config(reward=reward, worker={"rewards": [JUDGED, SEEN]})
    both, judged, pooled = [job(0), job(1)], [job(2, reward=JUDGED)], [job(3, reward=SEEN), job(4, reward=POOLED)]
    admit(client, keys, [*both, *judged, *pooled])
    names = [[one.id for one in some] for some in (both, judged, pooled)]
    back: JudgeProcess | None = None
    started = start(made)
    try:
        async with tended(client, keys), working(made):
            await until(all_in(client, keys, names[2], "ready"))
            await until(lambda: is_blocked(client, keys, "reward.judges.length", ServiceCalled, error=" "))
            assert "ready" not in states(client, keys, [*names[0], *names[1]])
            back = JudgeProcess(gone.port, heard)
            await until(all_in(client, keys, [*names[0], *names[1]], "ready"))
            assert len(snapshot.snapshot(client, keys)["verifiers"]) == made.reward.pool.workers
    finally:
        if back is not None:
            back.kill()
    assert started.process.poll() is None
    for name in names[0]:
        for meta in metas(client, keys, name):
            parts = meta.reward_info["parts"]
            assert parts == {JUDGED: parts[JUDGED], POOLED: meta.num_generated}
            assert parts[JUDGED] > 0
            assert meta.reward == parts[JUDGED] + 100 * parts[POOLED]
    [first] = names[1]
    assert all(meta.reward > 0 and "parts" not in meta.reward_info for meta in metas(client, keys, first))
    assert [meta.reward_info["id"] for meta in metas(client, keys, names[2][0])] == [
        f"{names[2][0]}/{k}" for k in (0, 1)
    ]
    assert [meta.reward for meta in metas(client, keys, names[2][1])] == [fake.length, fake.length]
    assert all(int(client.hget(keys.group(name), "att") or 0) == 0 for some in names for name in some)
    assert len(fake.prompts) == 2 * 5, "nothing is drawn again"
    play.assert_conserved(client, keys)
