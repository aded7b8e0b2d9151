"""The verifier pool: real rq workers, really killed. What it gives is what the worker's own processes give (T11)."""

import asyncio
import contextlib
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Callback, Queue
from rq.serializers import JSONSerializer

from penstock.config import Config
from penstock.errors import ConfigError, RewardError
from penstock.protocol import snapshot
from penstock.protocol.waits import PublishedWaiting, Waiting, read_waits
from penstock.records.cause import Cause
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.records.worker_causes import ChecksRunning, NoVerifiers
from penstock.redis.server import RedisServer
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.pool.client import Checks
from penstock.workers.rewards.score import Rewards
from penstock.workers.rewards.wire import ENTRY, sample_to_json
from tests.integration import play
from tests.integration.fake_fixtures import Make
from tests.integration.parts import make_config, served
from tests.integration.processes import open_pidfds, wait_gone
from tests.integration.saved import saved
from tests.integration.worker_play import admit, all_in, job, metas, states, working
from tests.integration.worker_play import until as until_
from tests.missing import need_jail

PARTS = "tests.integration.verifier_parts"
NAMES = ("length", "alength", "seen", "detailed", "fraction", "numpy_bool", "keyless", "not_a_number", "text", "raises",
         "asks_to_end", "large", "hungry", "waits", "hangs")  # fmt: skip
ROOT = str(Path(__file__).parents[2])


#: Pools start slowly on a busy machine.
until = functools.partial(until_, limit_s=400.0)


class Pool:
    """``penstock verifiers`` as a process."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.path = saved(config, folder / "pool.yaml")
        self.log = folder / "pool.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli", "verifiers", "--config", str(self.path), "--name", "pool"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": ROOT},
            )  # fmt: skip

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def verifying(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Callable[..., Config]:
    """Makes configurations of this test's run."""

    def make(*more: str, **reward: Any) -> Config:
        pool = {"kind": "rq"} | reward.pop("pool", {})
        worker = {"rewards": [name if ":" in name else f"{PARTS}:{name}" for name in (*NAMES, *more)]}
        values = {"function": "math_verify", "timeout_s": 120.0, "pool": pool} | reward
        return make_config(redis_server.url, keys.run, tmp_path, reward=values, worker=worker, metrics={"port": 0})

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Config], Pool]]:
    pools: list[Pool] = []

    def begin(config: Config) -> Pool:
        pools.append(Pool(config, tmp_path))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.end()


@contextlib.asynccontextmanager
async def asking(config: Config, client: redis.Redis, keys: Keys, name: str = "w.1") -> AsyncIterator[Rewards]:
    """Rewards of a worker whose checks go to the pool."""
    asked = Checks(config, keys, name, PublishedWaiting(client, keys, f"worker:{name}:rewards"))
    rewards = Rewards(config.reward, asked, allowed_rewards(config))
    task = asyncio.create_task(asked.run())
    try:
        yield rewards
    finally:
        assert not task.done(), task.result()
        task.cancel()
        await rewards.close()


def sample(name: str, *, text: str = "so \\boxed{2}", label: str = "2", folder: Path | None = None) -> Sample:
    metadata = {"folder": str(folder), "list": [1, None, {"a": 0.5}]}
    made = Sample(Job("d/0/1", 2, prompt="1+1=é", label=label, metadata=metadata, reward=name), 1)
    made.append([1, 2])
    made.prompt_length = 2
    made.append([3, 4, 5], version=7, logprobs=[-0.5] * 3)
    made.text, made.turns, made.status = text, [text], "completed"
    return made


async def outcome(rewards: Rewards, name: str, **about: Any) -> tuple[Any, ...]:
    """(reward, info), or (outcome, sentence)."""
    made = sample(name if ":" in name or name in ("math_verify", "code") else f"{PARTS}:{name}", **about)
    try:
        await rewards.score(made)
    except RewardError as exc:
        return exc.outcome, str(exc)
    return made.reward, repr(made.reward_info)


def tries(folder: Path) -> list[tuple[int, int]]:
    """(process, parent) of each try so far, as far as whole lines are there."""
    path = folder / "tries"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), int(parent)) for pid, parent in (line.split() for line in lines)]


def names_present(client: redis.Redis, keys: Keys) -> list[str]:
    return [one["name"] for one in snapshot.snapshot(client, keys)["verifiers"]]


