"""What of a row nobody looks for: packed into one value, and taken out again.

The prompt, its tokens and the label stand once for all samples of a job (``Group``); a sample has its own where they
differ.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ProtocolError
from penstock.history.packing import pack_numbers, pack_runs, pack_text, unpack_numbers, unpack_runs, unpack_text
from penstock.history.row import TIMES, SampleRow
from penstock.payloads.format import Array
from penstock.protocol.records.codec import pack, unpack
from penstock.protocol.records.field_checks import checks_of
from penstock.protocol.records.record import Record, defaults_of, values_of
from penstock.words import writable

#: Arrays of longer samples, and the middle of longer texts, are not kept.
MAX_LENGTH, MAX_CHARS = 4 * 1024 * 1024, 1024 * 1024

#: What an error calls a value that cannot be read.
_WHAT = "A row of the history"
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Group(Record):
    """What the samples of a job share. It travels as the list of its values, as ``Body`` does."""

    #: ``pack_text``
    prompt: bytes
    label: str
    #: Token ids of the prompt (``pack_numbers``), or None.
    tokens: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Body(Record):
    """A field that is new goes to the end."""

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
    #: ``pack_text`` near the prompt.
    answer: bytes
    #: Where they are not those of the group.
    prompt: bytes | None = None
    label: str | None = None
    #: True: ``tokens`` goes on where the group's prompt ends.
    shares_tokens: bool = False
    tokens: list[Any] | None = None
    #: True: ``logprobs`` has the generated tokens alone, and is 0 at all others.
    of_generated: bool = False
    logprobs: list[Any] | None = None
    #: ``pack_runs``
    versions: list[Any] | None = None
    generated: list[Any] | None = None
    loss_mask: list[Any] | None = None


def group_of(row: SampleRow) -> Group:
    """What a job's first sample says of all of them."""
    tokens = _kept(row.tokens, "<i4")
    prompt = None if tokens is None else pack_numbers(tokens[: row.prompt_length])
    return Group(pack_text(_text(row.prompt)), _text(row.label), prompt)


def body_of(row: SampleRow, group: Group) -> Body:
    """The rest of ``row``, what it shares with ``group`` left out."""
    prompt, label = pack_text(_text(row.prompt)), _text(row.label)
    tokens, logprobs = _kept(row.tokens, "<i4"), _kept(row.logprobs, "<f4")
    shares = tokens is not None and pack_numbers(tokens[: row.prompt_length]) == group.tokens
    if shares and tokens is not None:
        tokens = tokens[row.prompt_length :]
    generated = _kept(row.generated, "u1")
    alone = logprobs is not None and generated is not None and len(generated) == len(logprobs)
    if alone and logprobs is not None and generated is not None:
        alone = not logprobs[generated == 0].view(np.uint32).any()
        logprobs = logprobs[generated != 0] if alone else logprobs
    return Body(
        finish_reason=_text(row.finish_reason),
        worker=_text(row.worker),
        prompt_length=row.prompt_length,
        attempts=row.attempts,
        crashes=row.crashes,
        num_turns=row.num_turns,
        num_aborts=row.num_aborts,
        cached_tokens=row.cached_tokens,
        generate_s=row.generate_s,
        reward_s=row.reward_s,
        reward_info=row.reward_info,
        times=_times_of(row),
        answer=pack_text(_text(row.answer), _text(row.prompt)),
        prompt=None if prompt == group.prompt else prompt,
        label=None if label == group.label else label,
        shares_tokens=shares,
        tokens=None if tokens is None else pack_numbers(tokens),
        of_generated=alone,
        logprobs=None if logprobs is None else pack_numbers(logprobs),
        versions=_runs(_kept(row.versions, "<i4")),
        generated=_runs(generated),
        loss_mask=_runs(_kept(row.loss_mask, "u1")),
    )


def to_bytes(record: Body | Group) -> bytes:
    """The list of its values: names would be a fifth of a short row."""
    return pack(list(values_of(type(record))(record)))  # type: ignore[arg-type]


