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
from functools import partial
from pathlib import Path

from penstock.config import Config
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights import publish
from penstock.consumers.weights.copies import Arena, Copy
from penstock.consumers.weights.copy_files import ServedCopy
from penstock.consumers.weights.folder_writer import FolderWriter, Task
from penstock.consumers.weights.shared_memory import SharedMemory
from penstock.consumers.weights.sources import Source
from penstock.protocol import scripts
from penstock.protocol.records.copied import Copied
from penstock.protocol.records.publication import Publication
from penstock.protocol.records.whole import Whole
from penstock.protocol.waits import PublishedWaiting, Waiting
from penstock.redis.call import Call
from penstock.redis.control import Control
from penstock.system.disk import until_room

log = logging.getLogger(__name__)

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
