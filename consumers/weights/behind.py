"""Write folders of versions in the background, after their announcement (docs/protocol.md, The send first).

    trainer's thread    take a copy ─> (announce, send) ─> put ─────────────> keep: repeat the announcement
    writer's thread                                         └─> folder ─> whole ─> offer

At most two copies are in memory, the newest and the one that is being written.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.config import Config
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights import publish
from penstock.consumers.weights.copies import Arena, Copy
from penstock.consumers.weights.sources import Source
from penstock.errors import DiskFull, PublishError
from penstock.protocol import scripts
from penstock.protocol.waits import PublishedWaiting, Waiting
from penstock.records.causes import Cause, WeightsUnwritten
from penstock.records.publication import Publication, Whole
from penstock.redis.call import Call
from penstock.redis.control import Control
from penstock.system.disk import until_room
from penstock.text import format_exc

log = logging.getLogger(__name__)


class Task(NamedTuple):
    """A version to be written."""

    publication: Publication
    copy: Copy


@dataclass(slots=True)
class _Newest:
    """Track the version put last."""

    task: Task
    #: Whether its copy is unchanged, so that a failed write can be retried.
    has_copy: bool = True
    #: Why it has no folder; '' once it has one, and during the first write.
    why: str = ""


class FolderWriter:
    """Write the folders of announced versions one after the other, in a thread that starts with the first ``put``.

        put(v)    queue v, replacing another that waits
        drop      remove the version that waits: its copy is about to be reused
        settle    wait until all folders are written
        check     raise the error of a failed write, and retry it

    The newest version always gets its folder: one that was dropped is owed until another is put. A trainer that waits
    for a batch publishes nothing, so a failed write is retried from its copy once the error was raised.

    Args:
        write: writes and verifies a version's folder and announces it; blocks. Its second argument returns True when
            it must no longer wait for disk space.
    """

    def __init__(self, write: Callable[[Task, Callable[[], bool]], None]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: Task | None = None
        self._writing: Task | None = None
        self._is_closed = False
        #: None: nothing was put, or a version with a folder was announced after it.
        self._newest: _Newest | None = None

    @property
    def owes(self) -> bool:
        """Return whether the newest version that was put has no folder, and may never have one."""
        with self._changed:
            return self._newest is not None and self._newest.why != ""

    def put(self, publication: Publication, copy: Copy) -> None:
        """Queue an announced version for writing. Returns at once; the copy must not change until it is written."""
        with self._changed:
            self._waiting = Task(publication, copy)
            self._newest = _Newest(self._waiting)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="weights-folder", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def drop(self) -> Copy | None:
        """Remove the version that waits; return the copy being read, or None. Returns at once."""
        with self._changed:
            if self._newest is not None:
                self._newest.has_copy = False
                if self._waiting is not None:
                    self._newest.why = "its copy was overwritten by a later one, which was not published"
            self._waiting = None
            return self._writing.copy if self._writing is not None else None

    def forgive(self) -> None:
        """Drop a failed folder, because a version with a folder was announced after it."""
        with self._changed:
            self._newest = None

    def settle(self, blocked_on: Callable[[Cause | None], None] = lambda cause: None) -> None:
        """Wait until all queued folders are written; raise as ``check``.

        Args:
            blocked_on: called periodically with the cause of the wait; None at the end.
        """
        self.rest(blocked_on)
        self.check()

    def check(self) -> None:
        """Raise PublishError if writing the newest version's folder failed, and retry it."""
        with self._changed:
            newest = self._newest
            if newest is None or not newest.why or newest.task is self._waiting or newest.task is self._writing:
                return
            why, then = newest.why, "publish again"
            if newest.has_copy and not self._is_closed:
                self._waiting, then = newest.task, "it is tried once more; publish again, or continue"
                self._changed.notify_all()
        version = newest.task.publication.version
        raise PublishError(f"Version {version} is announced and has no folder, because {why}: {then}.")

    def close(self, blocked_on: Callable[[Cause | None], None] = lambda cause: None) -> None:
        """Write the queued folders and end the thread. Blocks, but not for a full disk. Logs errors.

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
        """Wait until no folder is being written or queued, whether or not writes failed."""
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
            why = self._try_write(task)
            with self._changed:
                self._writing = None
                if self._newest is not None and self._newest.task is task:
                    self._newest.why = why
                self._changed.notify_all()

    def _try_write(self, task: Task) -> str:
        """Write a folder; return '' or the error."""
        version = task.publication.version
        try:
            self._write(task, self._is_room_unneeded)
        except DiskFull as exc:
            log.warning("version %d gets no folder: %s", version, exc)
            return str(exc).rstrip(".")
        except BaseException as exc:  # otherwise this thread would end silently
            log.error("the folder of version %d was not written", version, exc_info=exc)
            return format_exc(exc).rstrip(".")
        return ""

    def _is_room_unneeded(self) -> bool:
        """Return whether to stop waiting for disk space: a newer version waits, or the trainer ends."""
        with self._changed:
            return self._is_closed or self._waiting is not None


#: Interval at which the trainer checks that Redis still knows its newest folder.
KEEP_S = 1.0


class Behind:
    """Keep copies of published versions and write their folders, on rank 0 of a trainer.

    Args:
        folder: of published versions.
        in_use: returns versions that engines hold or load, or that are pinned, using the given connection.
        offer: called from the writer's thread with version, digest of the index, and complete folder.
    """

    def __init__(
        self,
        config: Config,
        subscriber: Subscriber,
        folder: Path,
        *,
        in_use: Callable[[Control], Collection[int]],
        offer: Callable[[int, str, Path], None],
    ) -> None:
        self._config, self._subscriber, self._folder = config, subscriber, folder
        self._in_use, self._offer = in_use, offer
        self._arenas = (Arena(), Arena())
        self._closed = threading.Event()
        self._control: Control | None = None
        self._newest: Whole | None = None
        self._kept = 0.0
        self.writer = FolderWriter(self._write)

    def take(self, source: Source) -> Copy:
        """Copy weights, if necessary over a version that waits for its folder. Blocks for the walk; PublishError."""
        busy = self.writer.drop()
        arena = next(one for one in self._arenas if busy is None or one.copy is not busy)
        return arena.take(source, publish.require_config(Path(self._config.model.path)))

    def put(self, publication: Publication, copy: Copy) -> None:
        """Write the folder of an announced version. Returns at once."""
        self.writer.put(publication, copy)

    def settle(self) -> None:
        """Wait until every folder is written, and report the wait. Raises PublishError if the newest failed."""
        self.writer.settle(self._subscriber.waiting.blocked_on)

    def rest(self) -> None:
        """Wait until no folder is being written, and report the wait. Ignores errors."""
        self.writer.rest(self._subscriber.waiting.blocked_on)

    def keep(self) -> None:
        """Repeat, during a wait, the announcement of the newest folder if Redis lost it.

        Blocks for at most a round trip every ``KEEP_S``. Raises PublishError as ``settle``.
        """
        self.writer.check()
        if time.monotonic() - self._kept < KEEP_S:
            return
        self._kept = time.monotonic()
        newest, model = self._newest, self._config.model.name
        control, keys = self._subscriber.control, self._subscriber.keys
        if newest is not None and not control.do(lambda client: client.hexists(keys.whole(model), str(newest.version))):
            self._announce(control, newest)

    def close(self) -> None:
        """Write the newest folder and end. Blocks for the disk; logs errors."""
        self._closed.set()
        self.writer.close(self._subscriber.waiting.blocked_on)
        if self._control is not None:
            self._control.close()

    def _write(self, task: Task, stopped: Callable[[], bool]) -> None:
        """Write, announce and offer a folder, in the writer's thread."""
        config, version = self._config, task.publication.version
        control, waiting = self._opened()
        began = time.monotonic()
        written = until_room(
            lambda: publish.write_weights(
                task.copy,
                config.model.path,
                self._folder,
                version,
                keep=config.trainer.keep_versions,
                in_use=lambda: self._in_use(control),
                max_bucket_bytes=config.trainer.bucket_bytes,
            ),
            blocked_on=waiting.blocked_on,
            stopped=stopped,
        )
        took_s = time.monotonic() - began
        whole = Whole(version, str(written.path), written.index_digest, written.num_bytes, took_s)
        self._announce(control, whole)
        self._newest = whole
        self._offer(version, written.index_digest, written.path)
        log.info("the folder of version %d was written in %.3f s", version, took_s)

    def _announce(self, control: Control, whole: Whole) -> None:
        answer = self._call(control, partial(scripts.whole, told=whole))
        if answer in ("owner", "version"):
            what = "another trainer has the subscription" if answer == "owner" else "Redis lost the publication"
            log.warning("the folder of version %d is not announced: %s", whole.version, what)

    def _call(self, control: Control, verb: Callable[..., Call[str]]) -> str:
        """Return the answer to one of the owner's verbs."""
        subscriber, model = self._subscriber, self._config.model.name
        while True:
            gen = subscriber.gen
            answer = control.call(verb(subscriber.keys, subscriber.name, owner=subscriber.owner, gen=gen, model=model))
            if answer != "owner" or subscriber.gen == gen:
                return answer  # else it was rewound meanwhile

    def _opened(self) -> tuple[Control, Waiting]:
        """Open a separate connection for the writer, and its reported wait."""
        if self._control is None:
            url = self._subscriber.control.url
            self._control = Control(url, stopped=self._closed.is_set, check=False)
        who = f"{self._subscriber.seat.who(self._subscriber.name)}:folder"
        return self._control, PublishedWaiting(self._control.client, self._subscriber.keys, who)
