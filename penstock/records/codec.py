"""Bytes of records: msgpack with bounds on everything decoded, never pickle."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack

from penstock.errors import ProtocolError
from penstock.text import safe_repr

#: Largest integer of a record, and smallest; checksums take 64 bits.
MOST, LEAST = 2**64 - 1, -(2**63)

Check = Callable[[Any], bool]


@cache
def checks_of(cls: type) -> dict[str, Check]:
    """Return a check for each field of a dataclass that declares more than Any, or has one in its metadata."""
    hints, found = get_type_hints(cls), {}
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        if check := field.metadata.get("check") or _check_of(hints[name]):
            found[name] = check
    return found


@cache
def column_checks_of(cls: type) -> dict[str, Check]:
    """Return a check for a list of values of each field: types are checked once, not value by value."""
    hints = get_type_hints(cls)
    return {name: _list_of(hints[name]) for name in checks_of(cls)}


def _are_pairs(value: Any) -> bool:
    return type(value) is list and all(
        type(pair) is list and len(pair) == 2 and set(map(type, pair)) == {int} for pair in value
    )


#: Metadata of a field that holds pairs of integers, such as ranges of versions.
PAIRS: dict[str, Check] = {"check": _are_pairs}


def _check_of(hint: Any) -> Check | None:
    """Return the check of a type; None: any value is valid, within the limits of decoding."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        parts = [_check_of(one) for one in inner]
        return None if None in parts else lambda value: any(part(value) for part in parts if part is not None)
    if origin is Literal:
        return lambda value: value in inner
    if origin is list:
        return _list_of(inner[0])
    if origin is tuple:
        return _tuple_of(inner)
    if origin in (dict, Mapping):
        return _dict_of(inner[1])
    if hint is float:
        return lambda value: type(value) in (float, int)
    if hint is NoneType:
        return lambda value: value is None
    if hint in (str, int, bool, bytes, list, dict):
        return lambda value: type(value) is hint
    return None


def _list_of(hint: Any) -> Check:
    if hint in (str, int, bool, bytes):
        return lambda value: type(value) is list and set(map(type, value)) <= {hint}
    if hint is float:
        return lambda value: type(value) is list and set(map(type, value)) <= {float, int}
    each = _check_of(hint)
    return lambda value: type(value) is list and (each is None or all(map(each, value)))


def _tuple_of(hints: tuple[Any, ...]) -> Check:
    each = _check_of(hints[0]) if hints[1:] == (...,) else None
    return lambda value: isinstance(value, list | tuple) and (each is None or all(map(each, value)))


def _dict_of(hint: Any) -> Check:
    each = _check_of(hint)
    return lambda value: type(value) is dict and (each is None or all(map(each, value.values())))


#: Most bytes of one control record; a manifest of 4,096 groups of 16 samples stays below it.
MAX_RECORD_BYTES = 64 * 1024 * 1024
#: Most bytes of one string inside a record (a prompt, a traceback).
MAX_TEXT_BYTES = 8 * 1024 * 1024
#: Most entries of one list or map inside a record.
MAX_ITEMS = 4 * 1024 * 1024
#: Most values of one record, including those in lists and maps: an empty list is one byte, and 64 once it is
#: created. The index of 500,000 tensors has 5 million.
MAX_VALUES = 2 * MAX_ITEMS
#: A larger record is scanned without building anything first, so that its claimed sizes are checked.
SKIP_BYTES = 64 * 1024


def pack(value: Any) -> bytes:
    """Encode plain values (None, bool, int, float, str, bytes, lists, maps with str keys) as msgpack."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def copy_plain(value: Any) -> Any:
    """Return ``value`` with its lists and maps copied, nested ones included. Other values are shared."""
    if isinstance(value, dict):
        return {key: copy_plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copy_plain(one) if isinstance(one, (list, dict)) else one for one in value]
    return value


def unpack(data: bytes, what: str) -> Any:
    """Decode one msgpack record; raises ProtocolError that names ``what`` on anything else or on too much."""
    _check_size(data, what)
    try:
        if len(data) > SKIP_BYTES:
            _unpacker(data).skip()
        return msgpack.unpackb(data, **_limits(len(data)), **_counting(data))
    except (ValueError, RecursionError, msgpack.UnpackException) as exc:
        raise _foreign(what, exc) from exc


def unpack_each(data: bytes, what: str, max_bin_bytes: int = MAX_TEXT_BYTES) -> Iterator[Any]:
    """Decode concatenated records, each when it is requested; raises as ``unpack``.

    ``MAX_VALUES`` limits all of them together.

    ``max_bin_bytes``: most bytes of one binary value inside a record.
    """
    _check_size(data, what)
    try:
        if len(data) > SKIP_BYTES:
            _skip_all(_unpacker(data, max_bin_bytes), len(data))
        unpacker, left = _unpacker(data, max_bin_bytes, _counting(data)), MAX_VALUES
        while unpacker.tell() < len(data):
            if (left := left - 1) < 0:
                raise _too_many()
            yield unpacker.unpack()
    except (ValueError, RecursionError, msgpack.UnpackException) as exc:
        raise _foreign(what, exc) from exc


def _check_size(data: bytes, what: str) -> None:
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"{what} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} a record may have.")


def _foreign(what: str, exc: Exception) -> ProtocolError:
    return ProtocolError(f"{what} is not a record that penstock wrote: {exc}.")


def _limits(num_bytes: int, max_bin_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """Return msgpack's limits: each entry takes a byte, so a list must not claim more entries than bytes."""
    most = min(MAX_ITEMS, num_bytes)
    return {
        "raw": False,
        "strict_map_key": True,
        "max_str_len": MAX_TEXT_BYTES,
        "max_bin_len": max_bin_bytes,
        "max_array_len": most,
        "max_map_len": most,
        "max_ext_len": 0,
    }


