"""One file of a history: its name, its schema, and how it is opened.

SQLite, since rows are found by reward, version, fate or words while others are written: Parquet stores columns in
blocks that are complete only when the file is closed, has no index of words, and a truncated file of it is unreadable.
Each commit is synced; the rollback journal is used instead of a write-ahead log, which needs memory shared by all
readers, impossible on a shared file system. One writer per file, any number of readers, each for a moment.

| table | a row is |
|---|---|
| `groups` | a job: its id, prompt and label; no body while only a use of it is known |
| `samples` | the searched fields of a sample; `lane` to `reason` are numbers of `words` |
| `blocks` | the other fields of samples of a job, numbered from `b` on: its place in `chunks`, and its lengths |
| `chunks` | blocks back to back |
| `pieces` | a token id, and the bytes that it stands for |
| `uses` | a sample in a batch |
| `answers`, `prompts` | words of a text, without their positions |
| `gone` | a part that was deleted to keep within `max_bytes`, and its number of rows |
"""

import contextlib
import math
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DiskFull, HistoryError
from penstock.history.blocks import blocks_of, pack_block, read_block
from penstock.history.bodies import Group, group_of
from penstock.history.packing import ChunkWriter, LookUp, Spelling, nothing_known
from penstock.history.row import SampleRow, Use, indexed
from penstock.payloads.format import Array
from penstock.system.disk import fsync
from penstock.text import format_exc, utf8_safe

#: Version of the schema; releases differ in it.
FORMAT = 3
#: "PSH1", in the header of each file.
APPLICATION = 0x50534831
#: A chunk of blocks fills one; rows that are scanned are close together.
PAGE_BYTES = 16384
#: Longest wait for another reader or writer of the same file.
BUSY_S = 60.0
#: Cache of a reader, for each file: an order by an index reads rows all over their table, which has 38 MB for a
#: million rows.
READ_CACHE_KIB = 48 * 1024
#: Most bytes of one value.
MAX_VALUE_BYTES = 512 * 1024 * 1024

SCHEMA = (
    "CREATE TABLE words(w INTEGER PRIMARY KEY, word TEXT NOT NULL UNIQUE)",
    "CREATE TABLE groups(g INTEGER PRIMARY KEY, job TEXT NOT NULL UNIQUE, body BLOB)",
    "CREATE TABLE samples(s INTEGER PRIMARY KEY, g INTEGER NOT NULL, k INTEGER NOT NULL, part INTEGER NOT NULL, "
    "lane INTEGER NOT NULL, dataset INTEGER NOT NULL, status INTEGER NOT NULL, fate INTEGER NOT NULL, "
    "reason INTEGER NOT NULL, reward REAL, oldest INTEGER NOT NULL, newest INTEGER NOT NULL, "
    "generated INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX samples_key ON samples(g, k, part)",
    "CREATE INDEX samples_reward ON samples(reward)",
    "CREATE INDEX samples_newest ON samples(newest)",
    "CREATE INDEX samples_generated ON samples(generated)",
    "CREATE INDEX samples_fate ON samples(fate)",
    # The largest difference, for rows with more than one version.
    "CREATE INDEX samples_span ON samples(newest - oldest) WHERE newest > oldest",
    "CREATE TABLE blocks(b INTEGER PRIMARY KEY, place INTEGER NOT NULL, bodies INTEGER NOT NULL, "
    "tokens INTEGER NOT NULL, logprobs INTEGER NOT NULL)",
    "CREATE TABLE chunks(n INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE pieces(t INTEGER PRIMARY KEY, special INTEGER NOT NULL, piece BLOB NOT NULL)",
    "CREATE TABLE uses(g INTEGER NOT NULL, k INTEGER NOT NULL, part INTEGER NOT NULL, sub INTEGER NOT NULL, "
    "batch INTEGER NOT NULL, version INTEGER NOT NULL, staleness INTEGER NOT NULL, loss INTEGER NOT NULL, "
    "PRIMARY KEY(g, k, part, sub, batch)) WITHOUT ROWID",
    "CREATE INDEX uses_batch ON uses(batch, g, k, part)",
    "CREATE TABLE gone(name TEXT PRIMARY KEY, samples INTEGER) WITHOUT ROWID",
    "CREATE VIRTUAL TABLE answers USING fts5(words, content='', columnsize=0, detail=none, tokenize='ascii')",
    "CREATE VIRTUAL TABLE prompts USING fts5(words, content='', columnsize=0, detail=none, tokenize='ascii')",
)

_NAME = re.compile(r"([0-9]{10})-([0-9]{6})\.sqlite")


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """Name of a file: of two files with the same sample, the row in the greater one is used."""

    #: Epoch of the recorder's election.
    epoch: int
    #: Counts up.
    number: int

    def path(self, folder: Path) -> Path:
        return folder / str(self)

    def __str__(self) -> str:
        return f"{self.epoch:010d}-{self.number:06d}.sqlite"


