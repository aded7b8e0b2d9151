"""Writes folders of versions that are announced already, one after the other, in a thread of its own.

    put(v)    being written: v waits, in the place of one that waited before; else it is begun
    drop      what waits is not begun any more: its copy is about to go
    settle    until all that was put is written
    check     raises what a write failed of, and has it tried once more

The newest always gets its folder: what was dropped is owed until another version is put. Who waits for a batch has
nothing to publish, so that what failed must not stay so: its copy is there, and it is begun again when it was said.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.consumers.weights.copies import Copy
from penstock.errors import DiskFull, PublishError
from penstock.protocol.records.causes import Cause, WeightsUnwritten
from penstock.protocol.records.publication import Publication
from penstock.text import format_exc

log = logging.getLogger(__name__)


class Task(NamedTuple):
    """A version to be written."""

    publication: Publication
    copy: Copy


@dataclass(slots=True)
class _Newest:
    """The version put last."""

    task: Task
    #: Whether its copy is still as it was, so that it can be written once more.
    has_copy: bool = True
    #: Why it has no folder, until it has one; '' while it is written for the first time.
    why: str = ""


class FolderWriter:
    """One thread, which begins with the first ``put``.

    Args:
        write: writes and proves a version's folder, and tells of it; blocks. It is given a word that is true when it
            is not to wait for room any more.
    """

    def __init__(self, write: Callable[[Task, Callable[[], bool]], None]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: Task | None = None
        self._writing: Task | None = None
        self._is_closed = False
        #: None, too, where a version that has its folder was announced after it.
        self._newest: _Newest | None = None

    @property
    def owes(self) -> bool:
        """Whether the newest version that was put has no folder, and may never have one."""
        with self._changed:
            return self._newest is not None and self._newest.why != ""

    def put(self, publication: Publication, copy: Copy) -> None:
        """Have the folder of an announced version written. Returns at once; the copy must stay as it is until then."""
        with self._changed:
            self._waiting = Task(publication, copy)
            self._newest = _Newest(self._waiting)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="weights-folder", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def drop(self) -> Copy | None:
        """Forget what waits; the copy that is being read, if there is one. Returns at once."""
        with self._changed:
            if self._newest is not None:
                self._newest.has_copy = False
                if self._waiting is not None:
                    self._newest.why = "its copy went for a later one, which was not published"
            self._waiting = None
            return self._writing.copy if self._writing is not None else None

    def forgive(self) -> None:
        """Drop a failed folder, because a version with a folder was announced after it."""
        with self._changed:
            self._newest = None

    def settle(self, blocked_on: Callable[[Cause | None], None] = lambda cause: None) -> None:
        """Wait until all that was put is written; raises as ``check``.

        Args:
            blocked_on: called now and then with the cause of the wait; None at the end.
        """
        self.rest(blocked_on)
        self.check()

    def check(self) -> None:
        """Raise PublishError where the newest version that was put has no folder; it is tried once more after that."""
        with self._changed:
            newest = self._newest
            if newest is None or not newest.why or newest.task is self._waiting or newest.task is self._writing:
                return
            why, then = newest.why, "publish again"
            if newest.has_copy and not self._is_closed:
                self._waiting, then = newest.task, "it is tried once more; publish again, or go on"
                self._changed.notify_all()
        version = newest.task.publication.version
        raise PublishError(f"Version {version} is announced and has no folder, as {why}: {then}.")

    def close(self, blocked_on: Callable[[Cause | None], None] = lambda cause: None) -> None:
        """End when what was put is written; a disk without room is not waited for. Blocks. Logs what fails.

        Args:
            blocked_on: as of ``settle``.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.rest(blocked_on)
        if self._thread is not None:
            self._thread.join()
        try:
            self.check()
        except PublishError as exc:
            log.error("%s", exc)

    def rest(self, blocked_on: Callable[[Cause | None], None] = lambda cause: None) -> None:
        """Wait until nothing is written and nothing waits, whatever came of it."""
        with self._changed:
            while (task := self._writing or self._waiting) is not None:
                blocked_on(WeightsUnwritten(task.publication.version))
                self._changed.wait(0.2)
            blocked_on(None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._is_closed:
                    self._changed.wait()
                if self._waiting is None:
                    return
                task = self._writing = self._waiting
                self._waiting = None
            why = self._failure_of(task)
            with self._changed:
                self._writing = None
                if self._newest is not None and self._newest.task is task:
                    self._newest.why = why
                self._changed.notify_all()

    def _failure_of(self, task: Task) -> str:
        """Write it; '' or why that was in vain."""
        version = task.publication.version
        try:
            self._write(task, self._gives_up)
        except DiskFull as exc:
            log.warning("version %d gets no folder: %s", version, exc)
            return str(exc).rstrip(".")
        except BaseException as exc:  # nobody could see the end of this thread
            log.error("the folder of version %d was not written", version, exc_info=exc)
            return format_exc(exc).rstrip(".")
        return ""

    def _gives_up(self) -> bool:
        """Return whether a newer version has its folder, or the trainer ends."""
        with self._changed:
            return self._is_closed or self._waiting is not None
