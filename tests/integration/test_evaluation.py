"""T18: an evaluation tells which versions drew it, and a version that is pinned draws its evaluation alone."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.subscription.evaluation import Evaluations
from penstock.consumers.subscription.evaluation_reader import EvaluationReader
from penstock.errors import PenstockError
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import EvaluationRunning
from penstock.workers.sglang import server_info
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import buffering
from tests.integration.worker_play import admit, all_in, is_blocked, job, metas, publish, until, working

Make = Callable[..., Config]

NUM_PROMPTS = 4


def reader_of(config: Config) -> EvaluationReader:
    return EvaluationReader(config, Evaluations(config, Unasked(), is_read=True))


class Unasked:
    """A clock that nobody asks: the evaluations of these tests are admitted by verbs."""

    def read(self) -> int:
        raise NotImplementedError

    def ask_evaluation(self, version: int, end: str) -> None:
        raise NotImplementedError


def admit_evaluation(client: redis.Redis, keys: Keys, version: int) -> list[str]:
    """As the producer does: one job a prompt, named by the version that is asked."""
    jobs = [job(i, id=f"held/{version}/{i}", n=1, lane="eval") for i in range(NUM_PROMPTS)]
    source = f"eval@{version}"
    pairs = [(one, one.to_bytes()) for one in jobs]
    client.hset(keys.source, "eval_jobs", NUM_PROMPTS)
    call = scripts.admit(keys, pairs, lane="eval", source=source, position=0, model="policy", gate=None, cohorts=True)
    assert run(client, call).admitted == NUM_PROMPTS
    return [one.id for one in jobs]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("pinned", "spans"), [(True, True), (False, True), (False, False)])
async def test_T18_a_pinned_version_draws_its_evaluation_alone(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    mode: str,
    pinned: bool,
    spans: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One worker, weights that change in place while the evaluation runs; training goes on beside it, and after it.

    Where nothing tells which weights drew a token, it carries the older version, and is not proven to be of it.
    """
    fake.open.clear()
    if not spans:
        monkeypatch.setattr(server_info, "reports_spans", lambda _: False)
    made = config(
        staleness={"mode": mode},
        worker={"slots": 16},
        data={"eval": [{"name": "held", "path": "held.jsonl"}], "eval_pinned": pinned},
    )
    asked = admit_evaluation(client, keys, 1)
    trained = admit(client, keys, [job(i) for i in range(2)])
    reader = reader_of(made)
    with buffering(made):
        async with working(made) as worker:
            await until(lambda: fake.num_running == NUM_PROMPTS + 4)
            publish(client, keys, publications[2])
            later = admit(client, keys, [job(2)])
            if pinned:
                await until(lambda: is_blocked(client, keys, "weights", EvaluationRunning, prompts=NUM_PROMPTS))
                assert (worker.services.engine.version, fake.loads) == (1, ["1"])
            else:
                await until(lambda: worker.services.engine.version == 2)
            fake.open.set()
            await until(all_in(client, keys, [*asked, *trained, *later], "ready"))
            reader.start()
            try:
                await until(lambda: reader.results.has(1, "held"))
            finally:
                reader.stop()
    (row,) = _rows(made.run_dir)
    drew = 2 if spans and not pinned else 1
    assert (row["dataset"], row["version"], row["num"]) == ("held", 1, NUM_PROMPTS)
    assert (row["oldest"], row["newest"], row["asked_share"]) == (drew, drew, 1.0 if pinned else 0.0)
    assert fake.loads == ["1", "2"]
    assert {meta.oldest for meta in metas(client, keys, later[0])} == {2}, "T12: work of a version waits for it"
    assert reader.results.has_reached(row["accuracy"]) == pinned


async def test_a_pinned_version_does_not_wait_for_a_lane_that_is_paused(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, publications: list[Publication]
) -> None:
    """Nobody draws an evaluation then, and training must go on."""
    client.sadd(keys.paused, "eval")
    admit_evaluation(client, keys, 1)
    made = config(data={"eval": [{"name": "held", "path": "held.jsonl"}], "eval_pinned": True})
    async with working(made) as worker:
        await until(lambda: worker.services.engine.version == 1)
        publish(client, keys, publications[2])
        await until(lambda: worker.services.engine.version == 2)
    play.assert_conserved(client, keys)


async def test_an_evaluation_tells_votes_and_categories_of_what_its_workers_noted(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
) -> None:
    held = {"name": "held", "path": "held.jsonl", "n": 2, "metadata_key": "about", "category_key": "kind"}
    made = config(data={"eval": [held]})
    jobs = [
        job(i, id=f"held/1/{i}", n=2, lane="eval", metadata={"kind": "even"} if i % 2 == 0 else {})
        for i in range(NUM_PROMPTS)
    ]
    client.hset(keys.source, "eval_jobs", NUM_PROMPTS)
    pairs = [(one, one.to_bytes()) for one in jobs]
    call = scripts.admit(keys, pairs, lane="eval", source="eval@1", position=0, model="policy", gate=None, cohorts=True)
    assert run(client, call).admitted == NUM_PROMPTS
    reader = reader_of(made)
    with buffering(made):
        async with working(made):
            await until(all_in(client, keys, [one.id for one in jobs], "ready"))
            reader.start()
            try:
                await until(lambda: reader.results.has(1, "held"))
            finally:
                reader.stop()
    (row,) = _rows(made.run_dir)
    assert (row["num"], row["prompts"]) == (2 * NUM_PROMPTS, NUM_PROMPTS)
    assert (row["maj@2"], row["pass@2"]) == (row["accuracy"], 0.0)
    assert {name: scores["prompts"] for name, scores in row["categories"].items()} == {"(none)": 2, "even": 2}


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("are_all_dead", [True, False])
async def test_I8_requeued_prompts_are_waited_for_where_they_make_an_evaluation(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    publications: list[Publication],
    are_all_dead: bool,
) -> None:
    """All prompts, or one of a dataset that has no other: then no more is to come, before and after it is answered."""
    names = ["held"] if are_all_dead else ["held", "other"]
    made = config(data={"eval": [{"name": name, "path": "held.jsonl"} for name in names]})
    admit_evaluation(client, keys, 3)
    client.hset(keys.source, mapping={"evaluating": 3, "evaluated": 3})
    dead = play.lease(client, keys, most=NUM_PROMPTS if are_all_dead else 1, version=1)
    for one in dead:
        failed = scripts.fail(keys, one.job, one.token, "w", reason="r", detail="", max_attempts=1, retry_ms=1)
        assert run(client, failed) == "dead"

    async def wait() -> Any:
        reader = reader_of(made)
        reader.start()
        try:
            return await asyncio.to_thread(reader.results.wait, 3, 400)
        finally:
            await asyncio.to_thread(reader.stop)

    no_more = f"Version 3 will get no accuracy on {names[-1]}: no prompt was answered"
    with buffering(made):
        async with working(made):
            with pytest.raises(PenstockError, match=no_more):
                await wait()
            assert all(run(client, scripts.requeue(keys, one.job, "policy")) for one in dead)
            if are_all_dead:
                assert set((await wait()).accuracy) == {"held"}
                return
            await until(all_in(client, keys, [one.job for one in dead], "ready"))
            with pytest.raises(PenstockError, match=no_more):
                await wait()
