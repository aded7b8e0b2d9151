"""Lists of a run, page by page: with rows, filters and orders of the command line."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.console.cli.target import Target
from penstock.console.resources import LISTS, NUMBERS, Resource, cells
from penstock.console.selection import Choice, order_of, select
from penstock.console.web.replies import NotThere

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


class Lists:
    """Lists of any number of runs. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[Any, ...], tuple[float, list[Row]]] = {}

    def page(
        self, target: Target, noun: str, *, where: Sequence[str], sort: str, limit: int, after: int
    ) -> dict[str, Any]:
        """Return a page of a list. Blocks as the reader of the noun, or not at all if cached.

        Args:
            sort: field, or ``-field`` for descending order; '' for the order of keys.
            after: number of rows to skip: ``next`` of the page before.

        Returns:
            ``rows``, and their shown ``cells`` as text; ``columns``: field, title, kind and meaning of each; ``total``
            rows; ``next``, None if it is the last page.

        Raises:
            NotThere: no such list.
            ConfigError: an invalid filter or order.
        """
        if noun not in LISTS:
            raise NotThere(f"There is no list of {noun!r}: there are {', '.join(LISTS)}.")
        resource = LISTS[noun]
        rows = self._rows(target, noun, tuple(where), sort, KEPT_FURTHER_S if after else KEPT_S)
        end = after + max(1, min(limit, MAX_LIMIT))
        shown = [_cut(row) for row in rows[after:end]]
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
            "next": end if end < len(rows) else None,
        }

    def _rows(self, target: Target, noun: str, where: tuple[str, ...], sort: str, kept_s: float) -> list[Row]:
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


def _read(target: Target, resource: Resource, where: Sequence[str], sort: str) -> list[Row]:
    """Return the selected rows in order; rows that are equal there, in the order of their keys."""
    rows = resource.rows(target.client, target.keys)
    rows.sort(key=lambda row: [order_of(row.get(field)) for field in resource.key])
    return select(rows, resource.fields, Choice(where, sort or None))


def _cut(value: Any) -> Any:
    """Return ``value`` with long texts and lists truncated."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, dict):
        return {name: _cut(entry) for name, entry in value.items()}
    return [_cut(entry) for entry in value[:MAX_LIMIT]] if isinstance(value, list | tuple) else value
