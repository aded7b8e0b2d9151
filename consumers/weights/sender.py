"""Interface of a transport on the trainer's side, and the transfer of one version that a transport carries out.

    transfer_open ─> workers enroll ─> Sender.send: decide ─> workers freeze their engines ─> weights ─> end

Messages to and from workers go through Redis (penstock/protocol/transfers.py).
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.config import TrainerConfig
from penstock.config.transport import TRANSPORTS, transport
from penstock.errors import ConfigError, Fenced, PublishError, QueueFull, QueueUnavailable
from penstock.protocol import transfers
from penstock.protocol.transfers import Decision, Enrollment, Word
from penstock.protocol.waits import Waiting
from penstock.records.causes import WorkerNotReady
from penstock.records.codec import name_shown
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.control import Control
from penstock.system.user_code import find
from penstock.text import format_exc

if TYPE_CHECKING:
    import torch

    from penstock.consumers.weights.sources import Bucket

log = logging.getLogger(__name__)

_POLL_S = 0.003
#: Polling interval for the workers that will be ready soon.
_EXPECT_S = 0.5


class TransferFailed(PublishError):
    """A transfer did not reach every member; its version goes by disk."""


class Transfer:
    """Give a sender the ready workers, the weights, and messages to and from each worker, for one version.

    Each of its waits blocks for at most ``timeout_s``, and is reported by `penstock why`.

    Args:
        walk: gathers the weights, bucket by bucket, from its first item on; every rank of a sharded source takes part.
    """

    def __init__(
        self,
        publication: Publication,
        config: TrainerConfig,
        walk: "Iterator[Bucket]",
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
        self._walk, self._is_walking = walk, False
        #: Error of the source that aborted the walk.
        self._source_failure: Exception | None = None
        self._is_decided = False
        #: Workers of the decision, and those of them not yet notified of the outcome.
        self._receiving: list[str] = []
        self._waiting_for_end: set[str] = set()

    def await_workers(self, expected: Callable[[], Collection[str]]) -> None:
        """Block until the expected workers have enrolled, or the time is over."""
        wanted, read_at = set(expected()), time.monotonic()

        def missing(state: dict[bytes, bytes]) -> Set[str]:
            nonlocal wanted, read_at
            self.workers = transfers.enrolled(state)
            if time.monotonic() - read_at > _EXPECT_S:
                wanted, read_at = set(expected()), time.monotonic()
            return wanted - self.workers.keys()

        self._poll("enroll", missing)
        if late := wanted - self.workers.keys():
            version = self.publication.version
            log.warning("workers not ready in time, they load the folder of version %d: %s", version, sorted(late))

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

    def buckets(self) -> "Iterator[Bucket]":
        """Yield full tensors in buckets, on the device where they were gathered. Blocks for the other ranks."""
        self._is_walking = True
        while True:
            try:  # not ``yield from``, which would end the walk if the caller stops early
                bucket = next(self._walk, None)
            except Exception as exc:
                self._source_failure = exc
                raise
            if bucket is None:
                return
            yield bucket

    def await_held(self) -> dict[str, str]:
        """Return the workers with a frozen engine, once all are or the time is over; do not write to engines before.

        Raises TransferFailed if another version took its place.

        Returns:
            Worker -> address through which the sender writes to its engine, '' if the receiver has none.
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
        if self._is_walking:
            for _ in self._walk:
                pass

    def _decide(self, decision: Decision) -> bool:
        self._is_decided = True
        return self._control.call(transfers.decide(self._keys, self.publication.model, decision))

    def _report(self, word: Word, worker: str, text: str) -> None:
        self._control.call(transfers.report(self._keys, self.publication.model, self.id, word, worker, text))

    def _await_reports(
        self, word: Word, step: Literal["hold", "receive"], *, stop_at_failure: bool = False
    ) -> dict[str, str]:
        """Return the workers' reports, once all have reported or the time is over. Raises TransferFailed."""
        reports: dict[str, str] = {}

        def missing(state: dict[bytes, bytes]) -> Set[str]:
            for name in self._receiving:
                if (text := state.get(f"{word}:{name}".encode())) is not None:
                    reports[name] = name_shown(text)
            return set() if stop_at_failure and any(reports.values()) else set(self._receiving) - reports.keys()

        self._deadline = time.monotonic() + self.timeout_s
        if not self._poll(step, missing):
            raise TransferFailed("another version took its place")
        return reports

    def _poll(
        self, step: Literal["enroll", "hold", "receive"], missing: Callable[[dict[bytes, bytes]], Set[str]]
    ) -> bool:
        """Read the transfer until no worker is missing or the time is over; return whether it is of this version."""
        key, version = self._keys.transfer(self.publication.model), self.publication.version
        while True:
            state = self._control.do(lambda client: client.hgetall(key))
            is_current = state.get(b"id") == self.id.encode()
            late = missing(state) if is_current else set()
            if not late or time.monotonic() > self._deadline:
                self._waiting.end()
                return is_current
            self._waiting.blocked_on(WorkerNotReady(min(late), version, step))
            time.sleep(_POLL_S)


