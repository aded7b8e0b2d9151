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

KEYS = Keys("run")
#: Version 14 was abandoned before an engine had it, with jobs that need it.
NEWEST = Publication("policy", 15, "disk", "/w/15", abandoned=[[14, 14]])


class Redis:
    def __init__(self, cohorts: list[int], workers: dict[str, int], loading: dict[str, list[int]]) -> None:
        self.cohorts = cohorts
        shown = {name: WorkerPresence(name=name, at=time.time(), version=version) for name, version in workers.items()}
        loads = {name: pack({"versions": versions, "at": time.time()}) for name, versions in loading.items()}
        self._maps = {
            KEYS.workers: {name: pack(one.to_record()) for name, one in shown.items()},
            KEYS.loading("policy"): loads,
        }

    async def do(self, work: Any) -> Any:
        return await work(self)

    async def hkeys(self, key: str) -> list[bytes]:
        return [str(version).encode() for version in self.cohorts]

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        return {name.encode(): data for name, data in self._maps[key].items()}


async def is_waited_for(redis: Redis, *, version: int = 13) -> bool:
    """Whether this worker, ``me``, waits before it loads the newest; ends the cohorts where it does."""
    waited: list[str] = []

    def for_(what: str) -> None:
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
            staleness=SimpleNamespace(rules=SimpleNamespace(drains=True)),
        ),
    )
    waiting: Any = SimpleNamespace(for_=for_, end=lambda: None)
    await Ends(services, waiting).wait(NEWEST)
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


async def test_T1_an_engine_of_an_abandoned_version_waits_for_nothing() -> None:
    assert not await is_waited_for(Redis([13], {}, {}), version=14)
