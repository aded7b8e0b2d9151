"""One file of a history as it is read: places in an order, rows, uses, counts."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from penstock.errors import ProtocolError
from penstock.history.bodies import body_from_bytes, fields_of, group_from_bytes
from penstock.history.cursor import Place, beyond
from penstock.history.filters import COLUMNS, Clause, Filters, Query, Sort, counting, queries
from penstock.history.part import PartName
from penstock.history.row import SampleRow, Use

#: Words whose numbers are kept at hand.
MOST_WORDS = 4096

#: (job, k, part)
Key = tuple[str, int, int]


class ReadPart:
    """A file that is read. Raises sqlite3.Error everywhere, which ``HistoryReader`` translates."""

    def __init__(self, name: PartName, path: Path, connection: sqlite3.Connection) -> None:
        self.name = name
        self.path = path
        self.connection = connection
        self._words: dict[int, str] = {}

    def places(self, filters: Filters, sort: Sort, after: Place | None, *, ascending: bool, limit: int) -> list[Place]:
        found: set[tuple[float, int]] = set()
        for query in queries(self.connection, filters, sort):
            found |= self._some(query, sort, after, ascending, limit)
        ordered = sorted(found, reverse=not ascending)[:limit]
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
        return set(self._rows(query, f"{value}, s", [where], f"ORDER BY {by} LIMIT {limit}"))

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
        return {(job, k, part): reward for job, k, part, reward in self._rows(named, "job, k, part, reward", [], "")}

    def number_of(self, key: Key) -> int | None:
        found = self.connection.execute(
            "SELECT s FROM groups JOIN samples USING(g) WHERE job = ? AND k = ? AND part = ?", key
        ).fetchone()
        return None if found is None else int(found[0])

    def key(self, number: int) -> Key | None:
        found: Key | None = self.connection.execute(
            "SELECT job, k, part FROM samples JOIN groups USING(g) WHERE s = ?", (number,)
        ).fetchone()
        return found

    def keys_of(self, job: str) -> list[Key]:
        found = self.connection.execute("SELECT job, k, part FROM groups JOIN samples USING(g) WHERE job = ?", (job,))
        return found.fetchall()

    def jobs(self) -> dict[int, str]:
        """Jobs by their hash."""
        return {hash(job): job for (job,) in self.connection.execute("SELECT job FROM groups")}

    def read(self, number: int, *, arrays: bool) -> SampleRow | None:
        """Raises ProtocolError where what is kept of it is no row."""
        found = self.connection.execute(
            "SELECT job, k, part, lane, status, fate, reason, reward, oldest, newest, generated, groups.body, "
            "bodies.body FROM samples JOIN groups USING(g) JOIN bodies USING(s) WHERE s = ?",
            (number,),
        ).fetchone()
        if found is None:
            return None
        job, k, part, *words, reward, oldest, newest, generated, shared, body = found
        if not (type(job) is str and all(type(one) is bytes for one in (shared, body))):
            raise ProtocolError("it holds other types than penstock writes.")
        lane, status, fate, reason = map(self._word, words)
        group = group_from_bytes(shared)
        return SampleRow(
            job, k, part, lane, reward=reward, oldest=oldest, newest=newest, num_generated=generated,
            status=status, fate=fate, reason=reason, **fields_of(body_from_bytes(body), group, arrays=arrays),
        )  # fmt: skip

    def uses_of(self, key: Key) -> list[Use]:
        found = self.connection.execute(
            "SELECT job, k, word, batch, version, staleness, loss, part FROM groups JOIN uses USING(g) "
            "JOIN words ON w = sub WHERE job = ? AND k = ? AND part = ?",
            key,
        )
        return [Use(*values) for values in found]

    def gone(self) -> list[tuple[str, int | None]]:
        return self.connection.execute("SELECT name, samples FROM gone").fetchall()

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
                raise ProtocolError("it names a word that is not there.")
            self._words[number] = found[0]
        return self._words[number]
