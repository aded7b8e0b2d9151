"""One complete group in the buffer's memory: a few numbers; its metadata stays in Redis until it is cut."""

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from penstock.errors import ProtocolError
from penstock.protocol.pass_rate import share_byte
from penstock.records.sample_meta import SampleMeta


@dataclass(slots=True)
class Group:
    """A group that is ready and not yet retired."""

    job: str
    lane: str
    #: Place in the order of admission to its lane, from 1.
    seq: int
    #: Place in the order of completion.
    completed: int
    #: Number of its samples.
    n: int
    #: Oldest version of any generated token; -1 without generated tokens.
    oldest: int
    #: All versions that generated tokens of it, ascending.
    versions: tuple[int, ...] = ()
    #: Requested samples; more than ``n`` if the group was closed without the others.
    wanted: int = 0
    #: Samples whose payload is permanent, or lost; the group may be cut when it is n.
    kept: int = 0
    #: Tokens of all samples, prompts included, and bytes of their payloads.
    tokens: int = 0
    num_bytes: int = 0
    #: Generated tokens of all samples.
    generated: int = 0
    #: Payload servers that have its samples, and those that do not answer: it is held back meanwhile.
    servers: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    #: k of samples whose payload is lost.
    lost: frozenset[int] = frozenset()
    #: Account (a subscription's name, or ``share:POOL``) -> uses so far, or the negative code of a disposal.
    uses: dict[str, int] = field(default_factory=dict)
    #: Subscription -> last batch that contains it.
    batches: dict[str, int] = field(default_factory=dict)
    #: Share of its right answers, from 0 to 1; 0 without any.
    right: float = 0.0
    #: Field -> mean over the samples, for samplers that use it.
    priority: dict[str, float] = field(default_factory=dict)
    #: When this leader ingested it (monotonic seconds).
    since_s: float = field(default_factory=time.monotonic)

    @property
    def newest(self) -> int:
        """Newest version of any generated token; -1 without generated tokens."""
        return self.versions[-1] if self.versions else -1

    @property
    def dataset(self) -> str:
        """Name of its prompt's dataset."""
        return self.job.partition("/")[0]

    @property
    def share_byte(self) -> int:
        """``right`` as it is recorded for its prompt."""
        return share_byte(round(self.right * self.n), self.n)

    def sum_up(self, records: Collection[SampleMeta], right_from: float) -> None:
        """Add the records of its samples. ``right_from``: reward from which on an answer is right."""
        versions: set[int] = set()
        for record in records:
            self.kept += 1
            versions.update(v for v, _ in record.loss_by_version)
            versions.update(v for v in (record.oldest, record.newest) if v >= 0)
            self.tokens += record.length
            self.generated += record.num_generated
            self.num_bytes += record.num_bytes
        self.versions = tuple(sorted(versions))
        self.right = sum(record.reward >= right_from for record in records) / max(1, len(records))


def priorities(records: Collection[SampleMeta], names: Collection[str]) -> dict[str, float]:
    """Return the mean of each number in the metadata, or ``reward_info``, of a group's samples; 0 if it is missing.

    ``reward_std`` is the deviation of the rewards in the group, of samples that bear loss.
    """
    found = {}
    for name in names:
        if name == "reward_std":
            found[name] = deviation([record.reward for record in records if record.num_loss])
            continue
        values = [_number(record, name) for record in records]
        found[name] = sum(values) / len(values) if values else 0.0
    return found


def _number(record: SampleMeta, name: str) -> float:
    value = getattr(record, name, record.reward_info.get(name))
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation, exactly 0 for equal values of any size, and for none."""
    if not values:
        return 0.0
    # A power of two that lets no square overflow or vanish: scaling by it is exact.
    exponent = math.frexp(max(map(abs, values)))[1]
    scaled = [math.ldexp(value, -exponent) for value in values]
    mean = fmean(value - scaled[0] for value in scaled)
    return math.ldexp(math.sqrt(fmean((value - scaled[0] - mean) ** 2 for value in scaled)), exponent)


def read_group(job: str, raw: Mapping[bytes, bytes], place: int) -> Group:
    """Parse the hash ``group:JOB``; ``place``: in the order of completion. Raises ProtocolError."""
    uses: dict[str, int] = {}
    batches: dict[str, int] = {}
    try:
        for key, value in raw.items():
            if key.startswith(b"u:"):
                uses[key[2:].decode()] = int(value)
            elif key.startswith(b"b:"):
                batches[key[2:].decode()] = int(value)
        return Group(
            job=job,
            lane=raw[b"ln"].decode(),
            seq=int(raw[b"seq"]),
            completed=place,
            n=int(raw[b"n"]),
            wanted=int(raw.get(b"w") or raw[b"n"]),
            oldest=int(raw.get(b"o", -1)),
            uses=uses,
            batches=batches,
        )
    except (KeyError, ValueError) as exc:
        raise ProtocolError(f"Group {job} is not in Redis as penstock writes it ({exc!r:.200}).") from exc


#: (subscription, batch) pairs: the last batch of each that contains a group.
_Batches = frozenset[tuple[str, int]]


@dataclass(slots=True)
class _Lot:
    """Groups that were used in the same batches, and so become durable together."""

    groups: dict[str, Group] = field(default_factory=dict)
    #: When the last of them was added (monotonic seconds).
    spent_at: float = 0.0


class Spent:
    """Used-up groups by their batches, so that a check costs as much as there are batches."""

    def __init__(self) -> None:
        self._lots: dict[_Batches, _Lot] = {}
        self._lot_of: dict[str, _Batches] = {}

    def __len__(self) -> int:
        return len(self._lot_of)

    def clear(self) -> None:
        self._lots.clear()
        self._lot_of.clear()

    def add(self, group: Group) -> None:
        """Add a group that will not be used again; adding it once more updates its batches."""
        self.discard(group)
        batches = frozenset(group.batches.items())
        lot = self._lots.setdefault(batches, _Lot())
        lot.groups[group.job] = group
        lot.spent_at = time.monotonic()
        self._lot_of[group.job] = batches

    def discard(self, group: Group) -> None:
        batches = self._lot_of.pop(group.job, None)
        if batches is None:
            return
        lot = self._lots[batches]
        del lot.groups[group.job]
        if not lot.groups:
            del self._lots[batches]

    def durable(self, ckpt: Mapping[str, int]) -> list[Group]:
        """Return the groups that no restored trainer can need: every batch with them is covered by a checkpoint."""
        return _flat(lot for batches, lot in self._lots.items() if _behind(batches, ckpt))

    def overdue(self, ckpt: Mapping[str, int], retention_s: float, may: Collection[str]) -> list[Group]:
        """Return groups that wait longer than ``retention_s`` for checkpoints, only of subscriptions in ``may``."""
        limit = time.monotonic() - retention_s
        lots = ((batches, lot) for batches, lot in self._lots.items() if lot.spent_at < limit)
        return _flat(
            lot
            for batches, lot in lots
            if not _behind(batches, ckpt) and _behind({(sub, n) for sub, n in batches if sub not in may}, ckpt)
        )


def _behind(batches: Collection[tuple[str, int]], ckpt: Mapping[str, int]) -> bool:
    # Batches of a dropped subscription block nothing.
    return all(n <= ckpt.get(sub, n) for sub, n in batches)


def _flat(lots: Iterable[_Lot]) -> list[Group]:
    return [group for lot in lots for group in lot.groups.values()]
