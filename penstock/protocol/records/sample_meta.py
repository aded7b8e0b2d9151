"""The record of a committed sample: all the buffer ever sees of it."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from typing import Any

from penstock.errors import ProtocolError
from penstock.names import MAX_ANSWERS, is_name
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import copy_plain, pack, unpack, unpack_each
from penstock.protocol.records.field_checks import checks_of, pairs
from penstock.protocol.records.record import Record, defaults_of, values_of
from penstock.words import shown

#: Most bytes of the record of one committed sample.
MAX_META_BYTES = 512 * 1024
#: Most tokens of a sample, and most bytes of its payload.
MAX_TOKENS, MAX_PAYLOAD_BYTES = 2**31, 2**40
#: Newest version that there can be: what the queue counts with counts no further.
MAX_VERSION = 2**53


# Not frozen: one is made for every sample, and a frozen one takes three times as long. Nobody changes it.
@dataclass(slots=True)
class SampleMeta(Record):
    """Record of a committed sample: all the buffer ever sees of it. A field that is new goes to the end.

    It travels as the list of its values: names would double its bytes, and there is one for every sample.
    """

    k: int
    #: Lease token under which it was committed, with the form of a name; part of the payload's key.
    token: str
    #: Name of the payload server.
    server: str
    #: XXH3-64 of the payload bytes.
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
    #: As of Sample.
    status: str
    finish_reason: str
    reward_info: dict[str, Any] = field(default_factory=dict)
    #: [name, bytes, CRC-32] of each side array that lies beside the payload; its name is part of a key too. Of one that
    #: the group shares a fourth: the k under whose name it lies.
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
    #: When it was packed to be committed (Unix time, seconds).
    packed_s: float = 0.0
    #: Of sample 0, the beginning of its job's label.
    label: str = ""
    #: As of Sample.
    pauses: list[list[int]] = field(default_factory=list, metadata=pairs())
    first_token_s: float = 0.0
    drawn_s: float = 0.0

    def to_bytes(self) -> bytes:
        return pack(values_of(SampleMeta)(self))

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "") -> "SampleMeta":
        return _meta(unpack(data, what or cls.__name__), what or cls.__name__)

    def copy_for_user(self) -> "SampleMeta":
        """Return a copy that user code may change: it shares no list or map with this record."""
        return SampleMeta(*(copy_plain(value) for value in values_of(SampleMeta)(self)))

    @property
    def num_loss(self) -> int:
        return sum(count for _, count in self.loss_by_version)


def iter_metas(data: bytes, what: str) -> Iterator[SampleMeta]:
    """Records of a ``meta:JOB`` string in the order of commits; ProtocolError where it holds anything else."""
    for value in unpack_each(data, what):
        yield _meta(value, what)


def stored(keys: Keys, job: str, meta: SampleMeta) -> str:
    """Key of the bytes of a committed sample: under its own name, or that of one it was committed with."""
    return keys.payload(f"{job}/{meta.shared[0] if meta.shared else meta.k}", meta.token)


#: Values that a record has at least, whichever version of penstock wrote it, and at most.
_META_LEAST = sum(default is MISSING for _, default in defaults_of(SampleMeta))
_META_MOST = len(defaults_of(SampleMeta))


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
        raise ProtocolError(f"{what} has values that no committed sample has.")
    return meta


#: Types of the values of records that were found right.
_META_KINDS: set[tuple[type, ...]] = set()
_MOST_KINDS = 256


def _check_kinds(values: list[Any], kinds: tuple[type, ...], what: str) -> None:
    checks = checks_of(SampleMeta)
    for (name, _), value in zip(defaults_of(SampleMeta), values, strict=False):
        if name in checks and not checks[name](value):
            raise ProtocolError(f"{what} has a field {name} that it cannot have: {shown(value)}.")
    if len(_META_KINDS) < _MOST_KINDS:
        _META_KINDS.add(kinds)


def _is_sound(meta: SampleMeta) -> bool:
    """Whether numbers, lengths and names can be those of a sample; its lists are of the right kinds all through."""
    for pair in meta.loss_by_version:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) is not int:
            return False
        if not 0 <= pair[1] <= MAX_TOKENS:
            return False
    if meta.shared and not _is_share(meta.shared, meta.num_bytes):
        return False
    return (
        0 <= meta.k < MAX_ANSWERS
        and 0 <= meta.num_bytes <= MAX_PAYLOAD_BYTES
        and 0 <= meta.num_generated <= meta.length <= MAX_TOKENS
        and 0 <= meta.num_unproven <= MAX_TOKENS
        and 0 <= meta.prompt_length <= meta.length
        and -1 <= meta.oldest <= MAX_VERSION
        and -1 <= meta.newest <= MAX_VERSION
        and math.isfinite(meta.reward)
        and math.isfinite(meta.temperature)
        and is_name(meta.token)
        and (not meta.sides or all(map(_is_side, meta.sides)))
    )


def _is_share(shared: list[int], num_bytes: int) -> bool:
    if len(shared) != 3 or set(map(type, shared)) != {int}:
        return False
    home, begin, size = shared
    return 0 <= home < MAX_ANSWERS and 0 <= begin <= begin + num_bytes <= size <= MAX_PAYLOAD_BYTES


def _is_side(side: Any) -> bool:
    if type(side) is not list or list(map(type, side)) not in ([str, int, int], [str, int, int, int]):
        return False
    name, num_bytes, checksum, *home = side
    return (
        is_name(name)
        and 0 <= num_bytes <= MAX_PAYLOAD_BYTES
        and 0 <= checksum < 2**32
        and all(0 <= k < MAX_ANSWERS for k in home)
    )
