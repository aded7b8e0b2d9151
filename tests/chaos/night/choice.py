"""What is run next: the kinds of faults that are furthest from their targets, on the workload that was run least."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.cluster.workloads import WORKLOADS
from tests.chaos.nemesis.kinds import KINDS
from tests.chaos.night.reach import fit, reach
from tests.chaos.night.targets import NET, NET_SHARE, TARGETS, net_share, target_of

#: Kinds of one run.
KINDS_OF_A_RUN = 6
#: Steps are slower than elsewhere: what a run does while a fault is held takes time from other runs.
STEP_S = 0.4
#: Workloads that every machine can run.
EVERYWHERE = tuple(one.name for one in WORKLOADS.values() if not one.is_cuda)
#: Target -> workloads that can be struck so. Of kinds as far from their targets those of few workloads come first.
REACHING = Counter(target_of(name, kind) for name in EVERYWHERE for kind in reach(WORKLOADS[name]))


@dataclass(frozen=True)
class Run:
    """One run of a night."""

    workload: str
    seed: int
    kinds: tuple[str, ...]
    faults: int
    #: Release of the server, and its binary.
    redis: str
    redis_server: Path
    #: Which time it is made.
    time: int = 1
    #: No fault is begun after so many.
    seconds: float = float("inf")

    @property
    def name(self) -> str:
        """As its history is called."""
        return f"{self.workload}-{self.seed}" + (f"-{self.time}" if self.time > 1 else "")

    @property
    def words(self) -> list[str]:
        """Arguments of ``tests.chaos.run`` that make it, and make it again."""
        return [
            "--workload", self.workload, "--seed", str(self.seed), "--faults", str(self.faults),
            "--kinds", ",".join(self.kinds), "--redis-server", str(self.redis_server), "--step-s", str(STEP_S),
            *(["--seconds", str(self.seconds)] if self.seconds < float("inf") else []),
        ]  # fmt: skip


def choose(
    seed: int,
    counted: Mapping[str, float],
    runs: Mapping[str, int],
    workloads: Collection[str] = EVERYWHERE,
    kinds: Collection[str] = tuple(KINDS),
) -> tuple[str, tuple[str, ...]]:
    """A workload and its kinds of faults.

    Args:
        seed: decides where several are as far from their targets.
        counted: target -> strikes so far, those that are expected of runs on their way among them.
        runs: workload -> runs so far.
        workloads: those to choose of.
        kinds: the same; a workload that none of them can strike is left out.
    """
    rng = Random(f"night/{seed}")
    reached = {name: reach(WORKLOADS[name]) & set(kinds) for name in workloads}
    reached = {name: found for name, found in reached.items() if found}
    is_full = net_share(counted) >= NET_SHARE

    def rank(workload: str, kind: str) -> tuple[float, int]:
        """How much of its target a kind has; the network's wait while they are more than their share."""
        target = target_of(workload, kind)
        waits = 1.0 if is_full and kind.partition(":")[0] == NET else 0.0
        return waits + counted.get(target, 0) / TARGETS[target], REACHING[target]

    def least(workload: str) -> list[str]:
        kinds = sorted(reached[workload])
        rng.shuffle(kinds)
        return sorted(kinds, key=lambda kind: rank(workload, kind))

    order = {name: least(name) for name in sorted(reached)}
    lowest = min(rank(name, kinds[0]) for name, kinds in order.items())
    candidates = [name for name, kinds in order.items() if rank(name, kinds[0]) == lowest]
    workload = min(rng.sample(candidates, len(candidates)), key=lambda name: runs.get(name, 0))
    return workload, tuple(_together(order[workload]))


def _together(kinds: list[str]) -> list[str]:
    """The first kinds that fit into one run."""
    found: list[str] = []
    for kind in kinds:
        if len(found) < KINDS_OF_A_RUN and fit(kind, found):
            found.append(kind)
    return found


def expected(run: Run) -> Counter[str]:
    """Target -> strikes that a run which is on its way is expected to make."""
    found = Counter[str]()
    for kind in run.kinds:
        found[target_of(run.workload, kind)] += max(1, run.faults // len(run.kinds))
    return found
