"""Represent complete groups in the buffer's memory by a few numbers; their metadata stays in Redis."""

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
    """Group that is ready and not yet retired."""

    job: str
    lane: str
    #: Place in the order of admission to its lane, from 1.
    seq: int
    #: Place in the order of completion, from 1.
    completed: int
    #: Number of its samples.
    n: int
    #: Oldest version of any generated token; -1 without generated tokens.
    oldest: int
    #: Versions that generated its tokens, ascending.
    versions: tuple[int, ...] = ()
    #: Number of requested samples; more than ``n`` if the group was shortened.
    wanted: int = 0
    #: Number of samples whose payload is permanent or lost; the group can be cut once this equals ``n``.
    kept: int = 0
    #: Tokens of all samples, prompts included, and bytes of their payloads.
    tokens: int = 0
    num_bytes: int = 0
    #: Generated tokens of all samples.
    generated: int = 0
    #: Payload servers that store its samples, and those of them that do not answer: until they do, it is not cut.
    servers: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()
    #: k of samples whose payload is lost.
    lost: frozenset[int] = frozenset()
    #: Account (a subscription's name, or ``share:POOL``) -> number of uses, or the negative code of a disposal.
    uses: dict[str, int] = field(default_factory=dict)
    #: Subscription -> last batch that contains it.
    batches: dict[str, int] = field(default_factory=dict)
    #: Share of correct answers, from 0 to 1.
    right: float = 0.0
    #: Field -> mean over the samples, for samplers that use it.
    priority: dict[str, float] = field(default_factory=dict)
    #: When this leader ingested it (monotonic seconds).
    since_s: float = field(default_factory=time.monotonic)

    @property
    def newest(self) -> int:
        """Return the newest version of any generated token; -1 without generated tokens."""
        return self.versions[-1] if self.versions else -1

    @property
    def dataset(self) -> str:
        """Return the name of its prompt's dataset."""
        return self.job.partition("/")[0]

    @property
    def share_byte(self) -> int:
        """Return ``right`` in the encoding that is recorded for its prompt."""
        return share_byte(round(self.right * self.n), self.n)

    def sum_up(self, records: Collection[SampleMeta], right_from: float) -> None:
        """Add the records of its samples. ``right_from``: smallest reward of a correct answer."""
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
    """Return field -> mean over a group's samples, from their metadata or ``reward_info``; missing values count as 0.

    ``reward_std`` is the standard deviation of the rewards of samples that bear loss.
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
    """Return the population standard deviation; exactly 0 if all values are equal, or none is given."""
    if not values:
        return 0.0
    # Scale by a power of two, which is exact, so that no square overflows or underflows.
    exponent = math.frexp(max(map(abs, values)))[1]
    scaled = [math.ldexp(value, -exponent) for value in values]
    mean = fmean(value - scaled[0] for value in scaled)
    return math.ldexp(math.sqrt(fmean((value - scaled[0] - mean) ** 2 for value in scaled)), exponent)


def read_group(job: str, raw: Mapping[bytes, bytes], place: int) -> Group:
    """Parse the hash ``group:JOB``. Raises ProtocolError. ``place``: place in the order of completion."""
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


#: (subscription, last batch that contains the group) pairs.
_Batches = frozenset[tuple[str, int]]


@dataclass(slots=True)
class _BatchSet:
    """Groups that were used in the same batches, and become durable together."""

    groups: dict[str, Group] = field(default_factory=dict)
    #: When the last group was added (monotonic seconds).
    added_s: float = 0.0


class UsedUpGroups:
    """Index used-up groups by their batches: the cost of a check grows with the number of batches, not of groups."""

    def __init__(self) -> None:
        self._sets: dict[_Batches, _BatchSet] = {}
        self._set_of: dict[str, _Batches] = {}

    def __len__(self) -> int:
        return len(self._set_of)

    def clear(self) -> None:
        self._sets.clear()
        self._set_of.clear()

    def add(self, group: Group) -> None:
        """Add a group that will not be used again, or update its batches."""
        self.discard(group)
        batches = frozenset(group.batches.items())
        used = self._sets.setdefault(batches, _BatchSet())
        used.groups[group.job] = group
        used.added_s = time.monotonic()
        self._set_of[group.job] = batches

    def discard(self, group: Group) -> None:
        batches = self._set_of.pop(group.job, None)
        if batches is None:
            return
        used = self._sets[batches]
        del used.groups[group.job]
        if not used.groups:
            del self._sets[batches]

    def durable(self, ckpt: Mapping[str, int]) -> list[Group]:
        """Return the groups that no restored trainer can need: checkpoints cover all their batches."""
        return _flat(used for batches, used in self._sets.items() if _is_covered(batches, ckpt))

    def overdue(self, ckpt: Mapping[str, int], retention_s: float, may: Collection[str]) -> list[Group]:
        """Return groups that wait longer than ``retention_s`` for checkpoints of subscriptions in ``may`` alone."""
        limit = time.monotonic() - retention_s
        sets = ((batches, used) for batches, used in self._sets.items() if used.added_s < limit)
        return _flat(
            used
            for batches, used in sets
            if not _is_covered(batches, ckpt) and _is_covered({(sub, n) for sub, n in batches if sub not in may}, ckpt)
        )


def _is_covered(batches: Collection[tuple[str, int]], ckpt: Mapping[str, int]) -> bool:
    # Batches of a deleted subscription do not block retirement.
    return all(n <= ckpt.get(sub, n) for sub, n in batches)


def _flat(sets: Iterable[_BatchSet]) -> list[Group]:
    return [group for used in sets for group in used.groups.values()]
