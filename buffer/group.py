"""One complete group in the buffer's memory: a few numbers; its metadata stays in Redis until it is cut."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from penstock.errors import ProtocolError
from penstock.protocol.records.pass_rate import share_byte
from penstock.protocol.records.sample_meta import SampleMeta


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
    offsets = [value - values[0] for value in values]
    mean = fmean(offsets)
    return math.sqrt(fmean((offset - mean) ** 2 for offset in offsets))


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
