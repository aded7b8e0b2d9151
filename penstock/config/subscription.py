"""Subscriptions as users define them: what a trainer's place at the buffer takes, how much, and for how long.

A definition is a flat map of strings and numbers, the hash ``sub:NAME``. ``Definition`` is its one description, for the
configuration, the trainer's client and the command line alike.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.config.section import Positive, Section
from penstock.errors import ConfigError
from penstock.names import HOME_LANES, check_name

Value = str | bytes | int | float
NotNegative = Annotated[int, Field(ge=0)]

Unit = Literal["groups", "samples", "tokens"]
Sampler = Literal["oldest_version", "newest_version", "fifo", "uniform", "prioritized", "cohort"]
OnExpiry = Literal["wait", "mask", "drop"]
Split = Literal["balanced", "tokens", "strided"]

#: Most samples of one batch: its manifest stays within one record.
MAX_BATCH_SAMPLES = 65536
_START = re.compile(r"oldest|newest|(completed|version):\d{1,15}")


class SubscriptionConfig(Section):
    """How a trainer's subscription takes groups."""

    #: Name of a pool whose members divide the groups among them; '': a copy, which sees every group.
    share: str = ""
    #: True where its publications move the clock and open the gate; exactly one trainer of a model should.
    driving: bool = True
    #: What ``size`` counts. A batch of samples or tokens is the fewest whole groups that hold so many.
    unit: Unit = "groups"
    #: Batch size in ``unit``; None takes ``trainer.batch_groups``.
    size: Positive | None = None
    #: The number of samples of a batch is a multiple of this (data-parallel ranks); the rest carries over.
    multiple: Positive = 1
    #: Order of the groups; None: by mode.
    sampler: Sampler | None = None
    #: prioritized: a number of each sample's metadata (reward, length, num_generated, ... or one that the reward
    #: returned beside its number), averaged over the group; ``reward_std`` is the deviation in the group.
    priority: str = "reward"
    #: prioritized: a group is drawn in proportion to max(priority, 0) ** exponent.
    exponent: Annotated[float, Field(ge=0, le=100)] = 1.0
    #: Batches that one group enters.
    reuse: Positive = 1
    #: Share of the groups that it takes, by a hash of the job and the seed.
    quota: Annotated[float, Field(gt=0, le=1)] = 1.0
    #: Batches that are cut ahead of the one being trained, at most; None: as many as are asked for.
    prefetch: NotNegative | None = None
    #: Most unused groups held for it; the longest held go first. 0: no limit.
    keep_groups: NotNegative = 0
    #: Most payload bytes of unused groups held for it. 0: no limit.
    keep_bytes: NotNegative = 0
    #: Longest time in seconds that it holds a group unused, or used and without a checkpoint past it, and longest
    #: absence of its trainer before it is parked. 0: for ever.
    keep_s: Annotated[float, Field(ge=0)] = 0.0
    #: Where a new subscription begins: oldest, newest, completed:N (behind the N-th completed group of the run), or
    #: version:N (groups drawn with version N or later).
    start: str = "oldest"
    #: Most versions between drawing a token and training it; None: that of ``staleness``, and none where it does not
    #: drive.
    bound: NotNegative | None = None
    #: What becomes of groups that would be older than the bound: wait for the trainer, mask their old tokens, or drop
    #: them; None: by mode.
    on_expiry: OnExpiry | None = None
    #: Only tokens of the newest version in their sample bear loss (partial rollouts); all keep versions and logprobs.
    mask_offpolicy: bool = False
    #: Split over ranks: equal counts balanced on tokens (Karmarkar-Karp), tokens alone, or strided.
    split: Split = "balanced"

    @field_validator("share")
    @classmethod
    def _share_is_a_name(cls, share: str) -> str:
        return share and _name("pool", share)

    @field_validator("start")
    @classmethod
    def _start_is_a_place(cls, start: str) -> str:
        if not _START.fullmatch(start):
            raise ValueError(f"start {start!r} is no place: use oldest, newest, completed:N or version:N")
        return start

    @model_validator(mode="after")
    def _can_be_cut(self) -> Self:
        if self.share and self.reuse > 1:
            raise ValueError("the members of a pool use each group once: remove reuse or share")
        if self.share and self.sampler == "cohort":
            raise ValueError("a cohort is complete, so it cannot be divided: remove share, or choose another sampler")
        if self.share and (self.quota < 1 or self.start != "oldest"):
            raise ValueError("members of a pool divide all groups: remove quota and start")
        if self.sampler == "cohort" and (self.unit != "groups" or self.multiple > 1 or self.quota < 1):
            raise ValueError("sampler cohort takes whole cohorts: its unit is groups, multiple and quota are 1")
        if self.sampler == "cohort" and (self.keep_groups or self.keep_bytes):
            raise ValueError("sampler cohort takes whole cohorts: remove keep_groups and keep_bytes")
        if self.unit == "groups" and self.size and 0 < self.keep_groups < self.size:
            raise ValueError(
                f"a batch of {self.size} groups can never be cut while at most {self.keep_groups} are held: "
                "raise keep_groups or lower size"
            )
        if self.unit != "tokens" and self.size and self.size > MAX_BATCH_SAMPLES:
            raise ValueError(f"a batch of {self.size} {self.unit} can never be cut: at most {MAX_BATCH_SAMPLES} fit")
        return self


