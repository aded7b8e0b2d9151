"""Filters of a history's rows, and the query for them in one file.

An index that selects few rows is used, and these are sorted. If there is no such index, rows are scanned in the
requested order until a page is full; if that takes long because few match, the complete table is scanned.
"""

import math
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.errors import ConfigError
from penstock.history.part import PartName
from penstock.history.row import match_of, phrases_of

#: An index that selects more rows than this, or more than one in ``SPARSE``, is not used: per row, a table scan takes a
#: tenth as long. The index of prompts is used if it selects fewer than ``FEW_PROMPTS``.
FEW, SPARSE, FEW_PROMPTS = 20_000, 16, 2_000


class Sort(StrEnum):
    """The sort order of rows; the greatest first by default."""

    #: Time of writing.
    RECORDED = "recorded"
    #: Rows without a reward are left out.
    REWARD = "reward"
    #: Newest version of the generated tokens.
    VERSION = "version"
    #: Generated tokens.
    LENGTH = "length"


#: Column of a sort, and the index in its order.
ORDERS = {
    Sort.RECORDED: ("s", ""),
    Sort.REWARD: ("reward", "samples_reward"),
    Sort.VERSION: ("newest", "samples_newest"),
    Sort.LENGTH: ("num_generated", "samples_length"),
}


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions that all have to hold; None or '' is no condition."""

    #: Id of a job.
    job: str = ""
    #: Words of the prompt, as ``text``.
    prompt: str = ""
    #: Words that all occur in the answer, or all in the prompt; ``"exact phrase"``, ``prefix*``.
    text: str = ""
    #: A version that generated tokens of it.
    version: int | None = None
    #: A batch that used it, and a subscription.
    batch: int | None = None
    subscription: str = ""
    least_reward: float | None = None
    most_reward: float | None = None
    fate: str = ""
    dataset: str = ""
    lane: str = ""
    status: str = ""

    def __post_init__(self) -> None:
        for name in ("least_reward", "most_reward"):
            value = getattr(self, name)
            if value is not None and math.isnan(value):
                bound = name.replace("_", " ")
                raise ConfigError(f"The {bound} is {value}, which nothing is above or below: give a number.")
        for name in ("version", "batch"):
            value = getattr(self, name)
            if value is not None and not -1 <= value < 2**63:
                raise ConfigError(f"{name} is {value}: give a number from 0.")
        for name in ("prompt", "text"):
            asked = getattr(self, name)
            if asked and not match_of(asked):
                raise ConfigError(f"{name} {asked!r} holds no letter and no digit to look for.")

    @property
    def phrases(self) -> list[str]:
        """Phrases that must occur in answer or prompt; the index knows only words."""
        return phrases_of(self.text)

    @property
    def prompt_phrases(self) -> list[str]:
        return phrases_of(self.prompt)


@dataclass(frozen=True, slots=True)
class Clause:
    """A condition on a row of ``samples``."""

    sql: str
    values: tuple[Any, ...]
    #: The index that selects its rows.
    index: str = ""
    #: True if it always selects few rows.
    is_narrow: bool = False


@dataclass(frozen=True, slots=True)
class Query:
    """``SELECT ... FROM source WHERE clauses``."""

    source: str
    clauses: tuple[Clause, ...]
    #: Column of the row's number: it has another name in the index of words.
    number: str = "s"
    #: Source for a table scan if following the order takes long; '' if it never does.
    otherwise: str = ""

    def select(self, what: str, more: Sequence[Clause] = (), end: str = "") -> tuple[str, list[Any]]:
        """Return the statement and its values."""
        clauses = (*self.clauses, *more)
        where = " AND ".join(clause.sql for clause in clauses) or "1"
        values = [value for clause in clauses for value in clause.values]
        return f"SELECT {what} FROM {self.source} WHERE {where} {end}", values


_AS_THEY_LIE = "samples NOT INDEXED"


def queries(part: sqlite3.Connection, filters: Filters, sort: Sort = Sort.RECORDED) -> list[Query]:
    """Return the queries for rows in one file: two if words may be in answer or prompt. Raises sqlite3.Error."""
    clauses = _clauses(part, filters)
    if not filters.text:
        return [_query(part, clauses, sort)]
    match = match_of(filters.text)
    in_answer = (Clause("answers MATCH ?", (match,)), *clauses)
    in_prompt = _in_prompt(part, match)
    return [
        # CROSS JOIN fixes the order: first the words, then the other conditions on their rows.
        Query("answers CROSS JOIN samples ON samples.s = answers.rowid", in_answer, "answers.rowid"),
        _query(part, (*clauses, in_prompt), sort),
    ]


def counting(part: sqlite3.Connection, filters: Filters) -> Query:
    """Return the query that counts the rows in one file. Raises sqlite3.Error."""
    clauses = _clauses(part, filters)
    if filters.text:
        match = match_of(filters.text)
        words = (
            "(s IN (SELECT rowid FROM answers WHERE answers MATCH ?) "
            "OR g IN (SELECT rowid FROM prompts WHERE prompts MATCH ?))"
        )
        clauses.append(Clause(words, (match, match)))
    return _query(part, clauses, Sort.RECORDED)


def _clauses(part: sqlite3.Connection, filters: Filters) -> list[Clause]:
    words = {name: word for name in ("fate", "lane", "dataset", "status") if (word := getattr(filters, name))}
    equal = [Clause(f"{name} = ?", (word,), "samples_fate" if name == "fate" else "") for name, word in words.items()]
    return [*equal, *_of_versions(part, filters), *_of_rewards(filters), *_of_groups(part, filters)]


def _of_versions(part: sqlite3.Connection, filters: Filters) -> Iterator[Clause]:
    if filters.version is None:
        return
    span = part.execute("SELECT max(newest - oldest) FROM samples WHERE newest > oldest").fetchone()[0] or 0
    last = min(filters.version + span, 2**63 - 1)
    yield Clause("newest BETWEEN ? AND ?", (filters.version, last), "samples_newest")
    yield Clause("oldest <= ?", (filters.version,))


def _of_rewards(filters: Filters) -> Iterator[Clause]:
    if filters.least_reward is None and filters.most_reward is None:
        return
    least = -math.inf if filters.least_reward is None else filters.least_reward
    most = math.inf if filters.most_reward is None else filters.most_reward
    yield Clause("reward BETWEEN ? AND ?", (least, most), "samples_reward")


def _in_prompt(part: sqlite3.Connection, match: str) -> Clause:
    counting = f"SELECT count(*) FROM (SELECT 1 FROM prompts WHERE prompts MATCH ? LIMIT {FEW_PROMPTS})"
    (found,) = part.execute(counting, (match,)).fetchone()
    where = "g IN (SELECT rowid FROM prompts WHERE prompts MATCH ?)"
    return Clause(where, (match,), is_narrow=found < FEW_PROMPTS)


def _of_groups(part: sqlite3.Connection, filters: Filters) -> Iterator[Clause]:
    if filters.job:
        yield Clause("g = (SELECT g FROM groups WHERE job = ?)", (filters.job,), is_narrow=True)
    if filters.prompt:
        yield _in_prompt(part, match_of(filters.prompt))
    if filters.batch is None and not filters.subscription:
        return
    used, values = [], []
    if filters.batch is not None:
        used, values = ["batch = ?"], [filters.batch]
    if filters.subscription:
        used.append("sub = ?")
        values.append(filters.subscription)  # type: ignore[arg-type]
    yield Clause(
        f"(g, k, part) IN (SELECT g, k, part FROM uses WHERE {' AND '.join(used)})",
        tuple(values),
        is_narrow=filters.batch is not None,
    )


def _query(part: sqlite3.Connection, clauses: Sequence[Clause], sort: Sort) -> Query:
    if any(clause.is_narrow for clause in clauses):
        return Query("samples", tuple(clauses))
    few = min(FEW, num_rows(part) // SPARSE + 1)
    sizes = {clause.index: _size(part, clause, few) for clause in clauses if clause.index}
    index, order = min(sizes, key=lambda name: sizes[name], default=""), ORDERS[sort][1]
    if index and sizes[index] < few:
        return Query(f"samples INDEXED BY {index}", tuple(clauses))
    if order:
        return Query(f"samples INDEXED BY {order}", tuple(clauses), otherwise=_AS_THEY_LIE if clauses else "")
    return Query(_AS_THEY_LIE, tuple(clauses))


def num_rows(part: sqlite3.Connection) -> int:
    """Return about how many rows a file has."""
    return int(part.execute("SELECT max(s) FROM samples").fetchone()[0] or 0)


def _size(part: sqlite3.Connection, clause: Clause, few: int) -> int:
    """Return the number of rows that an index selects, at most ``few``."""
    statement = f"SELECT count(*) FROM (SELECT 1 FROM samples WHERE {clause.sql} LIMIT {few})"
    return int(part.execute(statement, clause.values).fetchone()[0])


_TEXT = re.compile(r"([a-z]+):([^:]{1,32}):([0-9]{1,10})-([0-9]{1,6}):([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Place:
    """Identify a row in a sort order, after which the next page begins, so that new rows do not shift pages.

    Rows with equal values are ordered by file, then by number.
    """

    value: float
    part: PartName
    number: int

    def text(self, sort: Sort) -> str:
        """Return the position as text, which :func:`place_of` parses."""
        return f"{sort}:{self.value!r}:{self.part.epoch}-{self.part.number}:{self.number}"


def place_of(text: str, sort: Sort) -> Place:
    """Parse a position; raise ConfigError if ``text`` is not one of this order."""
    found = _TEXT.fullmatch(text)
    try:
        if found is None or found[1] != sort:
            raise ValueError
        value = float(found[2])
        if math.isnan(value):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{text!r} is no place in the order of {sort}: give --after what the page before ended with, and the same "
            "--sort."
        ) from None
    return Place(value, PartName(int(found[3]), int(found[4])), int(found[5]))


def beyond(place: Place | None, part: PartName, sort: Sort, *, ascending: bool, number: str = "s") -> Clause | None:
    """Return the condition for rows of ``part`` after ``place``; None if it has none."""
    column, less = ORDERS[sort][0], ">" if ascending else "<"
    if place is None:
        return Clause("reward IS NOT NULL", ()) if sort is Sort.REWARD else Clause("1", ())
    if sort is Sort.RECORDED:
        if part == place.part:
            return Clause(f"{number} {less} ?", (place.number,))
        return Clause("1", ()) if (part > place.part) is ascending else None
    if part == place.part:
        return Clause(f"({column}, s) {less} (?, ?)", (place.value, place.number))
    return Clause(f"{column} {less}{'=' if (part > place.part) is ascending else ''} ?", (place.value,))
