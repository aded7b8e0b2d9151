"""One file of a history, opened for reading: positions in an order, rows, uses, counts."""

import json
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from penstock.errors import ProtocolError
from penstock.history.blocks import Block, Piece
from penstock.history.filters import ORDERS, Clause, Filters, Place, Query, Sort, beyond, counting, num_rows, queries
from penstock.history.part import PartName
from penstock.history.row import COLUMNS, SampleRow, Use
from penstock.records.codec import checks_of

#: Most steps of SQLite (about ten per row) for a scan in an order, besides half a step for each row of the file. Then
#: the table is scanned.
PATIENCE = 200_000

#: (job, k, part)
Key = tuple[str, int, int]

T = TypeVar("T", bound=Collection[tuple[Any, ...]])
#: Types of the values of a column: SQLite stores any, whatever the column is declared as.
_TEXT, _INT, _NUMBER = {str}, {int}, {int, float}
_REWARD = {float, NoneType}


class ReadPart:
    """A file that is read. Every method raises sqlite3.Error, which ``HistoryReader`` translates."""

    def __init__(self, name: PartName, path: Path, connection: sqlite3.Connection) -> None:
        self.name = name
        self.path = path
        self.connection = connection
        #: Pieces that were read.
        self._pieces: dict[int, Piece] = {}
        #: The last block that was read.
        self._block: Block | None = None

    def places(self, filters: Filters, sort: Sort, after: Place | None, *, ascending: bool, limit: int) -> list[Place]:
        found: set[tuple[float, int]] = set()
        for query in queries(self.connection, filters, sort):
            found |= self._some(query, sort, after, ascending, limit)
        ordered = sorted(_sound(found, _NUMBER, _INT), reverse=not ascending)[:limit]
        return [Place(value, self.name, number) for value, number in ordered]

    def _some(
        self, query: Query, sort: Sort, after: Place | None, ascending: bool, limit: int
    ) -> set[tuple[float, int]]:
        where = beyond(after, self.name, sort, ascending=ascending, number=query.number)
        if where is None:
            return set()
        column, way = ORDERS[sort][0], "ASC" if ascending else "DESC"
        by = f"{query.number} {way}" if sort is Sort.RECORDED else f"{column} {way}, s {way}"
        value = "0" if sort is Sort.RECORDED else column
        ask = partial(self._rows, what=f"{value}, s", more=[where], end=f"ORDER BY {by} LIMIT {limit}")
        if not query.otherwise:
            return set(ask(query))
        steps = max(1, min(PATIENCE, num_rows(self.connection) // 2))
        found = self._at_most(steps, partial(ask, query))
        return set(ask(replace(query, source=query.otherwise)) if found is None else found)

    def _at_most(self, steps: int, ask: Callable[[], list[Any]]) -> list[Any] | None:
        """Return the result of ``ask``; None if it takes more than ``steps`` steps of SQLite."""
        self.connection.set_progress_handler(lambda: 1, steps)
        try:
            return ask()
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                return None
            raise
        finally:
            self.connection.set_progress_handler(None, 0)

    def _rows(self, query: Query, what: str, more: list[Clause], end: str) -> list[Any]:
        statement, values = query.select(what, more, end)
        return self.connection.execute(statement, values).fetchall()

    def count(self, filters: Filters, key: Key | None = None) -> int:
        query = counting(self.connection, filters)
        alone = "g = (SELECT g FROM groups WHERE job = ?) AND k = ? AND part = ?"
        more = [] if key is None else [Clause(alone, key)]
        if key is not None:
            query = Query("samples", query.clauses)
        return int(self._rows(query, "count(*)", more, "")[0][0])

    def columns(self, filters: Filters, *names: str) -> dict[Key, tuple[Any, ...]]:
        """Return columns that hold numbers of the matching samples."""
        query = counting(self.connection, filters)
        named = Query(f"(SELECT * FROM {query.source}) JOIN groups USING(g)", query.clauses)
        rows = self._rows(named, f"job, k, part, {', '.join(names)}", [], "")
        kinds = [_REWARD if name == "reward" else _INT for name in names]
        return {(job, k, part): tuple(found) for job, k, part, *found in _sound(rows, _TEXT, _INT, _INT, *kinds)}

    def number_of(self, key: Key) -> int | None:
        found = self.connection.execute(
            "SELECT s FROM groups JOIN samples USING(g) WHERE job = ? AND k = ? AND part = ?", key
        ).fetchone()
        return None if found is None else int(found[0])

    def key(self, number: int) -> Key | None:
        found: list[Key] = self.connection.execute(
            "SELECT job, k, part FROM samples JOIN groups USING(g) WHERE s = ?", (number,)
        ).fetchall()
        return next(iter(_sound(found, _TEXT, _INT, _INT)), None)

    def keys_of(self, job: str) -> list[Key]:
        found = self.connection.execute("SELECT job, k, part FROM groups JOIN samples USING(g) WHERE job = ?", (job,))
        return list(_sound(found.fetchall(), _TEXT, _INT, _INT))

    def jobs(self) -> dict[int, str]:
        """Return the jobs by their hash."""
        found = self.connection.execute("SELECT job FROM groups").fetchall()
        return {hash(job): job for (job,) in _sound(found, _TEXT)}

    def read(self, number: int, *, arrays: bool) -> SampleRow | None:
        """Return a row, or None; raise ProtocolError if it is damaged."""
        found = self.connection.execute(
            f"SELECT {', '.join(COLUMNS)} FROM samples JOIN groups USING(g) WHERE s = ?", (number,)
        ).fetchone()
        if found is None:
            return None
        columns, checks = dict(zip(COLUMNS, found, strict=True)), checks_of(SampleRow)
        if not all(checks[name](value) for name, value in columns.items()):
            raise ProtocolError("it holds other types than penstock writes.")
        block = self._block
        if block is None or not block.first <= number < block.first + len(block):
            block = self._block = Block(self.connection, number)
        return SampleRow(**columns, **block.fields(number - block.first, self._look_up, arrays=arrays))

    def _look_up(self, tokens: set[int]) -> Mapping[int, Piece]:
        """Return the pieces of the token ids that this file has."""
        if missing := [token for token in tokens if token not in self._pieces]:
            rows = self.connection.execute(
                "SELECT t, piece, special FROM pieces WHERE t IN (SELECT value FROM json_each(?))",
                (json.dumps(missing),),
            )
            for token, piece, is_special in rows:
                if type(piece) is not bytes:
                    raise ProtocolError("it spells a token as penstock does not.")
                self._pieces[token] = piece, bool(is_special)
        return {token: self._pieces[token] for token in tokens if token in self._pieces}

    def uses_of(self, jobs: Sequence[str]) -> list[Use]:
        """Return the uses of all samples of these jobs."""
        found = self.connection.execute(
            "SELECT job, k, sub, batch, version, staleness, loss, part FROM groups JOIN uses USING(g) "
            "WHERE job IN (SELECT value FROM json_each(?))",
            (json.dumps(jobs),),
        )
        return [Use(*values) for values in _sound(found.fetchall(), _TEXT, _INT, _TEXT, *5 * [_INT])]


def _sound(rows: T, *kinds: set[Any]) -> T:
    """Return ``rows`` if their columns have only these types; raise sqlite3.DatabaseError otherwise."""
    for types in {tuple(map(type, row)) for row in rows}:
        if not all(one in known for one, known in zip(types, kinds, strict=True)):
            raise sqlite3.DatabaseError("it holds other types than penstock writes")
    return rows
