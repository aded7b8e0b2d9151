"""Copies of a machine that engines may read.

FOLDER/DIGEST   locked, shared, by every process whose engine may read that copy: it is not deleted;
                alone by whoever deletes it
"""

import fcntl
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from penstock.system.disk import is_full, own_file
from penstock.workers.weights.machine_lock import locks

#: Versions that one engine may have to read: what it has, and what it is about to load.
HELD = 2


class CopyHolds:
    """Holds of one process, which end with it; ``folder`` exists and is accessible to its user alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Digest -> open file of its hold.
        self._held: OrderedDict[str, int] = OrderedDict()

    def hold(self, digest: str) -> None:
        """Hold a copy, and the one that was held before it. Raises OSError."""
        if digest not in self._held:
            handle = own_file(self.folder / digest)
            fcntl.flock(handle, fcntl.LOCK_SH)
            self._held[digest] = handle
        self._held.move_to_end(digest)
        while len(self._held) > HELD:
            os.close(self._held.popitem(last=False)[1])

    @contextmanager
    def meanwhile(self, digest: str) -> Iterator[None]:
        """Hold a copy while it is proven. Raises OSError if it is being deleted."""
        file = self.folder / digest
        handle = own_file(file)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), file.stat()):
                raise FileNotFoundError(f"{file} was deleted")
            yield
        finally:
            os.close(handle)

    @contextmanager
    def alone(self, digest: str) -> Iterator[bool]:
        """Return whether no live process holds the copy; none can start to meanwhile. Raises OSError."""
        try:
            handle = own_file(self.folder / digest)
        except OSError as exc:
            if not is_full(exc):
                raise
            yield True  # nobody can begin to, for want of room
            return
        try:
            yield locks(handle)
        finally:
            os.close(handle)

    def forget(self, copies: Collection[str]) -> None:
        """Delete the files of holds of all but ``copies``, and of what is held. Raises OSError."""
        for file in self.folder.iterdir():
            if file.name not in copies and file.name not in self._held:
                # Nobody's hold is a link.
                with nullcontext(True) if file.is_symlink() else self.alone(file.name) as may_go:
                    if may_go:
                        file.unlink()

    def close(self) -> None:
        """Release all holds."""
        while self._held:
            os.close(self._held.popitem()[1])
