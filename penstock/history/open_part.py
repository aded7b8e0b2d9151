"""A file of a history that is written: rows and uses, all of a call in one commit."""

import contextlib
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock.history.blocks import blocks_of, pack_block, read_block
from penstock.history.bodies import Group, group_of
from penstock.history.chunks import ChunkWriter
from penstock.history.part import PartName, translated
from penstock.history.pieces import LookUp, Spelling, nothing_known
from penstock.history.row import SampleRow, Use
from penstock.history.text import indexed
from penstock.payloads.format import Array
from penstock.text import utf8_safe

#: Most words whose numbers are cached.
MOST_WORDS = 4096


class OpenPart:
    """A file of a history, opened for writing.

    Args:
        look_up: returns the pieces of token ids.
    """

    def __init__(
        self, name: PartName, path: Path, connection: sqlite3.Connection, look_up: LookUp = nothing_known
    ) -> None:
        self.name = name
        self.path = path
        self.connection = connection
        self._spelling = Spelling(look_up)
        self._chunks = ChunkWriter(connection)
        #: Number of the next sample; numbers are never reused, for readers may have cached the old row.
        self._next = 1
        #: Numbers of words, and ids of pieces, that were committed.
        self._words: dict[str, int] = {}
        self._pieces: set[int] = set()

    def has(self, job: str) -> bool:
        with translated(self.path):
            return self._group_number(job) is not None

    def put(self, rows: Iterable[SampleRow], uses: Iterable[Use]) -> None:
        """Write all in one commit, or nothing."""
        jobs: dict[str, dict[tuple[int, int], SampleRow]] = {}
        for row in rows:
            jobs.setdefault(row.job, {})[row.k, row.part] = row
        with self._commit():
            numbers = {job: self._put_job(job, list(found.values())) for job, found in jobs.items()}
            self._put_uses(uses, numbers)

    def note(self, gone: Iterable[tuple[str, int | None]]) -> None:
        """Record the names of deleted files and how many samples they had; None: unknown."""
        with self._commit():
            self.connection.executemany("INSERT OR REPLACE INTO gone(name, samples) VALUES(?, ?)", gone)

    @contextlib.contextmanager
    def _commit(self) -> Iterator[None]:
        with translated(self.path):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._chunks.flush()
                self.connection.execute("COMMIT")
            except BaseException:
                self._words.clear()
                self._pieces.clear()
                # A full disk may have ended the transaction already.
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                self._chunks.recover()
                raise

    def _put_job(self, job: str, rows: Sequence[SampleRow]) -> int:
        """Write samples of a job, replacing earlier rows of them; return the number of its group."""
        number = self._group_number(job)
        if number is None:
            number, group = self._add_group(job, rows[0])
        else:
            group = self._group(number, rows[0])
            self._forget(number, group, rows)
        for block in blocks_of(rows):
            self._put_block(block, number, group)
        return number

    def _add_group(self, job: str, row: SampleRow) -> tuple[int, Group]:
        group = group_of(row, self._spelling)
        added = self.connection.execute("INSERT INTO groups(job, body) VALUES(?, ?)", (job, group.to_bytes()))
        number = int(added.lastrowid or 0)
        self._put_prompt(number, group, row.prompt)
        return number, group

    def _group(self, number: int, row: SampleRow) -> Group:
        """Return the group as its first row made it."""
        (body,) = self.connection.execute("SELECT body FROM groups WHERE g = ?", (number,)).fetchone()
        if body is not None:
            return Group.from_bytes(body)
        group = group_of(row, self._spelling)
        self.connection.execute("UPDATE groups SET body = ? WHERE g = ?", (group.to_bytes(), number))
        self._put_prompt(number, group, row.prompt)
        return group

    def _put_prompt(self, number: int, group: Group, prompt: str) -> None:
        if words := indexed(utf8_safe(prompt)):
            self.connection.execute("INSERT INTO prompts(rowid, words) VALUES(?, ?)", (number, words))

    def _put_block(self, rows: Sequence[SampleRow], number: int, group: Group) -> None:
        first, self._next = self._next, self._next + len(rows)
        packed = pack_block(rows, group, self._spelling)
        place = self._chunks.append(b"".join(packed))
        self.connection.execute(
            "INSERT INTO blocks(b, place, bodies, tokens, logprobs) VALUES(?, ?, ?, ?, ?)",
            (first, place, *map(len, packed)),
        )
        self.connection.executemany(
            "INSERT INTO samples(s, g, k, part, lane, dataset, status, fate, reason, reward, oldest, newest, generated)"
            " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [self._columns(row, first + at, number) for at, row in enumerate(rows)],
        )
        words = [(first + at, indexed(utf8_safe(row.answer))) for at, row in enumerate(rows)]
        self.connection.executemany("INSERT INTO answers(rowid, words) VALUES(?, ?)", [one for one in words if one[1]])
        self._put_pieces([row.tokens for row in rows if row.tokens is not None])

    def _columns(self, row: SampleRow, sample: int, group: int) -> tuple[object, ...]:
        reward = float(row.reward) if row.reward is not None and math.isfinite(row.reward) else None
        words = map(self._word, (row.lane, row.dataset, row.status, row.fate, row.reason))
        return (sample, group, row.k, row.part, *words, reward, row.oldest, row.newest, row.num_generated)

    def _put_pieces(self, tokens: Sequence[Array]) -> None:
        """Store the pieces of tokens that this file does not have yet."""
        for fresh in filter(None, (set(one.tolist()) - self._pieces for one in tokens)):
            found = self._spelling.pieces(fresh)
            self.connection.executemany(
                "INSERT OR IGNORE INTO pieces(t, special, piece) VALUES(?, ?, ?)",
                [(token, piece.is_special, piece.text) for token, piece in found.items()],
            )
            self._pieces |= fresh

    def _forget(self, number: int, group: Group, rows: Iterable[SampleRow]) -> None:
        """Delete the rows of these samples."""
        for row in rows:
            found = self.connection.execute(
                "SELECT s FROM samples WHERE g = ? AND k = ? AND part = ?", (number, row.k, row.part)
            ).fetchone()
            if found is not None:
                self._forget_one(found[0], group)

    def _forget_one(self, sample: int, group: Group) -> None:
        # Rows that this commit has written may be read already.
        self._chunks.flush()
        first, block = read_block(self.connection, sample, group, logprobs=False)
        if words := indexed(block.fields(sample - first, self._spelling, arrays=False)["answer"]):
            # A contentless index needs the deleted text.
            self.connection.execute(
                "INSERT INTO answers(answers, rowid, words) VALUES('delete', ?, ?)", (sample, words)
            )
        self.connection.execute("DELETE FROM samples WHERE s = ?", (sample,))
        left = "SELECT 1 FROM samples WHERE s BETWEEN ? AND ?"
        if self.connection.execute(left, (first, first + len(block.bodies) - 1)).fetchone() is None:
            self.connection.execute("DELETE FROM blocks WHERE b = ?", (first,))

    def _put_uses(self, uses: Iterable[Use], numbers: dict[str, int]) -> None:
        self.connection.executemany(
            "INSERT OR REPLACE INTO uses(g, k, part, sub, batch, version, staleness, loss) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    self._number_for(use.job, numbers),
                    use.k,
                    use.part,
                    self._word(use.subscription),
                    use.batch,
                    use.version,
                    use.staleness,
                    use.loss_tokens,
                )
                for use in uses
            ],
        )

    def _number_for(self, job: str, numbers: dict[str, int]) -> int:
        """Return the number of a job's group, which is created if only a use of it is known."""
        if job not in numbers:
            self.connection.execute("INSERT OR IGNORE INTO groups(job) VALUES(?)", (job,))
            numbers[job] = self._group_number(job) or 0
        return numbers[job]

    def _group_number(self, job: str) -> int | None:
        found = self.connection.execute("SELECT g FROM groups WHERE job = ?", (job,)).fetchone()
        return None if found is None else int(found[0])

    def _word(self, word: str) -> int:
        if word not in self._words:
            if len(self._words) >= MOST_WORDS:
                self._words.clear()
            self.connection.execute("INSERT OR IGNORE INTO words(word) VALUES(?)", (utf8_safe(word),))
            (number,) = self.connection.execute("SELECT w FROM words WHERE word = ?", (utf8_safe(word),)).fetchone()
            self._words[word] = number
        return self._words[word]
