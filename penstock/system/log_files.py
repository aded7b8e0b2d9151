"""Files that take the output of processes: bounded in size while others write them, and read from a process's start.

A log that has grown too long is copied to ``LOG.1`` (``LOG.1`` becomes ``LOG.2``, and so on) and then emptied in place:
its writers, which have opened it to append, go on without knowing. So any number of processes may write one log, those
of others (engines, Redis) too. A kill in between leaves lines twice, in ``LOG`` and ``LOG.1``; what is written in the
instant between the end of the copy and the emptying is lost.
"""

import asyncio
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.logs import as_text

#: Between two looks at a log's size.
LOOK_EVERY_S = 10.0
#: Most bytes of a log that are read for its last lines.
TAIL_BYTES = 64 * 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the lines of a process begin in its log. Made by ``mark`` when it is started."""

    path: Path
    #: Byte of the log at which they begin, unless it was rotated since.
    start: int
    #: What stood at ``LOG.1`` then.
    before: tuple[int, int] | None

    def last_lines(self, count: int) -> str:
        """The last lines that the process wrote; entries of JSON as text. Empty where there are none."""
        text = _read(self.path, self.start)
        if self._was_rotated():
            text = _read(numbered(self.path, 1), 0) + _read(self.path, 0)
        return as_text("\n".join(text.rstrip().splitlines()[-count:]))

    def _was_rotated(self) -> bool:
        return _identity(numbered(self.path, 1)) != self.before


def mark(path: Path) -> Mark:
    """Note where a log ends now, before a process that writes it is started."""
    return Mark(path, path.stat().st_size if path.exists() else 0, _identity(numbered(path, 1)))


def numbered(path: Path, n: int) -> Path:
    """``LOG.n``, the n-th of those that are kept; 1 is the newest."""
    return path.with_name(f"{path.name}.{n}")


def bound(paths: Iterable[Path], max_bytes: int, keep: int) -> None:
    """Rotate those of the logs that are longer than ``max_bytes``. Blocks for the file system.

    One that cannot be rotated stays as it is, and is said; the next look tries again.
    """
    for path in paths:
        try:
            rotate(path, max_bytes, keep)
        except OSError as exc:
            log.warning("log %s is longer than logs.max_bytes = %d and cannot be rotated: %s", path, max_bytes, exc)


async def keep_bounded(paths: Iterable[Path], max_bytes: int, keep: int) -> None:
    """``bound`` now and then, for ever, while the event loop goes on."""
    paths = tuple(paths)
    while True:
        await asyncio.to_thread(bound, paths, max_bytes, keep)
        await asyncio.sleep(LOOK_EVERY_S)


def rotate(path: Path, max_bytes: int, keep: int) -> bool:
    """Rotate a log that is longer than ``max_bytes``; whether it was. Two processes that do so at once do it once.

    Args:
        keep: logs kept beside it, at least 1.

    Raises:
        OSError: there is no room for the copy, or no right to make it; the log stays as it is.
    """
    try:
        with path.open("rb+") as file:
            if os.fstat(file.fileno()).st_size <= max_bytes or not _locked(file.fileno()):
                return False
            if os.fstat(file.fileno()).st_size <= max_bytes:
                return False  # another process did it just now
            copy = path.with_name(f".{path.name}.copy")
            try:
                with copy.open("wb") as out:
                    shutil.copyfileobj(file, out, 1024 * 1024)
                _shift(path, keep)
                copy.replace(numbered(path, 1))
            except BaseException:
                copy.unlink(missing_ok=True)
                raise
            file.truncate(0)
            return True
    except FileNotFoundError:
        return False


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shift(path: Path, keep: int) -> None:
    for n in range(keep - 1, 0, -1):
        if (older := numbered(path, n)).exists():
            older.replace(numbered(path, n + 1))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read(path: Path, start: int) -> str:
    """The end of a log from byte ``start`` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
