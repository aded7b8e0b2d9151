"""The definition of a subscription: which groups a trainer takes at the buffer, how many, and for how long.

``SubscriptionConfig`` has the user's settings, with None for those that follow other keys. ``Definition`` is complete:
the policy makes it of the configuration, the hash ``sub:NAME`` holds it as texts, and buffer, trainer and command line
read it from there.
"""

import re
from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from penstock.config.buffer import OnFilterError
from penstock.config.reading.validation_errors import explain
from penstock.config.section import Positive, Section, is_a_name
from penstock.config.staleness import MODES, Mode, OnExpiry, Sampler, places
from penstock.errors import ConfigError, ProtocolError
from penstock.names import HOME_LANES
from penstock.text import safe_repr

#: Most samples of one batch: its manifest stays within one record.
MAX_BATCH_SAMPLES = 65536
#: Largest number of a definition, and longest text.
MAX_NUMBER, MAX_TEXT = 2**63 - 1, 16384
#: Mode of a subscription to groups that its own trainer requested: evaluations, and requests.
Asked = Literal["eval"]
ASKED: Asked = "eval"

_START = re.compile(r"oldest|newest|(completed|version):\d{1,15}")
#: Context for reading from Redis, where definitions were validated as a whole before they were written.
_STORED = object()


class Unit(StrEnum):
    """Unit of the size of a batch."""

    GROUPS = "groups"
    SAMPLES = "samples"
    TOKENS = "tokens"


class Split(StrEnum):
    """How a batch is split over ranks."""

    BALANCED = "balanced"
    TOKENS = "tokens"
    STRIDED = "strided"


class Trait(Enum):
    """Traits of a field of a definition."""

    #: ``penstock subs set`` may change it while the subscription has groups.
    LIVE = auto()
    #: Likewise if the trainer requests its own groups.
    LIVE_WHERE_ASKED = auto()
    #: It decides which groups a subscription holds, or in what order: another value fills a new pool.
    POOL = auto()
    #: The members of a pool (``share``) must have the same value; subscribe refuses another.
    AGREED = auto()


def _parts(value: Any) -> Any:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


#: Names, as text separated by commas.
Names = Annotated[
    tuple[Annotated[str, Field(pattern="^[^,]+$")], ...],
    BeforeValidator(_parts),
    PlainSerializer(",".join, return_type=str),
]
NotNegative = Annotated[int, Field(ge=0)]