def trainers_device(config: TrainerConfig) -> "torch.device":
    """Return ``trainer.device``; for "cuda" the current one, because each rank has its own."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device(config.device)


class Sender(ABC):
    """Send weights to ready engines. Every rank of the trainer has one for its lifetime; rank 0 uses it.

    A version is announced before :meth:`send` is called, and its folder exists or is written later, so an error costs
    only time: waiting workers are notified and load the folder.
    """

    #: True: the folder is complete before ``begin``, and named in ``publication.path``, regardless of
    #: ``trainer.folder_first``.
    needs_folder: bool = False

    #: ``module:Class`` of the worker's side of a user's own transport.
    receiver: ClassVar[str] = ""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config

    @classmethod  # noqa: B027
    def set_up(cls) -> None:
        """Configure each process of the trainer before it creates a process group."""

    def begin(self, publication: Publication) -> None:  # noqa: B027
        """Prepare a version that is about to be announced, without any worker; return at once.

        Errors abort ``Trainer.publish``: the version is not announced.
        """

    @abstractmethod
    def send(self, transfer: Transfer) -> None:
        """Send to ``transfer.workers``, at least one: decide on the recipients, then send. Blocks.

        Raises:
            TransferFailed, or anything else: recipients that were not notified of the end load the folder.
        """

    def abandon(self) -> None:  # noqa: B027
        """Discard a failed transfer, so that no process waits in it and the next one starts anew.

        Errors are logged.
        """

    def close(self) -> None:
        """Close at the trainer's end. Errors are logged."""
        self.abandon()


def sender_of(name: str) -> type[Sender] | None:
    """Return the class of ``trainer.transport``; None if nothing is sent. Imports its module; raises ConfigError."""
    path = transport(name).sender
    if name in TRANSPORTS:
        module, _, attribute = path.partition(":")
        return getattr(import_module(f"penstock.consumers.weights.{module}"), attribute) if path else None
    found = find(path, "trainer.transport")
    if not (isinstance(found, type) and issubclass(found, Sender)):
        raise ConfigError(f"trainer.transport {name} is not a sender: derive its class from penstock.Sender.")
    return found


def deliver(sender: Sender, transfer: Transfer) -> str:
    """Send the weights; return '' or the error, after which workers load the folder.

    Raises:
        QueueUnavailable, QueueFull, Fenced: workers cannot be notified.
    """
    try:
        sender.send(transfer)
    except TransferFailed as exc:
        failure = str(exc)
    except (QueueUnavailable, QueueFull, Fenced):
        quietly(sender.abandon)
        raise
    except Exception as exc:  # out of device memory, or any error of a user's sender
        failure = f"the weights could not be sent ({exc!r})"
        log.debug("a sender raised", exc_info=True)
    else:
        return ""
    log.warning("transfer of version %d failed, workers load its folder: %s", transfer.publication.version, failure)
    quietly(sender.abandon)
    return failure


def quietly(end: Callable[[], None]) -> None:
    """Call a sender's cleanup; log and ignore its errors, as it may be a user's, or its device may be lost."""
    try:
        end()
    except Exception as exc:
        log.warning("failed to clean up a transfer of weights: %s", format_exc(exc))
        log.debug("a sender raised", exc_info=True)
