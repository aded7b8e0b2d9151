"""Derive the load on a run's workers from snapshots, and let the autoscaler decide on their number."""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config import Config
from penstock.config.fleet import AutoscaleConfig
from penstock.config.staleness import places
from penstock.config.subscription import Unit
from penstock.errors import ConfigError
from penstock.protocol.snapshot import snapshot
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.workers.fleet.models import groups_of
from penstock.workers.fleet.state import read_capacity, write_capacity

#: Capacity of the workers relative to the demand of trainers.
HEADROOM = 1.15
#: Seconds for which more workers are wanted before they are added.
UP_AFTER_S = 30.0
#: No change while wanted and present workers differ by no more than this share.
DEAD_BAND = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run; 0: not known yet."""

    #: Samples not committed yet, queued or in flight.
    open_samples: float
    #: Samples that one worker generates at once.
    slots: int
    #: Tokens that trainers consume, and that one worker generates with all slots taken, per second.
    trainer_tokens_per_s: float
    worker_tokens_per_s: float
    #: Staleness bound, and samples that go into one publication.
    bound: int
    samples_per_version: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted number of workers, and the term that binds: backlog, demand, fresh, min or max."""

    count: int
    binds: str
    #: Every known term, by name.
    terms: Mapping[str, int] = field(default_factory=dict)


def wanted(load: Load, config: AutoscaleConfig) -> Wanted:
    """Return how many workers a run needs, within ``min_workers`` and ``max_workers``: the smallest of three bounds.

        backlog = ceil(samples not yet committed / slots)
        demand  = ceil(1.15 x tokens/s that trainers consume / tokens/s of one worker with full slots)
        fresh   = ceil((bound + 1) x samples of a publication / slots)

    More workers than trainers consume only make stale samples; more than ``fresh`` find the gate closed. An unknown
    bound does not count.
    """
    terms = {"backlog": math.ceil(load.open_samples / load.slots)}
    if load.trainer_tokens_per_s > 0 and load.worker_tokens_per_s > 0:
        terms["demand"] = math.ceil(HEADROOM * load.trainer_tokens_per_s / load.worker_tokens_per_s)
    if load.samples_per_version > 0:
        terms["fresh"] = math.ceil(places(load.bound, 1) * load.samples_per_version / load.slots)
    binds = min(terms, key=lambda name: terms[name])
    if terms[binds] < config.min_workers:
        return Wanted(config.min_workers, "min", terms)
    if terms[binds] > config.max_workers:
        return Wanted(config.max_workers, "max", terms)
    return Wanted(terms[binds], binds, terms)