class SubscriptionConfig(Section):
    """Selection of groups by a trainer's subscription."""

    #: Name of a pool whose members divide the groups among themselves; '': no pool, so the subscription receives every
    #: group.
    share: Annotated[str, is_a_name("pool", or_empty=True), Trait.POOL] = ""
    #: Whether the trainer's publications move the clock and open the gate; set it for exactly one trainer of a model.
    driving: bool = True
    #: Unit of ``size``. A batch of samples or tokens is the smallest set of complete groups that reaches ``size``.
    unit: Annotated[Unit, Trait.LIVE] = Unit.GROUPS
    #: Batch size in ``unit``; None: ``trainer.batch_groups``.
    size: Positive | None = None
    #: The number of samples of a batch is a multiple of this value (for data-parallel ranks); the remainder is carried
    #: over.
    multiple: Annotated[Positive, Trait.LIVE] = 1
    #: Order of the groups; None: by mode.
    sampler: Sampler | None = None
    #: prioritized: a number of each sample (reward, length, num_generated, ..., or another entry that the reward
    #: returned), averaged over the group; ``reward_std`` is the standard deviation of the rewards in the group.
    priority: Annotated[str, Field(min_length=1), Trait.LIVE, Trait.POOL] = "reward"
    #: prioritized: a group is chosen with probability proportional to max(priority, 0) ** exponent.
    exponent: Annotated[float, Field(ge=0, le=100), Trait.LIVE, Trait.POOL] = 1.0
    #: Number of batches that one group enters.
    reuse: Annotated[Positive, Trait.LIVE, Trait.POOL, Trait.AGREED] = 1
    #: Share of the groups that the subscription takes, chosen by a hash of the job and the seed.
    quota: Annotated[float, Field(gt=0, le=1), Trait.LIVE, Trait.POOL] = 1.0
    #: Maximum number of batches cut ahead of the one being trained; None: as many as are requested.
    prefetch: Annotated[NotNegative | None, Trait.LIVE, Trait.LIVE_WHERE_ASKED] = None
    #: Maximum number of unused groups held for the subscription; the oldest are disposed of first. 0: no limit.
    keep_groups: Annotated[NotNegative, Trait.LIVE] = 0
    #: Time limit in seconds for holding a group that is unused, or used without a checkpoint past it; also the time
    #: without a trainer after which the subscription is parked. 0: no limit.
    keep_s: Annotated[float, Field(ge=0), Trait.LIVE, Trait.LIVE_WHERE_ASKED] = 0.0
    #: Start of a new subscription: oldest, newest, completed:N (after the N-th completed group of the run), or
    #: version:N (groups generated by version N or later).
    start: Annotated[str, Field(serialization_alias="from")] = "oldest"
    #: Maximum number of versions between generating a token and training on it; None: that of ``staleness``, or no
    #: bound if the subscription does not drive.
    bound: NotNegative | None = None
    #: Handling of groups beyond the bound: wait for the groups that are due, mask their old tokens, or drop them; None:
    #: by mode.
    on_expiry: OnExpiry | None = None
    #: Mask all tokens except those of the newest version in their sample (partial rollouts); masked tokens keep
    #: versions and logprobs.
    mask_offpolicy: bool = False
    #: Mask samples that ended at a limit (status truncated); their rewards still count in their group.
    mask_truncated: bool = False
    #: Split of a batch over ranks: equal counts balanced by tokens (balanced, Karmarkar-Karp), by tokens alone, or
    #: strided.
    split: Annotated[Split, Trait.LIVE, Trait.LIVE_WHERE_ASKED] = Split.BALANCED

    @classmethod
    def of(cls, values: Mapping[str, Any], name: str) -> Self:
        """Validate plain values as settings of subscription ``name``. Raises ConfigError that names invalid fields."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as exc:
            raise ConfigError(f"Subscription {name!r} is invalid: {_reasons(exc)}.") from exc

    @field_validator("start")
    @classmethod
    def _check_start(cls, start: str) -> str:
        if not _START.fullmatch(start):
            raise ValueError(f"start {start!r} is invalid: use oldest, newest, completed:N or version:N")
        return start

    @model_validator(mode="after")
    def _works(self, info: ValidationInfo) -> Self:
        if info.context is not _STORED:
            self._check_together()
        return self

    def _check_together(self) -> None:
        """Raise ValueError if no batch could ever be cut."""
        if self.share and self.reuse > 1:
            raise ValueError("members of a pool use each group once: remove reuse or share")
        if self.share and self.sampler is Sampler.COHORT:
            raise ValueError("a cohort cannot be divided among a pool: remove share, or use another sampler")
        if self.share and (self.quota < 1 or self.start != "oldest"):
            raise ValueError("members of a pool divide all groups: remove quota and start, or share")
        if self.sampler is Sampler.COHORT and (self.unit is not Unit.GROUPS or self.multiple > 1 or self.quota < 1):
            raise ValueError("sampler cohort takes complete cohorts: set unit to groups, and multiple and quota to 1")
        if self.sampler is Sampler.COHORT and self.keep_groups:
            raise ValueError("sampler cohort takes complete cohorts: remove keep_groups")
        if self.unit is Unit.GROUPS and self.size and 0 < self.keep_groups < self.size:
            raise ValueError(
                f"a batch of {self.size} groups can never be cut while at most {self.keep_groups} are held: "
                "raise keep_groups or lower size"
            )
        self._check_size()

    def _check_size(self) -> None:
        if self.unit is not Unit.TOKENS and self.size and self.size > MAX_BATCH_SAMPLES:
            raise ValueError(f"a batch of {self.size} {self.unit} can never be cut: at most {MAX_BATCH_SAMPLES} fit")


def account_of(name: str, share: str) -> str:
    """Return the name under which groups count a subscription's uses: its own, or that of its pool ``share``."""
    return f"share:{share}" if share else name


