"""One file of a history: its name, its schema, and how it is opened.

SQLite, since rows are found by reward, version, fate or words while others are written: Parquet stores columns in
blocks that are complete only when the file is closed, has no index of words, and a truncated file of it is unreadable.
Each commit is synced; the rollback journal is used instead of a write-ahead log, which needs memory shared by all
readers, impossible on a shared file system. One writer per file, any number of readers, each for a moment.

| table | a row is |
|---|---|
| `groups` | the id of a job |
| `samples` | the searched fields of a sample |
| `blocks` | the other fields and the arrays of samples of a job, numbered from `b` on (`blocks.py`) |
| `pieces` | a token id, and the bytes that it stands for |
| `uses` | a sample in a batch |
| `answers`, `prompts` | words of a text, without their positions; rows without a sample are of replaced ones |
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
from penstock.history.blocks import LookUp, blocks_of, pack_block
from penstock.history.row import ARRAYS, SampleRow, Use, indexed
from penstock.system.disk import fsync
from penstock.text import format_exc, utf8_safe

#: Version of the schema; releases differ in it.
FORMAT = 4
#: "PSH1", in the header of each file.
APPLICATION = 0x50534831
#: A block fills several and part of one: smaller pages leave less of that one empty.
PAGE_BYTES = 2048
#: Longest wait for another reader or writer of the same file.
BUSY_S = 60.0
#: Cache of a reader, for each file: an order by an index reads rows all over their table, which has 38 MB for a
#: million rows.
READ_CACHE_KIB = 48 * 1024
#: Most bytes of one value.
MAX_VALUE_BYTES = 512 * 1024 * 1024

SCHEMA = (
    "CREATE TABLE groups(g INTEGER PRIMARY KEY, job TEXT NOT NULL UNIQUE)",
    "CREATE TABLE samples(s INTEGER PRIMARY KEY, g INTEGER NOT NULL, k INTEGER NOT NULL, part INTEGER NOT NULL, "
    "lane TEXT NOT NULL, dataset TEXT NOT NULL, status TEXT NOT NULL, fate TEXT NOT NULL, reward REAL, "
    "oldest INTEGER NOT NULL, newest INTEGER NOT NULL, num_generated INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX samples_key ON samples(g, k, part)",
    "CREATE INDEX samples_reward ON samples(reward)",
    "CREATE INDEX samples_newest ON samples(newest)",
    "CREATE INDEX samples_length ON samples(num_generated)",
    "CREATE INDEX samples_fate ON samples(fate)",
    # The largest difference, for rows with more than one version.
    "CREATE INDEX samples_span ON samples(newest - oldest) WHERE newest > oldest",
    "CREATE TABLE blocks(b INTEGER PRIMARY KEY, fields BLOB NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, "
    "versions BLOB NOT NULL, generated BLOB NOT NULL, loss_mask BLOB NOT NULL)",
    "CREATE TABLE pieces(t INTEGER PRIMARY KEY, special INTEGER NOT NULL, piece BLOB NOT NULL)",
    "CREATE TABLE uses(g INTEGER NOT NULL, k INTEGER NOT NULL, part INTEGER NOT NULL, sub TEXT NOT NULL, "
    "batch INTEGER NOT NULL, version INTEGER NOT NULL, staleness INTEGER NOT NULL, loss INTEGER NOT NULL, "
    "PRIMARY KEY(g, k, part, sub, batch)) WITHOUT ROWID",
    "CREATE INDEX uses_batch ON uses(batch, g, k, part)",
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


class OpenPart:
    """A file of a history, opened for writing.

    Args:
        look_up: returns the pieces of token ids.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, look_up: LookUp = lambda _: {}) -> None:
        self.path = path
        self.connection = connection
        self._look_up = look_up
        #: Number of the next sample; numbers are never reused, for readers may have cached the old row.
        self._next = 1
        #: Token ids whose pieces were committed, as far as they are known.
        self._pieces: set[int] = set()

    def put(self, rows: Iterable[SampleRow], uses: Sequence[Use]) -> None:
        """Write all in one commit, or nothing; rows of the same samples are replaced."""
        jobs: dict[str, dict[tuple[int, int], SampleRow]] = {}
        for row in rows:
            jobs.setdefault(row.job, {})[row.k, row.part] = row
        with translated(self.path):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                for job, found in jobs.items():
                    self._put_job(job, list(found.values()))
                self._put_uses(uses)
                self.connection.execute("COMMIT")
            except BaseException:
                self._pieces.clear()
                # A full disk may have ended the transaction already.
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def _put_job(self, job: str, rows: Sequence[SampleRow]) -> None:
        self.connection.execute("INSERT OR IGNORE INTO groups(job) VALUES(?)", (job,))
        (group,) = self.connection.execute("SELECT g FROM groups WHERE job = ?", (job,)).fetchone()
        is_known = self.connection.execute("SELECT 1 FROM samples WHERE g = ? LIMIT 1", (group,)).fetchone()
        if is_known:
            # Not INSERT OR REPLACE, which makes FTS5 write its index at each row.
            replaced = [(group, row.k, row.part) for row in rows]
            self.connection.executemany("DELETE FROM samples WHERE g = ? AND k = ? AND part = ?", replaced)
        elif words := indexed(utf8_safe(rows[0].prompt)):
            self.connection.execute("INSERT INTO prompts(rowid, words) VALUES(?, ?)", (group, words))
        for block in blocks_of(rows):
            self._put_block(block, group)

    def _put_block(self, rows: Sequence[SampleRow], group: int) -> None:
        numbers = range(self._next, self._next + len(rows))
        self._next = numbers.stop
        self.connection.execute(
            f"INSERT INTO blocks(b, fields, {', '.join(ARRAYS)}) VALUES(?, ?{', ?' * len(ARRAYS)})",
            (numbers.start, *pack_block(rows)),
        )
        self.connection.executemany(
            "INSERT INTO samples(s, g, k, part, lane, dataset, status, fate, reward, oldest, newest, "
            "num_generated) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(number, group, *_columns(row)) for number, row in zip(numbers, rows, strict=True)],
        )
        words = [(number, indexed(utf8_safe(row.answer))) for number, row in zip(numbers, rows, strict=True)]
        self.connection.executemany("INSERT INTO answers(rowid, words) VALUES(?, ?)", [one for one in words if one[1]])
        self._put_pieces(set().union(*(row.tokens.tolist() for row in rows if row.tokens is not None)))

    def _put_pieces(self, tokens: set[int]) -> None:
        """Store the pieces of tokens that this file does not have yet."""
        if fresh := tokens - self._pieces:
            self.connection.executemany(
                "INSERT OR IGNORE INTO pieces(t, special, piece) VALUES(?, ?, ?)",
                [(token, is_special, piece) for token, (piece, is_special) in self._look_up(fresh).items()],
            )
            self._pieces |= fresh

    def _put_uses(self, uses: Sequence[Use]) -> None:
        jobs = dict.fromkeys(use.job for use in uses)
        self.connection.executemany("INSERT OR IGNORE INTO groups(job) VALUES(?)", [(job,) for job in jobs])
        self.connection.executemany(
            "INSERT OR REPLACE INTO uses(g, k, part, sub, batch, version, staleness, loss) "
            "SELECT g, ?, ?, ?, ?, ?, ?, ? FROM groups WHERE job = ?",
            [
                (use.k, use.part, use.subscription, use.batch, use.version, use.staleness, use.loss_tokens, use.job)
                for use in uses
            ],
        )


def _columns(row: SampleRow) -> tuple[object, ...]:
    reward = float(row.reward) if row.reward is not None and math.isfinite(row.reward) else None
    words = map(utf8_safe, (row.lane, row.dataset, row.status, row.fate))
    return (row.k, row.part, *words, reward, row.oldest, row.newest, row.num_generated)
