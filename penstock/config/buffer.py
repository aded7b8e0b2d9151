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
    """Which completed groups a subscription trains on (dynamic sampling)."""

    #: Called in this order when a group completes; the first that rejects it counts. ``nonzero_std`` (rewards must
    #: differ), or ``module:function``: gets a penstock.CompletedGroup, returns keep or (keep, reason).
    functions: list[FilterName] = Field(default_factory=list)
    #: A group whose filter raises: keep it (counted, with a warning), drop it, or stop cutting.
    on_error: OnFilterError = OnFilterError.KEEP
    #: Hold rejected groups back, and train on them if too few other groups remain to fill a batch.
    keep_when_few: bool = False

    @model_validator(mode="after")
    def _something_is_rejected(self) -> Self:
        if self.keep_when_few and not self.functions:
            raise ValueError(
                "keep_when_few holds back what filters reject, and functions names none: name one, or remove it"
            )
        return self


class BufferConfig(Section):
    #: Leadership is lost when not renewed for so long.
    lease_s: Seconds = 5.0
    #: Results of scoring jobs that are not collected are deleted after so long.
    score_ttl_s: Seconds = 3600.0
    #: An evaluation that no consumer reads is written to ``eval.jsonl``, and its groups are deleted, after so long.
    eval_ttl_s: Seconds = 600.0
    #: Filters (module:function) that subscriptions may name beside those of ``trainer.filter``.
    filters: list[FilterName] = Field(default_factory=list)
