"""One file of a history: its name, what is in it, and how it is opened.

SQLite, for a row must be found by its reward, version, fate or words while others are written: Parquet keeps columns in
blocks that are whole only once they are closed, has no index of words, and a file of it that was cut off cannot be read
at all. Each commit is synced; a journal of the pages before, not a write-ahead log, for that needs memory which all
readers share, and a shared file system has none. One writer a file, any number of readers, each for an instant.

| table | a row is |
|---|---|
| `groups` | a job: its id, prompt and label; no body while only a use of it is known |
| `samples` | what samples are looked for by; `lane` to `reason` are numbers of `words` |
| `blocks` | the rest of some samples of a job, those numbered from `b` on: its place in `chunks`, and its lengths |
| `chunks` | blocks behind one another |
| `pieces` | a token id, and the bytes that it stands for |
| `uses` | a sample in a batch |
| `answers`, `prompts` | words of a text, without their places |
| `gone` | a part that was deleted to keep within `max_bytes`, and its number of rows |
"""

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DiskFull, HistoryError
from penstock.system.disk import fsync
from penstock.words import said

#: What is in these files; another number is another release's.
FORMAT = 3
#: "PSH1", of the header of each file.
APPLICATION = 0x50534831
#: A chunk of blocks fills one; rows that are gone through one after another stand close together.
PAGE_BYTES = 16384
#: Longest wait for whoever reads or writes the same file.
BUSY_S = 60.0
#: Pages that a reader keeps at hand, of each file: an order by an index asks for rows all over their table, which of a
#: million rows has 38 MB.
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
    # Of the few that hold more than one version: how far those lie apart at most.
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
    """Which file: of two that hold the same sample, the greater one has the row that counts."""

    #: Of the recorder's election.
    epoch: int
    #: Counts up.
    number: int

    def path(self, folder: Path) -> Path:
        return folder / str(self)

    def __str__(self) -> str:
        return f"{self.epoch:010d}-{self.number:06d}.sqlite"


#: Rows that no recorder has written yet: later than all that were.
LIVE = PartName(10**10 - 1, 10**6 - 1)


def parts_of(folder: Path) -> list[PartName]:
    """The files of a history, oldest first; none where there is no such folder. Blocks; raises OSError."""
    try:
        found = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    return sorted(PartName(int(name[1]), int(name[2])) for name in found if name)


def newest_epoch(folder: Path) -> int:
    """The latest epoch that there is a file of; 0 for none. Blocks; raises OSError."""
    return max((name.epoch for name in parts_of(folder)), default=0)


def size_of(path: Path) -> int:
    """Bytes of a file and its journal; 0 where it is not there."""
    total = 0
    for one in (path, journal_of(path)):
        with contextlib.suppress(FileNotFoundError):
            total += one.stat().st_size
    return total


def journal_of(path: Path) -> Path:
    """Where the pages are that a commit changes, until it is done."""
    return path.with_name(f"{path.name}-journal")


def begin(folder: Path, epoch: int) -> tuple[PartName, sqlite3.Connection]:
    """Make a file that nobody else has, and open it. Blocks; raises HistoryError, DiskFull, OSError."""
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
    """Open an empty file of ours, and make the tables in it; where that fails, nothing of it stays."""
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
        # A disk that is full must not be filled with what is left of each try, nor a process run out of files.
        for one in (path, journal_of(path)):
            one.unlink(missing_ok=True)
        raise


def in_memory() -> sqlite3.Connection:
    """What a file is, for as long as it is open: for rows that are nobody's history yet."""
    made = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _make_tables(made)
    return made


def open_to_read(path: Path) -> sqlite3.Connection | None:
    """Open a file of a history; None where it is not there, or only just begun. Blocks.

    A recorder that was killed in a commit left a journal, and the first who opens the file takes the commit back: that
    needs the right to write there.

    Raises:
        HistoryError: it is damaged, of another release, or no part of a history.
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
    """Whether it holds our tables, and nothing else; False while they are being made."""
    known = [sql for (sql,) in found.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
    (application,), (number,) = (
        found.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    if not known and not application:
        return False
    if application == APPLICATION and number != FORMAT:
        raise HistoryError(f"{path} is of format {number} of a history, and this release reads {FORMAT}.")
    # Tables of our own alone: a trigger or a view would be somebody else's code.
    ours = [sql for sql in known if not sql.startswith(("CREATE TABLE 'answers_", "CREATE TABLE 'prompts_"))]
    if application != APPLICATION or sorted(ours) != sorted(SCHEMA):
        raise HistoryError(f"{path} is no part of a history.")
    return True


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Errors of SQLite as ours: DiskFull where there is no room, else HistoryError; both name ``path``."""
    try:
        yield
    # UnicodeDecodeError: what SQLite says of a damaged file may quote bytes of it.
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as exc:
        if getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise DiskFull(f"{path} cannot grow: no room is left.") from exc
        raise HistoryError(f"{path}, a part of the history, cannot be used: {said(exc)}.") from exc