#: Rows that no recorder has written yet: later than all written ones.
LIVE = PartName(10**10 - 1, 10**6 - 1)


def parts_of(folder: Path) -> list[PartName]:
    """List the files of a history, oldest first; [] if the folder does not exist. Blocks; raises OSError."""
    try:
        found = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    return sorted(PartName(int(name[1]), int(name[2])) for name in found if name)


def newest_epoch(folder: Path) -> int:
    """Return the latest epoch that has a file; 0 if none has. Blocks; raises OSError."""
    return max((name.epoch for name in parts_of(folder)), default=0)


def size_of(path: Path) -> int:
    """Return the bytes of a file and its journal; 0 if it does not exist."""
    total = 0
    for one in (path, journal_of(path)):
        with contextlib.suppress(FileNotFoundError):
            total += one.stat().st_size
    return total


def journal_of(path: Path) -> Path:
    """Return the path of the rollback journal, which exists during a commit."""
    return path.with_name(f"{path.name}-journal")


def begin(folder: Path, epoch: int) -> tuple[PartName, sqlite3.Connection]:
    """Create a new file, and open it. Blocks; raises HistoryError, DiskFull, OSError."""
    number = max((name.number for name in parts_of(folder) if name.epoch == epoch), default=0)
    while True:
        number += 1
        name = PartName(epoch, number)
        try:
            os.close(os.open(name.path(folder), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            continue
        made = _made(name.path(folder))
        fsync(folder)
        return name, made


def _made(path: Path) -> sqlite3.Connection:
    """Open an empty file, and create the tables in it; delete it if that fails."""
    made = None
    try:
        with translated(path):
            made = _connect(path, "rw")
            made.execute(f"PRAGMA page_size={PAGE_BYTES}")
            made.execute("PRAGMA secure_delete=OFF")
            made.execute("PRAGMA journal_mode=TRUNCATE")
            made.execute("PRAGMA synchronous=FULL")
            made.execute("BEGIN IMMEDIATE")
            _make_tables(made)
            made.execute("COMMIT")
        return made
    except BaseException:
        if made is not None:
            made.close()
        # Failed attempts must neither fill the disk nor use up file descriptors.
        for one in (path, journal_of(path)):
            one.unlink(missing_ok=True)
        raise


def in_memory() -> sqlite3.Connection:
    """Open a file in memory, for rows that are in no history yet."""
    made = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _make_tables(made)
    return made


def open_to_read(path: Path) -> sqlite3.Connection | None:
    """Open a file of a history; return None if it does not exist, or is still empty. Blocks.

    A recorder that was killed in a commit left a journal, and the first to open the file rolls the commit back: that
    needs write permission.

    Raises:
        HistoryError: it is damaged, of another release, or not part of a history.
    """
    try:
        if path.stat().st_size == 0:
            return None
    except FileNotFoundError:
        return None
    with translated(path):
        mode = "rw" if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro"
        found = _connect(path, mode)
        try:
            found.execute("PRAGMA query_only=ON")
            found.execute("PRAGMA cell_size_check=ON")
            found.execute(f"PRAGMA cache_size=-{READ_CACHE_KIB}")
            return found if _is_ours(found, path) else None
        except BaseException:
            found.close()
            raise


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    made = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_S,
        check_same_thread=False,
    )
    made.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    made.execute("PRAGMA trusted_schema=OFF")
    return made


def _make_tables(made: sqlite3.Connection) -> None:
    for statement in SCHEMA:
        made.execute(statement)
    made.execute(f"PRAGMA application_id={APPLICATION}")
    made.execute(f"PRAGMA user_version={FORMAT}")


def _is_ours(found: sqlite3.Connection, path: Path) -> bool:
    """Return whether it holds our tables, and nothing else; False while they are being created."""
    known = [sql for (sql,) in found.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
    (application,), (number,) = (
        found.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    if not known and not application:
        return False
    if application == APPLICATION and number != FORMAT:
        raise HistoryError(f"{path} is of format {number} of a history, and this release reads {FORMAT}.")
    # Only our own tables: a trigger or a view would be foreign code.
    ours = [sql for sql in known if not sql.startswith(("CREATE TABLE 'answers_", "CREATE TABLE 'prompts_"))]
    if application != APPLICATION or sorted(ours) != sorted(SCHEMA):
        raise HistoryError(f"{path} is no part of a history.")
    return True


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate errors of SQLite: DiskFull if the disk is full, else HistoryError; both name ``path``."""
    try:
        yield
    # UnicodeDecodeError: SQLite's message about a damaged file may quote bytes of it.
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as exc:
        if getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise DiskFull(f"{path} cannot grow: no room is left.") from exc
        raise HistoryError(f"{path}, a part of the history, cannot be used: {format_exc(exc)}.") from exc


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