class _Count:
    """Refuses a record with too many values while it is decoded: counts lists and maps from the inside out."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def of_list(self, made: list[Any]) -> list[Any]:
        self._take(1 + len(made))
        return made

    def of_map(self, made: dict[Any, Any]) -> dict[Any, Any]:
        self._take(1 + 2 * len(made))
        return made

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _too_many()


def _too_many() -> ValueError:
    return ValueError(f"it has more than {MAX_VALUES} values")


def _counting(data: bytes) -> dict[str, Any]:
    """Return the counting hooks; {} for a small record: a call for each list and map costs more than they do."""
    if len(data) <= SKIP_BYTES:
        return {}
    count = _Count()
    return {"list_hook": count.of_list, "object_hook": count.of_map}


def _unpacker(
    data: bytes, max_bin_bytes: int = MAX_TEXT_BYTES, counting: Mapping[str, Any] | None = None
) -> msgpack.Unpacker:
    limits = _limits(len(data), max_bin_bytes)
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_RECORD_BYTES, **limits, **(counting or {}))
    unpacker.feed(data)
    return unpacker


def _skip_all(unpacker: msgpack.Unpacker, size: int) -> None:
    while unpacker.tell() < size:
        unpacker.skip()


_COUNT = re.compile(rb"-?\d{1,18}")


def unpack_map(data: bytes, what: str) -> dict[str, Any]:
    """Decode a record that is a map; raises ProtocolError that names ``what`` on anything else."""
    value = unpack(data, what)
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not a record that penstock wrote.")
    return value


def number_in(record: dict[str, Any], field: str, what: str, default: float | None = None) -> float:
    """Return a finite number of a record; raise ProtocolError if it is invalid, or missing without a ``default``."""
    value: Any = record.get(field, default)
    if type(value) not in (float, int) or not math.isfinite(value):
        raise ProtocolError(f"{what} has a field {field} that it cannot have: {safe_repr(value)}.")
    return float(value)


def count_in(record: dict[str, Any], field: str, what: str, default: int | None = None) -> int:
    """Return an integer of a record; errors as ``number_in``."""
    value: Any = record.get(field, default)
    if type(value) is not int or not LEAST <= value <= MOST:
        raise ProtocolError(f"{what} has a field {field} that it cannot have: {safe_repr(value)}.")
    return value


def count_of(raw: bytes | None, what: str, remedy: str = "") -> int:
    """Parse a count in Redis, 0 if it is not set; raise ProtocolError as ``text_of``."""
    return int(text_of(b"0" if raw is None else raw, _COUNT, what, remedy))


def count_shown(raw: bytes | None) -> int | None:
    """Parse a count for display or optional use; None if it is invalid or missing."""
    return int(raw) if raw is not None and _COUNT.fullmatch(raw) else None


def value_shown(raw: bytes) -> int | str:
    """Return a count if the value is one, else the text: invalid values are shown as they are."""
    count = count_shown(raw)
    return name_shown(raw) if count is None else count


def text_of(raw: bytes, allowed: re.Pattern[bytes], what: str, remedy: str = "") -> str:
    """Decode text in Redis; raise ProtocolError that begins with ``what`` if no verb writes such text."""
    if not allowed.fullmatch(raw):
        raise ProtocolError(f"{what} is {safe_repr(raw)} in Redis, which no verb writes{remedy and f': {remedy}'}.")
    return raw.decode()


def name_in(raw: bytes, what: str) -> str:
    """Decode the name of a field or a key in Redis; raise ProtocolError that begins with ``what`` if it is not text."""
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise ProtocolError(f"{what} has a name that is not text: {safe_repr(raw)}.") from exc


def name_shown(raw: bytes) -> str:
    """Decode a name for display, whatever its bytes."""
    return raw.decode(errors="backslashreplace")
