"""Progress of a subscription: the fields of ``sub:NAME`` that verbs change."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from penstock.protocol.staleness import Lineage
from penstock.records.codec import count_of, text_of

#: Sums of rewards are limited to this on both sides of 0, as in ``judge``.
MOST_REWARD = 1e300

#: Formats that verbs write: a sum (as C prints it), ranges of versions, versions.
_SUM = re.compile(rb"-?\d{1,308}(\.\d{1,400})?(e[+-]?\d{1,2})?")
_RANGES = re.compile(rb"(\d{1,15}-\d{1,15}(,\d{1,15}-\d{1,15})*)?")
_VERSIONS = re.compile(rb"(\d{1,15}(,\d{1,15})*)?")


@dataclass(slots=True)
class Position:
    """Fields of ``sub:NAME`` that verbs change."""

    #: Last batch that was requested, cut, committed, and is durable.
    ask: int = 0
    cut: int = 0
    cursor: int = 0
    ckpt: int = 0
    #: Last batch that a rewind cannot undo.
    floor: int = 0
    #: Last batch that the last publication consumed.
    through: int = 0
    #: Generation: number of rewinds and changes of owner.
    gen: int = 0
    #: Places at the gate that batches up to ``cut`` consume.
    cum: int = 0
    #: Groups that one of its versions consumes; groups that a published version consumed, and groups disposed of.
    gb: int = 0
    p: int = 0
    disposed: int = 0
    #: Groups that were gone before it subscribed.
    start: int = 0
    #: Groups granted beyond the gate.
    owed: int = 0
    #: Places in the order of admission that were empty when their turn came.
    skipped: int = 0
    #: Groups disposed of so far, by reason: stale, rewound, filter/REASON.
    dropped: dict[str, int] = field(default_factory=dict)
    #: Groups whose filter raised; samples of filtered groups, and the sum of their rewards.
    filter_raised: int = 0
    rejected_samples: int = 0
    rejected_reward: float = 0.0
    #: Samples of groups disposed of as stale, and the tokens that they had generated.
    aged_samples: int = 0
    aged_tokens: int = 0
    #: True between a rewind and the publication that must follow it.
    restored: bool = False
    #: True while its owner has been gone for longer than ``keep_s``.
    parked: bool = False
    #: First batch that will not be cut because the data has ended; 0: none.
    ended: int = 0
    #: Groups that completed before this place, or before this version, are not for it.
    since: int = 0
    since_version: int = 0
    #: When its trainer last renewed its lease, by the clock of Redis, in ms.
    seen: int = 0
    lineage: Lineage = field(default_factory=Lineage)

    @classmethod
    def read(cls, raw: Mapping[bytes, bytes], name: str) -> Self:
        """Read the position from the hash ``sub:NAME``; raise ProtocolError that names an invalid field."""

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
    """Return one numeric field of a position; 0 if it is not set. Raises ProtocolError."""
    return count_of(value, *_field(key, name))


def read_lineage(abandoned: bytes | None, repeats: bytes | None, name: str) -> Lineage:
    """Parse a lineage from two fields of a position. Raises ProtocolError."""
    return Lineage.parse(
        _read_text(abandoned or b"", _RANGES, "abandoned", name), _read_text(repeats or b"", _VERSIONS, "repeats", name)
    )


def total_reward(rewards: Iterable[float]) -> float:
    """Sum the rewards that are numbers, within the limits of a subscription's sum."""
    values = list(rewards)
    try:
        total = math.fsum(values)
    except OverflowError:
        total = sum(values)
    return max(-MOST_REWARD, min(MOST_REWARD, total))


def _read_text(value: bytes, allowed: re.Pattern[bytes], key: str, name: str) -> str:
    return text_of(value, allowed, *_field(key, name))


def _field(key: str, name: str) -> tuple[str, str]:
    """Return the name of a position's field for an error, and the fix."""
    return f"Field {key} of subscription {name!r}", f"drop it with `penstock subs drop {name}`"
