"""Waits are followed to the last one: what the chain of each ends in."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.console.read.why import chains
from penstock.protocol.presence import WorkerPresence, WorkerState
from penstock.protocol.waits import describe
from penstock.records.cause import EDGE, Cause, Unknown
from penstock.records.causes import (
    REGISTRY,
    BatchNotCut,
    CohortUnfinished,
    GateClosed,
    GroupsMissing,
    NoPublication,
    TrainerAbsent,
)
from penstock.records.worker_causes import (
    Circle,
    CrashSuspects,
    EngineRestarting,
    EngineStarting,
    LanePaused,
    LockHolderStalled,
    NoJobs,
    NoPart,
    NoTrainer,
    PartGone,
    PartSilent,
    PartStarting,
    RedisFull,
    TrainerGone,
    VersionLoading,
    VersionNotServed,
    VersionRefused,
    WeightsDiskFull,
    WeightsOverLimit,
    WorkerSick,
    Working,
)
from tests.reference.waits import sample

LANES = ("suspect", "resume", "eval", "score", "train")
GATE = GateClosed("actor", 4, 4)
BATCH = BatchNotCut("actor", 3)
GROUPS = GroupsMissing(0, 4, "groups", running=0)
RUNNING = GroupsMissing(0, 4, "groups", running=7)
PRODUCER = {"part": "producer", "host": "h", "pid": 7, "age_s": 1.0}
BUFFER = {"part": "buffer", "host": "h", "pid": 8, "age_s": 1.0}
WORKER = WorkerPresence(name="w.1", state=WorkerState.SERVING)


def state(*waits: tuple[str, Cause], queued: int = 0, leased: int = 0, **over: Any) -> dict[str, Any]:
    """A run in which everybody is there; waits begin a second after one another, longest first."""
    return {
        "waits": [{"who": who, "since_s": 9.0 - i, **describe(cause)} for i, (who, cause) in enumerate(waits)],
        "lanes": {lane: {"queued": queued * (lane == "train"), "leased": leased * (lane == "train")} for lane in LANES},
        "delayed": 0,
        "paused": [],
        "parts": [PRODUCER, BUFFER],
        "leader": {"epoch": 1},
        "workers": [WORKER],
        "trainers": [{"name": "actor", "age_s": 30.0}],
        "subs": [{"name": "actor", "driving": 1, "owned": True}],
        **over,
    }


TRAINER = ("trainer:actor", BATCH)
SHORT = ("buffer:actor", GROUPS)
BUSY = ("buffer:actor", RUNNING)
IDLE = ("worker:w.1:intake", NoJobs(2))
SILENT = {**PRODUCER, "age_s": 40.0}


@pytest.mark.parametrize(
    ("seen", "depth", "end"),
    [
        (state(TRAINER, leader=None), 1, PartStarting("buffer", "h", 8)),
        (
            state(TRAINER, leader=None, parts=[{**BUFFER, "age_s": 33.0}]),
            1,
            PartGone("buffer", "h", 8, 33.0),
        ),
        (state(TRAINER, leader=None, parts=[]), 1, NoPart("buffer")),
        (
            state(TRAINER, SHORT, ("producer", GATE)),
            3,
            Circle("trainer:actor"),
        ),
        (
            state(TRAINER, SHORT, parts=[SILENT]),
            2,
            PartGone("producer", "h", 7, 40.0),
        ),
        (state(TRAINER, SHORT, parts=[BUFFER]), 2, NoPart("producer")),
        (state(TRAINER, SHORT), 2, Working("producer")),
        (state(TRAINER, SHORT, ("producer", RedisFull())), 3, None),
        (state(TRAINER, BUSY, queued=7, workers=[]), 2, NoPart("worker")),
        (state(TRAINER, BUSY, queued=7, paused=["train"]), 2, LanePaused("train", 7)),
        (
            state(TRAINER, BUSY, leased=7, workers=[replace(WORKER, running=5)]),
            2,
            Working("worker", samples=5),
        ),
        (
            state(
                TRAINER, BUSY, queued=7, workers=[replace(WORKER, state=WorkerState.CRASH_LOOP, why="no CUDA device")]
            ),
            2,
            WorkerSick("w.1", "crash loop", "no CUDA device"),
        ),
        (state(TRAINER, BUSY, ("worker:w.1:commit", RedisFull("commit")), leased=7), 3, None),
        (state(TRAINER, BUSY, IDLE, ("producer", GATE), queued=1), 4, Circle("trainer:actor")),
        (
            state(("producer", GATE), subs=[{"name": "actor", "driving": 1, "owned": False}]),
            1,
            TrainerGone("actor", 30.0, drives=True),
        ),
        (state(("producer", GATE)), 1, Working("trainer", "actor", idle_s=30.0)),
        (
            state(("producer", NoPublication("policy")), subs=[]),
            1,
            NoTrainer(),
        ),
        (
            state(
                ("subscription:judge", TrainerAbsent("judge", 3, 0)),
                subs=[{"name": "judge", "owned": False}],
            ),
            1,
            TrainerGone("judge"),
        ),
        (
            state(
                ("subscription:eval", TrainerAbsent("eval", 3, 0)),
                subs=[
                    {"name": "actor", "driving": 1, "owned": False},
                    {"name": "eval", "lanes": "eval", "owned": False},
                ],
            ),
            1,
            TrainerGone("eval", only_evaluates=True),
        ),
        (
            state(TRAINER, ("buffer:actor", CohortUnfinished(2, 4)), workers=[]),
            2,
            NoPart("worker"),
        ),
        (state(("worker:w.1:engine", EngineStarting())), 1, None),
    ],
)
def test_I8_a_chain_ends_in_its_cause(seen: dict[str, Any], depth: int, end: Cause | None) -> None:
    chain = chains(seen)[0]
    assert (len(chain.links), chain.end) == (depth, end), chain
    *links, cause = chain.to_map()["then"], chain.to_map()["cause"]
    assert [link.who for link in chain.links[1:]] == [link["who"] for link in links[0]]
    assert cause == str(chain.end or chain.links[-1].cause)
    assert chain.to_map()["cause_name"] == (chain.end or chain.links[-1].cause).name


def test_I8_every_wait_is_shown_once_in_the_longest_chain_that_holds_it() -> None:
    found = chains(state(("worker:w.1:engine", EngineStarting()), TRAINER, SHORT, parts=[SILENT]))
    assert [[link.who for link in chain.links] for chain in found] == [
        ["trainer:actor", "buffer:actor"],
        ["worker:w.1:engine"],
    ], "what ends in a silent part comes first"
    assert list(found[0].lines()) == [
        f"trainer:actor has waited 8 s for {BATCH}",
        f"  buffer:actor has waited 7 s for {GROUPS}",
        f"    {PartGone('producer', 'h', 7, 40.0)}",
    ]
    assert [len(chain.links) for chain in chains(state(TRAINER, SHORT, ("producer", GATE)))] == [3], "a circle, once"
    assert chains(state()) == []


REFUSED = replace(WORKER, state=WorkerState.CANNOT_LOAD, why="version 27 cannot be loaded: its shape differs")
REFUSES = ("worker:w.1:weights", VersionRefused("policy", 27, "its shape differs"))


def test_I8_a_silent_component_is_reported_first_and_its_old_waits_are_not() -> None:
    killed = replace(WORKER, name="w.2", host="h", pid=5, running=3, age_s=6.0)
    old = {"who": "worker:w.2:intake", "since_s": 37.0, "age_s": 6.0, **describe(VersionLoading(27))}
    seen = state(TRAINER, BUSY, leased=7, workers=[killed])
    seen["waits"].insert(0, old)

    first, *others = chains(seen)

    last = first.links[-1]
    assert (last.who, last.cause, last.since_s) == ("worker:w.2", PartSilent(5, "h"), 6.0)
    assert 37.0 not in [link.since_s for chain in (first, *others) for link in chain.links]


@pytest.mark.parametrize(
    ("part", "over"),
    [
        ("producer", {"parts": [{**PRODUCER, "age_s": 6.0}, BUFFER]}),
        ("buffer", {"parts": [PRODUCER, {**BUFFER, "age_s": 6.0}]}),
        ("gateway", {"parts": [PRODUCER, BUFFER, {**PRODUCER, "part": "gateway", "age_s": 6.0}]}),
        ("trainer:actor", {"subs": [{"name": "actor", "driving": 1, "owned": True, "silent_s": 6.0}]}),
    ],
)
def test_I8_a_silent_part_is_reported_before_longer_waits(part: str, over: dict[str, Any]) -> None:
    first = chains(state(("worker:w.1:engine", EngineStarting()), **over))[0].links[0]
    assert (first.who, type(first.cause), first.since_s) == (part, PartSilent, 6.0)


def test_I8_a_part_that_was_started_again_is_not_silent() -> None:
    killed = {**PRODUCER, "pid": 6, "age_s": 40.0}
    assert chains(state(parts=[killed, PRODUCER, BUFFER])) == []


@pytest.mark.parametrize(
    "refusal",
    [
        REFUSES[1],
        WeightsOverLimit("serving.max_bytes", "/fetched", 101, 0),
        WeightsDiskFull("/fetched", 99, 7),
        LockHolderStalled(4711, "/copies/.lock"),
        VersionNotServed(27),
    ],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize(
    "workers", [[REFUSED], [REFUSED, replace(WORKER, name="w.2")]], ids=["all refuse", "one refuses"]
)
def test_I8_an_engine_that_refuses_a_version_is_the_cause_and_not_the_circle_around_it(
    workers: list[WorkerPresence], refusal: Cause
) -> None:
    refuses = ("worker:w.1:weights", refusal)
    waits = (TRAINER, BUSY, ("worker:w.1:intake", IDLE[1]), ("producer", GATE), refuses)
    (chain,) = chains(state(*waits, queued=7, workers=workers))
    assert (chain.links[-1].cause, chain.end) == (refusal, None)


def test_I8_a_refusal_is_the_cause_where_the_worker_only_shows_it() -> None:
    (chain,) = chains(state(TRAINER, BUSY, IDLE, ("producer", GATE), queued=7, workers=[REFUSED]))
    assert chain.end == WorkerSick("w.1", "cannot load", REFUSED.why)


def test_I8_between_restarts_of_an_engine_the_wait_of_the_intake_leads_to_the_suspects() -> None:
    """The wait for a restart ends with each start, too soon to be seen; that of the intake lasts."""
    lost = replace(WORKER, state=WorkerState.ENGINE_AWAY)
    intake = ("worker:w.1:intake", EngineRestarting())
    (chain,) = chains(state(TRAINER, BUSY, intake, leased=7, workers=[lost], suspects=["d/0/9"]))
    assert chain.links[-1].who == "worker:w.1:intake"
    assert chain.end == CrashSuspects(("d/0/9",))


def test_I8_every_cause_is_handled_by_its_kind() -> None:
    """An edge leads on to the part that it names; what is none ends its chain."""
    for cause in map(sample, REGISTRY.values()):
        (chain, *_) = chains(state(("scorer:s", cause), workers=[replace(WORKER, name="WORKER")]))
        assert chain.links[0].cause == cause
        if cause.kind is EDGE:
            assert cause.part is not None
            assert chain.end is not None or len(chain.links) > 1, cause
        else:
            assert (len(chain.links), chain.end) == (1, None), cause


def test_a_cause_of_another_version_is_shown_by_its_name_and_ends_its_chain() -> None:
    (chain,) = chains(state(("worker:w.1:intake", Unknown("on_hold", {"gpu": 3}))))
    assert list(chain.lines()) == ["worker:w.1:intake has waited 9 s for on_hold (gpu 3)"]
    assert (chain.to_map()["name"], chain.to_map()["fields"]) == ("on_hold", {"gpu": 3})
