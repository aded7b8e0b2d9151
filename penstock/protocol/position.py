"""How far a subscription is: the fields of ``sub:NAME`` that verbs move."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from penstock.protocol.records.small_maps import count_of, text_of
from penstock.protocol.staleness import Lineage

#: The sum of rewards stops here, on both sides of 0, as ``judge`` has it.
MOST_REWARD = 1e300

#: What verbs write: a sum (Redis adds it up, as C prints it), ranges of versions, versions.
_SUM = re.compile(rb"-?\d{1,308}(\.\d{1,400})?(e[+-]?\d{1,2})?")
_RANGES = re.compile(rb"(\d{1,15}-\d{1,15}(,\d{1,15}-\d{1,15})*)?")
_VERSIONS = re.compile(rb"(\d{1,15}(,\d{1,15})*)?")


@dataclass(slots=True)
class Position:
    """Fields of ``sub:NAME`` that verbs move."""

    #: Last batch that was asked for, cut, committed, and is durable.
    ask: int = 0
    cut: int = 0
    cursor: int = 0
    ckpt: int = 0
    #: Batch up to which no rewind reaches.
    floor: int = 0
    #: Batches that the last publication consumed.
    through: int = 0
    #: Generation: rewinds and changes of hands.
    gen: int = 0
    #: Places at the gate that batches up to ``cut`` consume.
    cum: int = 0
    #: Groups that one of its versions consumes; those that a published version consumed, and those given up unused.
    gb: int = 0
    p: int = 0
    disposed: int = 0
    #: Groups that were gone before it came.
    start: int = 0
    #: Groups granted beyond the gate.
    owed: int = 0
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
    #: When its trainer last renewed its hold, by the clock of Redis, in ms.
    seen: int = 0
    lineage: Lineage = field(default_factory=Lineage)

    @classmethod
    def read(cls, raw: Mapping[bytes, bytes], name: str) -> Self:
        """The position in the hash ``sub:NAME``; ProtocolError that names a field which no verb wrote so."""

        drops = [key.decode(errors="backslashreplace") for key in raw if key.startswith(b"drop:")]
        return cls(
            **{key: read_count(raw.get(key.encode()), key, name) for key in _COUNTS},
            dropped={key.removeprefix("drop:"): read_count(raw.get(key.encode()), key, name) for key in drops},
            rejected_reward=float(_read_text(raw.get(b"rejected_reward", b"0"), _SUM, "rejected_reward", name)),
            restored=raw.get(b"restored") == b"1",
            parked=raw.get(b"parked") == b"1",
            lineage=read_lineage(raw.get(b"abandoned"), raw.get(b"repeats"), name),
        )


#: Fields that count.
_COUNTS = tuple(one.name for one in fields(Position) if one.type is int)


def read_count(value: bytes | None, key: str, name: str) -> int:
    """A field of a position that counts, for who reads it alone; 0 where it is not set. Raises ProtocolError."""
    return count_of(value, *_field(key, name))


def read_lineage(abandoned: bytes | None, repeats: bytes | None, name: str) -> Lineage:
    """The lineage that two fields of a position say, for who reads them alone. Raises ProtocolError."""
    return Lineage.parse(
        _read_text(abandoned or b"", _RANGES, "abandoned", name), _read_text(repeats or b"", _VERSIONS, "repeats", name)
    )


def total_reward(rewards: Iterable[float]) -> float:
    """The sum of rewards, where each is a number, as a subscription keeps it."""
    values = list(rewards)
    try:
        total = math.fsum(values)
    except OverflowError:
        total = sum(values)
    return max(-MOST_REWARD, min(MOST_REWARD, total))


def _read_text(value: bytes, allowed: re.Pattern[bytes], key: str, name: str) -> str:
    return text_of(value, allowed, *_field(key, name))


def _field(key: str, name: str) -> tuple[str, str]:
    """What an error calls a field of a position, and what to do."""
    return f"Field {key} of subscription {name!r}", f"drop it with `penstock subs drop {name}`"
