"""`penstock why` in each state that holds a run up: the last link names the cause.

States are written as the parts write them (verbs, presence records, waits) into a real Redis. With the parts' own
processes, which really die, all twelve: wide/test_why.py.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from console.read.why import chains
from penstock.names import Lane
from penstock.protocol import pauses, scripts, snapshot
from penstock.protocol.keys import Keys
from penstock.protocol.presence import WorkerPresence, WorkerState
from penstock.protocol.records.codec import pack
from penstock.protocol.scripts import note, run
from tests.integration import play

GATE = "the gate: trainer:actor has to publish a version that consumes what was admitted (4 of 4 places are taken)"
GROUPS = "2 more groups (0 of 2 are ready, {} are queued or running)"


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
        self.waits("trainer:actor", "batch 1 of buffer:actor", for_s=90)

    def waits(self, who: str, what: str, for_s: float = 60) -> None:
        now = time.time()
        record = pack({"what": what, "since": now - for_s, "at": now + 600})
        run(self.client, note(self.keys, self.keys.waits, who, record))

    def attends(self, part: str, silent_s: float = -600) -> None:
        record = pack({"part": part, "host": "h", "pid": 7, "at": time.time() - silent_s})
        run(self.client, note(self.keys, self.keys.parts, f"{part}:h:7", record))

    def works(self, name: str = "w1", state: str = WorkerState.SERVING, **shown: Any) -> None:
        one = WorkerPresence(name=name, state=state, version=1, slots=8, at=time.time() + 600, **shown)
        run(self.client, note(self.keys, self.keys.workers, name, pack(one.to_record())))

    def admits(self, count: int = 2) -> None:
        play.admit(self.client, self.keys, [play.job(i) for i in range(count)])
        self.waits("buffer:actor", GROUPS.format(count))


def no_worker(one: Run) -> None:
    one.admits()


def engine_hung(one: Run) -> None:
    one.admits()
    play.lease(one.client, one.keys, "w1", version=1)
    one.works(held=1, running=2)
    one.waits("worker:w1:intake", "jobs that an engine of version 1 may start, from the producer")
    one.waits(
        "worker:w1:requests", "the engine, which was asked for sample d/0/0/1 of job d/0/0, and sent nothing for 40 s"
    )


def crash_loop(one: Run) -> None:
    one.admits()
    one.works(state=WorkerState.CRASH_LOOP, why="no CUDA device")
    one.waits(
        "worker:w1:engine", "its engine, which died 5 times in 60 s and is tried every 30 s; the last reason: OOM"
    )


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
    one.waits("worker:w1:engine", "its engine to be started again; the last reason: Segmentation fault")


def reward_that_raises(one: Run) -> None:
    one.waits("buffer:actor", GROUPS.format(0))
    one.waits(
        "producer",
        "someone to correct the code of the run, or its data, and start the producer again: 20 of the last 20 jobs of "
        "d with reward mine:score died of it, and reward.max_died_share is 0.5; the last one: ValueError: no number",
    )


def redis_full(one: Run) -> None:
    one.waits("buffer:actor", GROUPS.format(0))
    one.waits("producer", "room in Redis, which is above 85 % of its maxmemory: sweep, or more memory")


def disk_full(one: Run) -> None:
    one.admits()
    one.works(running=2)


def leader_gone(one: Run) -> None:
    one.client.delete(one.keys.leader)
    one.attends("buffer", silent_s=33)


def producer_dead(one: Run) -> None:
    one.waits("buffer:actor", GROUPS.format(0))
    one.attends("producer", silent_s=33)


def payload_server_dead(one: Run) -> None:
    one.waits("buffer:actor", GROUPS.format(0))
    one.waits("producer", GATE)
    one.waits("buffer:payloads", "payload server p1 to answer: 2 groups are held back (refused); start it again, or")


def lane_paused(one: Run) -> None:
    one.admits()
    one.works()
    pauses.pause(one.client, one.keys, Lane.TRAIN, "operator anna")


#: What happened -> who stands in the chain, from the trainer on where it waits, and what it ends in.
CAUSES: list[tuple[Callable[[Run], None], list[str], str]] = [
    (no_worker, ["trainer:actor", "buffer:actor"], "there is no worker: start one"),
    (engine_hung, ["trainer:actor", "buffer:actor", "worker:w1:requests"], "d/0/0, and sent nothing for 40 s"),
    (crash_loop, ["trainer:actor", "buffer:actor", "worker:w1:engine"], "its engine, which died 5 times"),
    (gate_closed_by_a_dead_trainer, ["producer"], "trainer actor is gone: start it again, or drop its subscription"),
    (poison_prompt, ["trainer:actor", "buffer:actor", "worker:w1:engine"], "engines died of d/0/0 before, in lane sus"),
    (reward_that_raises, ["trainer:actor", "buffer:actor", "producer"], "someone to correct the code of the run"),
    (redis_full, ["trainer:actor", "buffer:actor", "producer"], "room in Redis, which is above 85 %"),
    (disk_full, ["trainer:actor", "redis"], "room on the disk of its append-only file; no part can write before"),
    (leader_gone, ["trainer:actor"], "no buffer leads: buffer on h (pid 7) has been silent for "),
    (
        producer_dead,
        ["trainer:actor", "buffer:actor"],
        "there is no producer: producer on h (pid 7) has been silent fo",
    ),
    (
        payload_server_dead,
        ["producer", "trainer:actor", "buffer:actor", "buffer:payloads"],
        "payload server p1 to answer: 2 groups are held back",
    ),
    (lane_paused, ["trainer:actor", "buffer:actor"], "lane train is paused by operator anna, "),
]


@pytest.mark.parametrize(("happens", "who", "cause"), CAUSES, ids=[case[0].__name__ for case in CAUSES])
def test_I8_the_last_link_is_the_cause(
    happens: Callable[[Run], None],
    who: list[str],
    cause: str,
    client: redis.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happens(Run(client, keys))
    if happens is disk_full:
        # Only a full disk makes a server say so: test_full_disk.py has one.
        monkeypatch.setattr(snapshot, "disk_trouble", lambda _: "room on the disk of its append-only file")

    found = [chain for chain in chains(snapshot.snapshot(client, keys)) if chain.links[0].who == who[0]]

    assert [[link.who for link in chain.links] for chain in found] == [who], [chain.to_map() for chain in found]
    assert cause in found[0].to_map()["cause"]
