"""Send requests that begin together and continue the same tokens, those of a group, as one HTTP request: a batch.

SGLang's HTTP process needs half as much CPU time for a batch of 8 as for 8 requests. Each request of it keeps its name,
by which it can be aborted, and gets its answer when that is complete. The stream has two events for each: the first
token, and the rest.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import EngineDied, EngineError
from penstock.text import safe_repr
from penstock.workers.sglang.http import EngineHttp
from penstock.workers.sglang.stream import MAX_EVENT_BYTES, Answer, most_tokens, read_events, read_head

#: Requests of this many tokens are sent alone: receiving answers of 3,072 tokens in one batch took 1.3 times the CPU
#: time.
MOST = 1024
#: More tokens than an answer has: SGLang sends an event for the first token and every so many later ones.
_INTERVAL = 1 << 30
#: Fields of a request that are its own; the others are equal in a batch.
_OWN = ("rid", "sampling_params")


class BatchFailed(EngineError):
    """The server ended a batch with an error, which may concern another request of it."""


class BatchRefused(BatchFailed):
    """The server answered a batch with an error status and generated nothing for it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class _Member:
    """One request."""

    body: dict[str, Any]
    answer: Answer
    done: "asyncio.Future[Any]"


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests that differ in their own fields alone."""

    members: list[_Member] = field(default_factory=list)
    #: Sends it; None until then.
    task: "asyncio.Task[None] | None" = None

    def takes(self, body: dict[str, Any]) -> bool:
        first = self.members[0].body
        return {**first, **{name: body[name] for name in _OWN}} == body

    @property
    def pending(self) -> list[_Member]:
        return [member for member in self.members if not member.done.done()]


class Batches:
    """All methods belong to one event loop.

    Args:
        hear: called with the rid of a request when tokens of it arrive.
        abort: aborts the request with a rid.
    """

    def __init__(
        self,
        http: EngineHttp,
        config: EngineConfig,
        *,
        hear: Callable[[str], None],
        abort: Callable[[str], Awaitable[None]],
    ) -> None:
        self._http = http
        self._config = config
        self._hear = hear
        self._abort = abort
        #: The batch that further requests may join until the event loop's next iteration.
        self._open: _Batch | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any], *, incremental: bool) -> Any:
        """Send a request, with others that are sent in the same iteration of the event loop; return its answer.

        Args:
            incremental: whether stream events have only new tokens.

        Raises:
            BatchFailed, BatchRefused: send it again, alone.
            EngineError: as ``EngineHttp.call``, and as ``Answer.extend``.
        """
        loop, batch = asyncio.get_running_loop(), self._open
        if batch is None or not batch.takes(body):
            batch = self._open = _Batch()
            loop.call_soon(self._send, batch)
        answer = Answer(body["rid"], incremental=incremental, most=most_tokens(body))
        member = _Member(body, answer, loop.create_future())
        batch.members.append(member)
        try:
            return await member.done
        except asyncio.CancelledError:
            self._leave(batch, member)
            raise

    def _leave(self, batch: _Batch, member: _Member) -> None:
        """Abort the request of a caller that does not wait any more; the others continue."""
        if batch.task is None or batch.task.done():
            return
        if not batch.pending:
            batch.task.cancel()
            return
        task = asyncio.create_task(self._abort_quietly(member.body["rid"]))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, rid: str) -> None:
        with contextlib.suppress(EngineError):
            await self._abort(rid)

    def _send(self, batch: _Batch) -> None:
        if self._open is batch:
            self._open = None
        batch.members = batch.pending
        if batch.members:
            batch.task = asyncio.create_task(self._run(batch), name=f"batch {batch.members[0].body['rid']}")

    async def _run(self, batch: _Batch) -> None:
        failure: Exception = EngineDied("the stream of a batch ended before its answers.")
        try:
            if len(batch.members) == 1:
                await self._ask_alone(batch.members[0])
            else:
                await self._stream(batch)
        except Exception as exc:
            failure = exc
        finally:
            for member in batch.pending:
                member.done.set_exception(failure)

    async def _ask_alone(self, member: _Member) -> None:
        limit_s = self._config.request_timeout_s
        answer = await self._http.call("POST", "/generate", member.body, limit_s, keep=True)
        if not member.done.done():
            member.done.set_result(answer)

    async def _stream(self, batch: _Batch) -> None:
        members = list(batch.members)
        waiting, count = dict(enumerate(members)), len(members)
        body = members[0].body | {
            "input_ids": [member.body["input_ids"] for member in members],
            "rid": [member.body["rid"] for member in members],
            "sampling_params": [member.body["sampling_params"] | {"stream_interval": _INTERVAL} for member in members],
            "stream": True,
        }
        del members
        async with self._http.request("POST", "/generate", body, self._config.request_timeout_s, keep=True) as response:
            if response.status != 200:
                status, head = response.status, await read_head(response.content)
                reason = str(self._http.refusal("/generate", status, head))
                # After another 5xx status the server, or a proxy before it, may have failed during generation.
                raise BatchRefused(reason, status) if status < 500 or status == 503 else BatchFailed(reason)
            async for event in read_events(response.content, MAX_EVENT_BYTES):
                index = event.get("index")
                if type(index) is not int or not 0 <= index < count:
                    raise BatchFailed(f"the engine ended a batch: {safe_repr(event)[:500]}")
                if (member := waiting.get(index)) is None:
                    continue
                self._take(member, event)
                if member.done.done():
                    # Its tokens are objects that every pass of the garbage collector visits.
                    batch.members.remove(waiting.pop(index))
                    del member, event
                    await asyncio.sleep(0)
            # To its end, so that the connection is kept.
            await read_head(response.content)

    def _take(self, member: _Member, event: dict[str, Any]) -> None:
        """Add an event to the answer of a request; an error in it is that of this request alone."""
        if member.done.done():
            return
        try:
            member.answer.extend(event)
        except EngineError as exc:
            member.done.set_exception(exc)
            return
        self._hear(member.body["rid"])
        if member.answer.is_finished:
            member.done.set_result(member.answer.whole())