async def test_T11_what_the_pool_gives_is_what_the_worker_gives(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config], start: Callable[[Config], Pool]
) -> None:
    config = verifying()
    start(config)
    here = Rewards(config.reward.model_copy(update={"timeout_s": 60.0}), allowed=allowed_rewards(config))
    questions: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in NAMES[:10]]
    questions += [
        ("math_verify", {"text": text, "label": label})
        for text, label in (("is \\boxed{\\frac{1}{2}}", "0.5"), ("\\boxed{2}", "0.5"), ("?", "1"), ("$1$", "no maths"))
    ]
    questions.append(("math_verify", {"text": "3", "label": "9^{9^{9^{9}}}"}))
    questions.append(("math_verify", {"text": "$9^{9^{9^{9}}}$", "label": "3"}))

    async with asking(config, client, keys) as there:
        given = await asyncio.gather(*(outcome(there, name, **about) for name, about in questions))
    expected = [await outcome(here, name, **about) for name, about in questions]
    await here.close()

    assert given == expected
    assert expected[-1] == (0.0, "{'out_of_time': True}")
    assert [one[0] for one in expected[6:10]] == ["reward_not_a_number"] * 3 + ["reward_raised"]
    await until(lambda: all(0 < client.ttl(key) <= 10 for key in client.scan_iter("rq:job:*")), "rq forgets checks")


async def test_one_pool_through_its_life(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config], start: Callable[[Config], Pool], tmp_path: Path
) -> None:
    """Killed at every level while a check runs: it is asked again, a bounded number of times."""
    config = verifying(timeout_s=60.0, max_attempts=3)
    async with asking(config, client, keys) as rewards:
        # Nobody is there: it waits, and says for what (I8).
        first = asyncio.create_task(outcome(rewards, "waits", folder=tmp_path))
        wait = await until(lambda: [one.cause for one in read_waits(client, keys)])
        assert wait == [NoVerifiers(1)]
        assert snapshot.snapshot(client, keys)["checks"] == 1
        pool = start(config)

        # The process that checks.
        await until(lambda: len(tries(tmp_path)) == 1)
        os.kill(tries(tmp_path)[0][0], signal.SIGKILL)
        # The verifier: its check dies with it, and another verifier takes its place.
        await until(lambda: len(tries(tmp_path)) == 2)
        check, verifier = tries(tmp_path)[1]
        gone = open_pidfds([check, verifier])
        os.kill(verifier, signal.SIGKILL)
        assert await asyncio.to_thread(wait_gone, gone, 10) == []
        await until(lambda: len(tries(tmp_path)) == 3)
        causes = lambda: (one.cause for one in read_waits(client, keys))  # noqa: E731
        busy = await until(lambda: next((one for one in causes() if isinstance(one, ChecksRunning)), None))
        assert (busy.checks, busy.verifiers[0][:5]) == (1, "pool-")
        workers = config.reward.pool.workers
        told = {'penstock_verifiers_processes{state="busy"} 1.0', f"penstock_verifiers_starts_total {workers + 1}.0"}
        await until(lambda: told <= served(client, keys, "verifiers"))
        (tmp_path / "go").touch()
        assert await first == (7.0, "{}")

        # The whole pool, three times: what is left is a named outcome.
        (tmp_path / "go").unlink()
        second = asyncio.create_task(outcome(rewards, "waits", folder=tmp_path))
        for attempt in range(4, 7):
            await until(lambda attempt=attempt: len(tries(tmp_path)) == attempt)  # type: ignore[misc]
            check, verifier = tries(tmp_path)[-1]
            gone = open_pidfds([check, verifier])
            pool.end()
            assert await asyncio.to_thread(wait_gone, gone, 10) == [], "nothing outlives the pool"
            client.delete(keys.verifiers)  # as their records would grow old
            pool = start(config)
        name, said = await second
        assert (name, "is gone" in said) == ("reward_raised", True), said

        # SIGTERM: the check that runs may end.
        third = asyncio.create_task(outcome(rewards, "waits", folder=tmp_path))
        await until(lambda: len(tries(tmp_path)) == 7)
        pool.process.send_signal(signal.SIGTERM)
        await until(lambda: "when their checks have ended" in pool.log.read_text())
        (tmp_path / "go").touch()
        assert await third == (7.0, "{}")
        await until(lambda: pool.process.poll() is not None)
        assert pool.process.returncode == 0, pool.log.read_text()
    assert names_present(client, keys) == []
    assert not _rewards_wait(client, keys)
    assert not client.exists(keys.verdicts("w.1"), keys.asker("w.1"))


async def test_children_of_a_check_end_with_the_pool(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config], start: Callable[[Config], Pool], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PENSTOCK_TEST_FOLDER", str(tmp_path))
    name = "tests.integration.harmful_parts:leaves_children"
    config = verifying(name)
    pool = start(config)
    async with asking(config, client, keys) as rewards:
        assert (await outcome(rewards, name))[0] == 3.0
    # Those in sessions of their own; rq ends the others with the check.
    gone = open_pidfds([int((tmp_path / f"child-{number}").read_text()) for number in (1, 2)])
    pool.process.send_signal(signal.SIGTERM)
    await until(lambda: pool.process.poll() is not None)
    assert pool.process.returncode == 0, pool.log.read_text()
    assert wait_gone(gone, 1) == []


