"""A file or folder that a verb writes: it is new, and what keeps it from being written is one sentence."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import ConfigError


def check_new(path: Path) -> None:
    """Raise ConfigError where ``path`` is there already, or its folder is not."""
    if path.exists():
        raise ConfigError(f"{path} is there already: name one that is not.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written, for there is no folder {path.parent}: make it, or name another.")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes ``path``. Raises ConfigError where the disk or the user's rights do not let it."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written ({exc.strerror or exc}): make room for it, or name another place."
        ) from exc
