"""Staleness as one object over admission, cut and expiry (T1-T5).

    staleness of a token = number of living versions in (version it was drawn with, train_version]

A rewind abandons versions: they name policies that no longer exist, so they do not age anything, and what was drawn
with one of them is not trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.config import BufferConfig, StalenessConfig, TrainerConfig
from penstock.errors import ConfigError

Mode = Literal["sync", "one_step", "async"]
OnExpiry = Literal["wait", "mask", "drop"]
Sampler = Literal["oldest_version", "fifo", "cohort"]

#: Bound of the modes that have one by definition.
_BOUNDS = {"sync": 0, "one_step": 1}


@dataclass(frozen=True, slots=True)
class Policy:
    """How old data may be, and what happens to what would be too old."""

    mode: Mode
    #: h: most living versions between drawing a token and the first optimizer step on it.
    bound: int
    on_expiry: OnExpiry
    sampler: Sampler

    @classmethod
    def of(cls, staleness: StalenessConfig, buffer: BufferConfig) -> "Policy":
        """The policy that a configuration means; raises ConfigError where its parts contradict each other."""
        mode = staleness.mode
        cohort = mode in _BOUNDS
        sampler = buffer.sampler or ("cohort" if cohort else "oldest_version")
        on_expiry = staleness.on_expiry or ("wait" if cohort else "mask")
        if mode == "one_step" and sampler != "cohort":
            raise ConfigError(f"buffer.sampler is {sampler}, but mode one_step trains whole cohorts: leave it out.")
        return cls(mode, _BOUNDS.get(mode, staleness.bound), on_expiry, sampler)

    def gate(self, groups_per_version: int) -> int:
        """Most admitted groups that are neither disposed of nor consumed by a published version (T3)."""
        return (1 + self.bound) * groups_per_version

    def definition(self, trainer: TrainerConfig) -> dict[str, str | int]:
        """Fields of the subscription of a trainer that drives the clock."""
        return {
            "lanes": "train",
            "mode": self.mode,
            "bound": self.bound,
            "on_expiry": self.on_expiry,
            "sampler": self.sampler,
            "size": trainer.batch_groups,
            "per_version": trainer.batches_per_version,
            "gb": trainer.batch_groups * trainer.batches_per_version,
            "reuse": 1,
            "driving": 1,
        }


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which versions live: all but the abandoned ranges, each (first, last)."""

    abandoned: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Lineage":
        """Read ``3-5,9-9``."""
        spans = [part.split("-") for part in text.split(",") if part]
        return cls(tuple((int(first), int(last)) for first, last in spans))

    def lives(self, version: int) -> bool:
        return not any(first <= version <= last for first, last in self.abandoned)

    def lag(self, version: int, train_version: int) -> int:
        """Living versions in (version, train_version]; 0 when nothing was drawn (version -1)."""
        if version < 0:
            return 0
        return sum(1 for v in range(version + 1, train_version + 1) if self.lives(v))

    def floor(self, train_version: int, bound: int) -> int:
        """Oldest version whose lag at ``train_version`` is within ``bound``."""
        version = train_version
        left = bound
        while version > 0:
            if self.lives(version):
                if left == 0:
                    return version
                left -= 1
            version -= 1
        return 0


def train_version(clock: int, n: int, through: int, per_version: int) -> int:
    """Version that a trainer holds at the first optimizer step of batch ``n`` (T2).

    Args:
        clock: version of the last publication, which consumed batches up to ``through``.
        per_version: batches between two publications.
    """
    return clock + (n - 1 - through) // per_version


def overdue(
    *,
    lineage: Lineage,
    train_version: int,
    bound: int,
    group_budget: int,
    remaining: int,
    untrained: Mapping[int, int],
    in_batch: Mapping[int, int],
) -> tuple[int, int] | None:
    """T4: the first version d whose groups could not all be trained before they expire if this batch were cut.

    For every living d within the bound, counting groups by their oldest version o, running ones included:

        untrained(o <= d) - in_batch(o <= d) <= (bound - lag(d)) * group_budget + remaining

    Args:
        group_budget: B, groups that one version consumes.
        remaining: R, groups that ``train_version`` still trains after this batch.
        untrained: oldest version -> groups not in any batch.
        in_batch: oldest version -> groups of the batch in question.

    Returns:
        (d, groups too many), or None when the batch may be cut.
    """
    floor = lineage.floor(train_version, bound)
    for d in range(floor, train_version):
        if not lineage.lives(d):
            continue
        left = sum(c for o, c in untrained.items() if o <= d) - sum(c for o, c in in_batch.items() if o <= d)
        allowed = (bound - lineage.lag(d, train_version)) * group_budget + remaining
        if left > allowed:
            return d, left - allowed
    return None
