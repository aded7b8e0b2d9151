"""Coordinate the transfer of one version to the ready workers, on rank 0 (penstock/protocol/transfers.py)."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.config import TrainerConfig
from penstock.errors import PublishError
from penstock.protocol import transfers
from penstock.protocol.transfers import Decision, Enrollment, Word
from penstock.protocol.waits import Waiting
from penstock.records.causes import WorkerNotReady
from penstock.records.codec import name_shown
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.control import Control

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

#: Tensors by the names that the engine loads; at most ``trainer.bucket_bytes``, or one tensor.
Bucket: TypeAlias = "list[tuple[str, Tensor]]"

_LOOK_S = 0.003
#: Polling interval for the workers that will be ready soon.
_EXPECT_S = 0.5


class TransferFailed(PublishError):
    """A transfer did not reach every member; its version goes by disk."""


class Transfer:
    """Give a sender the ready workers, the weights, and messages to and from each worker, for one version.

    Each of its waits blocks for at most ``timeout_s``, and is reported by `penstock why`.

    Args:
        walk: begins to gather the weights again, bucket by bucket; every rank of a sharded source takes part.
    """

    def __init__(
        self,
        publication: Publication,
        config: TrainerConfig,
        walk: Callable[[], Iterator[Bucket]],
        *,
        keys: Keys,
        control: Control,
        waiting: Waiting,
    ) -> None:
        self.publication = publication
        #: VERSION-REV of the publication.
        self.id = publication.id
        #: Ready workers, by name.
        self.workers: dict[str, Enrollment] = {}
        #: ``trainer.transfer_timeout_s`` and ``trainer.bucket_bytes``.
        self.timeout_s, self.bucket_bytes = config.transfer_timeout_s, config.bucket_bytes
        self._deadline = time.monotonic() + self.timeout_s
        self._keys, self._control, self._waiting = keys, control, waiting
        self._begin_walk = walk
        self._walk: Iterator[Bucket] | None = None
        #: Error of the source that aborted the walk.
        self._source_failure: Exception | None = None
        self._is_decided = False
        #: Workers of the decision, and those of them not yet notified of the outcome.
        self._receiving: list[str] = []
        self._waiting_for_end: set[str] = set()

    @property
    def left_s(self) -> float:
        """Return the remaining seconds for workers to become ready."""
        return max(0.0, self._deadline - time.monotonic())

    def await_workers(self, expected: Callable[[], Collection[str]]) -> None:
        """Block until the expected workers have enrolled, or the time is over."""
        key = self._keys.transfer(self.publication.model)
        wanted, looked = set(expected()), time.monotonic()
        while True:
            state = self._control.do(lambda client: client.hgetall(key))
            if state.get(b"id") != self.id.encode():
                break  # another version took its place
            self.workers = transfers.enrolled(state)
            if time.monotonic() - looked > _EXPECT_S:
                wanted, looked = set(expected()), time.monotonic()
            missing = wanted - self.workers.keys()
            if not missing or not self.left_s:
                break
            self._waiting.blocked_on(WorkerNotReady(min(missing), self.publication.version, "enroll"))
            time.sleep(_LOOK_S)
        self._waiting.end()
        if missing := wanted - self.workers.keys():
            version = self.publication.version
            log.warning("workers not ready in time, they load the folder of version %d: %s", version, sorted(missing))

    def decide(self, ranks: Mapping[str, int] | None = None, **where: Any) -> None:
        """Publish the decision on the recipients, once; other workers load the folder.

        Args:
            ranks: worker -> its first rank in a process group; None: every ready worker, as rank 0.
            where: fields of ``Decision``: ``group``, ``address``, ``port``, ``world_size``.

        Raises:
            TransferFailed: another version took its place.
        """
        ranks = dict.fromkeys(self.workers, 0) if ranks is None else dict(ranks)
        decision = Decision(self.id, ranks, self.publication.transport, bucket_bytes=self.bucket_bytes, **where)
        self._receiving, self._waiting_for_end = list(ranks), set(ranks)
        if not self._decide(decision):
            raise TransferFailed("another version took its place")

    def buckets(self) -> Iterator[Bucket]:
        """Yield full tensors in buckets, on the device where they were gathered. Blocks for the other ranks."""
        while (bucket := self._next()) is not None:
            yield bucket

    def await_held(self) -> dict[str, str]:
        """Return the workers with a frozen engine, once all are or the time is over; do not write to engines before.

        Returns:
            Worker -> address through which the sender writes to its engine, '' if the receiver has none.

        Raises:
            TransferFailed: another version took its place.
        """
        return self._await_reports(Word.HELD, "hold")

    def tell(self, worker: str, text: str) -> None:
        """Send the text that the worker's ``Arrival.told`` returns, for instance the location of the weights."""
        self._report(Word.KNOW, worker, text)

    def await_received(self) -> None:
        """Block until every worker has the weights.

        Raises TransferFailed if a worker failed, the time is over, or another version took its place.
        """
        took = self._await_reports(Word.TOOK, "receive", stop_at_failure=True)
        failed = [(worker, why) for worker, why in took.items() if why]
        failed += [(worker, "it did not answer in time") for worker in self._receiving if worker not in took]
        if failed:
            raise TransferFailed(f"worker {failed[0][0]} did not take the weights: {failed[0][1]}")

    def end(self, worker: str, why: str = "") -> None:
        """Notify the worker that it has the weights, or has to load the folder because of ``why``."""
        self._waiting_for_end.discard(worker)
        self._report(Word.SENT, worker, why)

    def close(self, failure: str) -> None:
        """Release all waiters: workers without a decision or an end, and other ranks in the walk.

        Raises:
            Exception: what the source of the weights raised.
        """
        if not self._is_decided:
            self._decide(Decision(self.id))
        if failure:
            for worker in sorted(self._waiting_for_end):
                self.end(worker, failure)
        if self._source_failure is not None:
            raise self._source_failure
        if self._walk is not None:
            for _ in self._walk:
                pass

    def _next(self) -> "Bucket | None":
        if self._walk is None:
            self._walk = self._begin_walk()
        try:
            return next(self._walk, None)
        except Exception as exc:
            self._source_failure = exc
            raise

    def _decide(self, decision: Decision) -> bool:
        self._is_decided = True
        return self._control.call(transfers.decide(self._keys, self.publication.model, decision))

    def _report(self, word: Word, worker: str, text: str) -> None:
        self._control.call(transfers.report(self._keys, self.publication.model, self.id, word, worker, text))

    def _await_reports(
        self, word: Word, step: Literal["hold", "receive"], *, stop_at_failure: bool = False
    ) -> dict[str, str]:
        """Return the workers' reports, once all have reported or the time is over. Raises TransferFailed."""
        key = self._keys.transfer(self.publication.model)
        fields = ["id", *(f"{word}:{name}" for name in self._receiving)]
        deadline = time.monotonic() + self.timeout_s
        while True:
            id_, *values = self._control.do(lambda client: client.hmget(key, fields))
            if id_ != self.id.encode():
                self._waiting.end()
                raise TransferFailed("another version took its place")
            reports = {
                name: name_shown(text) for name, text in zip(self._receiving, values, strict=True) if text is not None
            }
            missing = set(self._receiving) - reports.keys()
            if not missing or time.monotonic() > deadline or (stop_at_failure and any(reports.values())):
                break
            self._waiting.blocked_on(WorkerNotReady(min(missing), self.publication.version, step))
            time.sleep(_LOOK_S)
        self._waiting.end()
        return reports
