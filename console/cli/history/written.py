"""Write a new file or folder, with errors of one sentence."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import ConfigError


def check_new(path: Path) -> None:
    """Raise ConfigError if ``path`` exists already, or its folder does not."""
    if path.exists():
        raise ConfigError(f"{path} exists already: name another one.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written, for there is no folder {path.parent}: make it, or name another.")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Wrap the writing of ``path``. Raises ConfigError for errors of the disk or missing permissions."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written ({exc.strerror or exc}): make room for it, or name another place."
        ) from exc
