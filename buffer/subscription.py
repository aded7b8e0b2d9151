"""A trainer's place at the buffer: its definition and cursor as Redis has them, and its unused groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from buffer.group import Group
from buffer.samplers import Pool, make_pool
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
    )
    moved = {key: number(key) for key in ("ask", "cut", "cursor", "ckpt", "floor", "through", "cum")}
    position = Position(**moved, lineage=Lineage.parse(text("abandoned", "")))
    return definition, position


class Subscription:
    """One live subscription in the leader's memory; ``pool`` holds what it may still use."""

    def __init__(self, definition: Definition, position: Position) -> None:
        self.definition = definition
        self.position = position
        self.pool: Pool = make_pool(definition.sampler)

    @property
    def name(self) -> str:
        return self.definition.name

    def wants(self, group: Group) -> bool:
        """True while the group is of a lane of ours, kept, and unused up to the reuse limit."""
        return (
            group.lane in self.definition.lanes
            and group.kept >= group.n
            and 0 <= group.uses.get(self.name, 0) < self.definition.reuse
        )

    def is_final(self, group: Group) -> bool:
        """True when we will never use the group again (a rewind aside, which our checkpoint guards)."""
        if group.lane not in self.definition.lanes:
            return True
        uses = group.uses.get(self.name, 0)
        return uses < 0 or uses >= self.definition.reuse

    def is_durable(self, group: Group) -> bool:
        """True when no restored trainer can ask for a batch with this group."""
        return group.batches.get(self.name, 0) <= self.position.ckpt
