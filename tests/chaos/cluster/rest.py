"""The end of a run: everybody goes on without help, then the prompts stop, and it comes to rest."""

import time
from typing import TYPE_CHECKING, Any

from penstock.names import LANES
from penstock.protocol.presence import live_workers
from tests.chaos.cluster.supervisor import Part

if TYPE_CHECKING:
    from tests.chaos.cluster.cluster import Cluster

#: Nothing has changed for so long when a run is at rest; longer than any lease of a job, in leases.
QUIET_LEASES = 2.0


def goes_on(cluster: "Cluster") -> str:
    """Wait until every part is up, every worker serves, and every subscription has a new batch; '' or who does not.

    What a fault leaves behind must heal by itself: nothing is done here but waiting.
    """
    assert cluster.watch is not None
    before, timeout_s = dict(cluster.watch.committed_of), cluster.patience_s
    deadline = time.monotonic() + timeout_s
    while late := _late(cluster, before):
        cluster.supervisor.check()
        if time.monotonic() > deadline:
            return f"after {timeout_s:g} s: {'; '.join(late)}. {cluster.words()}"
        time.sleep(0.1)
    return ""


def _late(cluster: "Cluster", before: dict[str, int]) -> list[str]:
    """Who has not gone on yet."""
    assert cluster.watch is not None
    late = [f"{part.name} is not up" for part in _living(cluster) if not part.is_alive]
    names = sorted({seats.name for seats in cluster.workload.trainers} - _dropped(cluster))
    now = cluster.watch.committed_of
    late += [f"subscription {name} has no new batch" for name in names if now.get(name, 0) <= before.get(name, 0)]
    serving = cluster.ask(lambda client: {one.started_as for one in live_workers(client, cluster.keys) if _serves(one)})
    return late + [f"{part.name} does not serve" for part in cluster.of("worker") if part.name not in (serving or ())]


def _living(cluster: "Cluster") -> list[Part]:
    """Parts that should be up: trainers whose subscription was dropped can do nothing any more."""
    gone = {seats.group for seats in cluster.workload.trainers if seats.name in _dropped(cluster)}
    parts = [part for part in list(cluster.parts.values()) if not part.is_retired]
    return [part for part in parts if part.kind != "trainer" or part.name.rpartition(".")[0] not in gone]


def _dropped(cluster: "Cluster") -> set[str]:
    """Subscriptions that an operator dropped for good."""
    fields = cluster.ask(lambda client: client.hkeys(cluster.keys.subs), ())
    return {field[4:].decode() for field in fields if field.startswith(b"was:")}


def _serves(worker: Any) -> bool:
    return bool(worker.state == "serving")


def come_to_rest(cluster: "Cluster") -> str:
    """Stop who admits jobs, and wait until nothing moves any more and no job is leased; '' or what does not rest."""
    sources = [*cluster.of("producer"), *cluster.of("scorer")]
    for source in sources:
        cluster.retire(source)
    cluster.wait("the producers to end", lambda: not any(part.is_alive for part in sources))
    quiet_s = QUIET_LEASES * float(cluster.workload.resolved()["worker"]["lease_s"]) + 1.0
    timeout_s = cluster.patience_s
    deadline = time.monotonic() + timeout_s
    before, since = None, time.monotonic()
    while True:
        cluster.supervisor.check()
        now = cluster.ask(lambda client: _state(cluster, client))
        if now is None or now != before or _moves(cluster, now):
            before, since = now, time.monotonic()
        elif time.monotonic() - since > quiet_s:
            return ""
        if time.monotonic() > deadline:
            return f"the run does not come to rest in {timeout_s:g} s: {now}. {cluster.words()}"
        time.sleep(0.1)


def _moves(cluster: "Cluster", state: dict[str, Any]) -> bool:
    dead = [part for part in _living(cluster) if not part.is_alive]
    return bool(dead or state["leased"] or state["delayed"] or state["retiring"])


def _state(cluster: "Cluster", client: Any) -> dict[str, Any]:
    """What changes as long as anything is done."""
    keys = cluster.keys
    assert cluster.watch is not None
    pipe = client.pipeline(transaction=True)
    pipe.hgetall(keys.counters)
    pipe.hgetall(keys.clock)
    pipe.zcard(keys.delayed)
    pipe.scard(keys.retiring)
    pipe.zcard(keys.unrecorded)
    for lane in LANES:
        pipe.xlen(keys.jobs(lane))
    counters, clock, delayed, retiring, unrecorded, *lanes = pipe.execute()
    places = [client.hmget(keys.sub(name), "ask", "cut", "cursor", "ckpt", "gen") for name in cluster.watch.cursors]
    leased = cluster.watch.count_leased(client)
    moving = {"leased": leased, "delayed": delayed, "retiring": retiring + unrecorded, "lanes": lanes}
    return moving | {"counters": counters, "clock": clock, "places": places}
