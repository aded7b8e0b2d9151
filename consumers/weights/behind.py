"""Folders that come behind the announcement of their versions (docs/protocol.md, The send first).

    trainer's thread    take a copy ─> (announce, send) ─> put ─────────────> keep: say whole once more
    writer's thread                                         ├─> folder ─> whole ─> offer
    server's thread                                         └─> index ─> offer of the copy ─> copied

Two copies at most are in memory, the newest and the one that is being written.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.config import Config
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights import publish
from penstock.consumers.weights.copies import Arena, Copy, ServedCopy
from penstock.consumers.weights.shared_memory import SharedMemory
from penstock.consumers.weights.sources import Source
from penstock.errors import DiskFull, PublishError
from penstock.protocol import scripts
from penstock.protocol.waits import PublishedWaiting, Waiting
from penstock.records.causes import Cause, WeightsUnwritten
from penstock.records.publication import Copied, Publication, Whole
from penstock.redis.call import Call
from penstock.redis.control import Control
from penstock.system.disk import until_room
from penstock.text import format_exc

# Writes folders of versions that are announced already, one after the other, in a thread of its own.
#
#     put(v)    being written: v waits, in the place of one that waited before; else it is begun
#     drop      what waits is not begun any more: its copy is about to go
#     settle    until all that was put is written
#     check     raises what a write failed of, and has it tried once more
#
# The newest always gets its folder: what was dropped is owed until another version is put. Who waits for a batch has
# nothing to publish, so that what failed must not stay so: its copy is there, and it is begun again when it was said.

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


#: How often the trainer looks whether Redis still knows of its newest folder.
KEEP_S = 1.0


class Behind:
    """Copies and folders of one trainer, rank 0's.

    Args:
        folder: of published versions.
        in_use: versions that somebody holds, loads or has pinned, asked for by the given connection.
        offer: called with version, digest of its index and folder once it is whole, from the writer's thread.
        offer_copy: has a copy served until its folder is there, where that is wanted.
        memories: of the two copies, one each; (): memory of this process alone.
    """

    def __init__(
        self,
        config: Config,
        subscriber: Subscriber,
        folder: Path,
        *,
        in_use: Callable[[Control], Collection[int]],
        offer: Callable[[int, str, Path], None],
        offer_copy: Callable[[ServedCopy], None],
        memories: Sequence[SharedMemory] = (),
    ) -> None:
        self._config, self._subscriber, self._folder = config, subscriber, folder
        self._in_use, self._offer, self._offer_copy = in_use, offer, offer_copy
        self._arenas = [Arena(memory) for memory in memories or (None, None)]
        self._closed = threading.Event()
        self._control: Control | None = None
        self._newest: Whole | None = None
        self._copied: Copied | None = None
        self._kept = 0.0
        #: What writes the folders.
        self.writer = FolderWriter(self._write)

    def take(self, source: Source) -> Copy:
        """Copy weights; a version that waits for its folder gives its memory up. Blocks for the walk; PublishError."""
        busy = self.writer.drop()
        arena = next(one for one in self._arenas if busy is None or one.copy is not busy)
        return arena.take(source, publish.require_config(Path(self._config.model.path)))

    def put(self, publication: Publication, copy: Copy) -> None:
        """Have an announced version served out of memory, where that is wanted, and its folder written.

        Returns at once.
        """
        config = self._config
        self.writer.put(publication, copy)
        self._offer_copy(
            ServedCopy(
                publication.version, copy, Path(config.model.path), config.trainer.bucket_bytes, self._tell_of_copy
            )
        )

    def settle(self) -> None:
        """Wait until every folder is written, by name. Raises PublishError where the newest will have none."""
        self.writer.settle(self._subscriber.waiting.blocked_on)

    def rest(self) -> None:
        """Wait until no folder is being written, by name, whatever came of them."""
        self.writer.rest(self._subscriber.waiting.blocked_on)

    def keep(self) -> None:
        """Repeat, during a wait, the announcement of the newest folder, or of its copy, if Redis lost it.

        Blocks for two round trips at most, now and then. Raises PublishError as ``settle``.
        """
        self.writer.check()
        if time.monotonic() - self._kept < KEEP_S:
            return
        self._kept = time.monotonic()
        told, copied, model = self._newest, self._copied, self._config.model.name
        control, keys = self._subscriber.control, self._subscriber.keys
        if told is not None and not control.do(lambda client: client.hexists(keys.whole(model), str(told.version))):
            self._tell(control, told)
        is_needed = copied is not None and (told is None or told.version < copied.version)
        if copied is None or not is_needed:
            return
        # A failover may have gone back to an earlier one.
        if control.do(lambda client: client.get(keys.copied(model))) != copied.to_bytes():
            self._tell_of_copy(control, copied)

    def close(self) -> None:
        """End when the newest folder is written. Blocks for the disk; logs what fails."""
        self._closed.set()
        self.writer.close(self._subscriber.waiting.blocked_on)
        if self._control is not None:
            self._control.close()

    def _write(self, task: Task, gives_up: Callable[[], bool]) -> None:
        """Loop of the writer's thread."""
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
            stopped=gives_up,
        )
        took_s = time.monotonic() - began
        told = Whole(version, str(written.path), written.index_digest, written.num_bytes, took_s)
        self._tell(control, told)
        self._newest = told
        self._offer(version, written.index_digest, written.path)
        log.info("the folder of version %d was written in %.3f s", version, took_s)

    def _tell(self, control: Control, told: Whole) -> None:
        answer = self._say(control, partial(scripts.whole, told=told))
        if answer in ("owner", "version"):
            what = "another trainer has the subscription" if answer == "owner" else "Redis has forgotten it"
            log.warning("nobody is told of the folder of version %d: %s", told.version, what)

    def _tell_of_copy(self, control: Control, copied: Copied) -> bool:
        """Whether workers may take it. Of the server's thread, and the trainer's."""
        self._copied = copied  # where Redis does not answer it is said again
        answer = self._say(control, partial(scripts.copied, told=copied))
        if answer not in ("owner", "version"):
            return True
        self._copied = None
        what = "another trainer has the subscription" if answer == "owner" else "it is not the newest any more"
        log.info("nobody is told of the copy of version %d: %s", copied.version, what)
        return False

    def _say(self, control: Control, verb: Callable[..., Call[str]]) -> str:
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
