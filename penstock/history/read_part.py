"""One file of a history, opened for reading: positions in an order, rows, uses, counts."""

import contextlib
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from penstock.errors import ProtocolError
from penstock.history.blocks import Block, read_block
from penstock.history.bodies import Group
from penstock.history.filters import COLUMNS, Clause, Filters, Place, Query, Sort, beyond, counting, num_rows, queries
from penstock.history.packing import Piece, Spelling
from penstock.history.part import PartName
from penstock.history.row import SampleRow, Use

#: Most words whose numbers are cached.
MOST_WORDS = 4096

#: Pieces looked up at once.
PIECES = 512

#: Most steps of SQLite (about ten per row) for a scan in an order, besides half a step for each row of the file. Then
#: the table is scanned.
PATIENCE = 200_000

#: (job, k, part)
Key = tuple[str, int, int]

T = TypeVar("T", bound=Collection[tuple[Any, ...]])
#: Types of the values of a column: SQLite stores any, whatever the column is declared as.
_TEXT, _INT, _NUMBER = {str}, {int}, {int, float}
_REWARD, _COUNT = {float, NoneType}, {int, NoneType}


class ReadPart:
    """A file that is read. Every method raises sqlite3.Error, which ``HistoryReader`` translates."""

    def __init__(self, name: PartName, path: Path, connection: sqlite3.Connection) -> None:
        self.name = name
        self.path = path
        self.connection = connection
        self._words: dict[int, str] = {}
        self._spelling = Spelling(self._pieces)
        #: The last block read, with the number of its first sample, and whether with its logprobs.
        self._block: tuple[int, bool, Block] | None = None

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
        column, way = COLUMNS[sort][0], "ASC" if ascending else "DESC"
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
        if query is None:
            return 0
        alone = "g = (SELECT g FROM groups WHERE job = ?) AND k = ? AND part = ?"
        more = [] if key is None else [Clause(alone, key)]
        if key is not None:
            query = Query("samples", query.clauses)
        return int(self._rows(query, "count(*)", more, "")[0][0])

    def scores(self, filters: Filters) -> dict[Key, float | None]:
        query = counting(self.connection, filters)
        if query is None:
            return {}
        named = Query(f"(SELECT * FROM {query.source}) JOIN groups USING(g)", query.clauses)
        rows = self._rows(named, "job, k, part, reward", [], "")
        return {(job, k, part): reward for job, k, part, reward in _sound(rows, _TEXT, _INT, _INT, _REWARD)}

    def versions(self, filters: Filters) -> dict[Key, tuple[int, int, int]]:
        query = counting(self.connection, filters)
        if query is None:
            return {}
        named = Query(f"(SELECT * FROM {query.source}) JOIN groups USING(g)", query.clauses)
        rows = self._rows(named, "job, k, part, oldest, newest, generated", [], "")
        return {(job, k, part): rest for job, k, part, *rest in _sound(rows, _TEXT, *5 * [_INT])}

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
            "SELECT job, k, part, lane, status, fate, reason, reward, oldest, newest, generated, groups.body "
            "FROM samples JOIN groups USING(g) WHERE s = ?",
            (number,),
        ).fetchone()
        if found is None:
            return None
        job, k, part, *words, reward, oldest, newest, generated, shared = found
        numbers = set(map(type, (k, part, oldest, newest, generated)))
        if type(job) is not str or type(shared) is not bytes or numbers != _INT or type(reward) not in _REWARD:
            raise ProtocolError("it holds other types than penstock writes.")
        lane, status, fate, reason = map(self._word, words)
        first, block = self._block_of(number, shared, arrays)
        return SampleRow(
            job, k, part, lane, reward=reward, oldest=oldest, newest=newest, num_generated=generated,
            status=status, fate=fate, reason=reason,
            **block.fields(number - first, self._spelling, arrays=arrays),
        )  # fmt: skip

    def _block_of(self, number: int, shared: bytes, arrays: bool) -> tuple[int, Block]:
        """Return the block of a sample, and the number of its first sample."""
        if self._block is not None and self._block[1] >= arrays:
            first, _, block = self._block
            if first <= number < first + len(block.bodies):
                return first, block
        first, block = read_block(self.connection, number, Group.from_bytes(shared), logprobs=arrays)
        self._block = first, arrays, block
        return first, block

    def _pieces(self, tokens: Collection[int]) -> Mapping[int, Piece]:
        found: dict[int, Piece] = {}
        wanted = list(tokens)
        for start in range(0, len(wanted), PIECES):
            some = wanted[start : start + PIECES]
            marks = ",".join("?" * len(some))
            rows = self.connection.execute(f"SELECT t, special, piece FROM pieces WHERE t IN ({marks})", some)
            for token, special, piece in rows:
                if type(piece) is not bytes:
                    raise ProtocolError("it spells a token as penstock does not.")
                found[token] = Piece(piece, bool(special))
        return found

    def uses_of(self, key: Key) -> list[Use]:
        found = self.connection.execute(
            "SELECT job, k, word, batch, version, staleness, loss, part FROM groups JOIN uses USING(g) "
            "JOIN words ON w = sub WHERE job = ? AND k = ? AND part = ?",
            key,
        )
        return [Use(*values) for values in _sound(found.fetchall(), _TEXT, _INT, _TEXT, *5 * [_INT])]

    def uses_of_jobs(self, jobs: Sequence[str]) -> list[Use]:
        """Return the uses of all samples of these jobs, of at most some hundred."""
        found = self.connection.execute(
            "SELECT job, k, word, batch, version, staleness, loss, part FROM groups JOIN uses USING(g) "
            f"JOIN words ON w = sub WHERE job IN ({','.join('?' * len(jobs))})",
            jobs,
        )
        return [Use(*values) for values in _sound(found.fetchall(), _TEXT, _INT, _TEXT, *5 * [_INT])]

    def gone(self) -> list[tuple[str, int | None]]:
        return list(_sound(self.connection.execute("SELECT name, samples FROM gone").fetchall(), _TEXT, _COUNT))

    def size(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_size
        return 0

    def _word(self, number: int) -> str:
        if number not in self._words:
            if len(self._words) >= MOST_WORDS:
                self._words.clear()
            found = self.connection.execute("SELECT word FROM words WHERE w = ?", (number,)).fetchone()
            if found is None or type(found[0]) is not str:
                raise ProtocolError("it refers to a word that is missing.")
            self._words[number] = found[0]
        return self._words[number]


def _sound(rows: T, *kinds: set[Any]) -> T:
    """Return ``rows`` if their columns have only these types; raise sqlite3.DatabaseError otherwise."""
    for types in {tuple(map(type, row)) for row in rows}:
        if not all(one in known for one, known in zip(types, kinds, strict=True)):
            raise sqlite3.DatabaseError("it holds other types than penstock writes")
    return rows
