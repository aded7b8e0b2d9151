"""Section ``staleness``: the bound on the age of trained tokens, and the modes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from penstock.config.section import Section


class Mode(StrEnum):
    """How far training may lag behind generation."""

    SYNC = "sync"
    ONE_STEP = "one_step"
    ASYNC = "async"


class OnExpiry(StrEnum):
    """What happens to groups beyond the bound."""

    #: The cut waits for the groups that are due.
    WAIT = "wait"
    #: Tokens beyond the bound bear no loss.
    MASK = "mask"
    #: Groups with such a token are disposed of.
    DROP = "drop"


class Sampler(StrEnum):
    """The order in which a subscription takes its groups."""

    OLDEST_VERSION = "oldest_version"
    NEWEST_VERSION = "newest_version"
    FIFO = "fifo"
    UNIFORM = "uniform"
    PRIORITIZED = "prioritized"
    DIFFICULTY = "difficulty"
    COHORT = "cohort"


def places(bound: int, group_budget: int, extra: int = 0) -> int:
    """Return the number of places at the gate: most admitted groups neither disposed of nor consumed (T3).

    Args:
        bound: h, in versions.
        group_budget: B, groups that one version consumes.
        extra: groups that are admitted beyond that.
    """
    return (1 + bound) * group_budget + extra


@dataclass(frozen=True, slots=True)
class ModeRules:
    """Rules of a mode."""

    #: Most versions between generation and training; None: ``staleness.bound``.
    bound: int | None
    #: Default of ``staleness.on_expiry``.
    on_expiry: OnExpiry
    #: Default of ``trainer.subscription.sampler``.
    sampler: Sampler
    #: The default with filters, which would leave holes in a cohort; other samplers refill a drop at the same version.
    filtered_sampler: Sampler
    #: True if new weights are loaded only when the running cohort has ended.
    drains: bool = False

    @property
    def needs_cohorts(self) -> bool:
        """Return whether the mode requires cohorts, since each of its batches has one version."""
        return self.filtered_sampler is Sampler.COHORT


MODES: Mapping[Mode, ModeRules] = {
    Mode.SYNC: ModeRules(0, OnExpiry.WAIT, Sampler.COHORT, Sampler.OLDEST_VERSION),
    # Each batch has one version, so it stays a cohort even if filters drop some of its groups.
    Mode.ONE_STEP: ModeRules(1, OnExpiry.WAIT, Sampler.COHORT, Sampler.COHORT, drains=True),
    Mode.ASYNC: ModeRules(None, OnExpiry.MASK, Sampler.OLDEST_VERSION, Sampler.OLDEST_VERSION),
}


class StalenessConfig(Section):
    """The staleness policy of gate and cut (docs/internals/truth.md, T2 to T5)."""

    #: sync: the version that is trained on a batch also generates it; one_step: the previous version does; async: any
    #: version within ``bound``.
    mode: Mode = Mode.ASYNC
    #: Maximum number of versions between generating a token and training on it. sync fixes it at 0, one_step at 1.
    bound: Annotated[int, Field(ge=0)] = 4
    #: Handling of groups beyond the bound: wait for the groups that are due, mask tokens, or drop groups. None: by
    #: mode.
    on_expiry: OnExpiry | None = None

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"bound"})

    @property
    def rules(self) -> ModeRules:
        """Return the rules of ``mode``."""
        return MODES[self.mode]

    @model_validator(mode="after")
    def _set_bound(self) -> Self:
        wanted = self.rules.bound
        if wanted is None or self.bound == wanted:
            return self
        if "bound" in self.model_fields_set:
            raise ValueError(
                f"mode {self.mode} requires bound {wanted}, but bound is {self.bound}: remove bound, or use mode async"
            )
        self._follow(bound=wanted)
        return self
