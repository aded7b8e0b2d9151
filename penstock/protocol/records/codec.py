"""Bytes of records: msgpack with bounds on everything decoded, never pickle."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgpack

from penstock.errors import ProtocolError

#: Most bytes of one control record; a manifest of 4,096 groups of 16 samples stays below it.
MAX_RECORD_BYTES = 64 * 1024 * 1024
#: Most bytes of one string inside a record (a prompt, a traceback).
MAX_TEXT_BYTES = 8 * 1024 * 1024
#: Most entries of one list or map inside a record.
MAX_ITEMS = 4 * 1024 * 1024
#: Most values of one record, including those in lists and maps: an empty list is one byte, and 64 once it is
#: created. The index of 500,000 tensors has 5 million.
MAX_VALUES = 2 * MAX_ITEMS
#: Most fields, and bytes of a text, of a record that is skimmed.
MAX_SKIMMED = 256
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


def skim(data: bytes, fields: Collection[str], what: str) -> dict[str, Any]:
    """Decode only ``fields`` of a record that is a map, which hold plain values.

    Raises ProtocolError that names ``what``.
    """
    _check_size(data, what)
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=MAX_RECORD_BYTES, **_limits(0) | {"max_str_len": MAX_SKIMMED})
        unpacker.feed(data)
        num_fields = unpacker.read_map_header()
        if num_fields > MAX_SKIMMED:
            raise ValueError(f"it has {num_fields} fields")
        found = {}
        for _ in range(num_fields):
            if (name := unpacker.unpack()) in fields:
                found[name] = unpacker.unpack()
            else:
                unpacker.skip()
        return found
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
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
