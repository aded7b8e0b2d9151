"""`penstock why` in each state that holds a run up: the last link names the cause.

States are written as the parts write them (verbs, presence records, waits) into a real Redis. With the parts' own
processes, which really die, all twelve: wide/test_why.py.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from penstock.console.read.why import chains
from penstock.names import Lane
from penstock.protocol import scripts, snapshot, user_failures
from penstock.protocol.presence import WorkerPresence, WorkerState
from penstock.protocol.scripts import note, run
from penstock.records.cause import Cause
from penstock.records.causes import BatchNotCut, GateClosed, GroupsMissing, JobsFailing, PayloadServersAway
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.worker_causes import (
    CrashSuspects,
    EngineCrashLoop,
    EngineRestarting,
    EngineSilent,
    LanePaused,
    NoJobs,
    NoPart,
    PartGone,
    RedisDiskFull,
    RedisFull,
    TrainerGone,
)
from tests.integration import play
from tests.integration.parts import matches, wait_record

GATE = GateClosed("actor", 4, 4)


def missing(running: int) -> GroupsMissing:
    return GroupsMissing(0, 2, "groups", running)


class Run:
    """A run in which a trainer waits for a batch; each method does what a part does."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys = client, keys
        play.subscribe(client, keys, mode="async", size=2)
        play.join(client, keys)
        play.publish(client, keys, 1, 0)
        play.lead(client, keys)
        self.attends("producer")
        self.attends("buffer")
        self.waits("trainer:actor", BatchNotCut("actor", 1), for_s=90)

    def waits(self, who: str, cause: Cause, for_s: float = 60) -> None:
        now = time.time()
        run(self.client, note(self.keys, self.keys.waits, who, wait_record(cause, now - for_s, now + 600)))

    def attends(self, part: str, silent_s: float = -600) -> None:
        record = pack({"part": part, "host": "h", "pid": 7, "at": time.time() - silent_s})
        run(self.client, note(self.keys, self.keys.parts, f"{part}:h:7", record))

    def works(self, name: str = "w1", state: str = WorkerState.SERVING, **shown: Any) -> None:
        one = WorkerPresence(name=name, state=state, version=1, slots=8, at=time.time() + 600, **shown)
        run(self.client, note(self.keys, self.keys.workers, name, pack(one.to_record())))

    def admits(self, count: int = 2) -> None:
        play.admit(self.client, self.keys, [play.job(i) for i in range(count)])
        self.waits("buffer:actor", missing(count))


def no_worker(one: Run) -> None:
    one.admits()


def engine_hung(one: Run) -> None:
    one.admits()
    play.lease(one.client, one.keys, "w1", version=1)
    one.works(held=1, running=2)
    one.waits("worker:w1:intake", NoJobs(1))
    one.waits("worker:w1:requests", EngineSilent("d/0/0/1", 40.0))


def crash_loop(one: Run) -> None:
    one.admits()
    one.works(state=WorkerState.CRASH_LOOP, why="no CUDA device")
    one.waits("worker:w1:engine", EngineCrashLoop("OOM", 5, 60.0, 30.0))


def gate_closed_by_a_dead_trainer(one: Run) -> None:
    one.client.delete(one.keys.owner("actor"), one.keys.waits)
    one.waits("producer", GATE)


def poison_prompt(one: Run) -> None:
    one.admits(1)
    (held,) = play.lease(one.client, one.keys, "w1", version=1)
    for _ in range(2):
        run(one.client, scripts.crash(one.keys, held.job, held.token, "w1", ""))
        (held,) = play.lease(one.client, one.keys, "w1", version=1)
    run(one.client, scripts.release(one.keys, held.job, held.token))
    one.works(state=WorkerState.RESTARTING_ENGINE, why="Segmentation fault")
    one.waits("worker:w1:engine", EngineRestarting("Segmentation fault"))


def reward_that_raises(one: Run) -> None:
    one.waits("buffer:actor", missing(0))
    one.waits("producer", JobsFailing("d with reward mine:score", 20, 20, 0, 0.5, "ValueError: no number"))


def redis_full(one: Run) -> None:
    one.waits("buffer:actor", missing(0))
    one.waits("producer", RedisFull())


def disk_full(one: Run) -> None:
    one.admits()
    one.works(running=2)


def leader_gone(one: Run) -> None:
    one.client.delete(one.keys.leader)
    one.attends("buffer", silent_s=33)


def producer_dead(one: Run) -> None:
    one.waits("buffer:actor", missing(0))
    one.attends("producer", silent_s=33)


def payload_server_dead(one: Run) -> None:
    one.waits("buffer:actor", missing(0))
    one.waits("producer", GATE)
    one.waits("buffer:payloads", PayloadServersAway(("p1",), 2, "refused"))


def lane_paused(one: Run) -> None:
    one.admits()
    one.works()
    user_failures.pause(one.client, one.keys, Lane.TRAIN, "operator anna")


#: What happened -> who stands in the chain, from the trainer on where it waits, and the cause that it ends in.
CAUSES: list[tuple[Callable[[Run], None], list[str], type[Cause], dict[str, Any]]] = [
    (no_worker, ["trainer:actor", "buffer:actor"], NoPart, {"component": "worker"}),
    (engine_hung, ["trainer:actor", "buffer:actor", "worker:w1:requests"], EngineSilent, {"sample": "d/0/0/1"}),
    (crash_loop, ["trainer:actor", "buffer:actor", "worker:w1:engine"], EngineCrashLoop, {"failures": 5}),
    (gate_closed_by_a_dead_trainer, ["producer"], TrainerGone, {"subscription": "actor"}),
    (poison_prompt, ["trainer:actor", "buffer:actor", "worker:w1:engine"], CrashSuspects, {"jobs": ("d/0/0",)}),
    (reward_that_raises, ["trainer:actor", "buffer:actor", "producer"], JobsFailing, {"failed": 20}),
    (redis_full, ["trainer:actor", "buffer:actor", "producer"], RedisFull, {}),
    (disk_full, ["trainer:actor", "redis"], RedisDiskFull, {}),
    (leader_gone, ["trainer:actor"], PartGone, {"component": "buffer", "pid": 7}),
    (
        producer_dead,
        ["trainer:actor", "buffer:actor"],
        PartGone,
        {"component": "producer", "pid": 7},
    ),
    (
        payload_server_dead,
        ["producer", "trainer:actor", "buffer:actor", "buffer:payloads"],
        PayloadServersAway,
        {"servers": ("p1",), "groups": 2},
    ),
    (lane_paused, ["trainer:actor", "buffer:actor"], LanePaused, {"lane": "train", "by": "operator anna"}),
]


@pytest.mark.parametrize(("happens", "who", "kind", "fields"), CAUSES, ids=[case[0].__name__ for case in CAUSES])
def test_I8_the_last_link_is_the_cause(
    happens: Callable[[Run], None],
    who: list[str],
    kind: type[Cause],
    fields: dict[str, Any],
    client: redis.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happens(Run(client, keys))
    if happens is disk_full:
        # Only a full disk makes a server say so: test_full_disk.py has one.
        monkeypatch.setattr(snapshot, "disk_trouble", lambda _: "full")

    found = [chain for chain in chains(snapshot.snapshot(client, keys)) if chain.links[0].who == who[0]]

    assert [[link.who for link in chain.links] for chain in found] == [who], [chain.to_map() for chain in found]
    assert matches(found[0].end or found[0].links[-1].cause, kind, **fields), found[0]
