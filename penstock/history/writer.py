"""What a recorder writes: files of its own epoch, each commit synced, the oldest deleted to keep within a size."""

import contextlib
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock.errors import HistoryError
from penstock.history.bodies import Group, body_from_bytes, body_of, group_from_bytes, group_of, texts, to_bytes
from penstock.history.part import PartName, begin, journal_of, open_to_read, parts_of, size_of, translated
from penstock.history.row import SampleRow, Use
from penstock.history.text import words_of
from penstock.words import writable

#: A history of ``max_bytes`` has about so many files, none smaller or larger than these.
NUM_PARTS, LEAST_PART_BYTES, MOST_PART_BYTES = 16, 1024 * 1024, 1024 * 1024 * 1024


#: Words whose numbers are kept at hand.
MOST_WORDS = 4096


class HistoryWriter:
    """Writes the rows of one recorder. Not for several threads at once.

    Args:
        folder: of the history, ``RunFolder.history``; made where it is not there.
        epoch: of the recorder's election: greater than that of every recorder before it.
        max_bytes: of all files of the folder. Beyond it the oldest are deleted, and the rows that go are counted.
    """

    def __init__(self, folder: Path, epoch: int, *, max_bytes: int) -> None:
        self._folder = folder
        self._epoch = epoch
        self._max_bytes = max_bytes
        self._part_bytes = min(max(max_bytes // NUM_PARTS, LEAST_PART_BYTES), MOST_PART_BYTES)
        #: Ours alone, the newest last. No file that another process made is ever written to.
        self._parts: list[_OpenPart] = []

    def write(self, rows: Sequence[SampleRow], uses: Sequence[Use] = ()) -> None:
        """Keep rows and uses. They are on disk when this returns; a row of the same (job, k, part) is replaced.

        After an error any part of them may have been kept: give them all again. Blocks for the disk, and up to a minute
        for a reader.

        Raises:
            DiskFull: there is no room.
            HistoryError: the file cannot be written; the next call begins another one.
        """
        if not rows and not uses:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rotate()
        newest = self._parts[-1]
        jobs = {row.job for row in rows} | {use.job for use in uses}
        homes = {job: self._home(job) or newest for job in jobs}
        for part in list(self._parts):
            own = [row for row in rows if homes[row.job] is part]
            used = [use for use in uses if homes[use.job] is part]
            if own or used:
                self._put(part, own, used)

    def close(self) -> None:
        """Close the files. What was written stays; ``write`` would begin a new one."""
        for part in self._parts:
            part.connection.close()
        self._parts = []

    def _put(self, part: "_OpenPart", rows: Sequence[SampleRow], uses: Sequence[Use]) -> None:
        try:
            part.put(rows, uses)
        except HistoryError:
            self._parts.remove(part)
            part.connection.close()
            raise

    def _home(self, job: str) -> "_OpenPart | None":
        """The file of ours that has samples of a job; those of a job stay together."""
        return next((part for part in reversed(self._parts) if part.has(job)), None)

    def _rotate(self) -> None:
        if self._parts and size_of(self._parts[-1].path) < self._part_bytes:
            return
        name, connection = begin(self._folder, self._epoch)
        self._parts.append(_OpenPart(name, name.path(self._folder), connection))
        self._keep_within()

    def _keep_within(self) -> None:
        """Delete the oldest files until the rest, and one more of full size, keep within ``max_bytes``."""
        newest = self._parts[-1]
        there = [name for name in parts_of(self._folder) if name != newest.name]
        sizes = {name: size_of(name.path(self._folder)) for name in there}
        excess = sum(sizes.values()) + self._part_bytes - self._max_bytes
        for name in there:
            if excess <= 0:
                return
            self._delete(name)
            excess -= sizes[name]

    def _delete(self, name: PartName) -> None:
        """Delete a file, and note in the newest how many rows went with it, and with those that it had noted."""
        path, newest = name.path(self._folder), self._parts[-1]
        for part in [part for part in self._parts if part.name == name]:
            part.connection.close()
            self._parts.remove(part)
        newest.note([(str(name), _count_in(path)), *_gone_before(path)])
        for one in (path, journal_of(path)):
            one.unlink(missing_ok=True)


class _OpenPart:
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


def _count_in(path: Path) -> int | None:
    """Samples of a file; None where they cannot be counted."""
    with contextlib.suppress(HistoryError):
        found = open_to_read(path)
        if found is None:
            return 0
        with contextlib.closing(found), translated(path):
            return int(found.execute("SELECT count(*) FROM samples").fetchone()[0])
    return None


def _gone_before(path: Path) -> list[tuple[str, int | None]]:
    with contextlib.suppress(HistoryError):
        found = open_to_read(path)
        if found is not None:
            with contextlib.closing(found), translated(path):
                return [(str(name), samples) for name, samples in found.execute("SELECT name, samples FROM gone")]
    return []
