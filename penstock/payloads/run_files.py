"""Layout of a run's payloads in a folder: ``FOLDER/RUN/x/NAME``, with a mark that ``FOLDER/RUN`` holds payloads."""

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from penstock.errors import ConfigError
from penstock.system.disk import FULL

#: Suffixes of files; no quoted name ends in one, for there two hex digits follow a percent sign.
PENDING, WRITING, FREED = "%new", "%tmp", "%old"

#: File that marks a run's folder.
MARK = ".penstock-payloads"

#: Names of its subfolders, and prefixes of the names of files in these.
PARTS, KINDS = "0123456789abcdef", ("payload:", "side:")

#: Errors that mean that a file does not exist, or cannot: no file written here has such a name.
GONE = {errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL}

#: Most bytes of one write.
WRITE_BYTES = 1024 * 1024


@contextmanager
def if_there() -> Iterator[None]:
    """Ignore a file that does not exist."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in GONE:
            raise


def unkeep(path: str) -> None:
    """Make a permanent payload expire again; its time begins now. A missing one is ignored.

    Raises OSError.
    """
    with if_there():
        os.utime(path)
        try:
            os.rename(path, path + PENDING)
        except OSError as exc:
            # A folder that has to grow for the longer name stays as it is while the disk is full.
            if exc.errno not in FULL:
                raise


def renew(path: str) -> None:
    """Restart the time to live of a payload that is not kept; one that is permanent or missing is ignored.

    Raises OSError.
    """
    with if_there():
        os.utime(path + PENDING)


def run_of(name: str) -> str:
    """Return the name of the run that a key, or a prefix of keys, belongs to: it is in braces."""
    return name[name.index("{") + 1 : name.index("}")]


def file_of(folder: Path, name: str) -> str:
    """Return the path of a permanent payload by its key."""
    run, _, rest = name.partition("{")[2].partition("}:")
    file = quote(rest, safe=":")
    return f"{folder}/{run}/{PARTS[zlib.crc32(file.encode()) & 15]}/{file}"


def claim(folder: Path) -> None:
    """Mark a run's folder as a folder of payloads; raise ConfigError if it holds other files."""
    if (folder / MARK).exists():
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    if others := [file.name for file in folder.iterdir() if file.name != MARK]:
        raise ConfigError(
            f"{folder} holds {others[0]!r} and is not a folder of payloads: name another folder in "
            "redis.payload_servers, or another --run."
        )
    (folder / MARK).touch(mode=0o600)


def parts(folder: Path) -> list[Path]:
    """Return the subfolders of a run that hold its files, without links."""
    return [part for name in PARTS if (part := folder / name).is_dir() and not part.is_symlink()]


def check_access(folder: Path) -> None:
    """Raise OSError if files of a run cannot be listed and renamed, as ``files`` and the leader do."""
    for part in parts(folder):
        os.scandir(part).close()
        if not os.access(part, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(part))


def files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the payload files of a run, in any state."""
    for part in parts(folder):
        with os.scandir(part) as found:
            yield from (file for file in found if file.name.startswith(KINDS))


def names_in(part: Path, step: Callable[[], None]) -> list[str]:
    """Return the names of payload files in one subfolder; ``step`` is called for each. Blocks. Raises OSError."""
    names = []
    with os.scandir(part) as found:
        for file in found:
            step()
            names.append(file.name)
    return [name for name in names if name.startswith(KINDS)]


def delete(folder: Path, step: Callable[[], None]) -> int:
    """Delete a run's payloads, calling ``step`` for each; return their number. Blocks. Raises as ``claim``, OSError."""
    count = 0
    if not folder.exists():
        return count
    claim(folder)
    for file in files(folder):
        step()
        with suppress(FileNotFoundError):
            os.unlink(file.path)
            count += 1
    with suppress(OSError):  # other files keep their folder
        for part in parts(folder):
            step()
            part.rmdir()
        (folder / MARK).unlink()
        folder.rmdir()
    return count


def write_all(file: int, data: bytes, step: Callable[[], None]) -> None:
    """Write all of ``data`` in pieces, and call ``step`` after each. Blocks. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view[:WRITE_BYTES]) :]
        step()
