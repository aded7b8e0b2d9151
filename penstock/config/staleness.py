"""Section ``staleness``: how old what is trained on may be, and what each mode means."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from penstock.config.section import Section


class Mode(StrEnum):
    """How far training may lag behind drawing."""

    SYNC = "sync"
    ONE_STEP = "one_step"
    ASYNC = "async"


class OnExpiry(StrEnum):
    """What happens to groups that would be older than the bound."""

    #: The cut waits for the groups that are due.
    WAIT = "wait"
    #: Tokens that are too old bear no loss.
    MASK = "mask"
    #: Groups that hold such a token are given up.
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
    """Places at the gate: most admitted groups that are neither disposed of nor consumed by a published version (T3).

    Args:
        bound: h, in versions.
        group_budget: B, groups that one version consumes.
        extra: groups that are let in beyond that.
    """
    return (1 + bound) * group_budget + extra


@dataclass(frozen=True, slots=True)
class ModeRules:
    """What a mode means."""

    #: Most versions between drawing and training; None: ``staleness.bound`` says.
    bound: int | None
    #: Where ``staleness.on_expiry`` does not say.
    on_expiry: OnExpiry
    #: Where ``buffer.sampler`` does not say.
    sampler: Sampler
    #: The same with filters, which would leave holes in a cohort; without one a drop is refilled at the same version.
    filtered_sampler: Sampler
    #: True where new weights are loaded only when the cohort that runs has ended.
    drains: bool = False

    @property
    def needs_cohorts(self) -> bool:
        """True where no other sampler would be this mode: its batches are of one version each."""
        return self.filtered_sampler is Sampler.COHORT


MODES: Mapping[Mode, ModeRules] = {
    Mode.SYNC: ModeRules(0, OnExpiry.WAIT, Sampler.COHORT, Sampler.OLDEST_VERSION),
    # Its batches are of one version each, so they stay cohorts whatever filters leave of them.
    Mode.ONE_STEP: ModeRules(1, OnExpiry.WAIT, Sampler.COHORT, Sampler.COHORT, drains=True),
    Mode.ASYNC: ModeRules(None, OnExpiry.MASK, Sampler.OLDEST_VERSION, Sampler.OLDEST_VERSION),
}


class StalenessConfig(Section):
    """The policy object of gate and cut (docs/truth.md, T2 to T5)."""

    #: sync: a batch is drawn by the version that is trained on it; one_step: by the one before; async: by any version
    #: within ``bound``.
    mode: Mode = Mode.ASYNC
    #: Most versions between drawing a token and training it; sync means 0 and one_step 1.
    bound: Annotated[int, Field(ge=0)] = 4
    #: What happens to what would be too old: wait for what is due, mask tokens, or drop groups. None: by mode.
    on_expiry: OnExpiry | None = None

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"bound"})

    @property
    def rules(self) -> ModeRules:
        """What ``mode`` means."""
        return MODES[self.mode]

    @model_validator(mode="after")
    def _bound_by_mode(self) -> Self:
        wanted = self.rules.bound
        if wanted is None or self.bound == wanted:
            return self
        if "bound" in self.model_fields_set:
            raise ValueError(
                f"mode {self.mode} means bound {wanted}, and bound is {self.bound}: remove bound, or choose mode async"
            )
        self._follow(bound=wanted)
        return self
