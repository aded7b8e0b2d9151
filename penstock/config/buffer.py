"""Section ``buffer``: filters, and retention."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from penstock.config.hooks import FilterName
from penstock.config.section import Seconds, Section


class OnFilterError(StrEnum):
    """What to do with a group whose filter raises."""

    KEEP = "keep"
    DROP = "drop"
    #: Nothing is cut until it is corrected.
    STOP = "stop"


class FilterConfig(Section):
    """Selection of completed groups for training (dynamic sampling)."""

    #: Filters that are called, in this order, when a group completes; the first that rejects the group is counted.
    #: ``nonzero_std`` (rewards must differ), or ``module:function``, which receives a penstock.CompletedGroup and
    #: returns keep or (keep, reason).
    functions: list[FilterName] = Field(default_factory=list)
    #: Handling of a group whose filter raises: keep it (counted, with a warning), drop it, or stop cutting.
    on_error: OnFilterError = OnFilterError.KEEP
    #: Keep rejected groups, and train on them if too few other groups remain to fill a batch.
    keep_when_few: bool = False

    @model_validator(mode="after")
    def _check_filters(self) -> Self:
        if self.keep_when_few and not self.functions:
            raise ValueError(
                "keep_when_few holds back what filters reject, and functions names none: name one, or remove it"
            )
        return self


class BufferConfig(Section):
    #: Time in seconds after which the leader loses its lease if it has not renewed it.
    lease_s: Seconds = 5.0
    #: Time in seconds after which uncollected results of scoring jobs are deleted.
    score_ttl_s: Seconds = 3600.0
    #: Time in seconds after which an evaluation that no consumer has read is written to ``eval.jsonl`` and its groups
    #: are deleted.
    eval_ttl_s: Seconds = 600.0
    #: Filters (module:function) that subscriptions may name, in addition to those of ``trainer.filter``.
    filters: list[FilterName] = Field(default_factory=list)
