"""Plain files, atomic and durable names, private folders and files; and waiting for room on a full file system.

A process that needs room waits, and reports it.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import xxhash

from penstock.errors import DiskFull
from penstock.records.cause import Cause
from penstock.records.causes import FileUnwritable
from penstock.records.worker_causes import RoomOnDisk

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Most bytes of the name of a file.
MAX_NAME_BYTES = 255
#: Errors of a full file system.
FULL = (errno.ENOSPC, errno.EDQUOT)
#: Less than this counts as no room.
ROOM_BYTES = 1024 * 1024
#: Seconds between two attempts, and between two log lines about it.
LOOK_S, SAY_EVERY_S = 1.0, 60.0
#: Most pauses of LOOK_S before a file that cannot be written is tried again.
MAX_PAUSES = 30


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file, or a link to one, for reading. Blocks only for the disk.

    Raises:
        OSError: it cannot be opened, or is not a plain file: opening a FIFO would block until it has a writer.
        ValueError: the path is invalid.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "no plain file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def file_xxh3(path: Path) -> int:
    """Compute the XXH3-64 of a file's bytes: fast, for gigabytes. Blocks. Raises OSError, also if it is not plain."""
    with open_plain(path) as stream:
        return int.from_bytes(hashlib.file_digest(stream, xxhash.xxh3_64).digest())


def fsync(path: Path) -> None:
    """Sync the bytes of a file, or the names in a folder, to disk. Blocks. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a folder with its contents, a file, or a link and not its target. Blocks. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove_whole(path: Path, gone: Path, is_wanted: Callable[[], bool] = lambda: False) -> None:
    """Rename a folder or file, then delete it, so that no process finds half of it under its name. Blocks.

    Args:
        gone: temporary name on the same disk, free; the caller removes what a killed process left there.
        is_wanted: called after the rename, as another process may have begun to use it before: true undoes the
            rename.

    Raises:
        OSError: it may be under either name, and incomplete under ``gone``.
    """
    path.rename(gone)
    if is_wanted():
        gone.rename(path)
    else:
        remove(gone)


def own_folder(path: Path) -> None:
    """Create a folder, unless it exists, and make it private to this user. Blocks for the disk.

    Permissions of others are removed: writers could put a link there, and readers could lock its files.

    Raises:
        PermissionError: it is another user's, or its disk lets others write regardless of the mode. OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    handle = _opened_own(path)
    try:
        if os.fstat(handle).st_mode & 0o077:
            with suppress(PermissionError):  # a disk without modes
                os.fchmod(handle, 0o700)
        if os.fstat(handle).st_mode & 0o022:
            raise PermissionError(f"other users may write in {path}, and its disk keeps no mode: name another folder")
    finally:
        os.close(handle)


def check_own(path: Path) -> None:
    """Check that an existing folder is this user's, as ``own_folder`` does, without changes. Raises as it."""
    os.close(_opened_own(path))


def _opened_own(path: Path) -> int:
    """Open an existing folder; return its handle. Raises PermissionError if it is another user's. OSError."""
    link = path.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} is a link of another user (uid {link.st_uid}): name another folder")
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(handle).st_uid
        if owner != os.geteuid() and owner != _owner_of_new_files(path):
            raise PermissionError(
                f"{path} belongs to another user (uid {owner}): name another folder, or one below it, which is made"
            )
    except BaseException:
        os.close(handle)
        raise
    return handle


def _owner_of_new_files(folder: Path) -> int:
    """Return the owner of files that this process creates: a share may map root to another user."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except PermissionError:
        return os.geteuid()


def own_file(path: Path) -> int:
    """Open a private plain file for reading and writing, created if it is missing, without following links.

    Raises:
        PermissionError: it may not be opened, is a link, or is not a plain file. OSError.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise PermissionError(f"{path} is a link, and must be a file of penstock's: remove it") from exc
        raise
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise PermissionError(f"{path} is no plain file, and must be one of penstock's: remove it")
        if mode & 0o077:
            os.fchmod(handle, 0o600)
    except BaseException:
        os.close(handle)
        raise
    return handle


def locks(handle: int) -> bool:
    """Return whether this process has the exclusive lock of ``handle``; does not block. Raises OSError."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_full(exc: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a lack of room; Rust libraries give the number only as text."""
    while exc is not None:
        if isinstance(exc, DiskFull) or (isinstance(exc, OSError) and exc.errno in FULL):
            return True
        if any(f"(os error {code})" in str(exc) for code in FULL):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def has_room(path: Path) -> bool:
    """Return whether the file system of ``path`` has any room left."""
    return free_bytes(path) >= ROOM_BYTES


def until_room(
    work: Callable[[], T],
    *,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
    stopped: Callable[[], bool] = lambda: False,
    path: Path | None = None,
) -> T:
    """Repeat ``work`` until it has room. Blocks.

    Args:
        work: raises DiskFull, or an OSError for lack of room, and may then be repeated.
        blocked_on: called with the cause of the wait, repeatedly; with None at its end.
        stopped: called before every further attempt; true raises the last error of ``work``.
        path: the file that ``work`` writes; if given, every other OSError is retried too, after growing pauses.
    """
    said, pauses = -SAY_EVERY_S, 1
    while True:
        try:
            done = work()
        except (DiskFull, OSError) as exc:
            if not (path or is_full(exc)) or stopped():
                raise
            error = str(exc).rstrip(".")
            cause = FileUnwritable(str(path), error) if path and not is_full(exc) else RoomOnDisk(error)
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                log.warning("waiting for %s", cause)
            for _ in range(pauses):
                blocked_on(cause)
                time.sleep(LOOK_S)
                if stopped():
                    raise
            pauses = 1 if is_full(exc) else min(2 * pauses, MAX_PAUSES)
            continue
        if said > 0:
            blocked_on(None)
        return done


def put(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file atomically, readable by this user alone, or with ``mode``.

    Blocks; raises OSError.

    Several processes may do so concurrently: readers find the text of one of them.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        # Failed attempts must not fill a full disk.
        os.unlink(name)
        raise


def append(path: Path, data: str | bytes) -> None:
    """Append complete records to a file, or nothing. Blocks for the file system. Raises DiskFull, OSError.

    Text begins on a new line: a process that was killed may have left half a line.
    """
    raw = data.encode() if isinstance(data, str) else data
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(file).st_size
        if raw and isinstance(data, str) and size and os.pread(file, 1, size - 1) != b"\n":
            raw = b"\n" + raw
        try:
            view = memoryview(raw)
            while view:
                view = view[os.write(file, view) :]
        except OSError as exc:
            # Half a record would corrupt the next one.
            os.ftruncate(file, size)
            if exc.errno in FULL:
                raise DiskFull(f"{path} cannot grow: {exc.strerror}.") from exc
            raise
    finally:
        os.close(file)
