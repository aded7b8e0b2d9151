"""A teacher of a run: its logprobs are committed with each sample, and a teacher that is killed loses nothing."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis

from penstock.config import Config
from penstock.names import TEACHER_LOGPROBS
from penstock.payloads import sides
from penstock.records.keys import Keys
from penstock.records.worker_causes import ServiceCalled
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import matches
from tests.integration.test_judges import JudgeProcess
from tests.integration.worker_play import admit, all_in, is_blocked, job, metas, states, tended, until, wait_of, working

Make = Callable[..., Config]

NUM_JOBS = 3


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_PAUSE_S", 0.2)


def teacher_of(port: int, folder: str) -> dict[str, object]:
    limits = {"max_attempts": 100, "timeout_s": 600.0}
    return {"teacher": {"name": "big", "url": f"http://127.0.0.1:{port}", "path": folder} | limits}


def check_taught(client: redis.Redis, keys: Keys, name: str) -> None:
    """Each sample of a job is committed once, with a number for each token that was drawn."""
    samples = metas(client, keys, name)
    assert [meta.k for meta in samples] == [0, 1], "each is committed once"
    for meta in samples:
        [(side, _, checksum)] = meta.sides
        assert side == TEACHER_LOGPROBS
        data = client.get(keys.side(f"{name}/{meta.k}", meta.token, side))
        array = sides.unpack(side, data, name, checksum)
        assert array.dtype == np.float32
        assert len(array) == meta.length - meta.prompt_length
        assert array[:3].tolist() == [-7 / 64, -8 / 64, -9 / 64], "those of its own tokens"


async def test_I2_T17_a_teacher_killed_under_its_questions_has_no_sample_drawn_again_or_without_its_logprobs(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    heard.touch()
    first = JudgeProcess(0, heard, silent=True)
    made = config()
    made = config(rollout=teacher_of(first.port, made.model.path))
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
        check_taught(client, keys, name)
    assert len(fake.prompts) == drawn, "nothing is drawn again"
    play.assert_conserved(client, keys)


async def test_I8_a_teacher_that_hears_and_says_nothing_is_waited_for_by_name(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    heard.touch()
    silent = JudgeProcess(0, heard, silent=True)
    made = config()
    made = config(rollout=teacher_of(silent.port, made.model.path))
    names = admit(client, keys, [job(i) for i in range(NUM_JOBS)])
    answering: JudgeProcess | None = None
    whom = f"http://127.0.0.1:{silent.port}/generate"
    try:
        async with tended(client, keys), working(made):
            told = await until(lambda: wait_of(client, keys, "rollout.teacher"))
            assert matches(told, ServiceCalled, service="rollout.teacher big", url=whom)
            await until(lambda: is_blocked(client, keys, "rollout.teacher", ServiceCalled, more=2 * NUM_JOBS - 1))
            silent.kill()
            await until(lambda: is_blocked(client, keys, "rollout.teacher", ServiceCalled, error=" "))
            answering = JudgeProcess(silent.port, heard)
            await until(all_in(client, keys, names, "ready"))
            await until(lambda: not wait_of(client, keys, "rollout.teacher"))
    finally:
        silent.kill()
        if answering is not None:
            answering.kill()


async def test_a_teacher_that_is_away_costs_no_try_and_is_waited_for_by_name(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    heard.touch()
    gone = JudgeProcess(0, heard)
    gone.kill()
    made = config()
    asked = teacher_of(gone.port, made.model.path)
    asked["teacher"] = asked["teacher"] | {"max_attempts": 1}  # type: ignore[operator]
    made = config(rollout=asked)
    names = admit(client, keys, [job(i) for i in range(NUM_JOBS)])
    back: JudgeProcess | None = None
    try:
        async with tended(client, keys):
            async with working(made, "first"):
                await until(lambda: is_blocked(client, keys, "rollout.teacher", ServiceCalled, error=" "))
                await until(lambda: len(fake.prompts) == 2 * NUM_JOBS)
            assert states(client, keys, names) == ["queued"] * NUM_JOBS, "who leaves hands them back"
            async with working(made, "second"):
                await until(lambda: wait_of(client, keys, "rollout.teacher"))
                back = JudgeProcess(gone.port, heard)
                await until(all_in(client, keys, names, "ready"))
    finally:
        if back is not None:
            back.kill()
    for name in names:
        check_taught(client, keys, name)
        assert int(client.hget(keys.group(name), "att") or 0) == 0, "nobody is charged"
    assert client.xlen(keys.dead) == 0
    assert len(fake.prompts) == 2 * NUM_JOBS, "nothing is drawn again"
    play.assert_conserved(client, keys)


async def test_a_teacher_that_refuses_has_jobs_buried_as_model_failed_and_nothing_drawn_twice(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    heard.touch()
    refusing = JudgeProcess(0, heard, how="refuses")
    made = config()
    asked = teacher_of(refusing.port, made.model.path)
    asked["teacher"] = asked["teacher"] | {"max_attempts": 1}  # type: ignore[operator]
    made = config(rollout=asked)
    names = admit(client, keys, [job(0)])
    try:
        async with tended(client, keys), working(made):
            await until(all_in(client, keys, names, "dead"))
    finally:
        refusing.kill()
    [(_, fields)] = client.xrange(keys.dead)
    assert fields[b"reason"] == b"model_failed"
    assert b"rollout.teacher big: 1 tries failed, the last with status 400" in fields[b"detail"]
    assert len(fake.prompts) == 2, "each sample is drawn once, and what was drawn is tried again"
    play.assert_conserved(client, keys)
