"""Bytes of records: msgpack with bounds on everything decoded, never pickle."""

from collections.abc import Iterator
from typing import Any

import msgpack

from penstock.errors import ProtocolError

#: Most bytes of one control record; a manifest of 4,096 groups of 16 samples stays below it.
MAX_RECORD_BYTES = 64 * 1024 * 1024
#: Most bytes of one string inside a record (a prompt, a traceback).
MAX_TEXT_BYTES = 8 * 1024 * 1024
#: Most entries of one list or map inside a record.
MAX_ITEMS = 4 * 1024 * 1024
#: A record of more bytes is gone through without building anything first: what it claims to hold, it must hold.
SKIP_BYTES = 64 * 1024


def pack(value: Any) -> bytes:
    """Plain values (None, bool, int, float, str, bytes, lists, maps with str keys) as msgpack."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes, what: str) -> Any:
    """Decode one msgpack record; raises ProtocolError that names ``what`` on anything else or on too much."""
    _check_size(data, what)
    try:
        if len(data) > SKIP_BYTES:
            _unpacker(data).skip()
        return msgpack.unpackb(data, **_limits(len(data)))
    except (ValueError, RecursionError, msgpack.UnpackException) as exc:
        raise _foreign(what, exc) from exc


def unpack_each(data: bytes, what: str, max_bin_bytes: int = MAX_TEXT_BYTES) -> Iterator[Any]:
    """Decode records that stand one after another, each when it is asked for; raises as ``unpack``.

    ``max_bin_bytes``: most bytes of one binary value inside a record.
    """
    _check_size(data, what)
    try:
        if len(data) > SKIP_BYTES:
            _skip_all(_unpacker(data, max_bin_bytes), len(data))
        unpacker = _unpacker(data, max_bin_bytes)
        while unpacker.tell() < len(data):
            yield unpacker.unpack()
    except (ValueError, RecursionError, msgpack.UnpackException) as exc:
        raise _foreign(what, exc) from exc


def _check_size(data: bytes, what: str) -> None:
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"{what} has {len(data)} bytes, more than the {MAX_RECORD_BYTES} a record may have.")


def _foreign(what: str, exc: Exception) -> ProtocolError:
    return ProtocolError(f"{what} is not a record that penstock wrote: {exc}.")


def _limits(num_bytes: int, max_bin_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """Each entry takes a byte: a list that claims more than there are must not be made room for."""
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


def _unpacker(data: bytes, max_bin_bytes: int = MAX_TEXT_BYTES) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_RECORD_BYTES, **_limits(len(data), max_bin_bytes))
    unpacker.feed(data)
    return unpacker


def _skip_all(unpacker: msgpack.Unpacker, size: int) -> None:
    while unpacker.tell() < size:
        unpacker.skip()
