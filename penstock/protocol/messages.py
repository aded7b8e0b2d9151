"""What travels between the parts, and its bytes: msgpack with bounds on everything decoded, never pickle.

``Job`` is what a producer admits, ``Sample`` one answer while a worker makes it, ``SampleMeta`` the record of a
committed sample that the buffer works with, ``Manifest`` the record of one cut batch, ``Publication`` one version
of the weights.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgpack

from penstock.errors import ProtocolError
from penstock.names import MAX_ANSWERS
from penstock.protocol.keys import Keys
from penstock.protocol.record_types import bounds, checks_of, column_checks_of, pairs
from penstock.words import shown

#: Most bytes of one control record; a manifest of 4,096 groups of 16 samples stays below it.
MAX_RECORD_BYTES = 64 * 1024 * 1024
#: Most bytes of one string inside a record (a prompt, a traceback).
MAX_TEXT_BYTES = 8 * 1024 * 1024
#: Most bytes of the record of one committed sample.
MAX_META_BYTES = 512 * 1024
#: Most entries of one list or map inside a record.
MAX_ITEMS = 4 * 1024 * 1024
#: Most tokens of a sample, and most bytes of its payload.
MAX_TOKENS, MAX_PAYLOAD_BYTES = 2**31, 2**40
#: A record of more bytes is gone through without building anything first: what it claims to hold, it must hold.
_SKIP_BYTES = 64 * 1024

T = TypeVar("T", bound="Record")

#: Logprobs after temperature, or before it.
LogprobKind = Literal["scaled", "original"]


def pack(value: Any) -> bytes:
    """Plain values (None, bool, int, float, str, bytes, lists, maps with str keys) as msgpack."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes, what: str) -> Any:
    """Decode one msgpack record; raises ProtocolError that names ``what`` on anything else or on too much."""
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"{what} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} a record may have.")
    try:
        if len(data) > _SKIP_BYTES:
            _unpacker(data).skip()
        return msgpack.unpackb(data, **_limits(len(data)))
    except (ValueError, RecursionError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"{what} is not a record that penstock wrote: {exc}.") from exc


def _limits(num_bytes: int) -> dict[str, Any]:
    """Each entry takes a byte: a list that claims more than there are must not be made room for."""
    most = min(MAX_ITEMS, num_bytes)
    return {
        "raw": False,
        "strict_map_key": True,
        "max_str_len": MAX_TEXT_BYTES,
        "max_bin_len": MAX_TEXT_BYTES,
        "max_array_len": most,
        "max_map_len": most,
        "max_ext_len": 0,
    }


def _unpacker(data: bytes) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_RECORD_BYTES, **_limits(len(data)))
    unpacker.feed(data)
    return unpacker


class Record:
    """A frozen dataclass that travels as a msgpack map of its fields. Unknown fields are refused."""

    __slots__ = ()

    def to_map(self) -> dict[str, Any]:
        """Fields by name; those that hold their default are left out, as ``from_map`` puts them back."""
        # Not asdict: it copies what is nested, which takes a manifest of 512 rows from 1 to 19 ms.
        known, values = _defaults(type(self)), _values(type(self))  # type: ignore[arg-type]
        return {
            name: value
            for (name, default), value in zip(known, values(self), strict=True)
            if value != default or default is MISSING
        }

    def to_bytes(self) -> bytes:
        return pack(self.to_map())

    @classmethod
    def from_map(cls: type[T], value: Any, what: str = "") -> T:
        return _build(cls, value, what or cls.__name__)

    @classmethod
    def from_bytes(cls: type[T], data: bytes, what: str = "") -> T:
        return cls.from_map(unpack(data, what or cls.__name__), what)


@cache
def _values(cls: type[Record]) -> Callable[[Any], tuple[Any, ...]]:
    """What reads all fields of a record at once."""
    names = [name for name, _ in _defaults(cls)]  # type: ignore[arg-type]
    return attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)


