"""Lists of a run, page by page: the rows, filters and orders of the command line, and the next page by its key."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from penstock.console.cli.lists import Choice, order_of, select
from penstock.console.cli.target import Target
from penstock.console.read import dead, groups, jobs, weights, workers
from penstock.console.web.replies import NotThere
from penstock.errors import ConfigError

#: Rows of a page, and for how long a list is not read again: a page further on is of the list that the first is of,
#: unless whoever looks took their time.
MAX_LIMIT = 1000
KEPT_S = 2.0
KEPT_FURTHER_S = 60.0
#: Lists that are kept, each for one run and choice.
MAX_KEPT = 16
#: Most characters of a text in a row: details show more.
MAX_TEXT = 2000

Row = dict[str, Any]
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Noun:
    """What a list is of: its reader, the fields that a filter or an order may name, and those that name a row."""

    read: Callable[[Target], Sequence[Row]]
    fields: Sequence[str]
    key: tuple[str, ...]


NOUNS: Mapping[str, Noun] = {
    "jobs": Noun(lambda at: jobs.list_jobs(at.client, at.keys), jobs.FIELDS, ("job",)),
    "dead": Noun(lambda at: dead.list_dead(at.client, at.keys), dead.FIELDS, ("job", "buried_ms")),
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
    """Some rows of a list, how many it has, and what the next page begins after; None where there is none."""

    rows: list[Row]
    total: int
    next: str | None


class Lists:
    """Of any number of runs. For any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Key, tuple[float, list[tuple[Key, Row]]]] = {}

    def page(self, target: Target, noun: str, *, where: Sequence[str], sort: str, limit: int, after: str) -> Page:
        """A page of a list. Blocks as the reader of the noun, or not at all.

        Args:
            sort: field, or ``-field`` for the other way round; '' for the order of keys.
            after: ``next`` of the page before; '' for the first.

        Raises:
            NotThere: there is no such list.
            ConfigError: a filter, an order or ``after`` cannot be read.
        """
        if noun not in NOUNS:
            raise NotThere(f"There is no list of {noun!r}: there are {', '.join(NOUNS)}.")
        rows = self._rows(target, noun, tuple(where), sort, KEPT_FURTHER_S if after else KEPT_S)
        begin = _begin(rows, after, down=sort.startswith("-"))
        shown = rows[begin : begin + max(1, min(limit, MAX_LIMIT))]
        more = begin + len(shown) < len(rows)
        return Page([_cut(row) for _, row in shown], len(rows), _told(shown[-1][1], noun, sort) if more else None)

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
    """The rows of a choice by their keys, in order."""
    held = NOUNS[noun]
    # The order is that of the keys, which the next page begins after: so the field alone is judged here.
    chosen = select(held.read(target), held.fields, Choice(where, sort or None))
    keyed = [(_key(_values(row, noun, sort)), dict(row)) for row in chosen]
    return sorted(keyed, key=lambda one: one[0], reverse=sort.startswith("-"))


def _values(row: Mapping[str, Any], noun: str, sort: str) -> list[Any]:
    fields = ((sort.removeprefix("-"),) if sort else ()) + NOUNS[noun].key
    return [row.get(field) for field in fields]


def _key(values: Sequence[Any]) -> Key:
    return tuple(order_of(_plain(value)) for value in values)


def _told(row: Mapping[str, Any], noun: str, sort: str) -> str:
    return orjson.dumps([_plain(value) for value in _values(row, noun, sort)]).decode()


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)[:MAX_TEXT]


def _begin(rows: Sequence[tuple[Key, Row]], after: str, *, down: bool) -> int:
    """Where the rows behind ``after`` begin, whether or not that one is still there."""
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
    """``value`` as a list shows it: long texts and lists cut."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, dict):
        return {name: _cut(entry) for name, entry in value.items()}
    return [_cut(entry) for entry in value[:MAX_LIMIT]] if isinstance(value, list | tuple) else value
