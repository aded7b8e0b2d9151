"""Derive the load on a run's workers from snapshots, and decide on their number. Pure: reads and starts nothing."""

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
from penstock.workers.fleet.groups import groups_of

#: Capacity of the workers relative to the demand of trainers.
HEADROOM = 1.15
#: Seconds for which more workers are wanted before they are added.
UP_AFTER_S = 30.0
#: No change while wanted and present workers differ by no more than this share.
DEAD_BAND = 0.1
#: Window over which the consumption of trainers is averaged, in seconds.
WINDOW_S = 60.0
#: Below this many seconds it is unknown.
LEAST_S = 10.0
#: Most recent changes of the group's size that are published.
MAX_DECISIONS = 32


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
    """Set the size of a fleet's one regular group of the trained model.

    Up when wanted for a while, down after long, never within the dead band.

    Args:
        capacity: known tokens/s of a worker with full slots; 0: unknown.

    Raises:
        ConfigError: there is not exactly one such group.
    """

    def __init__(self, config: Config, capacity: float = 0.0) -> None:
        assert config.fleet.autoscale is not None
        self.group = the_group(config)
        #: Latest known value: workers that are throttled by the gate or have just started report none.
        self.capacity = capacity
        #: The latest decision, the term that binds, and earlier changes, for people.
        self.record: dict[str, Any] = {}
        self._config, self._limits = config, config.fleet.autoscale
        self._since: tuple[int, float] | None = None
        self._cut: deque[tuple[float, float]] = deque()
        self._decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)

    def decide(self, now: float, state: Mapping[str, Any], present: int) -> int:
        """Return the number of workers to have from ``now`` on (seconds, any origin).

        Args:
            state: a snapshot (``penstock.protocol.snapshot``); consumption is a difference of two.
            present: workers that run or start.
        """
        want = wanted(self.load(now, state), self._limits)
        count = self.settle(now, want.count, present)
        # A change that cannot be made at once is decided repeatedly, and recorded once.
        change = {"before": present, "engines": count, "binds": want.binds}
        last = self._decisions[-1] if self._decisions else {}
        if count != present and {name: last.get(name) for name in change} != change:
            self._decisions.append({"at": time.time(), **change, "wanted": want.count, "terms": dict(want.terms)})
        self.record = {
            "group": self.group,
            "wanted": want.count,
            "binds": want.binds,
            "engines": count,
            "capacity_tokens_per_s": self.capacity,
            "terms": dict(want.terms),
            "decisions": list(self._decisions),
        }
        return count

    def settle(self, now: float, want: int, present: int) -> int:
        """Return ``want`` once it has been wanted for long enough, else ``present``, within the limits."""
        limits = self._limits
        if not limits.min_workers <= present <= limits.max_workers:
            return max(limits.min_workers, min(want, limits.max_workers))
        direction = (want > present) - (want < present)
        if direction == 0 or abs(want - present) <= DEAD_BAND * present:
            self._since = None
            return present
        if self._since is None or self._since[0] != direction:
            self._since = (direction, now)
        if now - self._since[1] < (UP_AFTER_S if direction > 0 else limits.down_after_s):
            return present
        self._since = None
        return want

    def load(self, now: float, state: Mapping[str, Any]) -> Load:
        """Return the load that a snapshot taken at ``now`` shows."""
        config, workers = self._config, state["workers"]
        samples = sum(one.samples for one in workers)
        tokens = sum(one.generated_tokens for one in workers)
        mean_tokens = tokens / samples if samples else 0.0
        shown = [one.capacity_tokens_per_s for one in workers if one.capacity_tokens_per_s]
        if shown:
            self.capacity = sum(shown) / len(shown)
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


def the_group(config: Config) -> str:
    """Return ``MODEL.GROUP`` to scale; see :class:`Autoscaler`."""
    (model,) = [one for one in groups_of(config) if one.name == config.model.name]
    able = [
        f"{model.name}.{name}"
        for name, group in model.groups()
        if group.worker_type == "regular" and not group.urls and group.gpus is None
    ]
    if len(able) != 1:
        raise ConfigError(
            f"fleet.autoscale scales one regular group of {model.name}, and there are {len(able)} that can grow: "
            "remove autoscale, or have exactly one (without urls and gpus)."
        )
    return able[0]
