"""The fields of a row that are not searched: those shared by the samples of a job (``Group``), the rest (``Body``)."""

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ProtocolError
from penstock.history.packing import Spelling, pack_integers, squeeze, unpack_integers, unsqueeze
from penstock.history.row import TIMES, SampleRow
from penstock.payloads.format import Array
from penstock.records.codec import MAX_RECORD_BYTES, MAX_TEXT_BYTES, checks_of, pack, unpack
from penstock.records.record import Record, defaults_of, values_of
from penstock.text import utf8_safe

#: Arrays of longer samples, and the middle of longer texts, are not kept; so no block has arrays of more tokens.
MAX_LENGTH, MAX_CHARS = 4 * 1024 * 1024, 1024 * 1024

#: Name of an unreadable value in errors.
WHAT = "A row of the history"
_MICRO = 1_000_000
#: Bytes of a packed integer.
_MOST_BYTES = 6
#: Later times are invalid: the year 5138.
_MAX_TIME_S = 1e11


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Fields shared by the samples of a job."""

    #: None: the text of ``tokens``.
    prompt: str | None
    label: str
    #: [P] int32, tokens of the prompt; None: not kept, or kept with those of each sample.
    tokens: Array | None

    def text(self, spelling: Spelling) -> str:
        """Return the prompt. Raises ProtocolError if it is the text of tokens that are unknown."""
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
        """Parse ``data``; raise ProtocolError if it is invalid."""
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
    """The other fields of a sample, stored as the list of their values. Add new fields at the end."""

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
    #: Microseconds: the first known time since 1970, then the difference to each of ``TIMES``; None: not known.
    times: list[Any]
    #: None: the text of the tokens after the prompt.
    answer: str | None
    #: Prompt and label, if they differ from the group's.
    prompt: str | None = None
    label: str | None = None
    #: Tokens of its own; None: no arrays are kept.
    num_tokens: int | None = None
    #: True: they follow the tokens of the group.
    shares_tokens: bool = False
    #: Length, version, and 1 for generated plus 2 for loss, of each run of equal tokens.
    marks: list[Any] | None = None
    tries: str = ""
    pauses: list[list[float]] = field(default_factory=list)


def group_of(row: SampleRow, spelling: Spelling) -> Group:
    """Make the fields shared by a job's samples, from the first one."""
    is_kept = row.tokens is not None and len(row.tokens) <= MAX_LENGTH
    tokens = row.tokens[: row.prompt_length].astype("<i4") if is_kept and row.tokens is not None else None
    tokens = tokens if tokens is not None and _fits(tokens) else None
    is_spelled = tokens is not None and (row.is_spelled or _spells(spelling, tokens, row.prompt, special=True))
    return Group(None if is_spelled else _text(row.prompt), _text(row.label), tokens)


def _fits(tokens: Array) -> bool:
    """Return whether a record can hold the tokens as one value; a longer one could not be read."""
    return _MOST_BYTES * len(tokens) < MAX_TEXT_BYTES or len(pack_integers(tokens)) <= MAX_TEXT_BYTES


def body_of(row: SampleRow, group: Group, spelling: Spelling, tokens: Array | None, marks: list[int] | None) -> Body:
    """Make the body of ``row``, without the fields it shares with ``group``.

    Args:
        tokens: the tokens to keep: all, or those after the group's; None: not kept.
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
    """Return the values of a body, without names, which would be a fifth of a short row."""
    return list(values_of(Body)(body))


def body_from(values: Any) -> Body:
    """Make a body of its values; raise ProtocolError if they are invalid."""
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
    """Return the fields of a ``SampleRow`` by name, except its arrays. Raises ProtocolError.

    Args:
        tokens: [L] of the sample; None if they are not kept.
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
    """Return the text of tokens; raise ProtocolError if one is unknown."""
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
    return utf8_safe(text, MAX_CHARS)


def _times_of(row: SampleRow) -> list[int | None]:
    # A time in a record may be any value of its type.
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
