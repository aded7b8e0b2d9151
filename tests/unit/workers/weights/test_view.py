"""What a worker reads before it selects a version."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.staleness import Mode
from penstock.protocol.presence import WorkerPresence
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.publication import Publication, Whole
from penstock.workers.weights.select import OtherEngine, Purpose, View
from penstock.workers.weights.view import ViewReader

KEYS = Keys("run")
HOUR_S = 3600.0


class Redis:
    """Answers from dictionaries, and notes in which order it is asked."""

    def __init__(self, *published: Publication | bytes) -> None:
        #: Newest first.
        self.published = [one if isinstance(one, bytes) else one.to_bytes() for one in published]
        self.whole: dict[str, bytes] = {}
        self.hashes: dict[str, dict[bytes, bytes]] = {KEYS.workers: {}, KEYS.loading("policy"): {}}
        self.cohorts: list[bytes] = []
        self.evaluation: list[bytes] = []
        self.is_paused = False
        self.asked: list[str] = []
        self._answers: list[Any] = []

    def show(self, name: str, version: int, state: str = "serving", *, held: int = 0, ahead_s: float = 0.0) -> None:
        """A worker is present, whose clock is ahead."""
        one = WorkerPresence(name=name, at=time.time() + ahead_s, version=version, state=state, held=held)
        self.hashes[KEYS.workers][name.encode()] = pack(one.to_record())

    def loads(self, name: str, *versions: int) -> None:
        """It noted what it is about to load."""
        self.hashes[KEYS.loading("policy")][name.encode()] = pack({"versions": list(versions), "at": time.time()})

    async def do(self, work: Any) -> Any:
        return await work(self)

    async def xrevrange(self, key: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        self.asked.append(key)
        return [(b"%d-0" % at, {b"p": data}) for at, data in enumerate(self.published[:count])]

    def pipeline(self, *, transaction: bool) -> "Redis":
        self._answers = []
        return self

    def _answer(self, key: str, answer: Any) -> None:
        self.asked.append(key)
        self._answers.append(answer)

    def hmget(self, key: str, names: list[str]) -> None:
        self._answer(key, [self.whole.get(name) for name in names])

    def hgetall(self, key: str) -> None:
        self._answer(key, self.hashes.get(key, {}))

    def hkeys(self, key: str) -> None:
        self._answer(key, self.cohorts)

    def zrange(self, key: str, *_: int) -> None:
        self._answer(key, self.evaluation)

    def sismember(self, key: str, *_: str) -> None:
        self._answer(key, int(self.is_paused))

    async def execute(self) -> list[Any]:
        return self._answers


def reader(redis: Redis, *, drains: bool = True, eval_pinned: bool = False, version: int = 13) -> ViewReader:
    services: Any = SimpleNamespace(
        keys=KEYS,
        worker="me",
        control=redis,
        engine=SimpleNamespace(version=version, rev=0, offloaded=set()),
        engine_lost=asyncio.Event(),
        config=SimpleNamespace(
            model=SimpleNamespace(name="policy"),
            data=SimpleNamespace(eval_pinned=eval_pinned),
            worker=SimpleNamespace(lease_s=15.0),
            staleness=SimpleNamespace(rules=SimpleNamespace(drains=drains), mode=Mode.ASYNC, bound=3),
        ),
    )
    return ViewReader(services)


async def read(redis: Redis, **fields: Any) -> View:
    return await reader(redis, **fields).read(Purpose.RUN)


def publication(version: int, path: str = "", **fields: Any) -> Publication:
    return Publication("policy", version, "disk", path, **fields)


async def test_T5_publications_are_read_before_cohorts_and_these_before_other_workers() -> None:
    """In another order a cohort that is admitted, or begun, meanwhile would be missed."""
    redis = Redis(publication(15))
    await read(redis, eval_pinned=True)
    order = [KEYS.weights("policy"), KEYS.whole("policy"), KEYS.aside("policy"), KEYS.cohorts, KEYS.workers]
    assert redis.asked[:6] == [*order, KEYS.loading("policy")]
    assert len(redis.asked) == 8
    redis.asked.clear()
    await read(redis, drains=False)
    assert redis.asked == order[:3], "only one_step needs more"


async def test_folders_that_were_completed_after_the_announcement_are_found() -> None:
    redis = Redis(publication(16), publication(15), publication(14, "/w/14"), b"no record")
    redis.whole = {"15": Whole(15, "/w/15", "digest").to_bytes()}
    view = await reader(redis).read(Purpose.RUN, publication(13))
    assert [(one.version, one.path) for one in view.published] == [(16, ""), (15, "/w/15"), (14, "/w/14")]
    assert view.published[1].index == "digest"
    assert view.loaded == publication(13)
    redis.whole["13"] = Whole(13, "/w/13", "d13").to_bytes()
    view = await reader(redis).read(Purpose.RUN, publication(13))
    assert view.loaded is not None
    assert view.loaded.index == "d13"


async def test_records_of_the_newest_that_cannot_be_read_are_reported() -> None:
    redis = Redis(b"no record", publication(15, "/w/15"))
    mine = reader(redis)
    assert [one.version for one in (await mine.read(Purpose.RUN)).published] == [15]
    assert "publication 0-0" in mine.malformed
    redis = Redis(publication(16), publication(15))
    redis.whole = {"16": b"no record", "15": b"no record"}
    mine = reader(redis)
    assert not any(one.is_whole for one in (await mine.read(Purpose.RUN)).published)
    assert "The folder of version 16 of model 'policy' is not a record" in mine.malformed


@pytest.mark.parametrize(
    ("state", "version", "held", "counts"),
    [
        ("serving", 14, 0, True),
        ("cannot load", 14, 0, True),
        ("draining", 14, 1, True),
        ("draining", 14, 0, False),
        ("restarting engine", 14, 1, False),
        ("restarting engine", -1, 1, False),
        ("engine away", -1, 1, False),
        ("draining", -1, 1, False),
        ("crash loop", -1, 0, False),
        ("offloaded", 14, 0, False),
    ],
)
async def test_only_a_worker_whose_engine_generates_counts(state: str, version: int, held: int, counts: bool) -> None:
    """What it noted that it loads means nothing while it has no engine."""
    redis = Redis(publication(15))
    redis.show("other", version, state, held=held)
    redis.show("me", 13)
    redis.loads("other", 14, 15)
    redis.loads("gone", 14)
    assert (await read(redis)).others == ((OtherEngine(14, (15,)),) if counts else ())


@pytest.mark.parametrize(("ahead_s", "counts"), [(-HOUR_S, False), (HOUR_S, False), (-13.0, True), (-30.0, False)])
async def test_T5_a_stalled_worker_counts_as_long_as_its_leases_hold(ahead_s: float, counts: bool) -> None:
    """It may resume and commit. One whose clock is far off may never come back."""
    redis = Redis(publication(15))
    redis.show("other", 14, ahead_s=ahead_s)
    assert bool((await read(redis)).others) == counts


async def test_unreadable_records_of_others_are_skipped() -> None:
    redis = Redis(publication(15))
    redis.cohorts = [b"14", b"x", b"9" * 5000, b"13"]
    redis.show("other", 14)
    redis.hashes[KEYS.loading("policy")][b"other"] = redis.hashes[KEYS.workers][b"another"] = b"no record"
    view = await read(redis)
    assert view.cohorts == (13, 14)
    assert view.others == (OtherEngine(14),)


@pytest.mark.parametrize(("is_paused", "version", "count"), [(False, 13, 2), (True, 13, 0), (False, 14, 1)])
async def test_T18_an_evaluation_counts_whose_jobs_name_the_version_of_the_engine(
    is_paused: bool, version: int, count: int
) -> None:
    redis = Redis(publication(15))
    redis.evaluation = [b"eval/13/0", b"eval/13/1", b"eval/14/0", b"another program's"]
    redis.is_paused = is_paused
    assert (await read(redis, drains=False, eval_pinned=True, version=version)).evaluating == count
    assert (await read(redis, drains=False, version=version)).evaluating == 0