@cache
def _defaults(cls: type[Record]) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each field; MISSING where there is none."""
    return tuple(
        (f.name, f.default_factory() if f.default_factory is not MISSING else f.default)
        for f in fields(cls)  # type: ignore[arg-type]
    )


def _build(cls: type[T], value: Any, what: str) -> T:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not a map of fields.")
    for name, check in checks_of(cls).items():  # type: ignore[arg-type]
        if name in value and not check(value[name]):
            raise ProtocolError(f"{what} has a field {name} that it cannot have: {shown(value[name])}.")
    try:
        return cls(**value)
    except TypeError as exc:
        if unknown := value.keys() - {name for name, _ in _defaults(cls)}:  # type: ignore[arg-type]
            raise ProtocolError(
                f"{what} has fields that this version of penstock does not know: {sorted(unknown)}."
            ) from exc
        raise ProtocolError(f"{what} lacks a field: {exc}.") from exc


@dataclass(frozen=True, slots=True)
class Job(Record):
    """One prompt to be answered ``n`` times."""

    #: ``DATASET/EPOCH/INDEX``; deterministic, so that admitting twice is seen.
    id: str
    #: Answers wanted; sample ids are ``ID/k`` with 0 <= k < n.
    n: int = field(metadata=bounds(1, MAX_ANSWERS))
    #: The prompt as text, template applied; or None where ``prompt_ids`` is given.
    prompt: str | None = None
    #: The prompt as token ids.
    prompt_ids: list[int] | None = None
    #: What the reward compares with, as text; a label of another type as JSON.
    label: str = ""
    #: Handed through to rewards and environments.
    metadata: dict[str, Any] = field(default_factory=dict)
    #: SGLang names: max_new_tokens, temperature, stop, stop_token_ids, ignore_eos, ...
    sampling: dict[str, Any] = field(default_factory=dict)
    #: Home lane: train, eval or score.
    lane: str = "train"
    #: Version at admission; no engine with an older one may start it (T12).
    not_before: int = 0
    #: A built-in name, or an import path ``module:callable`` that the worker's configuration names too; None takes the
    #: run's reward.
    reward: str | None = None
    #: Import path of an environment that the worker's configuration names too; None: a single turn.
    environment: str | None = None
    #: Answers that are given, as text or token ids: those of samples 0, 1, ... The rest of the ``n`` are drawn.
    answers: list[Any] = field(default_factory=list)
    #: The label where it is not text: a number, list or map as the dataset has it; None: ``label`` is all.
    label_value: Any = None

    @property
    def raw_label(self) -> Any:
        """The label with the type that it has in the dataset."""
        return self.label if self.label_value is None else self.label_value

    @property
    def dataset(self) -> str:
        return self.id.rsplit("/", 2)[0]

    @property
    def epoch(self) -> int:
        return int(self.id.rsplit("/", 2)[1])

    @property
    def index(self) -> int:
        return int(self.id.rsplit("/", 2)[2])


@dataclass(slots=True)
class Sample:
    """One answer, while a worker makes it; rewards and environments are given this.

    All arrays have one entry per token of the whole sequence, prompt included (L).
    """

    job: Job
    k: int
    #: [L] prompt and everything after it, as the engine saw and returned it.
    tokens: list[int] = field(default_factory=list)
    #: [L] log-probability with which the engine drew the token; 0 where nothing was drawn (T6).
    logprobs: list[float] = field(default_factory=list)
    #: [L] 1 on tokens that the policy drew.
    generated: list[int] = field(default_factory=list)
    #: [L] 1 on tokens to train.
    loss_mask: list[int] = field(default_factory=list)
    #: [L] weight version the token was drawn with; -1 where nothing was drawn (T8).
    versions: list[int] = field(default_factory=list)
    prompt_length: int = 0
    #: pending | completed | truncated | aborted | failed | given
    status: str = "pending"
    #: stop | length | abort, as the engine said; given.
    finish_reason: str = ""
    #: All generated text, special tokens left out.
    text: str = ""
    #: Generated text of each turn; ``text`` is their concatenation.
    turns: list[str] = field(default_factory=list)
    reward: float | None = None
    #: What the reward returned beside the number.
    reward_info: dict[str, Any] = field(default_factory=dict)
    #: Name -> numpy array beside the tokens (routed experts, images), stored in a key of its own; see sides.py.
    sides: dict[str, Any] = field(default_factory=dict)
    num_turns: int = 1
    num_aborts: int = 0
    cached_tokens: int = 0
    #: Drawn tokens whose version stands for the oldest that may have drawn them; of the others it is proven (T6).
    num_unproven: int = 0
    started_s: float = 0.0
    generate_s: float = 0.0
    reward_s: float = 0.0

    @property
    def id(self) -> str:
        return f"{self.job.id}/{self.k}"

    def append(
        self, tokens: list[int], *, version: int = -1, logprobs: list[float] | None = None, loss: bool = True
    ) -> None:
        """Append drawn tokens (``logprobs`` given, one version) or given ones (prompt, observation: mask 0)."""
        drawn = logprobs is not None
        if drawn and len(logprobs or []) != len(tokens):
            raise ProtocolError(f"sample {self.id}: {len(logprobs or [])} logprobs for {len(tokens)} tokens.")
        count = len(tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * count)
        self.generated.extend([1 if drawn else 0] * count)
        self.loss_mask.extend([1 if drawn and loss else 0] * count)
        self.versions.extend([version if drawn else -1] * count)


# Not frozen: one is made for every sample, and a frozen one takes three times as long. Nobody changes it.
@dataclass(slots=True)
class SampleMeta(Record):
    """Record of a committed sample: all the buffer ever sees of it. A field that is new goes to the end.

    It travels as the list of its values: names would double its bytes, and there is one for every sample.
    """

    k: int
    #: Lease token under which it was committed; part of the payload's key.
    token: str
    #: Name of the payload server.
    server: str
    #: CRC-32 of the payload bytes.
    checksum: int
    num_bytes: int
    #: L
    length: int
    prompt_length: int
    num_generated: int
    #: Temperature the behaviour logprobs are scaled by (T6).
    temperature: float
    #: Version -> tokens with loss mask 1 drawn under it, as pairs, ascending.
    loss_by_version: list[list[int]]
    #: Oldest and newest version of all generated tokens; -1 where there is none.
    oldest: int
    newest: int
    reward: float
    status: str
    finish_reason: str
    reward_info: dict[str, Any] = field(default_factory=dict)
    #: [name, bytes, CRC-32] of each side array that lies beside the payload.
    sides: list[list[Any]] = field(default_factory=list)
    worker: str = ""
    #: Where the bytes lie when samples that were committed together share one key: (k whose key it is, offset in
    #: bytes, bytes of all of them). Empty: they lie alone, under this sample's own key.
    shared: list[int] = field(default_factory=list)
    #: scaled: logprobs after temperature; original: before it (T6).
    logprob_kind: str = "scaled"
    num_turns: int = 1
    num_aborts: int = 0
    cached_tokens: int = 0
    started_s: float = 0.0
    generate_s: float = 0.0
    reward_s: float = 0.0
    #: As of Sample.
    num_unproven: int = 0

    def to_bytes(self) -> bytes:
        return pack(_values(SampleMeta)(self))

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "") -> "SampleMeta":
        return _meta(unpack(data, what or cls.__name__), what or cls.__name__)

    @property
    def num_loss(self) -> int:
        return sum(count for _, count in self.loss_by_version)


def iter_metas(data: bytes, what: str) -> Iterator[SampleMeta]:
    """Records of a ``meta:JOB`` string in the order of commits; ProtocolError where it holds anything else."""
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"{what} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} a record may have.")
    try:
        if len(data) > _SKIP_BYTES:
            _skip_all(_unpacker(data), len(data))
        for value in _unpacker(data):
            yield _meta(value, what)
    except (ValueError, RecursionError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"{what} is not a record that penstock wrote: {exc}.") from exc


def _skip_all(unpacker: msgpack.Unpacker, size: int) -> None:
    while unpacker.tell() < size:
        unpacker.skip()


def stored(keys: Keys, job: str, meta: SampleMeta) -> str:
    """Key of the bytes of a committed sample: under its own name, or that of one it was committed with."""
    return keys.payload(f"{job}/{meta.shared[0] if meta.shared else meta.k}", meta.token)


#: Values that a record has at least, whichever version of penstock wrote it, and at most.
_META_LEAST = sum(default is MISSING for _, default in _defaults(SampleMeta))
_META_MOST = len(_defaults(SampleMeta))


def _meta(values: Any, what: str) -> SampleMeta:
    if not isinstance(values, list) or len(values) < _META_LEAST:
        raise ProtocolError(f"{what} lacks fields that a committed sample has.")
    if len(values) > _META_MOST:
        raise ProtocolError(f"{what} has fields that this version of penstock does not know.")
    kinds = tuple(map(type, values))
    if kinds not in _META_KINDS:
        _check_kinds(values, kinds, what)
    meta = SampleMeta(*values)
    if not _is_sound(meta):
        raise ProtocolError(f"{what} has numbers that no committed sample has.")
    return meta


#: Types of the values of records that were found right.
_META_KINDS: set[tuple[type, ...]] = set()
_MOST_KINDS = 256


def _check_kinds(values: list[Any], kinds: tuple[type, ...], what: str) -> None:
    checks = checks_of(SampleMeta)
    for (name, _), value in zip(_defaults(SampleMeta), values, strict=False):
        if name in checks and not checks[name](value):
            raise ProtocolError(f"{what} has a field {name} that it cannot have: {shown(value)}.")
    if len(_META_KINDS) < _MOST_KINDS:
        _META_KINDS.add(kinds)


def _is_sound(meta: SampleMeta) -> bool:
    """Whether numbers and lengths can be those of a sample; its lists are of the right kinds all through."""
    for pair in meta.loss_by_version:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) is not int:
            return False
    if meta.shared and (len(meta.shared) != 3 or set(map(type, meta.shared)) != {int}):
        return False
    return (
        0 <= meta.k < MAX_ANSWERS
        and 0 <= meta.num_bytes <= MAX_PAYLOAD_BYTES
        and 0 <= meta.num_generated <= meta.length <= MAX_TOKENS
        and 0 <= meta.num_unproven <= MAX_TOKENS
        and 0 <= meta.prompt_length <= meta.length
        and math.isfinite(meta.reward)
        and math.isfinite(meta.temperature)
        and (not meta.sides or _are_lists(meta.sides))
    )


def _are_lists(values: list[Any]) -> bool:
    return set(map(type, values)) <= {list}


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

    def samples(self) -> list[Row]:
        return self.rows

    def to_map(self) -> dict[str, Any]:
        """Rows travel as columns, a third of the bytes and one pass to read; a column of defaults stays at home."""
        columns = {}
        for name, default in _defaults(Row):
            column = [getattr(row, name) for row in self.rows]
            if default is MISSING or any(value != default for value in column):
                columns[name] = column
        return Record.to_map(self) | {"rows": columns}

    @classmethod
    def from_map(cls, value: Any, what: str = "") -> "Manifest":
        what = what or cls.__name__
        return _build(cls, value | {"rows": _rows(value.get("rows"), what)} if isinstance(value, dict) else value, what)

    @staticmethod
    def digest(data: bytes) -> str:
        """Name of a manifest's bytes; a commit carries it, so that a batch that was cut anew is seen."""
        return hashlib.blake2b(data, digest_size=12).hexdigest()


