"""What of a row nobody looks for, as values: what the samples of a job share (``Group``), and the rest (``Body``)."""

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ProtocolError
from penstock.history.packing import pack_integers, squeeze, unpack_integers, unsqueeze
from penstock.history.pieces import Spelling
from penstock.history.row import TIMES, SampleRow
from penstock.payloads.format import Array
from penstock.protocol.records.codec import MAX_RECORD_BYTES, MAX_TEXT_BYTES, pack, unpack
from penstock.protocol.records.field_checks import checks_of
from penstock.protocol.records.record import Record, defaults_of, values_of
from penstock.words import writable

#: Arrays of longer samples, and the middle of longer texts, are not kept; so no block has arrays of more tokens.
MAX_LENGTH, MAX_CHARS = 4 * 1024 * 1024, 1024 * 1024

#: What an error calls a value that cannot be read.
WHAT = "A row of the history"
_MICRO = 1_000_000
#: Bytes of a packed integer.
_MOST_BYTES = 6
#: Later ones are none: the year 5138.
_MAX_TIME_S = 1e11


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What the samples of a job share."""

    #: None: it is what ``tokens`` spell.
    prompt: str | None
    label: str
    #: [P] int32, those of the prompt; None: not kept, or kept with those of each sample.
    tokens: Array | None

    def text(self, spelling: Spelling) -> str:
        """Its prompt. Raises ProtocolError where its tokens are to spell it, and cannot."""
        if self.prompt is not None:
            return self.prompt
        if self.tokens is None:
            raise ProtocolError(f"{WHAT} has a prompt without words and tokens.")
        return spelled(spelling, self.tokens, special=True)

    def to_bytes(self) -> bytes:
        tokens = None if self.tokens is None else [len(self.tokens), pack_integers(self.tokens)]
        return squeeze(pack([self.prompt, self.label, tokens]))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Group":
        """Raises ProtocolError where ``data`` is none."""
        values = unpack(unsqueeze(data, MAX_RECORD_BYTES), WHAT)
        if not isinstance(values, list) or len(values) != 3:
            raise ProtocolError(f"{WHAT} is not what this version of penstock writes.")
        prompt, label, tokens = values
        if not (isinstance(prompt, str | None) and isinstance(label, str)):
            raise ProtocolError(f"{WHAT} has values that no row has.")
        if tokens is None:
            return cls(prompt, label, None)
        if not isinstance(tokens, list) or len(tokens) != 2 or type(tokens[0]) is not int or tokens[0] > MAX_LENGTH:
            raise ProtocolError(f"{WHAT} has values that no row has.")
        return cls(prompt, label, unpack_integers(tokens[1], tokens[0]))


@dataclass(frozen=True, slots=True)
class Body(Record):
    """The rest of a sample; it travels as the list of its values. A field that is new goes to the end."""

    finish_reason: str
    worker: str
    prompt_length: int
    attempts: int
    crashes: int
    num_turns: int
    num_aborts: int
    cached_tokens: int
    generate_s: float
    reward_s: float
    reward_info: dict[str, Any]
    #: Microseconds: the first one that is known since 1970, then between it and each of ``TIMES``; None: not known.
    times: list[Any]
    #: None: what the tokens behind the prompt spell.
    answer: str | None
    #: Where they are not those of the group.
    prompt: str | None = None
    label: str | None = None
    #: Tokens of its own; None: no arrays are kept.
    num_tokens: int | None = None
    #: True: these go on where the tokens of the group end.
    shares_tokens: bool = False
    #: Length, version, and 1 for drawn plus 2 for loss, of each run of equal tokens.
    marks: list[Any] | None = None
    tries: str = ""
    pauses: list[list[float]] = field(default_factory=list)


def group_of(row: SampleRow, spelling: Spelling) -> Group:
    """What a job's first sample says of all of them."""
    is_kept = row.tokens is not None and len(row.tokens) <= MAX_LENGTH
    tokens = row.tokens[: row.prompt_length].astype("<i4") if is_kept and row.tokens is not None else None
    tokens = tokens if tokens is not None and _fits(tokens) else None
    is_spelled = tokens is not None and (row.is_spelled or _spells(spelling, tokens, row.prompt, special=True))
    return Group(None if is_spelled else _text(row.prompt), _text(row.label), tokens)


def _fits(tokens: Array) -> bool:
    """Whether a record takes them as one value: what it does not take nobody could read."""
    return _MOST_BYTES * len(tokens) < MAX_TEXT_BYTES or len(pack_integers(tokens)) <= MAX_TEXT_BYTES