class Definition(SubscriptionConfig):
    """A whole definition, as ``sub:NAME`` holds it."""

    size: Positive
    sampler: Sampler = "fifo"
    #: Lanes whose groups it takes, with commas.
    lanes: str = "train"
    #: sync | one_step | async | eval
    mode: str = "async"
    #: -1: none, for one that does not drive.
    bound: Annotated[int, Field(ge=-1)] = 0
    on_expiry: OnExpiry = "mask"
    #: Batches per publication.
    per_version: Positive = 1
    #: Model whose clock bounds it; '': none.
    model: str = ""
    seed: int = 0
    #: ``over_sampling_groups``, ``min_groups_before_first_batch`` and ``filter`` of its trainer.
    over: NotNegative = 0
    min_first: NotNegative = 0
    filters: str = ""
    on_filter_error: Literal["keep", "drop", "stop"] = "keep"
    keep_when_few: bool = False

    @field_validator("lanes")
    @classmethod
    def _lanes_are_admitted_to(cls, lanes: str) -> str:
        if unknown := set(lanes.split(",")) - set(HOME_LANES):
            raise ValueError(f"nothing is ever admitted to {sorted(unknown)}: lanes are {', '.join(HOME_LANES)}")
        return lanes

    @field_validator("model")
    @classmethod
    def _model_is_a_name(cls, model: str) -> str:
        return model and _name("model", model)

    @model_validator(mode="after")
    def _drives_a_model(self) -> Self:
        if self.driving and not self.model:
            raise ValueError("a subscription that drives the clock needs the model whose clock that is")
        if self.driving and self.bound < 0:
            raise ValueError("a subscription that drives the clock needs a bound of 0 or more")
        if self.keep_when_few and (self.unit != "groups" or self.share):
            raise ValueError("keep_when_few counts groups of one subscription: remove unit, share or keep_when_few")
        return self

    def fields(self) -> dict[str, Value]:
        """The fields of ``sub:NAME``, with ``gb``, the groups that one version consumes (a guess where unit is not
        groups; the cuts correct it)."""
        values = self.model_dump()
        values["from"] = values.pop("start")
        values["gb"] = self.per_version * (self.size if self.unit == "groups" else 1)
        return {name: _text(value) for name, value in values.items()}


def subscription_of(values: Mapping[str, Any], name: str) -> SubscriptionConfig:
    """A ``trainer.subscription`` from plain values; ConfigError that names what is wrong with it."""
    try:
        return SubscriptionConfig.model_validate(dict(values))
    except ValidationError as exc:
        raise _translated(exc, name) from exc


def checked(values: Mapping[str, Any], name: str) -> Definition:
    """A definition from plain values; ConfigError that names what is wrong with it."""
    try:
        return Definition.model_validate(dict(values))
    except ValidationError as exc:
        raise _translated(exc, name) from exc


def _translated(exc: ValidationError, name: str) -> ConfigError:
    parts = [
        f"{'.'.join(map(str, error['loc']))}: {error['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        for error in exc.errors()
    ]
    return ConfigError(f"Subscription {name!r} cannot work: {'; '.join(parts)}.")


def _name(kind: str, name: str) -> str:
    try:
        return check_name(kind, name)
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)