class Autoscaler:
    """Turn wanted numbers into changes: up when wanted for a while, down after long, never within the dead band."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._since: tuple[int, float] | None = None

    def decide(self, now: float, want: int, present: int) -> int:
        """Return the number of workers to have from ``now`` on; starting ones count as present."""
        config = self._config
        if not config.min_workers <= present <= config.max_workers:
            return max(config.min_workers, min(want, config.max_workers))
        direction = (want > present) - (want < present)
        if direction == 0 or abs(want - present) <= DEAD_BAND * present:
            self._since = None
            return present
        if self._since is None or self._since[0] != direction:
            self._since = (direction, now)
        if now - self._since[1] < (UP_AFTER_S if direction > 0 else config.down_after_s):
            return present
        self._since = None
        return want


#: Window over which the consumption of trainers is averaged, in seconds.
WINDOW_S = 60.0
#: Below this many seconds it is unknown.
LEAST_S = 10.0
#: Most recent changes of the group's size that are published.
MAX_DECISIONS = 32
#: Relative change after which a capacity is written again.
KEEP_CHANGE = 0.02


class Pressure:
    """Reads snapshots one after the other, because consumption is a difference of two.

    Args:
        capacity: known tokens/s of a worker with full slots; 0: unknown.
    """

    def __init__(self, config: Config, capacity: float = 0.0) -> None:
        self._config = config
        self._cut: deque[tuple[float, float]] = deque()
        #: Latest known value: workers that are throttled by the gate or have just started report none.
        self.capacity = capacity

    def load(self, now: float, state: Mapping[str, Any]) -> Load:
        """Return the load of a snapshot (``penstock.protocol.snapshot``) taken at ``now`` (seconds, any origin)."""
        config, workers = self._config, state["workers"]
        samples = sum(one.samples for one in workers)
        tokens = sum(one.generated_tokens for one in workers)
        mean_tokens = tokens / samples if samples else 0.0
        shown = [one.capacity_tokens_per_s for one in workers if one.capacity_tokens_per_s]
        if shown:
            self.capacity = sum(shown) / len(shown)
        assert config.fleet.autoscale is not None
        driving = [sub for sub in state["subs"] if sub.get("driving") and sub.get("unit", Unit.GROUPS) == Unit.GROUPS]
        return Load(
            open_samples=self._open_samples(state),
            slots=config.worker.slots,
            trainer_tokens_per_s=self._consumed(now, driving) * config.rollout.n * mean_tokens,
            worker_tokens_per_s=self.capacity,
            bound=max((int(sub.get("bound", 0)) for sub in driving), default=0),
            samples_per_version=config.rollout.n
            * sum(int(sub.get("size", 0)) * int(sub.get("per_version", 1)) for sub in driving),
        )

    def _open_samples(self, state: Mapping[str, Any]) -> float:
        """Return the samples not yet committed: of queued jobs, reported by workers, and held by silent workers."""
        lanes, workers = state["lanes"].values(), state["workers"]
        queued = sum(lane["queued"] for lane in lanes) + state["delayed"]
        held = sum(one.held for one in workers)
        silent = max(0, sum(lane["leased"] for lane in lanes) - held)
        reported: int = sum(one.open_samples for one in workers)
        return float((queued + silent) * self._config.rollout.n + reported)

    def _consumed(self, now: float, driving: list[dict[str, Any]]) -> float:
        """Return groups per second that went into batches; 0: unknown."""
        cut = float(sum(int(sub.get("cut", 0)) * int(sub.get("size", 0)) for sub in driving))
        if self._cut and cut < self._cut[-1][1]:
            self._cut.clear()  # another subscription, or one that left
        self._cut.append((now, cut))
        while now - self._cut[0][0] > WINDOW_S:
            self._cut.popleft()
        first, before = self._cut[0]
        return (cut - before) / (now - first) if now - first >= LEAST_S else 0.0


class Scaling:
    """The autoscaler of a fleet's one regular group of the trained model. Reads Redis; starts nothing.

    Raises:
        ConfigError: there is not exactly one such group.
    """

    def __init__(self, config: Config, client: Client, keys: Keys) -> None:
        assert config.fleet.autoscale is not None
        self.group = the_group(config)
        self._config = config.fleet.autoscale
        self._pressure = Pressure(config, read_capacity(client, keys))
        self._autoscaler = Autoscaler(self._config)
        self._client, self._keys = client, keys
        #: Capacity last written.
        self._kept = self._pressure.capacity
        #: The latest decision, the term that binds, and earlier changes, for people.
        self.record: dict[str, Any] = {}
        self._decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)

    def decide(self, present: int) -> int:
        """Return how many engines to have, if ``present`` run. Blocks for a few round trips."""
        now = time.monotonic()
        want = wanted(self._pressure.load(now, snapshot(self._client, self._keys)), self._config)
        self._keep_capacity()
        count = self._autoscaler.decide(now, want.count, present)
        self._note(want, present, count)
        self.record = {
            "group": self.group,
            "wanted": want.count,
            "binds": want.binds,
            "engines": count,
            "capacity_tokens_per_s": self._pressure.capacity,
            "terms": dict(want.terms),
            "decisions": list(self._decisions),
        }
        return count

    def _note(self, want: Wanted, present: int, count: int) -> None:
        """Record a change with its reason; one that cannot be made at once is decided repeatedly, and recorded once."""
        change = {"before": present, "engines": count, "binds": want.binds}
        last = self._decisions[-1] if self._decisions else {}
        if count != present and {name: last.get(name) for name in change} != change:
            self._decisions.append({"at": time.time(), **change, "wanted": want.count, "terms": dict(want.terms)})

    def _keep_capacity(self) -> None:
        """Save the capacity for the next fleet of this run."""
        now = self._pressure.capacity
        if now and abs(now - self._kept) > KEEP_CHANGE * now:
            write_capacity(self._client, self._keys, now)
            self._kept = now


def the_group(config: Config) -> str:
    """Return ``MODEL.GROUP`` to scale; see :class:`Scaling`."""
    (model,) = [one for one in groups_of(config) if one.name == config.model.name]
    able = [
        f"{model.name}.{name}"
        for name, group in zip(model.names(), model.server_groups, strict=True)
        if group.worker_type == "regular" and not group.urls and group.gpus is None
    ]
    if len(able) != 1:
        raise ConfigError(
            f"fleet.autoscale scales one regular group of {model.name}, and there are {len(able)} that can grow: "
            "remove autoscale, or have exactly one (without urls and gpus)."
        )
    return able[0]
