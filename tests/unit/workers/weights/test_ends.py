"""What one_step waits for before it loads other weights (T5)."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocol.keys import Keys
from penstock.protocol.presence import WorkerPresence
from penstock.protocol.records.codec import pack
from penstock.protocol.records.publication import Publication
from workers.weights.ends import Ends
from workers.weights.folders import Folders

KEYS = Keys("run")
#: Version 14 was abandoned before an engine had it, with jobs that need it.
NEWEST = Publication("policy", 15, "disk", "/w/15", abandoned=[[14, 14]])


class Redis:
    def __init__(self, cohorts: list[int], workers: dict[str, int], loading: dict[str, list[int]]) -> None:
        self.cohorts = [str(version).encode() for version in cohorts]
        shown = {name: WorkerPresence(name=name, at=time.time(), version=version) for name, version in workers.items()}
        loads = {name: pack({"versions": versions, "at": time.time()}) for name, versions in loading.items()}
        #: Publications whose folder is there.
        self.whole: list[Publication] = []
        self.maps = {
            KEYS.workers: {name: pack(one.to_record()) for name, one in shown.items()},
            KEYS.loading("policy"): loads,
        }

    async def do(self, work: Any) -> Any:
        return await work(self)

    async def hkeys(self, key: str) -> list[bytes]:
        return self.cohorts

    async def xrevrange(self, key: str, end: str, first: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        assert end == "(17-0"
        return [(b"", {b"p": one.to_bytes()}) for one in reversed(self.whole) if one.version >= int(first)]

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        return {name.encode(): data for name, data in self.maps[key].items()}


def ends(redis: Redis, *, version: int = 13, drains: bool = True, waited: list[str] | None = None) -> Ends:
    """Of this worker, ``me``; the cohorts end where it waits."""

    def for_(what: str) -> None:
        assert waited is not None
        waited.append(what)
        redis.cohorts = []

    services: Any = SimpleNamespace(
        keys=KEYS,
        worker="me",
        control=redis,
        engine=SimpleNamespace(version=version, offloaded=set()),
        engine_lost=asyncio.Event(),
        config=SimpleNamespace(
            model=SimpleNamespace(name="policy"),
            data=SimpleNamespace(eval_pinned=False),
            staleness=SimpleNamespace(rules=SimpleNamespace(drains=drains)),
        ),
    )
    waiting: Any = SimpleNamespace(for_=for_, end=lambda: None)
    control: Any = redis
    return Ends(services, waiting, Folders(KEYS, control, waiting, _nothing))


async def _nothing() -> None:
    """No newest publication: nothing here asks for it."""


async def is_waited_for(redis: Redis, *, version: int = 13) -> bool:
    """Whether it waits before it loads the newest."""
    waited: list[str] = []
    await ends(redis, version=version, waited=waited).wait(NEWEST)
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
    ],
)
async def test_T5_a_cohort_is_waited_for_while_an_engine_may_draw_it(
    cohorts: list[int], workers: dict[str, int], loading: dict[str, list[int]], waits: bool
) -> None:
    assert await is_waited_for(Redis(cohorts, workers, loading)) == waits


async def test_what_cannot_be_read_is_left_out() -> None:
    redis = Redis([14], {"me": 13, "other": 14}, {})
    redis.cohorts += [b"x", b"9" * 5000]
    redis.maps[KEYS.loading("policy")]["another"] = redis.maps[KEYS.workers]["another"] = b"no record"
    assert await is_waited_for(redis)


async def test_T1_an_engine_of_an_abandoned_version_waits_for_nothing() -> None:
    assert not await is_waited_for(Redis([13], {}, {}), version=14)


def version(number: int) -> Publication:
    return Publication("policy", number, "disk", f"/w/{number}", index="c" * 32)


@pytest.mark.parametrize(
    ("cohorts", "whole", "first"),
    [
        ([14, 15], [13, 14, 15, 16], 14),  # drawn under it, though 16 is there by now
        ([14], [15, 16], 15),  # 14 has no folder any more
        ([14], [], None),
        ([13, 14], [14], None),  # 13 is to end first
        ([17], [14, 15, 16], None),
        ([], [14, 15, 16], None),
    ],
)
async def test_T5_an_engine_loads_what_the_oldest_cohort_is_drawn_under_first(
    cohorts: list[int], whole: list[int], first: int | None
) -> None:
    """The disk is slower than a step: several versions have their folders at once."""
    redis = Redis(cohorts, {}, {})
    redis.whole = list(map(version, whole))
    found = await ends(redis).first(version(17), set())
    assert (None if found is None else found.version) == first
    assert await ends(redis, drains=False).first(version(17), set()) is None


async def test_what_will_not_do_is_passed_over() -> None:
    redis = Redis([14], {}, {})
    redis.whole = [version(14), version(15), version(16)]
    newest = Publication("policy", 17, "disk", "/w/17", abandoned=[[15, 15]])
    found = await ends(redis).first(newest, {"14-0"})
    assert found is not None
    assert found.version == 16
