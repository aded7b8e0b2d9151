"""The parts of a run as a graph: what each is at, what flows, and where the cause is marked."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.console.web.overview import PARTS, overview, place_of, place_of_cause
from penstock.console.web.runs import Look
from penstock.consumers.grpo.rows import Rows
from penstock.protocol.gate import Room
from penstock.records.cause import Cause
from penstock.records.causes import REGISTRY, GateClosed
from penstock.records.worker_causes import LanePaused, NoPart, NoTrainer, RedisDiskFull
from tests.reference.waits import sample
from tests.unit.console.read import test_why as why

COUNTERS = {"admitted": 10, "committed": 40, "completed": 9, "cut": 3, "published": 2}
NONE = Rows(steps=[], evals=[], queue=[])


def state(*waits: tuple[str, Cause], **over: Any) -> dict[str, Any]:
    whole = {"version": 2, "step": 2, "ready": 5, "inflight": 1, "dead": 0, "verifiers": [], "checks": 0}
    sub = {"name": "actor", "driving": 1, "owned": True, "cut": 3, "cursor": 2}
    return whole | why.state(*waits) | {"subs": [sub], "counters": COUNTERS, **over}


def seen(held: dict[str, Any], rates: dict[str, float] | None = None) -> dict[str, Any]:
    return overview(Look(held, rates or {}, {"actor": Room(free=3, places=8)}), NONE, 50)


def part(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["parts"] if one["id"] == name)


def test_a_run_in_which_all_work_has_no_cause() -> None:
    found = seen(state())
    assert [one["id"] for one in found["parts"]] == [*PARTS]
    assert {one["is"] for one in found["parts"]} == {"well"}
    assert {one["cause"] for one in found["parts"]} == {""}
    assert found["chains"] == []
    assert ["gate of actor", "5 of 8 groups"] in part(found, "producer")["facts"]


def test_goodput_is_told_once_tokens_are() -> None:
    tokens = {"train": {"heard": 100, "accounts": {"trained": 60, "filtered:zero_std": 30}}}
    assert seen(state(tokens=tokens))["figures"]["goodput"] == 0.6
    assert seen(state())["figures"]["goodput"] is None


def test_edges_have_rates_and_depths() -> None:
    worker = replace(why.WORKER, version=1)
    found = seen(state(workers=[worker, why.WORKER], lanes={"train": {"queued": 7, "leased": 4}}), {"admitted": 1.5})
    edges = {(one["from"], one["to"]): (one["rate"], one["depth"]) for one in found["edges"]}
    assert edges == {
        ("producer", "queue"): (1.5, 7),
        ("queue", "workers"): (0.0, 4),
        ("workers", "buffer"): (0.0, 5),
        ("buffer", "trainer"): (0.0, 1),
        ("trainer", "workers"): (0.0, 2),
    }
    assert {one["rate"] for one in seen(state())["edges"]} == {None}, "at the first look none is known"


@pytest.mark.parametrize(
    ("held", "part_name", "end"),
    [
        (state(why.TRAINER, leader=None, parts=[why.PRODUCER]), "buffer", NoPart("buffer")),
        (state(why.TRAINER, why.SHORT, parts=[why.BUFFER]), "producer", NoPart("producer")),
        (
            state(why.TRAINER, why.BUSY, workers=[], lanes={"train": {"queued": 7, "leased": 0}}),
            "workers",
            NoPart("worker"),
        ),
        (state(("producer", GateClosed("actor", 4, 4)), subs=[]), "trainer", NoTrainer("actor")),
        (state(("redis", RedisDiskFull())), "queue", RedisDiskFull()),
    ],
    ids=["buffer", "producer", "workers", "trainer", "redis"],
)
def test_the_part_that_a_chain_ends_in_is_marked(held: dict[str, Any], part_name: str, end: Cause) -> None:
    found = seen(held)
    assert part(found, part_name)["cause"] == str(end)
    assert {one["id"] for one in found["parts"] if one["cause"]} == {part_name}


def test_a_chain_that_ends_in_a_part_at_work_marks_none() -> None:
    found = seen(state(why.TRAINER, why.SHORT))
    assert [one["at_work"] for one in found["chains"]] == [True]
    assert {one["cause"] for one in found["parts"]} == {""}
    assert part(found, "trainer")["is"] == part(found, "buffer")["is"] == "waits"


@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("worker:w.1:intake", "workers"),
        ("subscription:actor", "trainer"),
        ("verifiers:v0", "workers"),
        ("", ""),
        ("weather", ""),
    ],
)
def test_a_waiter_belongs_to_a_part(who: str, where: str) -> None:
    assert place_of(who) == where


def test_every_cause_that_names_a_part_belongs_to_one() -> None:
    for cause in map(sample, REGISTRY.values()):
        if cause.part is not None and cause.part.kind != "COMPONENT":
            assert place_of_cause(cause) in PARTS, cause
    assert place_of_cause(LanePaused("train", 7)) == "queue"
