"""Lists of a run, page by page: with rows, filters and orders of the command line, and a key for the next page."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from penstock.console.cli.target import Target
from penstock.console.resources import LISTS, NUMBERS, Resource, cells
from penstock.console.selection import Choice, order_of, select
from penstock.console.web.replies import NotThere
from penstock.errors import ConfigError

#: Most rows of a page, and how long a list is cached: following pages are of the same list as the first,
#: unless the cache has expired.
MAX_LIMIT = 1000
KEPT_S = 2.0
KEPT_FURTHER_S = 60.0
#: Most cached lists, each of one run and choice.
MAX_KEPT = 16
#: Most characters of a text in a row: details show more.
MAX_TEXT = 2000

Row = Mapping[str, Any]
Key = tuple[Any, ...]


class Lists:
    """Lists of any number of runs. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Key, tuple[float, list[tuple[Key, Row]]]] = {}

    def page(
        self, target: Target, noun: str, *, where: Sequence[str], sort: str, limit: int, after: str
    ) -> dict[str, Any]:
        """Return a page of a list. Blocks as the reader of the noun, or not at all if cached.

        Args:
            sort: field, or ``-field`` for descending order; '' for the order of keys.
            after: ``next`` of the page before; '' for the first.

        Returns:
            ``rows``, and their shown ``cells`` as text; ``columns``: field, title, kind and meaning of each; ``total``
            rows; ``next``, None if it is the last page.

        Raises:
            NotThere: no such list.
            ConfigError: an invalid filter, order or ``after``.
        """
        if noun not in LISTS:
            raise NotThere(f"There is no list of {noun!r}: there are {', '.join(LISTS)}.")
        resource = LISTS[noun]
        rows = self._rows(target, noun, tuple(where), sort, KEPT_FURTHER_S if after else KEPT_S)
        begin = _begin(rows, after, down=sort.startswith("-"))
        shown = [_cut(row) for _, row in rows[begin : begin + max(1, min(limit, MAX_LIMIT))]]
        more = begin + len(shown) < len(rows)
        return {
            "rows": shown,
            "cells": [_cut(row) for row in cells(resource.on_page, shown)],
            "columns": [
                {
                    "name": one.name,
                    "title": one.title,
                    "meaning": one.meaning,
                    "kind": "number" if one.kind in NUMBERS else one.kind,
                }
                for one in resource.on_page
            ],
            "total": len(rows),
            "next": orjson.dumps(_values(shown[-1], resource, sort)).decode() if more else None,
        }

    def _rows(
        self, target: Target, noun: str, where: tuple[str, ...], sort: str, kept_s: float
    ) -> list[tuple[Key, Row]]:
        name = (target.keys.run, noun, where, sort)
        with self._lock:
            read_at, rows = self._kept.get(name, (0.0, []))
        if not read_at or self._clock() - read_at >= kept_s:
            rows = _read(target, LISTS[noun], where, sort)
            with self._lock:
                self._kept.pop(name, None)
                while len(self._kept) >= MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[name] = (self._clock(), rows)
        return rows


def _read(target: Target, resource: Resource, where: Sequence[str], sort: str) -> list[tuple[Key, Row]]:
    """Return the selected rows by their keys, in order."""
    # Sorted by key, from which the next page continues: only check the field here.
    chosen = select(resource.rows(target.client, target.keys), resource.fields, Choice(where, sort or None))
    keyed = [(tuple(map(order_of, _values(row, resource, sort))), row) for row in chosen]
    return sorted(keyed, key=lambda one: one[0], reverse=sort.startswith("-"))


def _values(row: Row, resource: Resource, sort: str) -> list[Any]:
    """Return what the order of a row depends on."""
    fields = ((sort.removeprefix("-"),) if sort else ()) + resource.key
    values = (row.get(field) for field in fields)
    return [value if value is None or isinstance(value, int | float) else str(value)[:MAX_TEXT] for value in values]


def _begin(rows: Sequence[tuple[Key, Row]], after: str, *, down: bool) -> int:
    """Return the index of the first row after ``after``, whether or not that row still exists."""
    if not after:
        return 0
    try:
        values = orjson.loads(after)
    except ValueError:
        values = None
    if not isinstance(values, list) or not values:
        raise ConfigError("after: this is not where a page ended; ask for the first one anew.")
    key = tuple(map(order_of, values))
    return sum(1 for one, _ in rows if (one >= key if down else one <= key))


def _cut(value: Any) -> Any:
    """Return ``value`` with long texts and lists truncated."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, dict):
        return {name: _cut(entry) for name, entry in value.items()}
    return [_cut(entry) for entry in value[:MAX_LIMIT]] if isinstance(value, list | tuple) else value
