"""Lists of a run, page by page: with rows, filters and orders of the command line, and a key for the next page."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from penstock.console.cli.lists import Choice, order_of, select
from penstock.console.cli.target import Target
from penstock.console.read import groups, jobs, weights, workers
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

Row = dict[str, Any]
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Noun:
    """A kind of list: its reader, the fields for filters and order, and those that identify a row."""

    read: Callable[[Target], Sequence[Row]]
    fields: Sequence[str]
    key: tuple[str, ...]


NOUNS: Mapping[str, Noun] = {
    "jobs": Noun(lambda at: jobs.list_jobs(at.client, at.keys), jobs.FIELDS, ("job",)),
    "dead": Noun(lambda at: jobs.list_dead(at.client, at.keys), jobs.DEAD_FIELDS, ("job", "buried_ms")),
    "groups": Noun(lambda at: groups.list_groups(at.client, at.keys), groups.FIELDS, ("job", "subscription")),
    "workers": Noun(
        lambda at: [asdict(one) for one in workers.list_workers(at.client, at.keys)], workers.FIELDS, ("name",)
    ),
    "weights": Noun(
        lambda at: weights.list_weights(at.client, at.keys, at.models()), weights.FIELDS, ("model", "id")
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a list, their total number, and the start of the next page; None if it is the last."""

    rows: list[Row]
    total: int
    next: str | None


class Lists:
    """Lists of any number of runs. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Key, tuple[float, list[tuple[Key, Row]]]] = {}

    def page(self, target: Target, noun: str, *, where: Sequence[str], sort: str, limit: int, after: str) -> Page:
        """Return a page of a list. Blocks as the reader of the noun, or not at all if cached.

        Args:
            sort: field, or ``-field`` for descending order; '' for the order of keys.
            after: ``next`` of the page before; '' for the first.

        Raises:
            NotThere: no such list.
            ConfigError: an invalid filter, order or ``after``.
        """
        if noun not in NOUNS:
            raise NotThere(f"There is no list of {noun!r}: there are {', '.join(NOUNS)}.")
        rows = self._rows(target, noun, tuple(where), sort, KEPT_FURTHER_S if after else KEPT_S)
        begin = _begin(rows, after, down=sort.startswith("-"))
        shown = rows[begin : begin + max(1, min(limit, MAX_LIMIT))]
        more = begin + len(shown) < len(rows)
        return Page([_cut(row) for _, row in shown], len(rows), _key_text(shown[-1][1], noun, sort) if more else None)

    def _rows(
        self, target: Target, noun: str, where: tuple[str, ...], sort: str, kept_s: float
    ) -> list[tuple[Key, Row]]:
        name = (target.keys.run, noun, where, sort)
        with self._lock:
            read_at, rows = self._kept.get(name, (0.0, []))
        if not read_at or self._clock() - read_at >= kept_s:
            rows = _read(target, noun, where, sort)
            with self._lock:
                self._kept.pop(name, None)
                while len(self._kept) >= MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[name] = (self._clock(), rows)
        return rows


def _read(target: Target, noun: str, where: Sequence[str], sort: str) -> list[tuple[Key, Row]]:
    """Return the selected rows by their keys, in order."""
    held = NOUNS[noun]
    # Sorted by key, from which the next page continues: only check the field here.
    chosen = select(held.read(target), held.fields, Choice(where, sort or None))
    keyed = [(_key(_values(row, noun, sort)), dict(row)) for row in chosen]
    return sorted(keyed, key=lambda one: one[0], reverse=sort.startswith("-"))


def _values(row: Mapping[str, Any], noun: str, sort: str) -> list[Any]:
    fields = ((sort.removeprefix("-"),) if sort else ()) + NOUNS[noun].key
    return [row.get(field) for field in fields]


def _key(values: Sequence[Any]) -> Key:
    return tuple(order_of(_plain(value)) for value in values)


def _key_text(row: Mapping[str, Any], noun: str, sort: str) -> str:
    return orjson.dumps([_plain(value) for value in _values(row, noun, sort)]).decode()


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)[:MAX_TEXT]


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
    key = _key(values)
    return sum(1 for one, _ in rows if (one >= key if down else one <= key))


def _cut(value: Any) -> Any:
    """Return ``value`` with long texts and lists truncated."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, dict):
        return {name: _cut(entry) for name, entry in value.items()}
    return [_cut(entry) for entry in value[:MAX_LIMIT]] if isinstance(value, list | tuple) else value