class Definition(SubscriptionConfig):
    """Complete definition of a subscription."""

    driving: bool = False
    size: Annotated[Positive, Trait.LIVE] = 1
    sampler: Annotated[Sampler, Trait.LIVE, Trait.POOL] = Sampler.FIFO
    #: -1: none, for a subscription that does not drive.
    bound: Annotated[int, Field(ge=-1), Trait.LIVE, Trait.AGREED] = 0
    on_expiry: Annotated[OnExpiry, Trait.LIVE, Trait.AGREED] = OnExpiry.MASK
    mode: Mode | Asked = Mode.ASYNC
    #: Lanes whose groups it takes.
    lanes: Annotated[Names, Trait.POOL, Trait.AGREED] = ("train",)
    #: Number of batches per publication.
    per_version: Positive = 1
    #: Optimizer steps of the reference trainer that a batch is divided over, by whole groups.
    minibatches: Positive = 1
    #: Model whose clock bounds it; '': none.
    model: Annotated[str, is_a_name("model", or_empty=True), Trait.AGREED] = ""
    seed: Annotated[int, Field(ge=0), Trait.POOL] = 0
    #: Groups admitted beyond the gate, and groups needed before the first cut.
    over: NotNegative = 0
    min_first: NotNegative = 0
    #: Names of group filters, in the order of their calls.
    filters: Annotated[Names, Trait.POOL, Trait.AGREED] = ()
    on_filter_error: Annotated[OnFilterError, Trait.POOL, Trait.AGREED] = OnFilterError.KEEP
    #: Rejected groups are held back until it is known whether enough others remain.
    keep_when_few: Annotated[bool, Trait.POOL] = False
    #: Roles that train each batch, the driving one first; (): a single trainer.
    roles: Names = ()

    @classmethod
    def read(cls, raw: Mapping[bytes, bytes], name: str) -> Self:
        """Read the definition from the hash ``sub:NAME``; raise ProtocolError that names invalid fields.

        Combinations of fields are not checked again.
        """
        try:
            return cls.model_validate(cls.texts_of(raw), context=_STORED)
        except ValidationError as exc:
            raise ProtocolError(
                f"Subscription {name!r} cannot be read from Redis: {_reasons(exc)}; correct it with `penstock subs "
                f"set`, or delete it with `penstock subs drop {name}`."
            ) from exc

    @classmethod
    def texts_of(cls, raw: Mapping[bytes, bytes]) -> dict[str, str]:
        """Return the fields of the definition that are set in the hash ``sub:NAME``, as text."""
        stored = {name: raw.get(cls.key_of(name).encode()) for name in cls.model_fields}
        return {name: value.decode(errors="backslashreplace") for name, value in stored.items() if value}

    @classmethod
    def key_of(cls, name: str) -> str:
        """Return the hash field in ``sub:NAME`` that stores field ``name``."""
        return cls.model_fields[name].serialization_alias or name

    def texts(self) -> dict[str, str]:
        """Return every field as text."""
        return {name: _text(value) for name, value in self.model_dump().items()}

    def fields(self) -> dict[str, str]:
        """Return the fields for the hash ``sub:NAME``: all of them, and ``gb``, the groups that one version consumes.

        For a batch not in groups that is an estimate, which the cuts correct.
        """
        fields = {self.key_of(name): text for name, text in self.texts().items()}
        return fields | {"gb": str(self.group_budget or self.per_version)}

    @property
    def group_budget(self) -> int:
        """Return the number of groups that one version consumes; 0 if unknown in advance (unit samples or tokens)."""
        return self.size * self.per_version if self.unit is Unit.GROUPS else 0

    def account(self, name: str) -> str:
        """Return the name under which groups count the uses of subscription ``name`` with this definition."""
        return account_of(name, self.share)

    @property
    def asks(self) -> bool:
        """Return whether it takes groups that its own trainer requested."""
        return self.mode == ASKED

    @field_validator("*")
    @classmethod
    def _check_limits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise ValueError(f"the value must be at most {MAX_NUMBER}")
        if isinstance(value, str | tuple) and sum(map(len, value)) > MAX_TEXT:
            raise ValueError(f"the value must have at most {MAX_TEXT} characters")
        return value

    @field_validator("lanes")
    @classmethod
    def _check_lanes(cls, lanes: tuple[str, ...]) -> tuple[str, ...]:
        if (unknown := set(lanes) - set(HOME_LANES)) or not lanes:
            raise ValueError(f"no jobs are admitted to {sorted(unknown)}: use {', '.join(HOME_LANES)}")
        return lanes

    def _check_together(self) -> None:
        super()._check_together()
        if self.driving and not self.model:
            raise ValueError("a driving subscription requires model: set it, or set driving to false")
        if self.driving and self.bound < 0:
            raise ValueError("a driving subscription requires a bound of 0 or more: set bound")
        if self.keep_when_few and (self.unit is not Unit.GROUPS or self.share):
            raise ValueError("keep_when_few requires unit groups and no pool: remove unit, share or keep_when_few")
        if self.driving and isinstance(self.mode, Mode):
            self._check_mode(self.mode)
        if self.sampler is Sampler.COHORT:
            self._check_cohort()
        if self.sampler is Sampler.DIFFICULTY and (self.bound < 0 or not self.model):
            raise ValueError(
                "sampler difficulty leaves easy and hard groups until they are due, which without a bound they never "
                "are: give it a bound, or choose another sampler"
            )
        self._check_first()

    def _check_mode(self, mode: Mode) -> None:
        """Raise ValueError if settings contradict the mode of a driving subscription (T5)."""
        rules = MODES[mode]
        if rules.bound is not None and self.bound != rules.bound:
            raise ValueError(
                f"mode {mode} requires bound {rules.bound} for a driving subscription, but bound is {self.bound}: "
                "remove bound, or begin a run of mode async"
            )
        if rules.needs_cohorts and self.sampler is not Sampler.COHORT:
            raise ValueError(
                f"mode {mode} trains complete cohorts, but sampler is {self.sampler}: remove sampler, "
                "or begin a run of mode async"
            )

    def _check_cohort(self) -> None:
        if self.over:
            raise ValueError(
                "a whole cohort has no use for more groups than it has: leave trainer.over_sampling_groups out, or "
                "choose another sampler than cohort"
            )
        if self.keep_when_few:
            raise ValueError(
                "rejects are left out of a whole cohort, whose batch is smaller then: leave "
                "trainer.filter.keep_when_few out, or choose another sampler than cohort"
            )

    def _check_first(self) -> None:
        # If the number of places is unknown (samples, tokens, pools), missing groups are granted for the batch.
        if self.driving and self.group_budget and not self.share:
            room = places(self.bound, self.group_budget, self.over)
            if self.min_first > room:
                raise ValueError(
                    f"trainer.min_groups_before_first_batch is {self.min_first}, but the gate admits at most {room} "
                    "groups before the first batch is trained: lower it, or raise the bound, the "
                    "size of a batch or trainer.over_sampling_groups"
                )
        if 0 < self.keep_groups < self.min_first:
            raise ValueError(
                f"a first batch that waits for {self.min_first} groups (trainer.min_groups_before_first_batch) can "
                f"never be cut while at most {self.keep_groups} are held: raise keep_groups or lower it"
            )

    def _check_size(self) -> None:
        if self.asks:
            return  # the batch is as large as its request
        super()._check_size()
        if self.unit is Unit.GROUPS and self.size < self.minibatches:
            raise ValueError(
                f"a batch of {self.size} groups, which are not split, cannot be divided over {self.minibatches} "
                "minibatches: raise its size, or lower trainer.minibatches"
            )


@cache
def fields_with(trait: Trait) -> frozenset[str]:
    """Return the names of the fields of a definition with this trait."""
    return frozenset(name for name, field in Definition.model_fields.items() if trait in field.metadata)


def _reasons(exc: ValidationError) -> str:
    """Describe the invalid fields."""
    found: dict[str, str] = {}
    for error in exc.errors():
        field = str(error["loc"][0]) if error["loc"] else ""
        # A union reports an error for each member; the first is enough.
        found.setdefault(field, _reason(field, error))
    return "; ".join(found.values())


def _reason(field: str, error: ErrorDetails) -> str:
    return f"{field}: {explain(error, safe_repr(error['input']))}".removeprefix(": ")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)
