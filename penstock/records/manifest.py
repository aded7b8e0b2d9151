"""The manifest of a cut batch: its samples, and which of their tokens bear loss."""

import hashlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from penstock.errors import ProtocolError
from penstock.records.codec import PAIRS, column_checks_of
from penstock.records.record import Record, build, defaults_of, names_shown


# Not frozen, since creating a frozen instance takes three times as long, for every sample. Do not change it.
@dataclass(slots=True)
class Row(Record):
    """One sequence of a manifest: a sample, or one part of a sample that has several; these are adjacent."""

    job: str
    k: int
    token: str
    server: str
    checksum: int
    num_bytes: int
    length: int
    prompt_length: int
    num_generated: int
    #: Tokens that bear loss after expiry is applied.
    num_loss: int
    oldest: int
    newest: int
    #: Oldest version that bears loss after expiry is applied; -1 if none does.
    oldest_loss: int
    reward: float
    status: str
    temperature: float = 1.0
    #: True if the payload was lost after the commit: the row is a filler with mask 0.
    lost: bool = False
    #: Version -> tokens that bear loss after expiry, as pairs, if there are several; empty: all are of oldest_loss.
    loss_versions: list[list[int]] = field(default_factory=list)
    #: See SampleMeta.
    shared: list[int] = field(default_factory=list)
    #: [name, bytes, checksum] of each side array that lies beside the payload.
    sides: list[list[Any]] = field(default_factory=list)
    #: See SampleMeta.
    logprob_kind: str = "scaled"
    #: See Sample.
    num_unproven: int = 0
    #: True if no token bore loss when it was committed: its reward is in no advantage, and in no deviation of its group
    #: (T11).
    masked: bool = False
    #: Index of this part among those of its sample.
    part: int = 0
    #: Index of its first token in the payload; -1: it is an ordinary sample, the complete payload.
    begin: int = -1

    @property
    def sample(self) -> str:
        """Id of the row: ``JOB/k``, or ``JOB/k.part`` for a part after the first."""
        return f"{self.job}/{self.k}.{self.part}" if self.part else f"{self.job}/{self.k}"

    @property
    def payload_id(self) -> str:
        """Id of the sample whose payload has the row's tokens."""
        return f"{self.job}/{self.k}"


def sample_numbers(rows: Sequence[Row]) -> list[int]:
    """Return the number of each row's sample, 0, 1, ...: the rows of a sample are adjacent."""
    numbers: list[int] = []
    number, before = -1, None
    for row in rows:
        if (key := (row.job, row.k)) != before:
            number, before = number + 1, key
        numbers.append(number)
    return numbers


def first_rows(rows: Sequence[Row]) -> list[Row]:
    """Return one row of each sample, for statistics that count samples (T11), and to read payloads once."""
    if all(row.begin < 0 for row in rows):
        return list(rows)
    return list(dict(zip(reversed(sample_numbers(rows)), reversed(rows), strict=True)).values())[::-1]


@dataclass(frozen=True, slots=True)
class Manifest(Record):
    """One cut batch. Rows are sorted by group, sample and part; every rank reads the same manifest."""

    sub: str
    #: Batch number, 1, 2, ...; the stream entry id is ``n-0``.
    n: int
    #: Version the trainer holds at the batch's first optimizer step (T2); kept on redelivery.
    train_version: int
    bound: int
    #: wait | mask | drop
    on_expiry: str
    #: sync | one_step | async
    mode: str
    #: Tokens of versions below this bear no loss (mask), or -1.
    mask_below: int
    rows: list[Row]
    #: Global denominators of T10; ``num_samples`` counts rows.
    num_loss_tokens: int
    num_samples: int
    num_groups: int
    #: Groups of this batch that this subscription uses for the first time.
    num_first_use: int
    #: Staleness over loss tokens: largest, and token mean; steps of versions, not of the optimizer.
    staleness_max: int
    staleness_mean: float
    seed: int = 0
    cut_s: float = 0.0
    #: Ranges (first, last) of versions up to ``train_version`` that age nothing (T1): abandoned by rewinds, or
    #: publications of restored weights. Ascending and disjoint; without those older than every row.
    abandoned: list[list[int]] = field(default_factory=list, metadata=PAIRS)
    #: Totals of the subscription since its start, when this batch was cut: ``dropped`` (disposals, reason -> groups:
    #: stale, rewound, filter/REASON; timed_out: dropped unfinished, of the complete run), ``raised`` (groups whose
    #: filter raised), ``rejected_samples`` and ``rejected_reward`` (samples of filtered groups, sum of their rewards:
    #: T11), ``aged_samples`` and ``aged_tokens`` (samples of stale groups, and their generated tokens: T4). {} if all
    #: are 0.
    ledger: dict[str, Any] = field(default_factory=dict)
    #: Groups that were closed without all their samples, and the number of missing samples (T11).
    num_partial_groups: int = 0
    num_missing_samples: int = 0
    #: Versions of the oldest and the newest token that bears loss; -1 if none does.
    version_min: int = -1
    version_max: int = -1
    #: Lag of the newest token that bears loss, mean over samples.
    staleness_newest: float = 0.0
    #: Lag of the oldest token that bears loss in trained batches (optimizer steps, if a batch is one); -1: unknown.
    staleness_steps: int = -1
    #: Split of its rows over ranks: balanced | tokens | strided.
    split: str = "balanced"
    #: True: tokens older than the newest one of their sample bear no loss.
    mask_offpolicy: bool = False
    #: True: samples of status truncated bear no loss.
    mask_truncated: bool = False

    def samples(self) -> list[Row]:
        return self.rows

    def to_map(self) -> dict[str, Any]:
        """Return plain values; rows as columns, without those of defaults: a third of the bytes, read in one pass."""
        columns = {}
        for name, default in defaults_of(Row):
            column = [getattr(row, name) for row in self.rows]
            if default is MISSING or any(value != default for value in column):
                columns[name] = column
        return Record.to_map(self) | {"rows": columns}

    @classmethod
    def from_map(cls, value: Any, what: str = "") -> "Manifest":
        what = what or cls.__name__
        return build(cls, value | {"rows": _rows(value.get("rows"), what)} if isinstance(value, dict) else value, what)

    @staticmethod
    def digest(data: bytes) -> str:
        """Return the digest of a manifest's bytes, by which commits detect a batch that was cut again."""
        return hashlib.blake2b(data, digest_size=12).hexdigest()


def _rows(columns: Any, what: str) -> list[Row]:
    """Make rows of their columns; raise ProtocolError if these are invalid."""
    known = defaults_of(Row)
    if not isinstance(columns, dict) or not {name for name, d in known if d is MISSING} <= columns.keys():
        raise ProtocolError(f"{what} lacks columns that rows have.")
    if unknown := columns.keys() - {name for name, _ in known}:
        raise ProtocolError(f"{what} has columns that this version of penstock does not know: {names_shown(unknown)}.")
    if any(not isinstance(column, list) for column in columns.values()):
        raise ProtocolError(f"{what} has columns that are no lists.")
    for name, check in column_checks_of(Row).items():
        if name in columns and not check(columns[name]):
            raise ProtocolError(f"{what} has rows whose {name} they cannot have.")
    count = len(columns["job"])
    if any(len(column) != count for column in columns.values()):
        raise ProtocolError(f"{what} has columns of different lengths.")
    return [Row(*row) for row in zip(*(columns.get(name, [default] * count) for name, default in known), strict=True)]