def group_from_bytes(data: bytes) -> Group:
    """Raises ProtocolError where ``data`` is none."""
    return Group(**_fields(Group, data))


def body_from_bytes(data: bytes) -> Body:
    """Raises ProtocolError where ``data`` is none."""
    return Body(**_fields(Body, data))


def texts(body: Body, group: Group) -> tuple[str, str]:
    """(prompt, answer) of a sample. Raises ProtocolError."""
    prompt = unpack_text(group.prompt if body.prompt is None else body.prompt)
    return prompt, unpack_text(body.answer, prompt)


def fields_of(body: Body, group: Group, *, arrays: bool) -> dict[str, Any]:
    """What of a ``SampleRow`` these hold, by name; without ``arrays`` those are None. Raises ProtocolError."""
    prompt, answer = texts(body, group)
    found: dict[str, Any] = {name: getattr(body, name) for name in _AS_THEY_ARE}
    found |= {"prompt": prompt, "answer": answer, "label": group.label if body.label is None else body.label}
    found |= dict(zip(TIMES, _times(body.times), strict=True))
    return found | (_arrays(body, group) if arrays else {})


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
)


def _arrays(body: Body, group: Group) -> dict[str, Array | None]:
    tokens = None if body.tokens is None else unpack_numbers(body.tokens, "int32")
    if tokens is not None and body.shares_tokens:
        tokens = np.concatenate((unpack_numbers(group.tokens, "int32"), tokens))
    runs = {
        name: None if (packed := getattr(body, name)) is None else unpack_runs(packed, dtype)
        for name, dtype in (("versions", "int32"), ("generated", "uint8"), ("loss_mask", "uint8"))
    }
    logprobs = None if body.logprobs is None else unpack_numbers(body.logprobs, "float32")
    generated = runs["generated"]
    if body.of_generated and logprobs is not None:
        if generated is None or np.count_nonzero(generated) != len(logprobs):
            raise ProtocolError(f"{_WHAT} has other numbers of logprobs and of generated tokens.")
        of_all = np.zeros(len(generated), np.float32)
        of_all[generated != 0] = logprobs
        logprobs = of_all
    found = {"tokens": tokens, "logprobs": logprobs, **runs}
    if len({len(array) for array in found.values() if array is not None}) > 1:
        raise ProtocolError(f"{_WHAT} has arrays of different lengths.")
    return found


def _fields(cls: type[Body] | type[Group], data: bytes) -> dict[str, Any]:
    values, known = unpack(data, _WHAT), defaults_of(cls)  # type: ignore[arg-type]
    if not isinstance(values, list) or len(values) > len(known):
        raise ProtocolError(f"{_WHAT} is not what this version of penstock writes.")
    found = {name: value for (name, _), value in zip(known, values, strict=False)}
    checks = checks_of(cls)  # type: ignore[arg-type]
    if any(name in checks and not checks[name](value) for name, value in found.items()):
        raise ProtocolError(f"{_WHAT} has values that no row has.")
    try:
        cls(**found)
    except TypeError as exc:
        raise ProtocolError(f"{_WHAT} lacks fields that a row has.") from exc
    return found


def _kept(array: Array | None, dtype: str) -> Array | None:
    if array is None or len(array) > MAX_LENGTH:
        return None
    return np.ascontiguousarray(array, np.dtype(dtype))


def _runs(array: Array | None) -> list[int] | None:
    return None if array is None else pack_runs(array)


def _text(text: str) -> str:
    return writable(text, MAX_CHARS)


def _times_of(row: SampleRow) -> list[int | None]:
    known = [round(getattr(row, name) * _MICRO) for name in TIMES]
    first = min((time for time in known if time > 0), default=0)
    return [first, *(time - first if time > 0 else None for time in known)]


def _times(packed: list[Any]) -> list[float]:
    if len(packed) != len(TIMES) + 1 or not all(type(one) is int or one is None for one in packed):
        raise ProtocolError(f"{_WHAT} has times that no row has.")
    first = packed[0] or 0
    return [0.0 if one is None else (first + one) / _MICRO for one in packed[1:]]
