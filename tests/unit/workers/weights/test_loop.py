"""What a publication that this worker may not take does to its engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.staleness import Mode
from penstock.errors import EngineDied, EngineError, PublishError
from penstock.records.cause import Cause
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import LockHolderStalled, VersionRefused, VersionRetried, WeightsOverLimit
from penstock.workers.jobs.valves import Valves
from penstock.workers.services import Tally
from penstock.workers.weights import loop
from penstock.workers.weights.loop import TRIES, WeightLoop
from penstock.workers.weights.select import Load, Purpose, View, select_version


class Redis:
    """Has publications, the newest first; the records of their folders are malformed."""

    def __init__(self, *publications: bytes) -> None:
        self.entries = [(b"1-0", {b"p": publication}) for publication in publications]
        self._answers: list[Any] = []

    async def do(self, work: Any) -> Any:
        return await work(self)

    async def call(self, _: Any) -> None:
        """Records what is loaded."""

    async def xrevrange(self, key: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self.entries

    def pipeline(self, **_: bool) -> "Redis":
        self._answers = []
        return self

    def hmget(self, _: str, names: list[str]) -> None:
        self._answers.append([b"no record"] * len(names))

    def hgetall(self, _: str) -> None:
        self._answers.append({})

    def hkeys(self, _: str) -> None:
        self._answers.append([])

    async def execute(self) -> list[Any]:
        return self._answers


class Waits(list[Cause]):
    """The causes that were reported."""

    cause = None

    def blocked_on(self, cause: Cause) -> None:
        self.append(cause)

    def end(self) -> None:
        """The wait is over."""


def services_of(lost: list[int], redis: Redis) -> Any:
    return SimpleNamespace(
        tally=Tally(),
        engine=SimpleNamespace(
            offloaded={"weights"}, version=1, rev=0, is_away=False, info=SimpleNamespace(num_ranks=0)
        ),
        engine_lost=asyncio.Event(),
        lose_engine=lambda birth, why="", hands_back=False: lost.append(birth),
        births=1,
        stands_in_for=-1,
        keys=Keys("run"),
        worker="w",
        valves=Valves(),
        control=redis,
        may_start_more=asyncio.Event(),
        show=asyncio.Event(),
        config=SimpleNamespace(
            model=SimpleNamespace(name="policy"),
            data=SimpleNamespace(eval_pinned=False),
            trainer=SimpleNamespace(transport="gloo", transfer_timeout_s=1.0),
            staleness=SimpleNamespace(rules=SimpleNamespace(drains=False), mode=Mode.ASYNC, bound=2),
            worker=SimpleNamespace(apply="abort", lease_s=15.0),
            serving=SimpleNamespace(enabled=False),
        ),
    )


def loop_of(services: Any, redis: Any, waits: Any) -> WeightLoop:
    return WeightLoop(services, redis, waits)


async def test_memory_that_is_wanted_back_waits_for_weights_that_may_be_loaded() -> None:
    """A transport that is refused costs no engine: its weights are still to come, and the next version may be good."""
    lost, waits = list[int](), Waits()
    redis = Redis(Publication(model="policy", version=2, transport="pigeon", path="/weights").to_bytes())
    services = services_of(lost, redis)
    followed = loop_of(services, redis, waits)

    assert await followed.step() == 0.0, "it noted what it is about to load"
    assert await followed.step() == loop.RETRY_S

    assert lost == []
    assert services.engine.offloaded == {"weights"}
    assert "publication 2 of 'policy' is by 'pigeon'" in followed.cannot_load
    assert len(waits) == 1


async def test_a_worker_starts_though_earlier_publications_and_the_folder_of_the_newest_cannot_be_read() -> None:
    newest, earlier = Publication("policy", 3, "gloo", ""), Publication("policy", 1, "gloo", "/weights")
    redis = Redis(newest.to_bytes(), b"no record", earlier.to_bytes())
    services = services_of([], redis)
    services.engine.version, services.engine.offloaded = -1, set()
    view = await loop_of(services, redis, Waits())._view(Purpose.START)
    decision = select_version(view)
    assert isinstance(decision, Load)
    assert decision.publication == earlier


async def test_the_error_of_a_publication_is_bounded() -> None:
    waits = Waits()
    followed = loop_of(services_of([], Redis()), Redis(), waits)

    followed._report(Publication("policy", 3, "disk", "/"), PublishError("x" * 10_000_000))

    assert len(followed.cannot_load) < 5_000
    assert len(str(waits[0])) < 5_000


async def test_a_refusal_with_a_cause_of_its_own_is_reported_as_that_cause() -> None:
    waits = Waits()
    followed = loop_of(services_of([], Redis()), Redis(), waits)
    cause = WeightsOverLimit("serving.max_bytes", "/fetched", 101, 0)

    followed._report(Publication("policy", 3, "disk", "/"), PublishError("it does not fit: raise it.", cause))
    followed._report(Publication("policy", 3, "disk", "/"), PublishError("its shape differs."))

    assert followed.cannot_load == "its shape differs."
    assert waits == [cause, VersionRefused("policy", 3, "its shape differs.")]


async def test_a_version_that_is_tried_again_shows_the_cause_of_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RETRY_S", 0.0)
    waits, services = Waits(), services_of([], Redis())
    services.config.staleness.rules.drains = True
    publication, cause = Publication("policy", 3, "disk", "/"), LockHolderStalled(4711, "/copies/.lock")
    followed = loop_of(services, Redis(), waits)

    for why in (PublishError("it stalls.", cause), EngineError("it died.")):
        assert await followed._failed_again(publication, why)

    assert waits == [cause, VersionRetried(3, "it died.")]


@pytest.mark.parametrize(
    ("drains", "is_away", "skipped"), [(True, False, True), (True, True, False), (False, False, False)]
)
async def test_a_version_before_the_newest_that_engines_die_of_in_their_start_is_skipped(
    drains: bool, is_away: bool, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one_step would never come to the newest. An engine that does not answer proves nothing about the version."""

    async def dies(publication: Publication) -> None:
        raise EngineDied("out of memory")

    newest, before = Publication("policy", 3, "disk", "/3"), Publication("policy", 2, "disk", "/2")
    redis = Redis(newest.to_bytes(), before.to_bytes())
    services = services_of([], redis)
    services.config.staleness.rules.drains = drains
    services.engine.offloaded, services.engine.version = set(), -1
    services.engine.start, services.engine.is_away = dies, is_away
    followed = loop_of(services, redis, Waits())

    async def is_wanted() -> None:
        """All of its memory is."""

    monkeypatch.setattr(followed, "_all_memory_is_wanted", is_wanted)
    for _ in range(TRIES):
        assert not (await followed._view(Purpose.START)).failed
        for place in (0, 1):
            monkeypatch.setattr(loop, "select_version", lambda view, place=place: Load(view.published[place]))
            with pytest.raises(EngineDied):
                await followed.start_engine()
    assert (await followed._view(Purpose.START)).failed == ({"2-0"} if skipped else set())


