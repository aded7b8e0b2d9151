"""What a fault is: a kind, which chooses its target and strikes; and an act, which is one of them at one moment."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.chaos.cluster.cluster import Cluster
    from tests.chaos.cluster.proxy_control import ProxyControl
    from tests.chaos.nemesis.failover import Failover

Facts = dict[str, Any]

#: A lease that has run out for certain, in leases.
PAST = (1.1, 1.6)
#: Lease of the owner of a subscription; penstock has no key for it.
OWNER_LEASE_S = 6.0
#: Lease of the recorder, for which there is none either.
RECORDER_LEASE_S = 15.0
#: What most faults may be keyed to.
USUAL_MOMENTS = ("cut", "commit", "weights", "publication", "lease", "checkpoint")


class NotStruck(Exception):
    """Nothing was done: what the fault needs was not there, or what it waits for did not come."""


@dataclass(slots=True)
class Ground:
    """What a nemesis works on."""

    cluster: "Cluster"
    #: Between the parts and their Redis; None: they reach it themselves, and no fault of the network is there.
    proxy: "ProxyControl | None" = None
    #: Small file systems of the run, by what lies there: redis, weights, checkpoints, history.
    disks: dict[str, Path] = field(default_factory=dict)
    #: What moves a part's clock: libfaketime, with the file that it reads; None where it is not installed.
    clocks: Path | None = None
    #: A replica and a sentinel; None: there is one Redis alone.
    failover: "Failover | None" = None

    def lease_s(self, kind: str) -> float:
        """Longest lease that a part of this kind holds or renews, in seconds."""
        config = self.cluster.workload.resolved()
        leases = {
            "worker": config["worker"]["lease_s"],
            "buffer": config["buffer"]["lease_s"],
            "trainer": OWNER_LEASE_S,
            "recorder": RECORDER_LEASE_S,
            "engine": config["engine"]["health_timeout_s"] * config["engine"]["health_failures"],
        }
        same = {"leader": "buffer", "standby": "buffer", "rank": "trainer"}
        return float(leases.get(same.get(kind, kind), config["worker"]["lease_s"]))

    def past_lease_s(self, kind: str, rng: Random) -> float:
        """A time in which such a lease runs out; for a server, any of the leases that it keeps."""
        holder = rng.choice(["worker", "buffer", "trainer"]) if kind in ("redis", "payload") else kind
        return round(self.lease_s(holder) * rng.uniform(*PAST), 3)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        choose: its target and figures, as plain JSON; None: there is nothing here to do it to.
        strike: do it; returns when it is over, and what was broken is whole again then.
        moments: those that it may be keyed to, besides any.
    """

    choose: Callable[[Ground, Random], Facts | None]
    strike: Callable[[Ground, Facts], None]
    weight: float = 1.0
    moments: tuple[str, ...] = USUAL_MOMENTS


@dataclass(frozen=True, slots=True)
class Act:
    """One fault of a schedule; ``facts`` are known once it was chosen."""

    number: int
    #: ``FAMILY:WHAT``.
    kind: str
    #: What it is keyed to; '': nothing.
    moment: str = ""
    #: Seconds after that.
    after_s: float = 0.0
    #: It does not wait until the run has recovered from the one before.
    chained: bool = False
    facts: Facts | None = None


def pick(rng: Random, names: "list[str]") -> str | None:
    """One of them; None of none. The same for the same names, in whatever order."""
    return rng.choice(sorted(names)) if names else None


def names_of(ground: Ground, *kinds: str) -> list[str]:
    """Parts of these kinds that live now. Where a sentinel watches over Redis, it alone decides what becomes of it."""
    kinds = tuple(kind for kind in kinds if kind != "redis" or ground.failover is None)
    return [part.name for kind in kinds for part in ground.cluster.of(kind) if part.is_alive]


def own_names(ground: Ground, *kinds: str) -> list[str]:
    """Those of them that the cluster starts itself: what another part starts has no command or exit code here."""
    return [name for name in names_of(ground, *kinds) if not ground.cluster.parts[name].is_adopted]
