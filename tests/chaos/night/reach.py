"""Which kinds of faults can strike a workload: what they need is there."""

from collections.abc import Callable

from tests.chaos.cluster.workloads import Workload
from tests.chaos.nemesis.clock import library
from tests.chaos.nemesis.kinds import KINDS

#: Part, as the signals name it -> whether a workload has it. Those that are not here are in all.
HAS: dict[str, Callable[[Workload], bool]] = {
    "standby": lambda one: one.buffers > 1,
    "buffers": lambda one: one.buffers > 1,
    "trainers": lambda one: sum(seats.ranks for seats in one.trainers) > 1,
    "verifier": lambda one: one.verifiers > 0,
    "check": lambda one: one.verifiers > 0,
    "router": lambda one: one.engines > 1,
    "launcher": lambda one: one.is_launched,
    "payload": lambda one: one.payload_servers > 0,
    "recorder": lambda one: one.recorders > 0,
    "recorders": lambda one: one.recorders > 1,
}
#: Kind -> whether a workload has what else it needs.
NEEDS: dict[str, Callable[[Workload], bool]] = {
    "term:producer": lambda one: not one.is_launched,
    "term:worker": lambda one: not one.is_launched,
    "term:leader": lambda one: not one.is_launched,
    "operator:requeue": lambda one: one.name == "failing",
    "operator:drop": lambda one: any(not seats.drives and not seats.role for seats in one.trainers),
    "operator:drain": lambda one: one.payload_servers > 1,
    "payloads:lost": lambda one: one.payload_servers > 1,
    "disk:history": lambda one: one.recorders > 0,
    "member:second_producer": lambda one: not one.is_launched,
    "member:leave": lambda one: one.workers > 1,
    "member:config": lambda one: not one.is_launched,
    "member:ranks": lambda one: any(not seats.role for seats in one.trainers),
    "rewind:older": lambda one: any(not seats.role for seats in one.trainers),
    "clock:redis": lambda one: library() is not None,
}
#: Kinds that a real engine is struck with: each takes it a start of half a minute.
OF_REAL = ("kill:engine", "stop:engine", "kill:worker", "kill:workers")
#: Families that cannot strike one run, since each puts itself before Redis.
APART = ("net", "sentinel")
#: Kinds that a sentinel's run leaves alone: it decides itself what becomes of its Redis.
OF_REDIS = ("kill:redis", "stop:redis", "term:redis", "clock:redis")


def reach(workload: Workload) -> frozenset[str]:
    """Kinds that can strike a workload."""
    if workload.is_real:
        return frozenset(OF_REAL)
    return frozenset(name for name in KINDS if _can(workload, name))


def _can(workload: Workload, name: str) -> bool:
    family, _, what = name.partition(":")
    if family in workload.spared:
        return False
    is_signal = family in ("kill", "stop", "term")
    return (not is_signal or HAS.get(what, _always)(workload)) and NEEDS.get(name, _always)(workload)


def _always(_: Workload) -> bool:
    return True


def fit(name: str, others: list[str]) -> bool:
    """Whether a kind can strike the same run as ``others``."""
    families = {other.partition(":")[0] for other in others}
    family = name.partition(":")[0]
    if family in APART and families & set(APART) - {family}:
        return False
    if "sentinel" in families:
        return family != "redis" and name not in OF_REDIS
    return family != "sentinel" or not ("redis" in families or set(others) & set(OF_REDIS))
