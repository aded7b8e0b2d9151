"""Receive weights that are sent without the disk, on the worker's side (penstock/protocol/transfers.py).

    prepare   enroll, wait for the decision; the engine keeps generating (drain: it has finished)
    receive   the engine is frozen and receives the weights by its transport (one file each, in this folder)

A failure before the first bytes has no effect (``NotBegun``). After it the engine's weights are mixed (``Partial``): it
generates nothing until it has loaded the folder of this version or a later one. An engine that does not answer at all
is stuck in a collective with a dead trainer or member: it is lost, and its successor loads a folder.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config.transport import TRANSPORTS, transport
from penstock.errors import (
    ConfigError,
    EngineDied,
    EngineError,
    ProtocolError,
    PublishError,
    QueueFull,
    QueueUnavailable,
)
from penstock.protocol import transfers
from penstock.protocol.transfers import Decision, Enrollment, Word
from penstock.protocol.waits import Waiting
from penstock.records.publication import Publication
from penstock.records.worker_causes import TransferUndecided
from penstock.redis.control import AsyncControl
from penstock.system.user_code import find
from penstock.text import format_exc, redact
from penstock.weights.index import TensorEntry, layout_digest, read_index
from penstock.workers.engine import Engine, NotBegun, Partial, Receive
from penstock.workers.services import Services

log = logging.getLogger(__name__)

_BLOCK_MS, _LOOK_S = 200, 0.003
#: The trainer times out first, so that a slow member is not lost.
MARGIN_S = 5.0


class NotSent(Exception):
    """The trainer did not send the weights; the message says why.

    Args:
        has_begun: whether some of them may have been written to the engine.
    """

    def __init__(self, why: str, *, has_begun: bool = True) -> None:
        super().__init__(why)
        self.has_begun = has_begun


class Arrival:
    """Represent one version that is sent to a receiver, with the decision on its recipients."""

    def __init__(self, services: Services, publication: Publication, decision: Decision) -> None:
        self.publication = publication
        self.decision = decision
        #: Its tensors, in the order in which they are sent.
        self.entries: Sequence[TensorEntry] = ()
        self._services = services
        self._timeout_s = services.config.trainer.transfer_timeout_s
        #: Whether the trainer waits for the outcome.
        self._is_awaited = False

    @property
    def rank(self) -> int:
        """First rank of the engine in the process group of the decision."""
        return self.decision.ranks[self._services.worker]

    async def post(self, path: str, body: dict[str, Any]) -> str:
        """Send a request to the engine's server; return '' or why it failed. Raises EngineDied without an answer."""
        try:
            answer = await self._services.engine.post(path, body, timeout_s=self._timeout_s + MARGIN_S)
        except EngineDied:
            raise
        except EngineError as exc:
            raise EngineDied(f"the engine is stuck in a transfer of weights: {exc}") from exc
        return "" if answer.get("success") else (str(answer.get("message", answer))[:500] or "no reason was given")

    async def told(self) -> str:
        """Report that the engine is frozen, and wait for the text that ``Transfer.tell`` sends to this worker.

        Raises:
            NotSent: the trainer aborted, or is silent; nothing was written to the engine.
        """
        try:
            word, text = await self._first_of(Word.KNOW, Word.SENT)
        except NotSent as exc:
            raise NotSent(str(exc), has_begun=False) from exc
        if word is Word.SENT:
            raise NotSent(text or "the trainer sent nothing", has_begun=False)
        self._is_awaited = True
        return text

    async def sent(self, where: str = "") -> str:
        """Report that the engine is frozen, and wait for ``Transfer.end``: '' when the trainer has written to it.

        Args:
            where: address through which the trainer writes to it, if it does.
        """
        return (await self._first_of(Word.SENT, where=where))[1]

    async def answer(self, failure: str) -> None:
        """Report the outcome to the trainer, if it failed or the trainer waits for it."""
        if failure or self._is_awaited:
            await self._report(Word.TOOK, failure)

    async def _first_of(self, *words: Word, where: str = "") -> tuple[Word, str]:
        services = self._services
        is_open = await self._report(Word.HELD, where)
        key = services.keys.transfer(self.publication.model)
        names = ["id", *(f"{word}:{services.worker}" for word in words)]
        deadline = time.monotonic() + 2 * self._timeout_s + MARGIN_S
        while is_open and time.monotonic() < deadline:
            id_, *texts = await services.control.do(lambda client: client.hmget(key, names))
            is_open = id_ == self.decision.id.encode()
            for word, text in zip(words, texts, strict=True):
                if is_open and text is not None:
                    return word, text.decode(errors="replace")
            await asyncio.sleep(_LOOK_S)
        raise NotSent("the trainer did not send it in time" if is_open else "the trainer began another transfer")

    async def _report(self, word: Word, text: str) -> bool:
        """Report to the trainer; return False if the transfer is over."""
        services, model = self._services, self.publication.model
        call = transfers.report(services.keys, model, self.decision.id, word, services.worker, text)
        return await services.control.call(call)


class Receiver(ABC):
    """Receive weights into a worker's engine. It lives as long as the worker; its calls do not overlap.

    Args:
        birth: counts the engine's starts: a new engine has nothing of the previous one's weights.
    """

    def __init__(self, engine: Engine, birth: Callable[[], int]) -> None:
        self.engine = engine
        self.birth = birth

    @property
    def standing(self) -> str:
        """Return the state of this engine that the sender needs for its decision: ``Enrollment.group``."""
        return ""

    async def prepare(self, arrival: Arrival) -> None:  # noqa: B027
        """Prepare for a transfer this worker takes part in; its engine still generates. Raises PublishError."""

    @abstractmethod
    async def receive(self, arrival: Arrival) -> str:
        """Receive the weights into the engine, which is frozen: no token is generated until this returns.

        Returns:
            '' when the engine has them, else why not: it then loads the folder.

        Raises:
            EngineDied: the engine does not answer; its successor loads the folder. Other exceptions count as reasons.
        """


