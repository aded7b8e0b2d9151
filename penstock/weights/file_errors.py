"""What the file system says of weights that somebody else wrote or keeps, as errors of these weights."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PublishError
from penstock.system.disk import is_full
from penstock.text import utf8_safe

#: What this process or its machine is short of: nothing is wrong with the file.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: Most characters of a path that is shown.
_MAX_PATH = 300


def shown_path(path: Path | str) -> str:
    """A path that may have come through Redis, as a sentence may hold it."""
    return utf8_safe(str(path), _MAX_PATH)


def is_folder(path: Path) -> bool:
    """Whether there is a folder. Raises PublishError where that cannot be seen from here."""
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
    """Within it, what the file system refuses is a PublishError that begins with ``what``.

    Raises:
        PublishError: a file is lost, or can not be read or written.
        OSError: there is no room, or this process is short of handles or memory: another file would fare no better.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _SHORT or is_full(exc):
            raise
        raise PublishError(f"{what}: {exc}.") from exc
