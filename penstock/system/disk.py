"""Plain files, names that outlive a power loss, what no other user may touch; and a file system without room.

For room whoever writes waits, and says so.
"""

import errno
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from penstock.errors import DiskFull
from penstock.protocol.records.causes import Cause, FileUnwritable, RoomOnDisk

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Most bytes of the name of a file.
MAX_NAME_BYTES = 255
#: What makes a file system full.
FULL = (errno.ENOSPC, errno.EDQUOT)
#: Less than this counts as no room.
ROOM_BYTES = 1024 * 1024
#: Between two tries, and between two lines that say so.
LOOK_S, SAY_EVERY_S = 1.0, 60.0
#: Most pauses of LOOK_S before a file that cannot be written is tried again.
MAX_PAUSES = 30


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file, or a link to one, for reading. Blocks for the disk alone.

    Raises:
        OSError: it cannot be opened, or is something else: a FIFO would be waited for until somebody writes to it.
        ValueError: no path is made so.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "no plain file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def fsync(path: Path) -> None:
    """The bytes of a file, or the names in a folder, reach the disk. Blocks for it. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a folder with what is in it, a file, or a link and not what it leads to. Blocks. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def remove_whole(path: Path, gone: Path, is_wanted: Callable[[], bool] = lambda: False) -> None:
    """Delete what others look for by its name, which goes first: nobody takes half a folder for a whole one. Blocks.

    Args:
        gone: its name meanwhile, on the same disk, free; what a killed process left there is its caller's to remove.
        is_wanted: asked once the name is gone, as somebody may have come for it until then: true puts it back.

    Raises:
        OSError: it may be under either name, and under ``gone`` not whole.
    """
    path.rename(gone)
    if is_wanted():
        gone.rename(path)
    else:
        remove(gone)


def own_folder(path: Path) -> None:
    """Have a folder that this user alone reads and writes, made where it is missing. Blocks for the disk.

    One of ours is closed to others: who may write in it can put a link there, and who may only read can lock its files.

    Raises:
        PermissionError: it is another user's, or its disk has others write in it whatever its mode. OSError.
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
    """Look whether a folder that is there is this user's, as ``own_folder`` does, and change nothing. Raises as it."""
    os.close(_opened_own(path))


def _opened_own(path: Path) -> int:
    """A handle of a folder that is there. Raises PermissionError where it is another user's. OSError."""
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
    """Whose a file is that this process makes there: a share may give all that root makes to another user."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except PermissionError:
        return os.geteuid()


def own_file(path: Path) -> int:
    """A handle, to read and write, of a plain file of this user alone, made where it is missing; no link is followed.

    Raises:
        PermissionError: a file that may not be opened, a link, or no plain file is there. OSError.
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


def is_full(exc: BaseException | None) -> bool:
    """Is this error, or what it came from, a lack of room? Libraries in Rust give the number in words alone."""
    while exc is not None:
        if isinstance(exc, DiskFull) or (isinstance(exc, OSError) and exc.errno in FULL):
            return True
        if any(f"(os error {code})" in str(exc) for code in FULL):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where ``path`` lies."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def has_room(path: Path) -> bool:
    """Is there any room to speak of where ``path`` lies?"""
    return free_bytes(path) >= ROOM_BYTES


def until_room(
    work: Callable[[], T],
    *,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
    stopped: Callable[[], bool] = lambda: False,
    path: Path | None = None,
) -> T:
    """Do ``work`` until there is room for it. Blocks.

    Args:
        work: raises DiskFull, or an OSError for lack of room, and may then be done again from its beginning.
        blocked_on: called with the cause of the wait, again while that lasts; None at its end.
        stopped: asked before every further try; true raises what ``work`` raised last.
        path: the file that ``work`` writes, where every other OSError is retried too, after longer and longer pauses.
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
    """Write a whole file in the place of what is there, readable by this user alone, or as ``mode`` says.

    Blocks; raises OSError.

    Any number of processes may do so at once, and whoever reads finds the text of one of them.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        # A disk that is full must not be filled with what is left of each try.
        os.unlink(name)
        raise


def append(path: Path, data: str | bytes) -> None:
    """Add whole records to a file, or nothing. Blocks for the file system. Raises DiskFull, OSError.

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
            # Half a record would spoil the one that is written next.
            os.ftruncate(file, size)
            if exc.errno in FULL:
                raise DiskFull(f"{path} cannot grow: {exc.strerror}.") from exc
            raise
    finally:
        os.close(file)