def receiver_of(name: str) -> type[Receiver]:
    """Return the class of a built-in transport that sends weights, or that a user's sender ``module:Class`` names.

    Imports its module; raises ConfigError.
    """
    if name in TRANSPORTS:
        named: Any = f"{__package__}.{TRANSPORTS[name].receiver}"
    else:
        named = getattr(find(name, "trainer.transport"), "receiver", None)
    if not isinstance(named, str) or not named:
        raise ConfigError(f"trainer.transport {name} names no receiver: write receiver = 'module:Class' in its class.")
    found = find(named, f"The receiver of trainer.transport {name},")
    if not (isinstance(found, type) and issubclass(found, Receiver)):
        raise ConfigError(f"the receiver {named} is not a receiver: derive its class from penstock.Receiver.")
    return found


class Transfers:
    """Enroll one engine for transfers, and receive them.

    Args:
        reader: a connection for blocking reads that nothing else uses meanwhile.

    Raises:
        ConfigError: ``trainer.transport`` of this worker's own configuration is a user's class without a receiver.
    """

    def __init__(self, services: Services, reader: AsyncControl, waiting: Waiting) -> None:
        self._services, self._reader, self._waiting = services, reader, waiting
        self._named = services.config.trainer.transport
        self._receivers: dict[str, Receiver] = {}
        #: Digest of the latest index read, digest of its layout, and its tensors.
        self._known: tuple[str, str, list[TensorEntry]] = ("", "", [])
        if self._named not in TRANSPORTS:
            receiver_of(self._named)

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
        return is_known and transport(publication.transport).is_sent and self._services.engine.info.num_ranks > 0

    async def learn(self, publication: Publication) -> None:
        """Store the layout of a loaded version, from the index in its folder. Reads a small file in a thread."""
        if publication.index and transport(self._named).is_sent:
            try:
                await self._entries_of(publication)
            except PublishError as exc:
                log.info("the layout of version %d is not known: %s", publication.version, exc)

    async def _entries_of(self, publication: Publication) -> list[TensorEntry]:
        """Return the tensors of a version, without a folder those of the last index read. Raises PublishError."""
        if publication.is_whole and publication.index != self._known[0]:
            index = await asyncio.to_thread(read_index, Path(publication.path), publication.index)
            entries = index.entries()
            layout = layout_digest((entry.name, entry.dtype, entry.shape) for entry in entries)
            self._known = publication.index, layout, entries
        return self._known[2]

    def receiver(self, name: str) -> Receiver:
        """Return the receiver of this transport; created on first use."""
        key = transport(name).receiver or name
        if key not in self._receivers:
            self._receivers[key] = receiver_of(name)(self._services.engine, lambda: self._services.births)
        return self._receivers[key]

    async def prepare(self, publication: Publication) -> Receive | None:
        """Enroll, and wait for the decision on the recipients.

        Returns:
            Receives the weights into a frozen engine, as :func:`receive`; None: they are not sent to this engine.
        """
        services, model, id_ = self._services, publication.model, publication.id
        receiver = self.receiver(publication.transport)
        engine = services.engine
        enrollment = Enrollment(services.worker, redact(engine.url), engine.info.num_ranks, receiver.standing)
        if not await services.control.call(transfers.enroll(services.keys, model, id_, enrollment)):
            return None
        decision = await self._decided(services.keys.transfers(model), id_)
        if decision is None or services.worker not in decision.ranks or decision.transport != publication.transport:
            return None
        arrival = Arrival(services, publication, decision)
        try:
            arrival.entries = await self._entries_of(publication)
            await receiver.prepare(arrival)
        except (EngineDied, QueueUnavailable, QueueFull):
            raise
        except Exception as exc:
            log.error("version %s is not received: its receiver raised", id_, exc_info=exc)
            await arrival.answer(f"its receiver raised {format_exc(exc)}")
            return None
        return partial(receive, receiver, arrival, engine)

    async def _decided(self, stream: str, id_: str) -> Decision | None:
        deadline = time.monotonic() + self._services.config.trainer.transfer_timeout_s + MARGIN_S
        after = b"0-0"  # the stream is short
        try:
            while time.monotonic() < deadline:
                self._waiting.blocked_on(TransferUndecided(id_))
                streams = {stream: after}
                found = await self._reader.do(lambda client: client.xread(streams, block=_BLOCK_MS))  # noqa: B023
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


async def receive(receiver: Receiver, arrival: Arrival, engine: Engine) -> None:
    """Receive the weights into a frozen engine, and notify the trainer.

    Raises:
        NotBegun: nothing was sent; the engine is unchanged.
        Partial: its weights are mixed.
        EngineDied: the engine was lost.
        QueueUnavailable, QueueFull: the trainer cannot be notified.
    """
    version, has_begun = arrival.publication.version, True
    engine.is_receiving = True
    try:
        failure = await receiver.receive(arrival)
    except EngineDied as exc:
        await arrival.answer(f"its engine is lost: {exc}"[:500])
        raise
    except NotSent as exc:
        failure, has_begun = str(exc), exc.has_begun
    except (QueueUnavailable, QueueFull):
        raise
    except Exception as exc:
        log.error("version %d was not received: its receiver raised", version, exc_info=exc)
        failure = f"its receiver raised {format_exc(exc)}"
    await arrival.answer(failure)
    if not failure:
        return
    if has_begun:
        raise Partial(f"version {version} was sent in part: {failure}")
    engine.is_receiving = False
    raise NotBegun(f"version {version} was not sent: {failure}")
