"""Compute how many workers a run needs: the smallest of three bounds, and when to change. Pure.

    N_backlog = ceil(samples not yet committed / slots)
    N_demand  = ceil(1.15 x tokens/s that trainers consume / tokens/s of one worker with full slots)
    N_fresh   = ceil((bound + 1) x samples of a publication / slots)

More workers than trainers consume only make stale samples; more than N_fresh find the gate closed. An unknown bound
does not count.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config.fleet import AutoscaleConfig
from penstock.config.staleness import places

#: Capacity of the workers relative to the demand of trainers.
HEADROOM = 1.15


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
    """Apply the formula above, within ``min_workers`` and ``max_workers``."""
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
        if direction == 0 or abs(want - present) <= config.dead_band * present:
            self._since = None
            return present
        if self._since is None or self._since[0] != direction:
            self._since = (direction, now)
        if now - self._since[1] < (config.up_after_s if direction > 0 else config.down_after_s):
            return present
        self._since = None
        return want
