"""The base of records: frozen dataclasses that are sent as maps of their fields, each of which is checked when read."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from penstock.errors import ProtocolError
from penstock.records.codec import checks_of, pack, unpack
from penstock.text import safe_repr

Entry = TypeVar("Entry")
V = TypeVar("V")

log = logging.getLogger(__name__)

#: Most messages that are remembered as logged.
_MOST = 1000
_said: set[str] = set()


def readable(records: Mapping[bytes, V], read: Callable[[bytes, V], Entry]) -> list[Entry]:
    """Read each entry (field, value), sorted by field. Entries that ``read`` refuses are skipped and logged.

    Args:
        read: raises ProtocolError for an invalid entry.
    """
    found = []
    for field, raw in sorted(records.items()):
        try:
            found.append(read(field, raw))
        except ProtocolError as exc:
            _leave_out(str(exc))
    return found


def _leave_out(why: str) -> None:
    """Log a skipped entry once: readers that poll twice a second would fill the log."""
    if why in _said:
        return
    if len(_said) >= _MOST:
        _said.clear()
    _said.add(why)
    log.warning("an entry that cannot be read is left out: %s", why)


T = TypeVar("T", bound="Record")


class Record:
    """A frozen dataclass that is encoded as a msgpack map of its fields. Unknown fields are refused."""

    __slots__ = ()

    def to_map(self) -> dict[str, Any]:
        """Return the fields by name, without those that hold their default, which ``from_map`` restores."""
        # Not asdict: it copies nested values, which takes a manifest of 512 rows from 1 to 19 ms.
        known, values = defaults_of(type(self)), values_of(type(self))  # type: ignore[arg-type]
        return {
            name: value
            for (name, default), value in zip(known, values(self), strict=True)
            if value != default or default is MISSING
        }

    def to_bytes(self) -> bytes:
        return pack(self.to_map())

    @classmethod
    def from_map(cls: type[T], value: Any, what: str = "") -> T:
        return build(cls, value, what or cls.__name__)

    @classmethod
    def from_bytes(cls: type[T], data: bytes, what: str = "") -> T:
        return cls.from_map(unpack(data, what or cls.__name__), what)


@cache
def values_of(cls: type[Record]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads all fields of a record at once."""
    names = [name for name, _ in defaults_of(cls)]  # type: ignore[arg-type]
    return attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)


@cache
def defaults_of(cls: type[Record]) -> tuple[tuple[str, Any], ...]:
    """Return (name, default) of each field; MISSING if it has none."""
    return tuple(
        (f.name, f.default_factory() if f.default_factory is not MISSING else f.default)
        for f in fields(cls)  # type: ignore[arg-type]
    )


def build(cls: type[T], value: Any, what: str) -> T:
    """Make a record of a map of its fields; raise ProtocolError that names ``what``."""
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not a map of fields.")
    for name, check in checks_of(cls).items():  # type: ignore[arg-type]
        if name in value and not check(value[name]):
            raise ProtocolError(f"{what} has a field {name} that it cannot have: {safe_repr(value[name])}.")
    try:
        return cls(**value)
    except TypeError as exc:
        if unknown := value.keys() - {name for name, _ in defaults_of(cls)}:  # type: ignore[arg-type]
            raise ProtocolError(
                f"{what} has fields that this version of penstock does not know: {names_shown(unknown)}."
            ) from exc
        raise ProtocolError(f"{what} lacks a field: {exc}.") from exc


#: Most unknown fields that are named.
_NAMED = 8


def names_shown(fields: set[Any]) -> str:
    """Join the first names for an error; a foreign map may have many, and bytes as names."""
    named = sorted(map(safe_repr, fields))[:_NAMED]
    return ", ".join(named) + (f" and {more} more" if (more := len(fields) - len(named)) else "")
