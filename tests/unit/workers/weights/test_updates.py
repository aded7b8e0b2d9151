"""What a publication that this worker may not take does to its engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.staleness import Mode
from penstock.errors import EngineDied, EngineError, PublishError
from penstock.records.causes import (
    Cause,
    LockHolderStalled,
    VersionRefused,
    VersionRetried,
    WeightsOverLimit,
)
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.workers.services import Tally
from penstock.workers.weights import choice, updates
from penstock.workers.weights.choice import TRIES
from penstock.workers.weights.updates import Updates


class Redis:
    """Has publications, the newest first; what tells of their folders is no record."""

    def __init__(self, *publications: bytes) -> None:
        self.entries = [(b"1-0", {b"p": publication}) for publication in publications]

    async def do(self, work: Any) -> Any:
        return await work(self)

    async def call(self, _: Any) -> None:
        """Records what is loaded."""

    async def xrevrange(self, key: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self.entries

    async def hget(self, *_: str) -> bytes:
        return b"no record"


def services_of(lost: list[int], redis: Redis | None = None) -> Any:
    return SimpleNamespace(
        tally=Tally(),
        engine=SimpleNamespace(offloaded={"weights"}, version=1, rev=0),
        engine_lost=SimpleNamespace(is_set=lambda: False),
        lose_engine=lambda birth, why="": lost.append(birth),
        births=1,
        keys=Keys("run"),
        worker="w",
        valves=None,
        control=redis,
        config=SimpleNamespace(
            model=SimpleNamespace(name="policy"),
            trainer=SimpleNamespace(transport="gloo", transfer_timeout_s=1.0),
            staleness=SimpleNamespace(rules=SimpleNamespace(drains=False), mode=Mode.ASYNC, bound=2),
            worker=SimpleNamespace(apply="abort"),
            serving=SimpleNamespace(enabled=False),
        ),
    )


async def test_memory_that_is_wanted_back_waits_for_weights_that_may_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that is refused costs no engine: its weights are still to come, and the next version may be good."""
    monkeypatch.setattr(updates, "RETRY_S", 0.0)
    lost: list[int] = []
    waits: list[Cause] = []
    services = services_of(lost)
    reader: Any = Redis(Publication(model="policy", version=2, transport="pigeon", path="/weights").to_bytes())
    waiting: Any = SimpleNamespace(blocked_on=waits.append)
    followed = Updates(services, reader, waiting)

    await followed.settle_memory()

    assert lost == []
    assert services.engine.offloaded == {"weights"}
    assert "publication 2 of 'policy' is by 'pigeon'" in followed.cannot_load
    assert len(waits) == 1


async def test_a_worker_starts_though_earlier_publications_and_what_tells_of_the_newest_cannot_be_read() -> None:
    newest, earlier = Publication("policy", 3, "gloo", ""), Publication("policy", 1, "gloo", "/weights")
    redis: Any = Redis(newest.to_bytes(), b"no record", earlier.to_bytes())
    followed = Updates(services_of([], redis), redis, waiting=SimpleNamespace())  # type: ignore[arg-type]

    assert await followed._choice.to_start_with(newest, None) == [earlier]


def test_what_is_said_of_a_publication_is_bounded() -> None:
    waits: list[Cause] = []
    followed = Updates(services_of([]), Redis(), SimpleNamespace(blocked_on=waits.append))  # type: ignore[arg-type]

    followed._report(Publication("policy", 3, "disk", "/"), PublishError("x" * 10_000_000))

    assert len(followed.cannot_load) < 5_000
    assert len(str(waits[0])) < 5_000


def test_a_refusal_with_a_cause_of_its_own_is_reported_as_that_cause() -> None:
    waits: list[Cause] = []
    followed = Updates(services_of([]), Redis(), SimpleNamespace(blocked_on=waits.append))  # type: ignore[arg-type]
    cause = WeightsOverLimit("serving.max_bytes", "/fetched", 101, 0)

    followed._report(Publication("policy", 3, "disk", "/"), PublishError("it does not fit: raise it.", cause))
    followed._report(Publication("policy", 3, "disk", "/"), PublishError("its shape differs."))

    assert followed.cannot_load == "its shape differs."
    assert waits == [cause, VersionRefused("policy", 3, "its shape differs.")]


async def test_a_version_that_is_tried_again_shows_the_cause_of_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "RETRY_S", 0.0)
    waits: list[Cause] = []
    waiting: Any = SimpleNamespace(blocked_on=waits.append, end=lambda: None)
    publication, cause = Publication("policy", 3, "disk", "/"), LockHolderStalled(4711, "/copies/.lock")

    for why in (PublishError("it stalls.", cause), EngineError("it died.")):
        assert await choice.Passed(waiting, is_tried_again=True).after(publication, why)

    assert waits == [cause, VersionRetried(3, "it died.")]


@pytest.mark.parametrize(
    ("drains", "is_away", "passed"), [(True, False, True), (True, True, False), (False, False, False)]
)
async def test_a_version_before_the_newest_that_engines_die_of_in_their_start_is_passed_over(
    drains: bool, is_away: bool, passed: bool
) -> None:
    """Or one_step would never come to the newest. An engine that does not answer says nothing of the version."""

    async def dies(publication: Publication) -> None:
        raise EngineDied("out of memory")

    services, newest = services_of([], Redis()), Publication("policy", 3, "disk", "/3")
    services.config.staleness.rules.drains = drains
    services.engine = SimpleNamespace(offloaded=set(), version=-1, start=dies, is_away=is_away)
    followed = Updates(services, Redis(), SimpleNamespace())  # type: ignore[arg-type]
    followed.newest = newest
    for _ in range(TRIES):
        assert not followed._choice.out
        for publication in (newest, Publication("policy", 2, "disk", "/2")):
            with pytest.raises(EngineDied):
                await followed._start_with(publication)
    assert followed._choice.out == ({"2-0"} if passed else set())