async def test_T11_verdicts_are_heard_whatever_the_clock_of_redis_was(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config], start: Callable[[Config], Pool]
) -> None:
    config, stream = verifying(), keys.verdicts("w.1")
    start(config)
    # A clock that is a day ahead, and then is not: what was written meanwhile has expired.
    client.xadd(stream, {"id": "another"}, id=f"{int(time.time() + 86400) * 1000}-0")
    async with asking(config, client, keys) as rewards:
        assert await outcome(rewards, "length") == (3.0, "{}")
        client.delete(stream)
        assert await outcome(rewards, "length") == (3.0, "{}")
        await until(lambda: not client.xlen(stream), "what was heard is gone")


async def test_T11_a_verifier_that_hangs_is_stopped_and_the_next_check_is_made(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config], start: Callable[[Config], Pool], tmp_path: Path
) -> None:
    config = verifying(timeout_s=1.0, pool={"workers": 1, "memory_bytes": 1024**3})
    async with asking(config, client, keys) as rewards:
        asked = time.monotonic()
        early = asyncio.create_task(outcome(rewards, "length"))
        await until(lambda: time.monotonic() > asked + 1.5 * config.reward.timeout_s)
        start(config)
        assert await early == (3.0, "{}"), "waiting for a verifier is not its time"
        hanging = asyncio.create_task(outcome(rewards, "hangs", folder=tmp_path))
        await until(lambda: tries(tmp_path))
        queued = asyncio.create_task(outcome(rewards, "length"))
        gone = open_pidfds([tries(tmp_path)[0][0]])

        assert await hanging == ("reward_timeout", f"sample d/0/1/1: reward {PARTS}:hangs took longer than 1 s.")
        assert await asyncio.to_thread(wait_gone, gone, 10) == []
        assert await queued == (3.0, "{}")
        assert len(tries(tmp_path)) == 1, "not tried again"

        # One that is cancelled (its lease is lost, say) is stopped too.
        cancelled = asyncio.create_task(outcome(rewards, "hangs", folder=tmp_path))
        await until(lambda: len(tries(tmp_path)) == 2)
        gone = open_pidfds([tries(tmp_path)[1][0]])
        cancelled.cancel()
        assert await asyncio.to_thread(wait_gone, gone, 10) == []

        # Bounds on what goes there, what comes back, and what it may take.
        assert (await outcome(rewards, "length", text="x" * 5_000_000))[0] == "reward_too_large"
        assert (await outcome(rewards, "large"))[0] == "reward_too_large"
        name, said = await outcome(rewards, "hungry")
        assert (name, "MemoryError" in said) == ("reward_raised", True)
        assert await outcome(rewards, "asks_to_end") == (
            "reward_raised", f"sample d/0/1/1: reward {PARTS}:asks_to_end raised SystemExit: 3"
        )  # fmt: skip


async def test_what_lies_in_redis_is_json_and_what_is_forged_is_not_run(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config], start: Callable[[Config], Pool], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = verifying(pool={"workers": 1})
    marker = tmp_path / "owned"
    monkeypatch.setenv("PENSTOCK_TEST_IMPORTED", str(marker))
    queue = Queue(keys.checks, connection=client, serializer=JSONSerializer)

    async with asking(config, client, keys) as rewards:
        task = asyncio.create_task(outcome(rewards, "length"))
        lost = (await until(queue.get_job_ids))[0]
        # As a Redis without an append-only file forgets it: it is missed, and asked again.
        client.delete(queue.key, f"rq:job:{lost}")
        (id_,) = await until(queue.get_job_ids)
        assert id_ != lost
        stored = client.hgetall(f"rq:job:{id_}")
        name, _, (asker, reward, text), _ = json.loads(zlib.decompress(stored[b"data"]))
        assert (name, asker, reward) == (ENTRY, "w.1", f"{PARTS}:length")
        assert json.loads(text)["job"]["id"] == "d/0/1"
        assert "logprobs" not in json.loads(text)
        assert not any(value.startswith(b"\x80") for value in stored.values()), "a pickle"

        # What another who may write to this Redis could put there, in front of it.
        for forge in (
            lambda: queue.enqueue("os.system", f"touch {marker}", at_front=True),
            lambda: queue.enqueue(ENTRY, "w.1", f"os:system touch {marker}", "{}", at_front=True),
            lambda: queue.enqueue(ENTRY, "w.1", "tests.integration.writes_when_imported:reward", text, at_front=True),
            lambda: queue.enqueue("tests.integration.writes_when_imported.reward", at_front=True),
            lambda: queue.enqueue(ENTRY, "no/name", f"{PARTS}:length", text, at_front=True),
            lambda: queue.enqueue(ENTRY, "w.1", f"{PARTS}:length", "[" * 100_000, at_front=True),
            lambda: queue.enqueue(ENTRY, str(marker), at_front=True, on_failure=Callback(f"{PARTS}.callback")),
        ):
            forge()
        bomb = queue.enqueue(ENTRY, at_front=True)
        client.hset(f"rq:job:{bomb.id}", "data", zlib.compress(b"[" + bytes(200 * 1024**2), 1))
        pickled = queue.enqueue(ENTRY, at_front=True)
        client.hset(f"rq:job:{pickled.id}", "data", pickle.dumps((os.mkdir, None, (str(marker),), {})))
        # Of a worker that is gone: skipped.
        left = sample_to_json(sample(f"{PARTS}:waits", folder=tmp_path), 10_000)
        queue.enqueue(ENTRY, "w.2", f"{PARTS}:waits", left, at_front=True)

        start(config)
        assert await task == (3.0, "{}")
        await until(lambda: queue.count == 0)
        assert await outcome(rewards, "length") == (3.0, "{}"), "the verifier lives"
        assert not marker.exists()
        assert tries(tmp_path) == []
        with pytest.raises(ConfigError, match="job d/0/1 names reward 'os:getpid'"):
            await outcome(rewards, "os:getpid")
        bytes_ = sample(f"{PARTS}:length")
        bytes_.job.metadata["image"] = b"x"
        with pytest.raises(RewardError, match="cannot go to the verifier pool as JSON") as caught:
            await rewards.score(bytes_)
        assert caught.value.outcome == "reward_raised"