def _rows(columns: Any, what: str) -> list[Row]:
    """Rows out of their columns; ProtocolError where they do not fit together."""
    known = _defaults(Row)
    if not isinstance(columns, dict) or not {name for name, d in known if d is MISSING} <= columns.keys():
        raise ProtocolError(f"{what} lacks columns that rows have.")
    if unknown := columns.keys() - {name for name, _ in known}:
        raise ProtocolError(f"{what} has columns that this version of penstock does not know: {sorted(unknown)}.")
    if any(not isinstance(column, list) for column in columns.values()):
        raise ProtocolError(f"{what} has columns that are no lists.")
    for name, check in column_checks_of(Row).items():
        if name in columns and not check(columns[name]):
            raise ProtocolError(f"{what} has rows whose {name} they cannot have.")
    count = len(columns["job"])
    if any(len(column) != count for column in columns.values()):
        raise ProtocolError(f"{what} has columns of different lengths.")
    return [Row(*row) for row in zip(*(columns.get(name, [default] * count) for name, default in known), strict=True)]


@dataclass(frozen=True, slots=True)
class Publication(Record):
    """One version of a model's weights, and where to load it from."""

    model: str
    version: int
    #: disk | nccl | gloo | cuda_ipc | checkpoint_engine: how workers that are ready at once may take it. The folder is
    #: there either way.
    transport: str
    #: Folder with config, tokenizer, safetensors and index.
    path: str
    #: Name -> [dtype, shape] of every tensor.
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    #: File name -> XXH3-64 of its bytes.
    checksums: dict[str, int] = field(default_factory=dict)
    step: int = 0
    #: Last batch that this version consumed.
    through: int = 0
    #: Announced again after every engine failed to load it.
    rev: int = 0
    published_s: float = 0.0
    #: Ranges (first, last) of versions that rewinds abandoned: an engine that holds one loads this without waiting.
    abandoned: list[list[int]] = field(default_factory=list, metadata=pairs())
    #: Digest of the index in the folder (weights/index.py), which names tensors, checksums and files; '' for none:
    #: then ``tensors`` and ``checksums`` say it here.
    index: str = ""
