"""A trainer's place at the buffer: its definition and cursor as Redis has them, and its unused groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from buffer.group import Group
from buffer.samplers import Pool, make_pool
from penstock.scripts import Judged
from penstock.staleness import Lineage


@dataclass(frozen=True, slots=True)
class Definition:
    """Fields of ``sub:NAME`` that a trainer sets."""

    name: str
    lanes: tuple[str, ...] = ("train",)
    mode: str = "async"
    bound: int = 0
    on_expiry: str = "mask"
    sampler: str = "fifo"
    #: Groups per batch.
    size: int = 1
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
    #: True between a rewind and the publication that has to follow it.
    restored: bool = False
    lineage: Lineage = field(default_factory=Lineage)


def parse(name: str, raw: Mapping[bytes, bytes]) -> tuple[Definition, Position]:
    """Read a ``sub:NAME`` hash."""

    def text(key: str, default: str) -> str:
        return raw.get(key.encode(), default.encode()).decode()

    def number(key: str, default: int = 0) -> int:
        return int(raw.get(key.encode()) or default)

    definition = Definition(
        name=name,
        lanes=tuple(text("lanes", "train").split(",")),
        mode=text("mode", "async"),
        bound=number("bound"),
        on_expiry=text("on_expiry", "mask"),
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
    )
    moved = {key: number(key) for key in ("ask", "cut", "cursor", "ckpt", "floor", "through", "cum", "skipped")}
    moved |= {key: number(key) for key in ("filter_raised", "rejected_samples")}
    dropped = {key[5:].decode(): int(value) for key, value in raw.items() if key.startswith(b"drop:")}
    lineage = Lineage.parse(text("abandoned", ""), text("repeats", ""))
    position = Position(
        **moved,
        restored=number("restored") == 1,
        lineage=lineage,
        dropped=dropped,
        rejected_reward=float(text("rejected_reward", "0")),
    )
    return definition, position


class Subscription:
    """One live subscription in the leader's memory; ``pool`` holds what it may still use."""

    def __init__(self, definition: Definition, position: Position) -> None:
        self.definition = definition
        self.position = position
        self.pool: Pool = make_pool(definition.sampler)
        #: Rejects that are held back (``keep_when_few``): job -> what is told when they are dropped, by completion.
        self.held: dict[str, Judged] = {}
        #: Groups whose filter raised, where that stops cutting: job -> what happened.
        self.stuck: dict[str, str] = {}
        #: Why no filter can be asked; '' when all can.
        self.unfilterable = ""
        #: Groups whose versions were not compared with the lineage yet.
        self._unproven: dict[str, Group] = {}
        self._proven_by = Lineage()

    @property
    def name(self) -> str:
        return self.definition.name

    def place(self, group: Group) -> None:
        """Into the pool, or out of it."""
        if self.wants(group):
            self.pool.add(group)
            self._unproven[group.job] = group
        else:
            self.pool.discard(group)
            self._unproven.pop(group.job, None)

    def abandoned(self) -> list[Group]:
        """Groups of the pool that hold a version which a rewind left behind (T1); looks at every group once."""
        lineage = self.position.lineage
        if lineage.abandoned != self._proven_by.abandoned:
            self._unproven = {group.job: group for group in self.pool}
        new, self._unproven, self._proven_by = self._unproven, {}, lineage
        return [group for group in new.values() if not all(map(lineage.lives, group.versions))]

    def forget(self, group: Group) -> None:
        """The group is no longer ready."""
        self.pool.discard(group)
        self._unproven.pop(group.job, None)
        self.held.pop(group.job, None)
        self.stuck.pop(group.job, None)

    def wants(self, group: Group) -> bool:
        """True while the group is of a lane of ours, kept, unused up to the reuse limit, and passed our filters."""
        return (
            self.covers(group)
            and group.kept >= group.n
            and 0 <= group.uses.get(self.name, 0) < self.definition.reuse
            and group.job not in self.held
            and group.job not in self.stuck
        )

    def is_final(self, group: Group) -> bool:
        """True when we will never use a group of ours again (a rewind aside, which our checkpoint guards)."""
        uses = group.uses.get(self.name, 0)
        return uses < 0 or uses >= self.definition.reuse

    def covers(self, group: Group) -> bool:
        """True when the group is of a lane of ours."""
        return group.lane in self.definition.lanes
