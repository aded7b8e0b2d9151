"""A trainer's place at the buffer: its definition and cursor as Redis has them, and its unused groups."""

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from buffer.group import Group
from buffer.samplers import Pool, make_pool
from penstock.protocol.scripts import Judged
from penstock.protocol.staleness import Lineage


@dataclass(frozen=True, slots=True)
class Definition:
    """Fields of ``sub:NAME`` that a trainer or an operator sets; ``penstock.protocol.subs`` says what each means."""

    name: str
    lanes: tuple[str, ...] = ("train",)
    mode: str = "async"
    bound: int = 0
    on_expiry: str = "mask"
    #: Tokens older than the newest one of their sample bear no loss.
    mask_offpolicy: bool = False
    sampler: str = "fifo"
    #: Batch size in ``unit``.
    size: int = 1
    unit: str = "groups"
    multiple: int = 1
    #: Batches per publication.
    per_version: int = 1
    reuse: int = 1
    #: Model whose clock bounds this subscription; '': none.
    model: str = ""
    driving: bool = False
    seed: int = 0
    #: Names of group filters, in the order in which they are asked.
    filters: tuple[str, ...] = ()
    on_filter_error: str = "keep"
    #: Hold rejects back until it is known whether enough others remain.
    keep_when_few: bool = False
    #: Groups that must be there before the first cut.
    min_first: int = 0
    share: str = ""
    priority: str = "reward"
    exponent: float = 1.0
    quota: float = 1.0
    #: Batches cut ahead of the one after the cursor; -1: as many as are asked for.
    prefetch: int = -1
    keep_groups: int = 0
    keep_bytes: int = 0
    keep_s: float = 0.0
    split: str = "balanced"

    @property
    def account(self) -> str:
        """Under what name groups count its uses."""
        return f"share:{self.share}" if self.share else self.name

    @property
    def group_budget(self) -> int:
        """Groups that one version consumes; of samples or tokens that is not known beforehand."""
        return self.size * self.per_version if self.unit == "groups" else 0


@dataclass(slots=True)
class Position:
    """Fields of ``sub:NAME`` that verbs move."""

    ask: int = 0
    cut: int = 0
    cursor: int = 0
    ckpt: int = 0
    floor: int = 0
    through: int = 0
    #: Places at the gate that batches up to ``cut`` consume.
    cum: int = 0
    #: Places in the order of admission that held nothing when their turn came.
    skipped: int = 0
    #: Groups given up unused so far, by reason: stale, rewound, filter/REASON.
    dropped: dict[str, int] = field(default_factory=dict)
    #: Groups whose filter raised; samples of filtered groups, and the sum of their rewards.
    filter_raised: int = 0
    rejected_samples: int = 0
    rejected_reward: float = 0.0
    #: Samples of groups that were given up for their age, and the tokens that they had generated.
    aged_samples: int = 0
    aged_tokens: int = 0
    #: True between a rewind and the publication that has to follow it.
    restored: bool = False
    #: True while nobody counts on it: its owner has been gone for longer than ``keep_s``.
    parked: bool = False
    #: The batch that never comes, since the data has ended; 0: none.
    ended: int = 0
    #: Places in the order of completion up to which, and the version before which, groups are not for it.
    since: int = 0
    since_version: int = 0
    lineage: Lineage = field(default_factory=Lineage)


def parse(name: str, raw: Mapping[bytes, bytes]) -> tuple[Definition, Position]:
    """Read a ``sub:NAME`` hash."""

    def text(key: str, default: str) -> str:
        return raw.get(key.encode(), default.encode()).decode()

    def number(key: str, default: int = 0) -> int:
        value = raw.get(key.encode())
        return int(value) if value else default

    definition = Definition(
        name=name,
        lanes=tuple(text("lanes", "train").split(",")),
        mode=text("mode", "async"),
        bound=number("bound"),
        on_expiry=text("on_expiry", "mask"),
        mask_offpolicy=number("mask_offpolicy") == 1,
        sampler=text("sampler", "fifo"),
        size=number("size", 1),
        per_version=number("per_version", 1),
        reuse=number("reuse", 1),
        model=text("model", ""),
        driving=number("driving") == 1,
        seed=number("seed"),
        filters=tuple(filter(None, text("filters", "").split(","))),
        on_filter_error=text("on_filter_error", "keep"),
        keep_when_few=number("keep_when_few") == 1,
        min_first=number("min_first"),
        unit=text("unit", "groups"),
        multiple=number("multiple", 1),
        share=text("share", ""),
        priority=text("priority", "reward"),
        exponent=float(text("exponent", "1")),
        quota=float(text("quota", "1")),
        prefetch=number("prefetch", -1),
        keep_groups=number("keep_groups"),
        keep_bytes=number("keep_bytes"),
        keep_s=float(text("keep_s", "0")),
        split=text("split", "balanced"),
    )
    moved = {key: number(key) for key in _MOVED}
    position = Position(
        **moved,
        restored=number("restored") == 1,
        parked=number("parked") == 1,
        lineage=Lineage.parse(text("abandoned", ""), text("repeats", "")),
        dropped={key[5:].decode(): int(value) for key, value in raw.items() if key.startswith(b"drop:")},
        rejected_reward=float(text("rejected_reward", "0")),
    )
    return definition, position


