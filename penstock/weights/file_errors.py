"""Convert file system errors on weights that another process wrote to PublishError."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PublishError
from penstock.system.disk import is_full
from penstock.text import utf8_safe

#: Errors of this process or machine, not of the file.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: Most characters of a path that is shown.
_MAX_PATH = 300


def shown_path(path: Path | str) -> str:
    """Return a path, which may come from Redis, as safe text for a message."""
    return utf8_safe(str(path), _MAX_PATH)


def is_folder(path: Path) -> bool:
    """Return whether the folder exists; raise PublishError if it cannot be inspected from this machine."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as exc:  # a path with a NUL is the latter
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise PublishError(
            f"{shown_path(path)} cannot be looked at on this machine ({why}): publish where workers may read."
        ) from exc


@contextmanager
def as_publish_error(what: str) -> Iterator[None]:
    """Convert file system errors in the block to a PublishError that begins with ``what``.

    Raises:
        PublishError: a file is missing, or cannot be read or written.
        OSError: the disk is full, or this process has no handles or memory left; other files would fail too.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _SHORT or is_full(exc):
            raise
        raise PublishError(f"{what}: {exc}.") from exc