def body_of(row: SampleRow, group: Group, spelling: Spelling, tokens: Array | None, marks: list[int] | None) -> Body:
    """The rest of ``row``, what it shares with ``group`` left out.

    Args:
        tokens: its own, where they are kept: all, or those behind the group's.
        marks: see ``Body``.
    """
    label = _text(row.label)
    shares = tokens is not None and row.tokens is not None and len(tokens) < len(row.tokens)
    is_alike = shares and row.is_spelled and group.prompt is None
    prompt = None if is_alike or (text := _text(row.prompt)) == group.text(spelling) else text
    is_spelled = tokens is not None and (row.is_spelled or _spells_answer(spelling, row))
    return Body(
        _text(row.finish_reason),
        _text(row.worker),
        row.prompt_length,
        row.attempts,
        row.crashes,
        row.num_turns,
        row.num_aborts,
        row.cached_tokens,
        row.generate_s,
        row.reward_s,
        row.reward_info,
        _times_of(row),
        None if is_spelled else _text(row.answer),
        prompt,
        None if label == group.label else label,
        None if tokens is None else len(tokens),
        shares,
        marks,
        _text(row.tries),
        row.pauses,
    )


def values(body: Body) -> list[Any]:
    """Names would be a fifth of a short row."""
    return list(values_of(Body)(body))


def body_from(values: Any) -> Body:
    """Raises ProtocolError where these are not the values of one."""
    known = defaults_of(Body)
    if not isinstance(values, list) or len(values) > len(known):
        raise ProtocolError(f"{WHAT} is not what this version of penstock writes.")
    checks = checks_of(Body)
    for (name, _), value in zip(known, values, strict=False):
        if name in checks and not checks[name](value):
            raise ProtocolError(f"{WHAT} has values that no row has.")
    try:
        return Body(*values)
    except TypeError as exc:
        raise ProtocolError(f"{WHAT} lacks fields that a row has.") from exc


def fields_of(body: Body, group: Group, spelling: Spelling, tokens: Array | None) -> dict[str, Any]:
    """What of a ``SampleRow`` these hold, by name, but for its arrays. Raises ProtocolError.

    Args:
        tokens: [L] of the sample; None where they are not kept.
    """
    found: dict[str, Any] = {name: getattr(body, name) for name in _AS_THEY_ARE}
    found["prompt"] = group.text(spelling) if body.prompt is None else body.prompt
    found["label"] = group.label if body.label is None else body.label
    found["answer"] = body.answer
    if body.answer is None:
        if tokens is None:
            raise ProtocolError(f"{WHAT} has an answer without words and tokens.")
        found["answer"] = spelled(spelling, tokens[body.prompt_length :], special=False)
    return found | dict(zip(TIMES, _times(body.times), strict=True))


_AS_THEY_ARE = (
    "finish_reason",
    "worker",
    "prompt_length",
    "attempts",
    "crashes",
    "num_turns",
    "num_aborts",
    "cached_tokens",
    "generate_s",
    "reward_s",
    "reward_info",
    "tries",
    "pauses",
)


def spelled(spelling: Spelling, tokens: Array, *, special: bool) -> str:
    """Raises ProtocolError where what one stands for is not known."""
    found = spelling.text(tokens.tolist(), special=special)
    if found is None:
        raise ProtocolError(f"{WHAT} has tokens whose text is not there.")
    return _text(found)


def _spells(spelling: Spelling, tokens: Array, text: str, *, special: bool) -> bool:
    return bool(text) and spelling.text(tokens.tolist(), special=special) == text


def _spells_answer(spelling: Spelling, row: SampleRow) -> bool:
    assert row.tokens is not None
    return _spells(spelling, row.tokens[row.prompt_length :], row.answer, special=False)


def _text(text: str) -> str:
    return writable(text, MAX_CHARS)


def _times_of(row: SampleRow) -> list[int | None]:
    # What a record calls a time may be anything that its type holds.
    known = [round(time * _MICRO) if 0 < (time := getattr(row, name)) < _MAX_TIME_S else 0 for name in TIMES]
    first = min((time for time in known if time > 0), default=0)
    return [first, *(time - first if time > 0 else None for time in known)]


def _times(packed: list[Any]) -> list[float]:
    if len(packed) != len(TIMES) + 1 or not all(type(one) is int or one is None for one in packed):
        raise ProtocolError(f"{WHAT} has times that no row has.")
    first = packed[0] or 0
    times = [0.0 if one is None else (first + one) / _MICRO for one in packed[1:]]
    if not all(0 <= time <= _MAX_TIME_S for time in times):
        raise ProtocolError(f"{WHAT} has times that no row has.")
    return times
