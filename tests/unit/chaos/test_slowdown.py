"""Faults at a pace are struck when they are due, whatever the run has got over; what is trained again is no gain."""

from types import SimpleNamespace
from typing import Any

from tests.chaos.cluster.workloads import BASE, WORKLOADS
from tests.chaos.nemesis.act import Kind
from tests.chaos.nemesis.schedule import Schedule
from tests.chaos.slowdown import Paced, trained


def test_an_act_comes_each_time_that_one_is_due_and_waits_for_nothing() -> None:
    kinds = {"any:thing": Kind(lambda _, rng: {}, lambda *_: None)}
    paced = Paced(Schedule(1, kinds), every_s=0.01, seconds=0.055)

    acts = [paced.next(["any:thing"]) for _ in range(6)]

    assert [act and act.number for act in acts] == [1, 2, 3, 4, 5, None]
    assert all(act.chained and not act.moment and not act.after_s for act in acts if act)


def test_batches_that_are_trained_again_after_a_rewind_count_once() -> None:
    watch = SimpleNamespace(cursors={"actor": 7, "judge": 3}, committed_of={"actor": 10, "judge": 3}, committed=13)
    cluster: Any = SimpleNamespace(watch=watch, workload=WORKLOADS["async"])

    assert trained(cluster) == 7 * BASE["trainer"]["batch_groups"]
