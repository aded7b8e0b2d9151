"""Send simultaneous requests with the same prompt, those of a group, as one batched HTTP request.

SGLang's HTTP process needs half the CPU time for a batch of 8 compared with 8 requests. Each request of a batch has its
own rid, can be aborted, and gets its answer when complete. The stream has two events per request: the first token, and
the rest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import EngineError
from penstock.text import safe_repr
from penstock.workers.sglang.http import EngineHttp
from penstock.workers.sglang.stream import MAX_EVENT_BYTES, Answer, most_tokens, read_events, read_head

#: Requests with at least this many tokens are sent alone: a batch took 1.3 times the CPU time for 3,072 tokens.
MAX_TOKENS = 1024
#: Stream interval larger than any answer: SGLang sends one event for the first token and one per interval.
_INTERVAL = 1 << 30
#: Fields that may differ between requests of a batch.
_OWN = ("rid", "sampling_params")


class BatchFailed(EngineError):
    """Report that the server failed a batch, possibly because of another of its requests."""


class BatchRefused(BatchFailed):
    """Report that the server refused a batch before generating."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class _Member:
    """Hold one request of a batch."""

    body: dict[str, Any]
    answer: Answer
    done: "asyncio.Future[Any]"


@dataclass(slots=True, eq=False)
class _Batch:
    """Collect requests that differ only in the fields of ``_OWN``."""

    members: list[_Member] = field(default_factory=list)
    #: Task that sends the batch; None until it starts.
    task: "asyncio.Task[None] | None" = None

    def takes(self, body: dict[str, Any]) -> bool:
        first = self.members[0].body
        return {**first, **{name: body[name] for name in _OWN}} == body

    @property
    def pending(self) -> list[_Member]:
        return [member for member in self.members if not member.done.done()]


class Batches:
    """Batch requests to one server. Not thread-safe.

    Args:
        on_tokens: called with the rid of a request when tokens of it arrive.
        abort: aborts the request with the given rid.
    """

    def __init__(
        self,
        http: EngineHttp,
        config: EngineConfig,
        *,
        on_tokens: Callable[[str], None],
        abort: Callable[[str], Awaitable[None]],
    ) -> None:
        self._http = http
        self._config = config
        self._on_tokens = on_tokens
        self._abort = abort
        #: Batch that further requests may join until the event loop's next iteration.
        self._open: _Batch | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def send(self, body: dict[str, Any], *, incremental: bool) -> Any:
        """Send a request, batched with others of the same event loop iteration; return its answer.

        Args:
            incremental: whether stream events contain only new tokens.

        Raises:
            BatchFailed, BatchRefused: the request has to be resent alone.
            EngineError: see ``EngineHttp.call`` and ``Answer.extend``.
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
        """Abort the request of a caller that stopped waiting; the other requests continue."""
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
        failure: Exception = BatchFailed("the stream of a batch ended before its answers.")
        try:
            if len(batch.members) == 1:
                await self._send_alone(batch.members[0])
            else:
                await self._stream(batch)
        except Exception as exc:
            failure = exc
        finally:
            for member in batch.pending:
                member.done.set_exception(failure)

    async def _send_alone(self, member: _Member) -> None:
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
                # Other 5xx statuses may mean that the server or a proxy failed during generation.
                raise BatchRefused(reason, status) if status < 500 or status == 503 else BatchFailed(reason)
            async for event in _readable(read_events(response.content, MAX_EVENT_BYTES)):
                index = event.get("index")
                if type(index) is not int or not 0 <= index < count:
                    raise BatchFailed(f"the engine failed a batch: {safe_repr(event)[:500]}")
                if (member := waiting.get(index)) is None:
                    continue
                self._take(member, event)
                if member.done.done():
                    # Release finished answers, whose token objects every garbage collection would visit.
                    batch.members.remove(waiting.pop(index))
                    del member, event
                    await asyncio.sleep(0)
            # Read to the end, so that the connection can be reused.
            await read_head(response.content)

    def _take(self, member: _Member, event: dict[str, Any]) -> None:
        """Add an event to the answer of a request; an error in it fails only this request."""
        if member.done.done():
            return
        try:
            member.answer.extend(event)
        except EngineError as exc:
            member.done.set_exception(exc)
            return
        self._on_tokens(member.body["rid"])
        if member.answer.is_finished:
            member.done.set_result(member.answer.complete())


async def _readable(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield events; one that cannot be read names no request, and raises BatchFailed."""
    try:
        async for event in events:
            yield event
    except EngineError as exc:
        raise BatchFailed(str(exc)) from exc
