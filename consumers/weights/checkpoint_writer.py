"""Write folders of versions in the background, after their announcement (docs/internals/protocol.md, The send first).

    trainer's thread    copy ─> (announce, send) ─> put ─────────────> keep: repeat the announcement
    writer's thread                                  └─> folder ─> whole ─> offer over HTTP

At most two copies are in memory, the newest and the one that is being written.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Config
from penstock.consumers.clock import weights_dir_of
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights import write
from penstock.consumers.weights.copies import Arena, Copy
from penstock.consumers.weights.sources import Source
from penstock.consumers.weights.static_files import StaticFiles
from penstock.errors import DiskFull, PublishError
from penstock.protocol import scripts
from penstock.protocol.presence import FRESH_S, live_workers
from penstock.protocol.scripts import loading_of
from penstock.protocol.waits import PublishedWaiting
from penstock.records.keys import Keys
from penstock.records.publication import Whole
from penstock.records.worker_causes import WeightsUnwritten
from penstock.redis.control import Control
from penstock.system.disk import until_room
from penstock.text import format_exc

log = logging.getLogger(__name__)

#: Interval at which the trainer checks that Redis still knows its newest folder.
KEEP_S = 1.0


@dataclass(eq=False, slots=True)
class _Task:
    """A version to write."""

    version: int
    copy: Copy
    #: Whether its copy is unchanged, so that a failed write can be retried.
    has_copy: bool = True
    #: Why it has no folder; '' once it has one, and during the first write.
    why: str = ""


class CheckpointWriter:
    """Copy versions and write the folders of announced ones, one after the other, on rank 0 of a trainer.

        copy      copy weights, over a version that waits if necessary
        put(v)    queue v, replacing another that waits; the first call starts the thread
        settle    wait until all folders are written
        check     raise the error of a failed write, and retry it

    The newest version always gets its folder: one that was replaced by a copy is owed until another is put. A trainer
    that waits for a batch publishes nothing, so a failed write is retried from its copy once the error was raised.

    Args:
        serving: offers complete folders over HTTP; None: disabled.
    """

    def __init__(self, config: Config, subscriber: Subscriber, serving: StaticFiles | None) -> None:
        self._config, self._subscriber, self._serving = config, subscriber, serving
        self._arenas = (Arena(), Arena())
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: _Task | None = None
        self._writing: _Task | None = None
        #: The version put last; None: nothing was put, or a version with a folder was announced after it.
        self._newest: _Task | None = None
        self._closed = threading.Event()
        #: Connection of the thread.
        self._control: Control | None = None
        #: The newest folder; time of the last check that Redis knows it.
        self._whole: Whole | None = None
        self._kept = 0.0

    @property
    def owes(self) -> bool:
        """Return whether the newest version that was put has no folder, and may never have one."""
        with self._changed:
            return self._newest is not None and self._newest.why != ""

    def copy(self, source: Source) -> Copy:
        """Copy weights, if necessary over a version that waits for its folder. Blocks for the walk; PublishError."""
        busy = self._drop_waiting()
        arena = next(one for one in self._arenas if busy is None or one.copy is not busy)
        return arena.take(source, write.require_config(Path(self._config.model.path)))

    def write_folder(
        self,
        source: Source,
        version: int,
        control: Control,
        waiting: PublishedWaiting,
        *,
        stopped: Callable[[], bool] = lambda: False,
        claim: Callable[[], None] = lambda: None,
    ) -> write.Written:
        """Write a folder as ``write_weights``; if the disk is full, wait for space and report it, unless ``stopped``.

        Args:
            control, waiting: of the calling thread.
        """
        config, keys = self._config, self._subscriber.keys
        return until_room(
            lambda: write.write_weights(
                source,
                config.model.path,
                weights_dir_of(config),
                version,
                keep=config.trainer.keep_versions,
                in_use=lambda: versions_in_use(control, keys, config.model.name),
                claim=claim,
                max_bucket_bytes=config.trainer.bucket_bytes,
            ),
            blocked_on=waiting.blocked_on,
            stopped=stopped,
        )

    def put(self, version: int, copy: Copy) -> None:
        """Queue an announced version for writing. Returns at once; the copy must not change until it is written."""
        with self._changed:
            self._waiting = self._newest = _Task(version, copy)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weights-folder", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forgive(self) -> None:
        """Drop a failed folder, because a version with a folder was announced after it."""
        with self._changed:
            self._newest = None

    def settle(self) -> None:
        """Wait until all queued folders are written, and report the wait; raise as ``check``."""
        self.rest()
        self.check()

    def rest(self) -> None:
        """Wait until no folder is being written or queued, whether or not writes failed, and report the wait."""
        waiting = self._subscriber.waiting
        with self._changed:
            while (task := self._writing or self._waiting) is not None:
                waiting.blocked_on(WeightsUnwritten(task.version))
                self._changed.wait(0.2)
            waiting.blocked_on(None)

    def check(self) -> None:
        """Raise PublishError if writing the newest version's folder failed, and retry it."""
        with self._changed:
            newest = self._newest
            if newest is None or not newest.why or newest in (self._waiting, self._writing):
                return
            why, then = newest.why, "publish again"
            if newest.has_copy and not self._closed.is_set():
                self._waiting, then = newest, "it is tried once more; publish again, or continue"
                self._changed.notify_all()
        raise PublishError(f"Version {newest.version} is announced and has no folder, because {why}: {then}.")

    def keep(self) -> None:
        """Repeat, during a wait, the announcement of the newest folder if Redis lost it.

        Blocks for at most a round trip every ``KEEP_S``. Raises PublishError as ``check``.
        """
        self.check()
        if time.monotonic() - self._kept < KEEP_S:
            return
        self._kept = time.monotonic()
        whole, key = self._whole, self._subscriber.keys.whole(self._config.model.name)
        control = self._subscriber.control
        if whole is not None and not control.do(lambda client: client.hexists(key, str(whole.version))):
            self._announce(control, whole)

    def close(self) -> None:
        """Write the queued folders and end the thread. Blocks, but not for a full disk. Logs errors."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self.rest()
        if self._thread is not None:
            self._thread.join()
        if self._control is not None:
            self._control.close()
        try:
            self.check()
        except PublishError as exc:
            log.error("%s", exc)

    def _drop_waiting(self) -> Copy | None:
        """Remove the version that waits; return the copy that is being read, or None. Returns at once."""
        with self._changed:
            if self._newest is not None:
                self._newest.has_copy = False
                if self._waiting is not None:
                    self._newest.why = "its copy was overwritten by a later one, which was not published"
            self._waiting = None
            return self._writing.copy if self._writing is not None else None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed.is_set())
                if self._waiting is None:
                    return
                task = self._writing = self._waiting
                self._waiting = None
            why = ""
            try:
                self._write(task)
            except DiskFull as exc:
                why = str(exc).rstrip(".")
                log.warning("version %d gets no folder: %s", task.version, exc)
            except BaseException as exc:  # otherwise this thread would end silently
                why = format_exc(exc).rstrip(".")
                log.error("the folder of version %d was not written", task.version, exc_info=exc)
            with self._changed:
                task.why, self._writing = why, None
                self._changed.notify_all()

    def _write(self, task: _Task) -> None:
        """Write, announce and offer a folder, in the thread."""
        sub, version, began = self._subscriber, task.version, time.monotonic()
        if self._control is None:
            self._control = Control(sub.control.url, stopped=self._closed.is_set, check=False)
        control = self._control
        waiting = PublishedWaiting(control.client, sub.keys, f"{sub.seat.who(sub.name)}:folder")
        written = self.write_folder(task.copy, version, control, waiting, stopped=self._is_room_unneeded)
        took_s = time.monotonic() - began
        whole = Whole(version, str(written.path), written.index_digest, written.num_bytes, took_s)
        self._announce(control, whole)
        self._whole = whole
        if self._serving is not None:
            self._serving.offer(version, written.index_digest, written.path)
        log.info("the folder of version %d was written in %.3f s", version, took_s)

    def _is_room_unneeded(self) -> bool:
        """Return whether to stop waiting for disk space: a newer version waits, or the trainer ends."""
        with self._changed:
            return self._closed.is_set() or self._waiting is not None

    def _announce(self, control: Control, whole: Whole) -> None:
        sub, model = self._subscriber, self._config.model.name
        while True:
            gen = sub.gen
            answer = control.call(scripts.whole(sub.keys, sub.name, owner=sub.owner, gen=gen, model=model, told=whole))
            if answer != "owner" or sub.gen == gen:
                break  # else it was rewound meanwhile
        if answer in ("owner", "version"):
            what = "another trainer has the subscription" if answer == "owner" else "Redis lost the publication"
            log.warning("the folder of version %d is not announced: %s", whole.version, what)


def versions_in_use(control: Control, keys: Keys, model: str) -> set[int]:
    """Return versions that engines hold, load or are about to load, or that are pinned.

    A worker that ends a load between the two reads is not missed: what it notes stays in the table until it notes its
    next load, beside the version that it holds then. One that notes a load after the first read is found by the read
    that follows the rename of a folder. Blocks. Raises ProtocolError if a worker's record is invalid.
    """
    pins = control.do(lambda client: client.hvals(keys.pins(model)))
    about = control.do(lambda client: client.hgetall(keys.loading(model)))
    # Read afterwards: a new worker notes what it is about to load before its presence.
    workers = {one.name: one.version for one in control.do(lambda client: live_workers(client, keys, all_=True))}
    found = {int(pin) for pin in pins} | set(workers.values())
    for name, data in about.items():
        worker, at, versions = loading_of(name, data)
        if worker in workers or time.time() - at < FRESH_S:
            found.update(versions)
    return found
