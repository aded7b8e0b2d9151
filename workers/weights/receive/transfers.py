"""Receive weights that are sent without the disk, on the worker's side (penstock/protocol/transfers.py).

    prepare   enroll, wait for the decision; the engine keeps generating (drain: it has finished)
    receive   the engine is frozen and receives the weights by its transport (one file each, in this folder)

A failure before the first bytes has no effect; after it the engine's weights are mixed, and the folder of this version
or of a later one is loaded before it resumes. An engine that does not answer at all is stuck in a collective with a
dead trainer or member: it is lost, and its successor loads a folder.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from penstock.config.transport import TRANSPORTS, transport
from penstock.errors import EngineDied, ProtocolError, PublishError, QueueFull, QueueUnavailable
from penstock.protocol import transfers
from penstock.protocol.transfers import Decision, Enrollment
from penstock.protocol.waits import Waiting
from penstock.records.causes import TransferUndecided
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.commands import AsyncClient, News
from penstock.redis.control import AsyncControl
from penstock.text import format_exc, redact
from penstock.weights.index import TensorEntry, layout_digest, read_index
from penstock.workers.engine import Engine
from penstock.workers.weights.folders import FolderToCome
from penstock.workers.weights.receive.arrival import MARGIN_S, Arrival, NotBegun, NotSent
from penstock.workers.weights.receive.receiver import Receiver, receiver_of, users_receiver

log = logging.getLogger(__name__)

#: Receives the weights into a frozen engine: None on success, else the publication to load from its folder, that one
#: or a later one. Raises FolderToCome if the engine is unchanged.
Receive = Callable[[], Awaitable[Publication | None]]
#: Returns a publication, or a later one, with its folder on this machine; waits for it.
Instead = Callable[[Publication], Awaitable[Publication]]

_BLOCK_MS = 200


async def _read(streams: dict[str, bytes], client: AsyncClient) -> News:
    return await client.xread(streams, block=_BLOCK_MS)


class Transfers:
    """Enroll one engine for transfers, and receive them.

    Args:
        named: ``trainer.transport`` of this worker's own configuration. A user's class is imported here: raises
            ConfigError.
        reader: a connection for blocking reads that nothing else uses meanwhile.
        timeout_s: ``trainer.transfer_timeout_s``.
        birth: counts the engine's starts.
        instead: finds a publication to load for an engine with partly updated weights.
    """

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        worker: str,
        *,
        named: str,
        control: AsyncControl,
        reader: AsyncControl,
        waiting: Waiting,
        timeout_s: float,
        birth: Callable[[], int],
        instead: Instead,
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._worker = worker
        self._named = named
        self._control = control
        self._reader = reader
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._birth = birth
        self._receivers: dict[type[Receiver], Receiver] = {}
        self._instead = instead
        #: Digest of the latest index read, digest of its layout, and its tensors.
        self._known: tuple[str, str, list[TensorEntry]] = ("", "", [])
        self._users = None if named in TRANSPORTS else users_receiver(named)

    def check(self, publication: Publication) -> None:
        """Raise PublishError on a transport that is neither built in nor named by this worker's configuration.

        Publications come from Redis, and a client of that Redis must not choose what is imported here.
        """
        if publication.transport in TRANSPORTS or publication.transport == self._named:
            return
        raise PublishError(
            f"publication {publication.version} of {publication.model!r} is by {publication.transport!r}, and this "
            f"worker's trainer.transport is {self._named}: name the same in both configurations, or use one of "
            f"{', '.join(TRANSPORTS)}."
        )

    @property
    def layout(self) -> str:
        """Digest of the layout of the latest index read; '': none."""
        return self._known[1]

    def may_take(self, publication: Publication) -> bool:
        """Return whether this engine can get these weights without the disk: without a folder, its layout is known."""
        is_known = bool(publication.index) if publication.is_whole else publication.layout == self.layout != ""
        return transport(publication.transport).is_sent and is_known and self._engine.info.num_ranks > 0

    async def learn(self, publication: Publication) -> None:
        """Store the layout of a loaded version, from the index in its folder. Reads a small file in a thread."""
        if not publication.is_whole or publication.index in ("", self._known[0]):
            return
        if not transport(self._named).is_sent:
            return
        try:
            index = await asyncio.to_thread(read_index, Path(publication.path), publication.index)
            entries = index.entries()
        except PublishError as exc:
            log.info("the layout of version %d is not known: %s", publication.version, exc)
            return
        layout = layout_digest((entry.name, entry.dtype, entry.shape) for entry in entries)
        self._known = publication.index, layout, entries

    def receiver(self, name: str) -> Receiver:
        """Return the receiver of this transport; created on first use."""
        kind = self._users if self._users is not None and name == self._named else receiver_of(name)
        if kind not in self._receivers:
            self._receivers[kind] = kind(self._engine, self._birth)
        return self._receivers[kind]

    async def prepare(self, publication: Publication) -> Receive | None:
        """Enroll, and wait for the decision on the recipients. Return None to load the folder."""
        if not self.may_take(publication):
            return None
        model, id_ = publication.model, publication.id
        receiver = self.receiver(publication.transport)
        stream = self._keys.transfers(model)
        newest = await self._control.do(lambda client: client.xrevrange(stream, count=1))
        after = newest[0][0] if newest else b"0-0"
        enrollment = Enrollment(self._worker, redact(self._engine.url), self._engine.info.num_ranks, receiver.standing)
        if not await self._control.call(transfers.enroll(self._keys, model, id_, enrollment)):
            return None
        decision = await self._decided(stream, after, id_)
        if decision is None or self._worker not in decision.ranks or decision.transport != publication.transport:
            return None
        arrival = Arrival(
            publication,
            decision,
            worker=self._worker,
            engine=self._engine,
            keys=self._keys,
            control=self._control,
            timeout_s=self._timeout_s,
            entries=() if publication.is_whole else self._known[2],
        )
        try:
            await receiver.prepare(arrival)
        except (EngineDied, QueueUnavailable, QueueFull):
            raise
        except Exception as exc:
            await _fail(arrival, exc)
            return None
        return partial(take, receiver, arrival, self._instead, self._engine)

    async def _decided(self, stream: str, after: bytes, id_: str) -> Decision | None:
        deadline = time.monotonic() + self._timeout_s + MARGIN_S
        try:
            while time.monotonic() < deadline:
                self._waiting.blocked_on(TransferUndecided(id_))
                found = await self._reader.do(partial(_read, {stream: after}))
                for entry, fields in found[0][1] if found else []:
                    after = entry
                    if fields.get(b"id") == id_.encode():
                        return Decision.from_bytes(fields.get(b"d", b""), f"decision on {id_}")
        except ProtocolError as exc:
            log.error("version %s is loaded from its folder: %s", id_, exc)
            return None
        finally:
            self._waiting.end()
        log.warning("version %s is loaded from its folder: the trainer did not decide in time", id_)
        return None


async def take(receiver: Receiver, arrival: Arrival, instead: Instead, engine: Engine) -> Publication | None:
    """Receive the weights and notify the trainer; return None, or the publication to load instead.

    Raises:
        EngineDied: the engine was lost.
        FolderToCome: nothing was sent, and there is no folder: the engine is unchanged.
        QueueUnavailable, QueueFull: the trainer cannot be notified.
    """
    publication, failure, has_begun = arrival.publication, "", True
    engine.is_receiving = True
    try:
        failure = await receiver.receive(arrival)
    except EngineDied as exc:
        await arrival.answer(f"its engine is lost: {exc}"[:500])
        raise
    except NotSent as exc:
        failure, has_begun = str(exc), not isinstance(exc, NotBegun)
    except (QueueUnavailable, QueueFull):
        raise
    except Exception as exc:
        await _fail(arrival, exc)
        return await instead(publication)
    await arrival.answer(failure)
    if not failure:
        return None
    log.warning("version %s is loaded from a folder: %s", arrival.decision.id, failure)
    if not has_begun and not publication.is_whole:
        engine.is_receiving = False
        raise FolderToCome(f"version {publication.version} was not sent: {failure}")
    return await instead(publication)


async def _fail(arrival: Arrival, exc: Exception) -> None:
    """Report an unexpected exception of a receiver to the trainer; the folder is loaded instead."""
    log.error("version %s is loaded from its folder: its receiver raised", arrival.decision.id, exc_info=exc)
    await arrival.answer(f"its receiver raised {format_exc(exc)}")