async def test_what_is_about_to_be_loaded_is_noted_and_the_view_read_again_before_the_engine_is_touched() -> None:
    """Of two workers that select at once, at least one sees what the other is about to do (T5)."""
    redis = Redis(Publication("policy", 2, "disk", "/2").to_bytes())
    services, steps = services_of([], redis), list[str]()
    services.engine.offloaded = set()

    async def note(_: Any) -> None:
        steps.append("noted")

    redis.call = note  # type: ignore[method-assign]
    followed = loop_of(services, redis, Waits())
    read = followed._views.read

    async def reads(*args: Any) -> View:
        steps.append("read")
        return await read(*args)

    async def apply(*_: Any, **__: Any) -> Any:
        steps.append("applied")
        raise PublishError("it is gone.")

    followed._views.read = reads  # type: ignore[method-assign]
    followed._updater.apply = apply  # type: ignore[method-assign]
    assert await followed.step() == 0.0
    await followed.step()
    assert steps[:4] == ["read", "noted", "read", "applied"]


@pytest.mark.parametrize("why", ["abandoned", "set aside"])
async def test_T1_a_version_that_is_given_up_while_it_is_fetched_is_not_loaded(why: str) -> None:
    five = Publication("policy", 5, "disk", "/w/5", index="5" * 32)
    six = Publication("policy", 6, "disk", "/w/6", index="6" * 32, abandoned=[[5, 5]])
    redis = Redis(five.to_bytes())
    services = services_of([], redis)
    services.engine.offloaded, services.engine.version = set(), 4
    loop, loaded, aside = WeightLoop(services, redis, Waits()), list[int](), dict[bytes, bytes]()
    redis.hgetall = lambda key: redis._answers.append(dict(aside))  # type: ignore[method-assign,func-returns-value]

    async def fetch(publication: Publication) -> Publication | None:
        if publication.version == 5 and not aside and len(redis.entries) == 1:
            if why == "set aside":
                aside[b"5-0"] = b"CUDA error"
            else:
                redis.entries = [(b"2-0", {b"p": six.to_bytes()}), *redis.entries]
            return None
        return publication

    async def apply(publication: Publication, policy: str, *, is_sent: bool = False) -> None:
        loaded.append(publication.version)

    loop.store.fetch, loop._updater.apply = fetch, apply  # type: ignore[method-assign,assignment]
    for _ in range(3):
        await loop.step()
    assert 5 not in loaded
