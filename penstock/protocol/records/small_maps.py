"""Small records without a class: maps of plain values, and their names in Redis."""

import math
import re
from typing import Any

from penstock.errors import ProtocolError
from penstock.protocol.records.codec import unpack
from penstock.protocol.records.field_checks import LEAST, MOST
from penstock.text import safe_repr

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
