"""A file of a history that is written to: rows and uses, all of a call in one commit."""

import contextlib
import math
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.history.bodies import Group, body_from_bytes, body_of, group_from_bytes, group_of, texts, to_bytes
from penstock.history.part import PartName, translated
from penstock.history.row import SampleRow, Use
from penstock.history.text import words_of
from penstock.words import writable

#: Words whose numbers are kept at hand.
MOST_WORDS = 4096


class OpenPart:
    """A file that is ours to write."""

    def __init__(self, name: PartName, path: Path, connection: sqlite3.Connection) -> None:
        self.name = name
        self.path = path
        self.connection = connection
        #: Numbers of words that were committed.
        self._words: dict[str, int] = {}

    def has(self, job: str) -> bool:
        with translated(self.path):
            found = self.connection.execute("SELECT 1 FROM groups WHERE job = ?", (job,)).fetchone()
        return found is not None

    def put(self, rows: Iterable[SampleRow], uses: Iterable[Use]) -> None:
        """Write all in one commit, or nothing."""
        with self._commit():
            for row in rows:
                self._put_row(row)
            for use in uses:
                self._put_use(use)

    def note(self, gone: Iterable[tuple[str, int | None]]) -> None:
        """Keep the names of deleted files and how many samples they had; None: nobody knows."""
        with self._commit():
            self.connection.executemany("INSERT OR REPLACE INTO gone(name, samples) VALUES(?, ?)", gone)

    @contextlib.contextmanager
    def _commit(self) -> Iterator[None]:
        with translated(self.path):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                self._words.clear()
                # A full disk may have ended it already.
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def _put_row(self, row: SampleRow) -> None:
        number, group = self._group(row)
        sample = self._sample(number, row)
        body = body_of(row, group)
        self.connection.execute("INSERT INTO bodies(s, body) VALUES(?, ?)", (sample, to_bytes(body)))
        self._index("answers", sample, row.answer)

    def _group(self, row: SampleRow) -> tuple[int, Group]:
        """Number and content of the row's group, which its first row makes and none changes."""
        found = self.connection.execute("SELECT g, body FROM groups WHERE job = ?", (row.job,)).fetchone()
        if found is not None and found[1] is not None:
            return int(found[0]), group_from_bytes(found[1])
        group = group_of(row)
        number = self._group_number(row.job)
        self.connection.execute("UPDATE groups SET body = ? WHERE g = ?", (to_bytes(group), number))
        self._index("prompts", number, row.prompt)
        return number, group

    def _group_number(self, job: str) -> int:
        self.connection.execute("INSERT OR IGNORE INTO groups(job) VALUES(?)", (job,))
        return int(self.connection.execute("SELECT g FROM groups WHERE job = ?", (job,)).fetchone()[0])

    def _sample(self, group: int, row: SampleRow) -> int:
        """The row's number, that of the row it replaces where there is one; all that was kept of that one is gone."""
        key = (group, row.k, row.part)
        found = self.connection.execute("SELECT s FROM samples WHERE g = ? AND k = ? AND part = ?", key).fetchone()
        if found is not None:
            self._forget(found[0], group)
        reward = row.reward if row.reward is not None and math.isfinite(row.reward) else None
        words = map(self._word, (row.lane, row.dataset, row.status, row.fate, row.reason))
        added = self.connection.execute(
            "INSERT INTO samples(s, g, k, part, lane, dataset, status, fate, reason, reward, oldest, newest, generated)"
            " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (found and found[0], *key, *words, reward, row.oldest, row.newest, row.num_generated),
        )
        return int(added.lastrowid or 0)

    def _forget(self, sample: int, group: int) -> None:
        (body,) = self.connection.execute("SELECT body FROM bodies WHERE s = ?", (sample,)).fetchone()
        (shared,) = self.connection.execute("SELECT body FROM groups WHERE g = ?", (group,)).fetchone()
        _, answer = texts(body_from_bytes(body), group_from_bytes(shared))
        if words := words_of(answer):
            # An index without the texts is told what it held.
            self.connection.execute(
                "INSERT INTO answers(answers, rowid, words) VALUES('delete', ?, ?)", (sample, " ".join(words))
            )
        self.connection.execute("DELETE FROM bodies WHERE s = ?", (sample,))
        self.connection.execute("DELETE FROM samples WHERE s = ?", (sample,))

    def _index(self, table: str, number: int, text: str) -> None:
        if words := words_of(writable(text)):
            self.connection.execute(f"INSERT INTO {table}(rowid, words) VALUES(?, ?)", (number, " ".join(words)))

    def _put_use(self, use: Use) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO uses(g, k, part, sub, batch, version, staleness, loss) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._group_number(use.job),
                use.k,
                use.part,
                self._word(use.subscription),
                use.batch,
                use.version,
                use.staleness,
                use.loss_tokens,
            ),
        )

    def _word(self, word: str) -> int:
        if word not in self._words:
            if len(self._words) >= MOST_WORDS:
                self._words.clear()
            self.connection.execute("INSERT OR IGNORE INTO words(word) VALUES(?)", (writable(word),))
            (number,) = self.connection.execute("SELECT w FROM words WHERE word = ?", (writable(word),)).fetchone()
            self._words[word] = number
        return self._words[word]
