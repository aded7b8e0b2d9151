"""Waits are followed to the last one: what the chain of each ends in."""

from dataclasses import replace
from typing import Any

import pytest

from console.read.why import chains
from penstock.protocol.presence import WorkerPresence, WorkerState

LANES = ("suspect", "resume", "eval", "score", "train")
GATE = "the gate: trainer:actor has to publish a version that consumes what was admitted (4 of 4 places are taken)"
BATCH = "batch 3 of buffer:actor"
GROUPS = "4 more groups (0 of 4 are ready, 0 are queued or running)"
RUNNING = "4 more groups (0 of 4 are ready, 7 are queued or running)"
PRODUCER = {"part": "producer", "host": "h", "pid": 7, "age_s": 1.0}
BUFFER = {"part": "buffer", "host": "h", "pid": 8, "age_s": 1.0}
WORKER = WorkerPresence(name="w.1", state=WorkerState.SERVING)
FIRST = "trainer:actor has waited 9 s for batch 3 of buffer:actor"


def state(*waits: tuple[str, str], queued: int = 0, leased: int = 0, **over: Any) -> dict[str, Any]:
    """A run in which everybody is there; waits begin a second after one another, longest first."""
    return {
        "waits": [{"who": who, "what": what, "since_s": 9.0 - i} for i, (who, what) in enumerate(waits)],
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
IDLE = ("worker:w.1:intake", "jobs that an engine of version 2 may start, from the producer")
SILENT = {**PRODUCER, "age_s": 40.0}


@pytest.mark.parametrize(
    ("seen", "depth", "end"),
    [
        (state(TRAINER, leader=None), 1, "no buffer leads: buffer on h (pid 8) has just started, or was just killed"),
        (
            state(TRAINER, leader=None, parts=[{**BUFFER, "age_s": 33.0}]),
            1,
            "no buffer leads: buffer on h (pid 8) has been silent for 33 s; start it again",
        ),
        (state(TRAINER, leader=None, parts=[]), 1, "no buffer leads: start it with `penstock buffer`"),
        (
            state(TRAINER, SHORT, ("producer", GATE)),
            3,
            "which leads back to trainer:actor: these wait for one another",
        ),
        (
            state(TRAINER, SHORT, parts=[SILENT]),
            2,
            "there is no producer: producer on h (pid 7) has been silent for 40 s; st",
        ),
        (state(TRAINER, SHORT, parts=[BUFFER]), 2, "there is no producer: start it with `penstock producer`"),
        (state(TRAINER, SHORT), 2, "the producer is at work"),
        (state(TRAINER, SHORT, ("producer", "room in Redis, which is above 85 %")), 3, ""),
        (state(TRAINER, BUSY, queued=7, workers=[]), 2, "there is no worker: start one"),
        (state(TRAINER, BUSY, queued=7, paused=["train"]), 2, "lane train is paused by a person, with 7 jobs in it"),
        (
            state(TRAINER, BUSY, leased=7, workers=[replace(WORKER, running=5)]),
            2,
            "workers are at work: 5 samples are be",
        ),
        (
            state(
                TRAINER, BUSY, queued=7, workers=[replace(WORKER, state=WorkerState.CRASH_LOOP, why="no CUDA device")]
            ),
            2,
            "worker w.1 is in the state crash loop: no CUDA device",
        ),
        (state(TRAINER, BUSY, ("worker:w.1:commit", "room in Redis for finished samples"), leased=7), 3, ""),
        (state(TRAINER, BUSY, IDLE, ("producer", GATE), queued=1), 4, "which leads back to trainer:actor"),
        (
            state(("producer", GATE), subs=[{"name": "actor", "driving": 1, "owned": False}]),
            1,
            "trainer actor is gone; its last step was 30 s ago: start it again, or drop its subscription",
        ),
        (state(("producer", GATE)), 1, "trainer actor is at work; its last step was 30 s ago"),
        (
            state(("producer", "the first publication of model policy, by the trainer"), subs=[]),
            1,
            "no trainer has joined",
        ),
        (
            state(
                ("subscription:judge", "its trainer to come: 3 groups are held"),
                subs=[{"name": "judge", "owned": False}],
            ),
            1,
            "trainer judge is gone: start it again",
        ),
        (
            state(
                ("subscription:eval", "its trainer to come: 3 groups are held"),
                subs=[
                    {"name": "actor", "driving": 1, "owned": False},
                    {"name": "eval", "lanes": "eval", "owned": False},
                ],
            ),
            1,
            "no trainer reads evaluations: start the trainer again, or drop subscription eval",
        ),
        (
            state(TRAINER, ("buffer:actor", "2 of 4 jobs of the cohort to be finished"), workers=[]),
            2,
            "there is no worker",
        ),
        (state(("worker:w.1:engine", "its engine to start")), 1, ""),
    ],
)
def test_I8_a_chain_ends_in_its_cause(seen: dict[str, Any], depth: int, end: str) -> None:
    chain = chains(seen)[0]
    assert (len(chain.links), chain.end.startswith(end), bool(chain.end)) == (depth, True, bool(end)), chain
    *links, cause = chain.to_map()["then"], chain.to_map()["cause"]
    assert [link.who for link in chain.links[1:]] == [link["who"] for link in links[0]]
    assert cause == (chain.end or chain.links[-1].what)


def test_I8_every_wait_is_shown_once_in_the_longest_chain_that_holds_it() -> None:
    found = chains(state(("worker:w.1:engine", "its engine to start"), TRAINER, SHORT, parts=[SILENT]))
    assert [[link.who for link in chain.links] for chain in found] == [
        ["trainer:actor", "buffer:actor"],
        ["worker:w.1:engine"],
    ], "what ends in a silent part comes first"
    assert list(found[0].lines()) == [
        "trainer:actor has waited 8 s for batch 3 of buffer:actor",
        f"  buffer:actor has waited 7 s for {GROUPS}",
        "    there is no producer: producer on h (pid 7) has been silent for 40 s; start it again",
    ]
    assert [len(chain.links) for chain in chains(state(TRAINER, SHORT, ("producer", GATE)))] == [3], "a circle, once"
    assert chains(state()) == []


REFUSED = replace(WORKER, state=WorkerState.CANNOT_LOAD, why="version 27 cannot be loaded: its shape differs")
REFUSES = ("worker:w.1", "a version of policy that can be loaded; 27 cannot: its shape differs")


def test_I8_a_silent_component_is_reported_first_and_its_old_waits_are_not() -> None:
    killed = replace(WORKER, name="w.2", host="h", pid=5, running=3, age_s=6.0)
    old = {"who": "worker:w.2:intake", "what": "version 27", "since_s": 37.0, "age_s": 6.0}
    seen = state(TRAINER, BUSY, leased=7, workers=[killed])
    seen["waits"].insert(0, old)

    first, *others = [list(chain.lines()) for chain in chains(seen)]

    said = "worker:w.2 has waited 6 s for a start: it has been silent since then, killed or frozen (pid 5 on h)"
    assert first[-1].strip() == said
    assert "37 s" not in str([first, *others])


@pytest.mark.parametrize(
    ("part", "over"),
    [
        ("producer", {"parts": [{**PRODUCER, "age_s": 6.0}, BUFFER]}),
        ("buffer", {"parts": [PRODUCER, {**BUFFER, "age_s": 6.0}]}),
        ("trainer:actor", {"subs": [{"name": "actor", "driving": 1, "owned": True, "silent_s": 6.0}]}),
    ],
)
def test_I8_a_silent_part_is_reported_before_longer_waits(part: str, over: dict[str, Any]) -> None:
    first = list(chains(state(("worker:w.1:engine", "its engine to start"), **over))[0].lines())
    assert first[0].startswith(f"{part} has waited 6 s for a start: it has been silent since then"), first


def test_I8_a_part_that_was_started_again_is_not_silent() -> None:
    killed = {**PRODUCER, "pid": 6, "age_s": 40.0}
    assert chains(state(parts=[killed, PRODUCER, BUFFER])) == []


@pytest.mark.parametrize(
    "workers", [[REFUSED], [REFUSED, replace(WORKER, name="w.2")]], ids=["all refuse", "one refuses"]
)
def test_I8_an_engine_that_refuses_a_version_is_the_cause_and_not_the_circle_around_it(
    workers: list[WorkerPresence],
) -> None:
    waits = (TRAINER, BUSY, ("worker:w.1:intake", IDLE[1]), ("producer", GATE), REFUSES)
    (chain,) = chains(state(*waits, queued=7, workers=workers))
    assert chain.links[-1].what == REFUSES[1]
    assert "wait for one another" not in chain.end


def test_I8_a_refusal_is_the_cause_where_the_worker_only_shows_it() -> None:
    (chain,) = chains(state(TRAINER, BUSY, IDLE, ("producer", GATE), queued=7, workers=[REFUSED]))
    assert chain.end == "worker w.1 is in the state cannot load: version 27 cannot be loaded: its shape differs"


def test_I8_between_restarts_of_an_engine_the_wait_of_the_intake_leads_to_the_suspects() -> None:
    """The wait for a restart ends with each start, too soon to be seen; that of the intake lasts."""
    lost = replace(WORKER, state=WorkerState.ENGINE_AWAY)
    intake = ("worker:w.1:intake", "its engine to be restarted")
    (chain,) = chains(state(TRAINER, BUSY, intake, leased=7, workers=[lost], suspects=["d/0/9"]))
    assert chain.links[-1].who == "worker:w.1:intake"
    assert chain.end.startswith("engines died of d/0/9 before, in lane suspect")
