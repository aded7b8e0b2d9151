"""Reading of a history: all files of all recorders, while they are written, after a kill, and despite damaged ones."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import HistoryError, ProtocolError
from penstock.history.filters import Filters, Place, Sort, place_of
from penstock.history.part import LIVE, OpenPart, PartName, in_memory, open_to_read, parts_of, translated
from penstock.history.read_part import Key, ReadPart
from penstock.history.row import SampleRow, Use, folded, key_of

#: Rows read at once: the file is locked against its writer meanwhile.
CHUNK = 256

#: Most damaged rows that are reported.
MOST_PROBLEMS = 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows, in the requested order."""

    rows: list[SampleRow]
    #: The ``after`` argument of ``rows`` for the next page; '' on the last page.
    next: str


class HistoryReader:
    """Reads the history in a folder. Not thread-safe. Every call blocks for the disk.

    A file that cannot be read is skipped and listed in ``problems``; rows of the others are read.

    Args:
        folder: ``RunFolder.history``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[PartName, ReadPart] = {}
        self._problems: dict[object, str] = {}

    @property
    def is_there(self) -> bool:
        """Whether the folder holds any file of a history."""
        return bool(parts_of(self._folder))

    @property
    def problems(self) -> list[str]:
        """A sentence about each file, and each row, that was skipped."""
        return list(self._problems.values())

    def show_too(self, rows: Sequence[SampleRow], uses: Sequence[Use] = ()) -> None:
        """Include these as the latest rows, replacing those of the last call; a row in a file takes precedence.

        For samples that are still in Redis.
        """
        if (before := self._parts.pop(LIVE, None)) is not None:
            before.connection.close()
        if rows or uses:
            live = in_memory()
            OpenPart(Path("memory"), live).put(rows, uses)
            self._parts[LIVE] = ReadPart(LIVE, Path("memory"), live)

    def close(self) -> None:
        for part in self._parts.values():
            part.connection.close()
        self._parts = {}

    def rows(
        self,
        filters: Filters | None = None,
        sort: Sort = Sort.RECORDED,
        limit: int = 50,
        after: str = "",
        *,
        ascending: bool = False,
        arrays: bool = False,
    ) -> Page:
        """Return the first ``limit`` matching rows, each sample once.

        Args:
            after: ``next`` of the page before, of the same order.
            ascending: the smallest first, instead of the greatest.
            arrays: with tokens, logprobs, versions and masks.

        Raises:
            ConfigError: ``after`` is not a position in this order.
        """
        filters = filters or Filters()
        place = place_of(after, sort) if after else None
        found: list[SampleRow] = []
        last: Place | None = None
        for place_found, part in self._places(filters, sort, place, ascending=ascending, chunk=min(limit + 1, CHUNK)):
            if len(found) == limit:
                return Page(found, last.text(sort) if last else "")
            row = self._read(part, place_found.number, arrays=arrays)
            if row is not None and _has_phrases(row, filters):
                found.append(row)
                last = place_found
        return Page(found, "")

    def each(
        self, filters: Filters | None = None, *, arrays: bool = False, ascending: bool = True
    ) -> Iterator[SampleRow]:
        """Yield all matching rows in the order in which they were written, or the latest first.

        Nothing is locked in between.
        """
        after = ""
        while True:
            page = self.rows(filters, limit=CHUNK, after=after, ascending=ascending, arrays=arrays)
            yield from page.rows
            after = page.next
            if not after:
                return

    def row(self, sample: str) -> SampleRow | None:
        """Return the row of a sample by its id, with its arrays, or None. Raises ConfigError for an invalid id."""
        key = key_of(sample)
        for part in reversed(self._open()):
            number = self._ask(part, partial(part.number_of, key))
            if number is not None and (row := self._read(part, number, arrays=True)) is not None:
                return row
        return None

    def uses(self, sample: str) -> list[Use]:
        """Return the batches that used a sample, by subscription and number. Raises ConfigError for an invalid id."""
        job, k, part = key_of(sample)
        return self.uses_of([SampleRow(job, k, part)])[0]

    def uses_of(self, rows: Sequence[SampleRow]) -> list[list[Use]]:
        """Return ``uses`` of each row: much faster than one by one."""
        found: dict[Key, dict[tuple[str, int], Use]] = {row.key: {} for row in rows}
        jobs = list({row.job for row in rows})
        for part in self._open():
            for use in self._ask(part, partial(part.uses_of, jobs)) or []:
                if (own := found.get((use.job, use.k, use.part))) is not None:
                    own[use.subscription, use.batch] = use
        return [[found[row.key][key] for key in sorted(found[row.key])] for row in rows]

    def count(self, filters: Filters | None = None) -> int:
        """Count the matching samples; those in several files count once."""
        filters = filters or Filters()
        if filters.phrases or filters.prompt_phrases:
            return sum(1 for _ in self.each(filters))
        parts = self._open()
        total = sum(self._ask(part, partial(part.count, filters)) or 0 for part in parts)
        return total - sum(1 for part, key in self._superseded(parts) if self._matches(part, key, filters))

    def scores(self, filters: Filters | None = None) -> dict[Key, float | None]:
        """Return the reward of each matching sample, by (job, k, part): much faster than their rows. No phrases."""
        return {key: reward for key, (reward,) in self._columns(filters, "reward").items()}

    def versions(self, filters: Filters | None = None) -> dict[Key, tuple[int, int, int]]:
        """Return oldest version, newest version and generated tokens of each sample, as ``scores``. No phrases."""
        return self._columns(filters, "oldest", "newest", "num_generated")

    def _columns(self, filters: Filters | None, *names: str) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for part in self._open():
            found |= self._ask(part, partial(part.columns, filters or Filters(), *names)) or {}
        return found

    def _open(self) -> list[ReadPart]:
        """Return the files that can be read: of two that hold a sample, the row in the later one is used."""
        there = [LIVE, *parts_of(self._folder)]
        for name in [name for name in self._parts if name not in there]:
            self._parts.pop(name).connection.close()
        for name in there:
            if name != LIVE and name not in self._parts and name not in self._problems:
                self._try_to_open(name)
        return [self._parts[name] for name in there if name in self._parts]

    def _try_to_open(self, name: PartName) -> None:
        path = name.path(self._folder)
        try:
            found = open_to_read(path)
        except HistoryError as exc:
            self._problems[name] = f"{exc} It is left out."
            return
        except OSError as exc:
            self._problems[name] = f"{path}, a part of the history, cannot be read ({exc.strerror}). It is left out."
            return
        if found is not None:
            self._parts[name] = ReadPart(name, path, found)

    def _ask(self, part: ReadPart, ask: Callable[[], T]) -> T | None:
        """Return the result of a query; None if the file is damaged: it is skipped from now on."""
        if part.name not in self._parts:
            return None
        try:
            with translated(part.path):
                return ask()
        except HistoryError as exc:
            self._problems[part.name] = f"{exc} It is left out."
            self._parts.pop(part.name).connection.close()
            return None

    def _places(
        self, filters: Filters, sort: Sort, after: Place | None, *, ascending: bool, chunk: int
    ) -> Iterator[tuple[Place, ReadPart]]:
        """Yield the matching rows in their order, each sample once."""
        parts = self._open()
        walk = partial(self._walk, filters=filters, sort=sort, after=after, ascending=ascending, chunk=chunk)
        merged: Iterable[tuple[Place, ReadPart]]
        if sort is Sort.RECORDED:
            # File by file: the others are not read before a page is full.
            merged = chain.from_iterable(map(walk, sorted(parts, key=lambda part: part.name, reverse=not ascending)))
        else:
            merged = heapq.merge(*map(walk, parts), key=lambda one: _order(one[0]), reverse=not ascending)
        later = {part.name: parts[at + 1 :] for at, part in enumerate(parts)}
        for place, part in merged:
            if part.name not in self._parts:
                continue
            if not later[part.name] or not self._is_superseded(part, place.number, later[part.name]):
                yield place, part

    def _walk(
        self, part: ReadPart, filters: Filters, sort: Sort, after: Place | None, ascending: bool, chunk: int
    ) -> Iterator[tuple[Place, ReadPart]]:
        """Yield the rows of one file in their order, in chunks."""
        size = chunk
        while True:
            ask = partial(part.places, filters, sort, after, ascending=ascending, limit=size)
            found = self._ask(part, ask) or []
            yield from ((place, part) for place in found)
            if len(found) < size:
                return
            after, size = found[-1], CHUNK

    def _is_superseded(self, part: ReadPart, number: int, later: list[ReadPart]) -> bool:
        """Return whether a later file has a row of the same sample."""
        key = self._ask(part, partial(part.key, number))
        return key is not None and any(self._ask(other, partial(other.number_of, key)) is not None for other in later)

    def _superseded(self, parts: list[ReadPart]) -> Iterator[tuple[ReadPart, Key]]:
        """Yield the samples of a file that a later one has too."""
        if len(parts) < 2:
            return
        seen: set[int] = set()
        for at, part in reversed(list(enumerate(parts))):
            jobs = self._ask(part, part.jobs) or {}
            for job in (jobs[digest] for digest in jobs.keys() & seen):
                for key in self._ask(part, partial(part.keys_of, job)) or []:
                    if any(self._ask(other, partial(other.number_of, key)) is not None for other in parts[at + 1 :]):
                        yield part, key
            seen |= jobs.keys()

    def _matches(self, part: ReadPart, key: Key, filters: Filters) -> bool:
        return bool(self._ask(part, partial(part.count, filters, key)))

    def _read(self, part: ReadPart, number: int, *, arrays: bool) -> SampleRow | None:
        """Return a row; None if it is damaged, which is recorded in ``problems``."""
        try:
            return self._ask(part, partial(part.read, number, arrays=arrays))
        except ProtocolError as exc:
            if len(self._problems) < MOST_PROBLEMS:
                self._problems[part.name, number] = f"Row {number} of {part.path} is left out: {exc}"
            return None


def _order(place: Place) -> tuple[Any, ...]:
    return place.value, place.part, place.number


def _has_phrases(row: SampleRow, filters: Filters) -> bool:
    """Return whether the requested phrases occur in the row: the index knows words, not their order."""
    prompt_phrases, phrases = filters.prompt_phrases, filters.phrases
    if not prompt_phrases and not phrases:
        return True
    prompt = folded(row.prompt)
    if not all(phrase in prompt for phrase in prompt_phrases):
        return False
    return all(phrase in prompt for phrase in phrases) or all(phrase in folded(row.answer) for phrase in phrases)