async def test_a_workers_samples_wait_for_the_pool_and_outlive_the_worker(
    client: redis.Redis, keys: Keys, config: Make, start: Callable[[Config], Pool], tmp_path: Path
) -> None:
    """Through the whole worker, on a fake engine."""
    reward = {"function": f"{PARTS}:seen", "pool": {"kind": "rq"}, "timeout_s": 30.0}
    made = config(reward=reward, worker={"rewards": [f"{PARTS}:length"]})
    jobs = admit(client, keys, [job(i, n=2) for i in range(4)])
    async with working(made, "first"):
        await until(lambda: snapshot.snapshot(client, keys)["checks"] == 8)
        assert isinstance(await until(lambda: _rewards_wait(client, keys)), NoVerifiers)
    assert states(client, keys, jobs) == ["queued"] * 4, "handed back"
    await until(lambda: snapshot.snapshot(client, keys)["checks"] == 0, "its checks are withdrawn")

    async with working(made, "second"):
        start(made)
        await until(all_in(client, keys, jobs, "ready"))
        assert len(names_present(client, keys)) == 2
    for name in jobs:
        for meta in metas(client, keys, name):
            assert (meta.reward, meta.reward_info["id"]) == (1.0, f"{name}/{meta.k}")
            assert meta.worker.startswith("second")
    play.assert_conserved(client, keys)


def _rewards_wait(client: redis.Redis, keys: Keys) -> Cause | None:
    return next((one.cause for one in read_waits(client, keys) if one.who.endswith(":rewards")), None)


async def test_T11_the_pool_runs_programs_of_answers_in_a_jail(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config], start: Callable[[Config], Pool]
) -> None:
    need_jail()
    config = verifying(function="code", timeout_s=200.0, code={"total_s": 100.0})
    pool = start(config)
    label = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
    reaches = f"import redis\nprint(redis.from_url({config.redis.url!r}).ping())"
    peeks = "import os\nprint([one for one in os.environ if 'PENSTOCK' in one.upper()][0])"
    async with asking(config, client, keys) as rewards:
        texts = ["print(sum(map(int, input().split())))", "print(3)", reaches, peeks, "import os\nos.kill(-1, 9)"]
        found = await asyncio.gather(*(outcome(rewards, "code", text=text, label=label) for text in texts))
    assert [one[0] for one in found] == [1.0, 0.0, 0.0, 0.0, 0.0], found
    assert found[0] == (1.0, "{'passed': 2, 'tests': 2}")
    assert "run in a jail: " in pool.log.read_text()
    assert pool.process.poll() is None


def test_a_pool_whose_reward_is_not_there_says_so(
    verifying: Callable[..., Config], start: Callable[[Config], Pool]
) -> None:
    pool = start(verifying(function="no_such_module:f"))
    assert pool.process.wait(60) == 2
    assert "there is no module no_such_module" in pool.log.read_text()


def test_a_worker_whose_reward_the_pool_does_not_run_is_refused(
    client: redis.Redis, keys: Keys, verifying: Callable[..., Config]
) -> None:
    config = verifying()
    asked = Checks(config, keys, "w.1", Waiting())
    with pytest.raises(ConfigError, match=r"add it to worker\.rewards"):
        Rewards(config.reward.model_copy(update={"function": "os:getpid"}), asked)
    asyncio.run(asked.close())