#: Fields of a definition that say which groups a pool holds, and in what order.
_POOL_FIELDS = (
    "lanes", "sampler", "seed", "priority", "exponent", "reuse", "quota", "share", "filters", "on_filter_error",
    "keep_when_few",
)  # fmt: skip
#: Numbers of ``sub:NAME`` that verbs move.
_MOVED = (
    "ask", "cut", "cursor", "ckpt", "floor", "through", "cum", "skipped", "since", "since_version", "filter_raised",
    "rejected_samples", "aged_samples", "aged_tokens", "ended",
)  # fmt: skip


class Subscription:
    """One live subscription in the leader's memory; ``pool`` holds what it may still use."""

    def __init__(self, definition: Definition, position: Position) -> None:
        self.definition = definition
        self.position = position
        #: Rejects that are held back (``keep_when_few``): job -> what is told when they are dropped, by completion.
        self.held: dict[str, Judged] = {}
        #: Groups whose filter raised, where that stops cutting: job -> what happened.
        self.stuck: dict[str, str] = {}
        #: Why no filter can be asked; '' when all can.
        self.unfilterable = ""
        self.pool: Pool = make_pool(
            definition.sampler, seed=definition.seed, priority=definition.priority, exponent=definition.exponent
        )
        #: Groups that are not for it, with the reason; the leader has yet to say so.
        self.refused: dict[str, tuple[Group, str]] = {}
        #: Groups whose versions were not compared with the lineage yet.
        self._unproven: dict[str, Group] = {}
        self._proven_by = Lineage()

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def account(self) -> str:
        return self.definition.account

    def keeps_its_pool(self, definition: Definition) -> bool:
        """True where another definition takes the same groups in the same order."""
        mine, other = self.definition, definition
        return all(getattr(mine, name) == getattr(other, name) for name in _POOL_FIELDS)

    def place(self, group: Group) -> None:
        """Into the pool, or out of it."""
        if not self.wants(group):
            self._take_out(group)
        elif reason := self._refuses(group):
            self.refused[group.job] = (group, reason)
        else:
            self.pool.add(group)
            self._unproven[group.job] = group

    def _refuses(self, group: Group) -> str:
        """Why an unused group is not for this subscription, or ''."""
        position = self.position
        if group.completed <= position.since or 0 <= group.oldest < position.since_version:
            return "before"
        if self.definition.quota < 1 and _draw(self.definition.seed, group.job) >= self.definition.quota:
            return "quota"
        return ""

    def too_many(self) -> list[Group]:
        """Groups held beyond what the subscription may hold, longest held first."""
        definition, pool = self.definition, self.pool
        groups = len(pool) - definition.keep_groups if definition.keep_groups else 0
        num_bytes = pool.num_bytes - definition.keep_bytes if definition.keep_bytes else 0
        oldest_s = time.monotonic() - definition.keep_s if definition.keep_s else -math.inf
        over: list[Group] = []
        for group in pool:
            if groups <= 0 and num_bytes <= 0 and group.since_s >= oldest_s:
                break
            over.append(group)
            groups -= 1
            num_bytes -= group.num_bytes
        return over

    def abandoned(self) -> list[Group]:
        """Groups of the pool that hold a version which a rewind left behind (T1), until they are given up.

        Others are looked at once.
        """
        lineage = self.position.lineage
        if lineage.abandoned != self._proven_by.abandoned:
            self._unproven = {group.job: group for group in self.pool}
        self._proven_by = lineage
        dead = [group for group in self._unproven.values() if not all(map(lineage.lives, group.versions))]
        self._unproven = {group.job: group for group in dead}
        return dead

    def forget(self, group: Group) -> None:
        """The group is no longer ready."""
        self._take_out(group)
        self.held.pop(group.job, None)
        self.stuck.pop(group.job, None)

    def _take_out(self, group: Group) -> None:
        self.pool.discard(group)
        self.refused.pop(group.job, None)
        self._unproven.pop(group.job, None)

    def wants(self, group: Group) -> bool:
        """True while the group is of a lane of ours, kept, unused up to the reuse limit, and passed our filters."""
        return (
            self.covers(group)
            and group.kept >= group.n
            and not group.away
            and 0 <= group.uses.get(self.account, 0) < self.definition.reuse
            and group.job not in self.held
            and group.job not in self.stuck
        )

    def is_final(self, group: Group) -> bool:
        """True when we will never use a group of ours again (a rewind aside, which our checkpoint guards)."""
        uses = group.uses.get(self.account, 0)
        return uses < 0 or uses >= self.definition.reuse

    def covers(self, group: Group) -> bool:
        """True when the group is of a lane of ours."""
        return group.lane in self.definition.lanes


def _draw(seed: int, job: str) -> float:
    """A number in [0, 1) that is always the same for this job."""
    digest = hashlib.blake2b(f"{seed}/{job}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
