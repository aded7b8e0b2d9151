"""The manifest of a cut batch: which samples it holds, and what of them bears loss."""

import hashlib
from dataclasses import MISSING, dataclass, field
from typing import Any

from penstock.errors import ProtocolError
from penstock.protocol.records.field_checks import column_checks_of, pairs
from penstock.protocol.records.record import Record, build, defaults_of, names_shown


# Not frozen: one is made for every sample, and a frozen one takes three times as long. Nobody changes it.
@dataclass(slots=True)
class Row(Record):
    """One sample of a manifest."""

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
    #: Oldest version that bears loss after expiry is applied; -1 where none does.
    oldest_loss: int
    reward: float
    status: str
    temperature: float = 1.0
    #: True where the payload was lost after the commit: the row is a filler with mask 0.
    lost: bool = False
    #: Version -> tokens that bear loss after expiry, as pairs, where there are several; empty: all are of oldest_loss.
    loss_versions: list[list[int]] = field(default_factory=list)
    #: As of SampleMeta.
    shared: list[int] = field(default_factory=list)
    #: [name, bytes, CRC-32] of each side array that lies beside the payload.
    sides: list[list[Any]] = field(default_factory=list)
    #: As of SampleMeta.
    logprob_kind: str = "scaled"
    #: As of Sample.
    num_unproven: int = 0
    #: True where no token bore loss when it was committed, whatever became of it later: its reward takes part in no
    #: advantage, and in no deviation of its group (T11).
    masked: bool = False

    @property
    def sample(self) -> str:
        return f"{self.job}/{self.k}"


@dataclass(frozen=True, slots=True)
class Manifest(Record):
    """One cut batch. Rows stand group by group; every rank reads the same manifest."""

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
    #: Global denominators of T10.
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
    #: Ranges (first, last) of versions up to ``train_version`` that age nothing (T1): rewinds abandoned them, or they
    #: published the restored weights once more. Ascending and disjoint; none that every row is newer than.
    abandoned: list[list[int]] = field(default_factory=list, metadata=pairs())
    #: What the subscription gave up unused since its start, when this batch was cut: ``dropped`` (reason -> groups:
    #: stale, rewound, filter/REASON; timed_out: given up unfinished, of the whole run), ``raised`` (groups whose filter
    #: raised), ``rejected_samples`` and ``rejected_reward`` (samples of filtered groups, sum of their rewards: T11),
    #: ``aged_samples`` and ``aged_tokens`` (samples of groups given up for their age, tokens that they had generated:
    #: T4). {} where that is nothing.
    ledger: dict[str, Any] = field(default_factory=dict)
    #: Groups that were closed without all their samples, and the samples that are not there (T11).
    num_partial_groups: int = 0
    num_missing_samples: int = 0
    #: Versions of the oldest and the newest token that bears loss; -1 where none does.
    version_min: int = -1
    version_max: int = -1
    #: Lag of the newest token that bears loss, mean over samples.
    staleness_newest: float = 0.0
    #: Lag of the oldest token that bears loss in batches trained (optimizer steps, where a batch is one); -1: unknown.
    staleness_steps: int = -1
    #: How its rows are split over ranks: balanced | tokens | strided.
    split: str = "balanced"
    #: True: tokens older than the newest one of their sample bear no loss.
    mask_offpolicy: bool = False
    #: True: samples of status truncated bear no loss.
    mask_truncated: bool = False

    def samples(self) -> list[Row]:
        return self.rows

    def to_map(self) -> dict[str, Any]:
        """Rows travel as columns, a third of the bytes and one pass to read; a column of defaults stays at home."""
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
        """Name of a manifest's bytes; a commit carries it, so that a batch that was cut again is seen."""
        return hashlib.blake2b(data, digest_size=12).hexdigest()


def _rows(columns: Any, what: str) -> list[Row]:
    """Rows out of their columns; ProtocolError where they do not fit together."""
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
