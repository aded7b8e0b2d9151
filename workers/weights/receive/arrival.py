"""Exchange messages with the trainer about one version that is sent (penstock/protocol/transfers.py)."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import EngineDied, EngineError
from penstock.protocol import transfers
from penstock.protocol.transfers import Decision, Word
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.control import AsyncControl
from penstock.weights.index import TensorEntry
from penstock.workers.engine import Engine

_LOOK_S = 0.003
#: The trainer times out first, so that a slow member is not lost.
MARGIN_S = 5.0


class Arrival:
    """Represent one version that is sent to a receiver, with the decision on its recipients.

    Args:
        timeout_s: ``trainer.transfer_timeout_s``.
    """

    def __init__(
        self,
        publication: Publication,
        decision: Decision,
        *,
        worker: str,
        engine: Engine,
        keys: Keys,
        control: AsyncControl,
        timeout_s: float,
        entries: Sequence[TensorEntry] = (),
    ) -> None:
        self.publication = publication
        self.decision = decision
        #: Tensors of another version with the same layout, if this one has no folder yet.
        self.entries = entries
        self._worker = worker
        self._engine = engine
        self._key = keys.transfer(publication.model)
        self._keys = keys
        self._control = control
        self._timeout_s = timeout_s
        #: Whether the trainer waits for the outcome.
        self._is_awaited = False

    @property
    def rank(self) -> int:
        """First rank of the engine in the process group of the decision."""
        return self.decision.ranks[self._worker]

    async def post(self, path: str, body: dict[str, Any]) -> str:
        """Send a request to the engine's server; return '' or why it failed. Raises EngineDied without an answer."""
        try:
            answer = await self._engine.post(path, body, timeout_s=self._timeout_s + MARGIN_S)
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
            raise NotBegun(str(exc)) from exc
        if word is Word.SENT:
            raise NotBegun(text or "the trainer sent nothing")
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
        is_open = await self._report(Word.HELD, where)
        names = ["id", *(f"{word}:{self._worker}" for word in words)]
        deadline = time.monotonic() + 2 * self._timeout_s + MARGIN_S
        while is_open and time.monotonic() < deadline:
            id_, *texts = await self._control.do(lambda client: client.hmget(self._key, names))
            if id_ != self.decision.id.encode():
                is_open = False
                break
            for word, text in zip(words, texts, strict=True):
                if text is not None:
                    return word, text.decode(errors="replace")
            await asyncio.sleep(_LOOK_S)
        raise NotSent("the trainer did not send it in time" if is_open else "the trainer began another transfer")

    async def _report(self, word: Word, text: str) -> bool:
        """Report to the trainer; return False if the transfer is over."""
        call = transfers.report(self._keys, self.publication.model, self.decision.id, word, self._worker, text)
        return await self._control.call(call)


class NotSent(Exception):
    """The trainer did not send the weights; the message says why. The folder is loaded instead."""


class NotBegun(NotSent):
    """The transfer did not begin: the engine is unchanged."""
