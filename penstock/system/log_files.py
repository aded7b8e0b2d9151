"""Log files of processes: bounded in size while they are written, and read from a process's start.

A log that is too long is copied to ``LOG.1`` (``LOG.1`` becomes ``LOG.2``, and so on) and then truncated in place:
its writers, which have opened it for appending, continue unaware. So any number of processes may write one log, also
others (engines, Redis). A kill in between leaves lines twice, in ``LOG`` and ``LOG.1``; what is written between the
end of the copy and the truncation is lost.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.system.disk import locks
from penstock.system.logs import as_text

#: Seconds between two checks of a log's size.
LOOK_EVERY_S = 10.0
#: Rotated files kept of each log.
KEEP = 3
#: Most bytes of a log that are read for its last lines.
TAIL_BYTES = 64 * 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """Position in a log where the lines of a process begin. Made by ``mark`` before it is started."""

    path: Path
    #: Offset at which they begin, unless the log was rotated since.
    start: int
    #: Identity of ``LOG.1`` at that time.
    before: tuple[int, int] | None

    def last_lines(self, count: int) -> str:
        """Return the last lines of the process; JSON entries as text. Empty if it wrote none."""
        text = _read(self.path, self.start)
        if self._was_rotated():
            text = _read(numbered(self.path, 1), 0) + _read(self.path, 0)
        return as_text("\n".join(text.rstrip().splitlines()[-count:]))

    def _was_rotated(self) -> bool:
        return _identity(numbered(self.path, 1)) != self.before


def mark(path: Path) -> Mark:
    """Record the end of a log before a process that writes it is started."""
    return Mark(path, path.stat().st_size if path.exists() else 0, _identity(numbered(path, 1)))


def numbered(path: Path, n: int) -> Path:
    """Return the path of ``LOG.n``, the n-th rotated file; 1 is the newest."""
    return path.with_name(f"{path.name}.{n}")


def bound(paths: Iterable[Path], max_bytes: int) -> None:
    """Rotate the logs that are longer than ``max_bytes``. Blocks for the file system.

    A log that cannot be rotated is left unchanged, with a warning; the next call retries.
    """
    for path in paths:
        try:
            rotate(path, max_bytes)
        except OSError as exc:
            log.warning("log %s is longer than logs.max_bytes = %d and cannot be rotated: %s", path, max_bytes, exc)


async def keep_bounded(paths: Iterable[Path], max_bytes: int) -> None:
    """Call ``bound`` periodically, for ever, without blocking the event loop."""
    paths = tuple(paths)
    while True:
        await asyncio.to_thread(bound, paths, max_bytes)
        await asyncio.sleep(LOOK_EVERY_S)


def rotate(path: Path, max_bytes: int) -> bool:
    """Rotate a log that is longer than ``max_bytes``; return whether it was. Concurrent calls rotate it once.

    Raises:
        OSError: the copy has no room, or may not be created; the log is unchanged.
    """
    try:
        with path.open("rb+") as file:
            if os.fstat(file.fileno()).st_size <= max_bytes or not locks(file.fileno()):
                return False
            if os.fstat(file.fileno()).st_size <= max_bytes:
                return False  # another process did it just now
            copy = path.with_name(f".{path.name}.copy")
            try:
                with copy.open("wb") as out:
                    shutil.copyfileobj(file, out, 1024 * 1024)
                _shift(path)
                copy.replace(numbered(path, 1))
            except BaseException:
                copy.unlink(missing_ok=True)
                raise
            file.truncate(0)
            return True
    except FileNotFoundError:
        return False


def _shift(path: Path) -> None:
    for n in range(KEEP - 1, 0, -1):
        if (older := numbered(path, n)).exists():
            older.replace(numbered(path, n + 1))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read(path: Path, start: int) -> str:
    """Return the end of a log from byte ``start`` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
