"""Nested maps and lists, as YAML gives them, addressed by keys."""

from collections.abc import Iterator
from typing import Any

from penstock.errors import ConfigError

#: ``a.b.c`` as its parts; a place in a list is its number, as text.
Key = tuple[str, ...]


def put(values: dict[str, Any], key: Key, value: Any, source: str) -> None:
    """Set ``key``, in place; maps are merged.

    Args:
        source: source of the value, for the error.

    Raises:
        ConfigError: the key leads through a plain value, or to no place of a list.
    """
    at: Any = values
    for depth, part in enumerate(key[:-1]):
        if isinstance(at, list):
            at = at[_index(at, part, key, source)]
        else:
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
        if not isinstance(at, dict | list):
            raise ConfigError(f"{'.'.join(key)} ({source}): {'.'.join(key[: depth + 1])} is not a section.")
    last: Any = key[-1]
    if isinstance(at, list):
        last = _index(at, last, key, source)
    if isinstance(value, dict) and isinstance(old := at[last] if isinstance(at, list) else at.get(last), dict):
        for name, entry in value.items():
            put(old, (name,), entry, source)
    else:
        at[last] = value


def _index(values: list[Any], part: str, key: Key, source: str) -> int:
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(values):
        raise ConfigError(
            f"{'.'.join(key)} ({source}): {part!r} is not an index of a list of {len(values)}; count from 0, "
            "or set the whole list as [..., ...]."
        )
    return int(part)


def leaves(value: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the keys of all plain values, and of empty maps and lists."""
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from leaves(entry, (*key, str(name)))
    elif isinstance(value, list) and value:
        for index, entry in enumerate(value):
            yield from leaves(entry, (*key, str(index)))
    else:
        yield key
