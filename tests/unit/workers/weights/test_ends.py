"""What one_step waits for before it loads other weights (T5)."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocol.presence import WorkerPresence
from penstock.records.causes import Cause
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.workers.weights.ends import Ends
from penstock.workers.weights.folders import Folders

KEYS = Keys("run")
NEWEST = Publication("policy", 15, "disk", "/w/15")
HOUR_S = 3600.0


class Redis:
    def __init__(self, cohorts: list[int], workers: dict[str, int], loading: dict[str, list[int]]) -> None:
        self.cohorts = [str(version).encode() for version in cohorts]
        loads = {name: pack({"versions": versions, "at": time.time()}) for name, versions in loading.items()}
        #: Publications whose folder is there.
        self.whole: list[Publication] = []
        self.workers: dict[str, bytes] = {}
        self.loading = loads
        for name, version in workers.items():
            self.show(name, version)

    def show(self, name: str, version: int, state: str = "serving", *, held: int = 0, ahead_s: float = 0.0) -> None:
        """A worker is there, whose clock is ahead."""
        one = WorkerPresence(name=name, at=time.time() + ahead_s, version=version, state=state, held=held)
        self.workers[name] = pack(one.to_record())

    async def do(self, work: Any) -> Any:
        return await work(self)

    async def hkeys(self, key: str) -> list[bytes]:
        return self.cohorts

    async def xrevrange(self, key: str, end: str, first: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        last = int(end.removeprefix("(").removesuffix("-0"))
        between = [one for one in self.whole if int(first) <= one.version < last]
        return [(b"", {b"p": one.to_bytes()}) for one in reversed(between)]

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        found = {KEYS.workers: self.workers, KEYS.loading("policy"): self.loading}[key]
        return {name.encode(): data for name, data in found.items()}


def ends(
    redis: Redis,
    *,
    version: int = 13,
    offloaded: tuple[str, ...] = (),
    drains: bool = True,
    waited: list[Cause] | None = None,
    end: Callable[[], None] = lambda: None,
) -> Ends:
    """Of this worker, ``me``; where it waits, ``end`` is called."""

    def blocked_on(cause: Cause) -> None:
        assert waited is not None
        waited.append(cause)
        end()

    services: Any = SimpleNamespace(
        keys=KEYS,
        worker="me",
        control=redis,
        engine=SimpleNamespace(version=version, offloaded=set(offloaded)),
        engine_lost=asyncio.Event(),
        config=SimpleNamespace(
            model=SimpleNamespace(name="policy"),
            data=SimpleNamespace(eval_pinned=False),
            worker=SimpleNamespace(lease_s=15.0),
            staleness=SimpleNamespace(rules=SimpleNamespace(drains=drains)),
        ),
    )
    waiting: Any = SimpleNamespace(blocked_on=blocked_on, end=lambda: None)
    control: Any = redis
    return Ends(services, waiting, Folders(KEYS, control, waiting, _nothing))


async def _nothing() -> None:
    """No newest publication: nothing here asks for it."""


async def is_waited_for(
    redis: Redis, newest: Publication = NEWEST, *, version: int = 13, out: tuple[str, ...] = ()
) -> bool:
    """Whether it waits before it loads the newest."""
    waited: list[Cause] = []
    assert await ends(redis, version=version, waited=waited, end=lambda: redis.cohorts.clear()).wait(newest, out)
    return bool(waited)


@pytest.mark.parametrize(
    ("cohorts", "workers", "loading", "waits"),
    [
        ([], {}, {}, False),
        ([13], {}, {}, True),  # drawn here
        ([15, 16], {}, {}, False),  # drawn under the newest, or a later one
        ([14], {"me": 13}, {"me": [13, 15]}, False),  # nobody can have it
        ([14], {"me": 13, "other": 13}, {"me": [13, 15], "other": [13, 15]}, False),
        ([13, 14], {"me": 13}, {}, True),
        ([14], {"me": 13, "other": 14}, {}, True),  # drawn there
        ([14], {"me": 13, "other": 13}, {"other": [13, 14]}, True),  # about to be
        ([14], {"me": 13, "other": 15}, {}, False),
        ([14], {"me": 13, "other": 15}, {"other": [14, 15]}, False),  # it had that before
        ([14], {"me": 13}, {"other": [13, 14]}, False),  # gone
    ],
)
async def test_T5_a_cohort_is_waited_for_while_an_engine_may_draw_it(
    cohorts: list[int], workers: dict[str, int], loading: dict[str, list[int]], waits: bool
) -> None:
    assert await is_waited_for(Redis(cohorts, workers, loading)) == waits


@pytest.mark.parametrize(
    ("state", "version", "held", "waits"),
    [
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
async def test_only_a_worker_whose_engine_draws_is_waited_for(state: str, version: int, held: int, waits: bool) -> None:
    """What it said that it loads says nothing while it has no engine."""
    redis = Redis([14], {"me": 13}, {"other": [14, 15]})
    redis.show("other", version, state, held=held)
    assert await is_waited_for(redis) == waits


async def test_what_nobody_will_draw_under_is_not_waited_for() -> None:
    abandons = Publication("policy", 15, "disk", "/w/15", abandoned=[[14, 14]])
    for version, loading in ((14, [13, 14]), (13, [13, 14])):
        redis = Redis([14], {"me": 13, "other": version}, {"other": loading})
        assert not await is_waited_for(redis, abandons), "what it draws is dropped"
    redis = Redis([14], {"me": 13, "other": 13}, {"other": [13, 14]})
    assert not await is_waited_for(redis, out=("14-0",)), "engines died of it"


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
async def test_a_worker_whose_clock_is_far_off_is_not_waited_for(ahead_s: float) -> None:
    redis = Redis([14], {"me": 13}, {"other": [13, 14]})
    redis.show("other", 14, ahead_s=ahead_s)
    assert not await is_waited_for(redis)


@pytest.mark.parametrize(("silent_s", "waits"), [(13.0, True), (30.0, False)])
async def test_T5_a_worker_that_stands_still_is_waited_for_as_long_as_its_leases_hold(
    silent_s: float, waits: bool
) -> None:
    redis = Redis([14], {"me": 13}, {})
    redis.show("other", 14, ahead_s=-silent_s)
    assert await is_waited_for(redis) == waits


async def test_what_cannot_be_read_is_left_out() -> None:
    redis = Redis([14], {"me": 13, "other": 14}, {})
    redis.cohorts += [b"x", b"9" * 5000]
    redis.loading["another"] = redis.workers["another"] = b"no record"
    assert await is_waited_for(redis)


async def test_T1_an_engine_of_an_abandoned_version_waits_for_nothing() -> None:
    abandons = Publication("policy", 15, "disk", "/w/15", abandoned=[[14, 14]])
    assert not await is_waited_for(Redis([13], {}, {}), abandons, version=14)


def of_version(number: int) -> Publication:
    return Publication("policy", number, "disk", f"/w/{number}", index="c" * 32)


@pytest.mark.parametrize(
    ("cohorts", "whole", "first"),
    [
        ([14, 15], [13, 14, 15, 16], 14),  # drawn under it, though 16 is there by now
        ([14], [15, 16], 15),  # 14 has no folder any more
        ([14], [], None),
        ([13, 14], [14], None),  # 13 is to end first, and then it is asked again
        ([17], [14, 15, 16], None),
        ([], [14, 15, 16], None),
    ],
)
async def test_T5_an_engine_loads_what_the_oldest_cohort_is_drawn_under_first(
    cohorts: list[int], whole: list[int], first: int | None
) -> None:
    """The disk is slower than a step: several versions have their folders at once."""
    redis = Redis(cohorts, {}, {})
    redis.whole = list(map(of_version, whole))
    found = await ends(redis).first(of_version(17), set())
    assert (None if found is None else found.version) == first
    assert await ends(redis, drains=False).first(of_version(17), set()) is None


@pytest.mark.parametrize(
    ("other", "first"),
    [(14, 14), (15, 15), (17, None), (16, 14), (18, 14)],
    ids=["its own", "later", "the newest", "abandoned", "not known here"],
)
async def test_T5_a_cohort_that_was_begun_under_a_later_version_is_gone_on_with_under_that(
    other: int, first: int | None
) -> None:
    """Its own had no folder then."""
    redis = Redis([14], {"me": 13, "other": other}, {})
    redis.whole = list(map(of_version, (13, 14, 15, 16)))
    newest = Publication("policy", 17, "disk", "/w/17", abandoned=[[16, 16]])
    for version in (13, -1):
        found = await ends(redis, version=version).first(newest, set())
        assert (None if found is None else found.version) == first


@pytest.mark.parametrize(
    ("cohorts", "workers", "is_held_up"),
    [
        ([14], {"other": 14}, True),
        ([13], {"other": 14}, True),  # begun late
        ([14], {"other": 15}, False),
        ([14], {"other": 13}, False),
        ([15], {"other": 14}, False),
        ([14], {"me": 14}, False),
    ],
)
async def test_T5_an_engine_is_not_started_with_what_comes_after_a_cohort_that_is_drawn_elsewhere(
    cohorts: list[int], workers: dict[str, int], is_held_up: bool
) -> None:
    redis = Redis(cohorts, workers, {})
    assert await ends(redis, version=-1).is_held_up(NEWEST, NEWEST, set()) == is_held_up
    assert not await ends(redis, version=-1, drains=False).is_held_up(NEWEST, NEWEST, set())
    waited: list[Cause] = []
    assert await ends(redis, version=-1, waited=waited, end=redis.cohorts.clear).wait(NEWEST, set())
    assert bool(waited) == is_held_up


@pytest.mark.parametrize(
    ("abandoned", "goes_on"), [([[13, 15]], False), ([[15, 15]], False), ([[14, 14]], True), ([], True)]
)
async def test_T1_what_was_abandoned_meanwhile_is_waited_for_no_more(abandoned: list[list[int]], goes_on: bool) -> None:
    redis = Redis([13], {"me": 13}, {})
    waited: list[Cause] = []
    mine = ends(redis, waited=waited, end=redis.cohorts.clear)
    later = Publication("policy", 16, "disk", "/w/16", abandoned=abandoned)

    async def announced() -> Publication:
        return later

    mine._folders.newest = announced
    assert await mine.wait(NEWEST, set()) == goes_on
    assert bool(waited) == goes_on


async def test_what_will_not_do_is_passed_over() -> None:
    redis = Redis([14], {}, {})
    redis.whole = [of_version(14), of_version(15), of_version(16)]
    newest = Publication("policy", 17, "disk", "/w/17", abandoned=[[15, 15]])
    found = await ends(redis).first(newest, {"14-0"})
    assert found is not None
    assert found.version == 16


@pytest.mark.parametrize(
    ("cohorts", "version", "offloaded", "had", "first"),
    [
        ([14, 15], -1, (), -1, 14),
        ([], -1, (), -1, None),
        ([14, 15], -1, (), 15, 15),  # no engine goes back behind what it had
        ([14], -1, (), 17, None),
        ([14, 15], 14, ("weights",), -1, 14),  # it was in that memory
        ([14, 15], 14, ("kv_cache",), -1, None),  # it still has it
        ([13, 15], 14, ("weights", "kv_cache"), -1, 14),
    ],
)
async def test_T5_an_engine_without_weights_begins_with_what_the_oldest_cohort_is_drawn_under(
    cohorts: list[int], version: int, offloaded: tuple[str, ...], had: int, first: int | None
) -> None:
    redis = Redis(cohorts, {}, {})
    redis.whole = list(map(of_version, (13, 14, 15, 16)))
    found = await ends(redis, version=version, offloaded=offloaded).first(of_version(17), set(), had)
    assert (None if found is None else found.version) == first


@pytest.mark.parametrize("cohorts", [[13, 14], [14]], ids=["behind its own", "drawn elsewhere"])
async def test_T5_a_version_that_a_cohort_is_drawn_under_is_found_in_the_wait_too(cohorts: list[int]) -> None:
    """Its folder comes meanwhile, or the cohort that the engine draws ends."""
    redis = Redis(cohorts, {"me": 13, "other": 14}, {})
    waited: list[Cause] = []

    def end() -> None:
        assert len(waited) == 1
        redis.cohorts, redis.whole = [b"14"], [of_version(14)]

    assert not await ends(redis, waited=waited, end=end).wait(NEWEST, set()), "another one comes first"
