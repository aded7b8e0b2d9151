"""Checks whether a decoded value has the declared type and bounds of a record's field."""

from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

#: Largest integer of a record, and smallest; checksums take 64 bits.
MOST, LEAST = 2**64 - 1, -(2**63)

Check = Callable[[Any], bool]


@cache
def checks_of(cls: type) -> dict[str, Check]:
    """Return a check for each field of a dataclass that declares more than Any; its metadata may bound a number."""
    hints, found = get_type_hints(cls), {}
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        check = _check_of(hints[name])
        if field.metadata.get("pairs"):
            check = _are_pairs
        elif field.metadata:
            check = _bounded(field.metadata["least"], field.metadata["most"])
        if check is not None:
            found[name] = check
    return found


@cache
def column_checks_of(cls: type) -> dict[str, Check]:
    """Return a check for a list of values of each field: types are checked once, not value by value."""
    hints = get_type_hints(cls)
    return {name: _list_of(hints[name]) for name in checks_of(cls)}


def bounds(least: int, most: int) -> dict[str, int]:
    """Return the metadata of a field that holds an integer between ``least`` and ``most``."""
    return {"least": least, "most": most}


def pairs() -> dict[str, bool]:
    """Return the metadata of a field that holds pairs of integers, such as ranges of versions."""
    return {"pairs": True}


def _are_pairs(value: Any) -> bool:
    return type(value) is list and all(
        type(pair) is list and len(pair) == 2 and set(map(type, pair)) == {int} for pair in value
    )


def _bounded(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


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
