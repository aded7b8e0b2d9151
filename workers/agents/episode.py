"""Run an episode: an environment whose observations are the requests of an agent.

    request ─> continues the last turn: its new messages are the observation
    ├─> was answered before: repeat the recorded answer
    └─> otherwise (rewritten or branched history): its context is a new part

Recorded turns are found by digests of their requests (``requests.Request``), which are part of the snapshot. Another
worker can therefore continue an episode after a kill, and the agent only waits longer for its answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass
from typing import Any

import orjson

from penstock.errors import EpisodeFailed, EpisodeMoved, EpisodeSuperseded, ProtocolError
from penstock.records.codec import unpack
from penstock.records.job import Job
from penstock.records.sample import MAX_PARTS, Sample, SampleStatus
from penstock.text import safe_repr, utf8_safe
from penstock.workers.agents.requests import Limits, Request, RequestInvalid, in_thread
from penstock.workers.jobs.environments import Observation
from penstock.workers.jobs.episodes import unpacked_state

#: Most queued requests of an episode.
MAX_WAITING = 64
#: Most bytes of an agent's ``info`` as JSON, which has to fit into the record of a sample.
MAX_INFO_BYTES = 64 * 1024
#: Most characters of an agent's error.
MAX_ERROR = 4000


@dataclass(slots=True)
class Turn:
    """Record a turn: digest of its request, and position of its tokens."""

    #: Size and digest of the complete request.
    size: int
    request_digest: bytes
    #: Index of the first token of the part, of the turn's first token, and after its last one (0: not generated yet).
    part: int
    start: int
    end: int = 0
    #: A ``FinishReason``; '' during generation.
    reason: str = ""
    #: Digest of the answer, and its number of messages or characters; b"" until the answer is parsed.
    answer: bytes = b""
    length: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """Describe how an agent ends an episode."""

    reward: float | None = None
    info: dict[str, Any] | None = None
    #: Error that fails the attempt; '' if the episode is complete.
    error: str = ""


#: Builds the response to an agent from the sample, index and record of the turn, and the request.
MakeAnswer = Callable[[Sample, int, Turn, Request], Awaitable[dict[str, Any]]]


class AgentEpisode:
    """Act as the environment of one sample, driven by ``ask`` and ``finish``. Not thread-safe.

    Args:
        attempt: attempt of the job; keys of other attempts are refused.
        make_answer: builds the response for a turn.
        idle_s: longest wait for a request, in seconds.
        max_context: most tokens of a part.
        max_turns: most turns.
    """

    #: Repeating a wait for a request has no effect.
    repeatable = True

    def __init__(
        self,
        sample: Sample,
        attempt: int,
        *,
        make_answer: MakeAnswer,
        idle_s: float,
        max_context: int,
        max_turns: int,
    ) -> None:
        self.job = sample.job
        self.k = sample.k
        self._sample = sample
        self.attempt = attempt
        #: Nonce of the agent's key; None until an agent opens the episode.
        self.nonce: str | None = None
        #: Nonces of agents whose conversation was discarded.
        self._superseded: set[str | None] = set()
        self.opened = asyncio.Event()
        self.timeout_s = idle_s
        self._make_answer = make_answer
        self._max_context = max_context
        self._max_turns = max_turns
        self._turns: list[Turn] = []
        self._limits = Limits()
        self._waiting: asyncio.Queue[Request | End] = asyncio.Queue(MAX_WAITING)
        #: Request being answered.
        self._current: Request | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end: End | None = None

    @property
    def turn_limits(self) -> dict[str, Any]:
        return {"max_new_tokens": self._limits.max_tokens, "stop": list(self._limits.stop)}

    def open(self, nonce: str) -> None:
        """Assign the episode to the agent with this key.

        Raises:
            EpisodeSuperseded: another agent has the episode, or the episode started over after this agent opened it.
        """
        if self.nonce not in (None, nonce) or nonce in self._superseded:
            raise EpisodeSuperseded
        self.nonce = nonce
        self.opened.set()

    def has_turns(self, sample: Sample) -> bool:
        """Return whether a sample has turns of this attempt; turns of earlier attempts are not continued."""
        if sample.state is None:
            return False
        snapshot = unpacked_state(sample.state)[2]
        return bool(snapshot) and unpack(snapshot, "the snapshot of an episode")["attempt"] == self.attempt

    async def ask(self, request: Request) -> dict[str, Any]:
        """Answer a request. Blocks until its turn is stored.

        Raises:
            RequestInvalid: the request cannot be answered; the episode continues.
            EpisodeMoved: this worker no longer has the episode.
            EpisodeSuperseded: the episode started over.
        """
        digest = await in_thread(lambda: request.request_digest)
        current = self._current
        if request.is_retry and current is not None and current.request_digest == digest:
            return await asyncio.shield(current.answered)
        self._put(request)
        return await asyncio.shield(request.answered)

    async def finish(self, end: End) -> None:
        """End the episode. Blocks until the end is stored; raises like ``ask``."""
        if self._end is None:
            self._put(end)
        await asyncio.shield(self._ended)

    def _put(self, item: Request | End) -> None:
        if self._ended.done():
            raise EpisodeMoved
        try:
            self._waiting.put_nowait(item)
        except asyncio.QueueFull:
            raise RequestInvalid(
                f"this episode already has {MAX_WAITING} queued requests: wait for an answer before sending another"
            ) from None

    # Methods of an environment, which the worker calls.

    async def reset(self, job: Job) -> Observation:
        """Wait for the first request, whose context is the prompt."""
        if self._turns or self._current is not None:
            self._start_over()
        while True:
            request = await self._next()
            if isinstance(request, End):
                raise EpisodeFailed(request.error or "the agent ended the episode without a turn")
            try:
                tokens = self._fitting(await in_thread(request.start))
            except RequestInvalid as exc:
                self._refuse(exc)
                continue
            self._begin(request, 0, len(tokens))
            return Observation(tokens=tokens)

    async def step(self, sample: Sample) -> Observation | None:
        """Answer the last request and wait for the next one; return None once the agent has ended the episode."""
        turn = self._turns[-1]
        turn.end, turn.reason = len(sample.tokens), sample.finish_reason
        if self._current is not None:
            await self._answer(sample, turn, self._current)
            self._current = None
        while True:
            request = await self._next()
            if isinstance(request, End):
                self._finish(request, sample)
                return None
            try:
                observation = await self._observation(sample, request)
            except RequestInvalid as exc:
                self._refuse(exc)
                continue
            if observation is not None:
                return observation
            self._current = None

    async def snapshot(self) -> dict[str, Any]:
        return {
            "nonce": self.nonce,
            "attempt": self.attempt,
            "turns": [list(astuple(turn)) for turn in self._turns],
            "limits": [self._limits.max_tokens, list(self._limits.stop)],
        }

    async def restore(self, job: Job, state: dict[str, Any]) -> None:
        """Continue the episode of another worker. Raises EpisodeSuperseded for another attempt."""
        if state["attempt"] != self.attempt:
            raise EpisodeSuperseded
        if self.nonce not in (None, state["nonce"]):
            self._drop(EpisodeSuperseded())
        self.nonce = state["nonce"]
        self.opened.set()
        self._turns = [Turn(*fields) for fields in state["turns"]]
        if not self._turns:
            raise ProtocolError(f"the snapshot of episode {self.job.id}/{self.k} has no turn.")
        most, stop = state["limits"]
        self._limits = Limits(most, tuple(stop))

    async def close(self) -> None:
        """Notify the agent of the end; report success only if the end was stored."""
        if self._ended.done():
            return
        is_stored = self._sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        if self._end is not None and (is_stored or self._end.error):
            self._ended.set_result(None)
        else:
            self._ended.set_exception(EpisodeMoved())
            self._ended.exception()  # marks it as retrieved: possibly no request is waiting
        self._drop(EpisodeMoved())

    def _start_over(self) -> None:
        """Discard the conversation: its version was abandoned, or it could not be continued."""
        self._drop(EpisodeSuperseded())
        self._superseded.add(self.nonce)
        self._turns, self.nonce = [], None
        self.opened.clear()

    def _drop(self, exc: Exception) -> None:
        """Fail all waiting requests with an error."""
        self._refuse(exc)
        while not self._waiting.empty():
            item = self._waiting.get_nowait()
            if isinstance(item, Request):
                self._current = item
                self._refuse(exc)

    async def _next(self) -> Request | End:
        """Return the next request and make it the current one, or return the end."""
        item = await self._waiting.get()
        if isinstance(item, Request):
            self._current = item
        return item

    def _refuse(self, exc: Exception) -> None:
        """Fail the current request with an error."""
        request, self._current = self._current, None
        if request is not None and not request.answered.done():
            request.answered.set_exception(exc)
            request.answered.exception()  # marks it as retrieved: the agent may have disconnected

    def _begin(self, request: Request, part: int, start: int) -> None:
        """Record the start of a turn at token ``start`` of the sample."""
        self._turns.append(Turn(request.size, request.request_digest, part, start))
        self._limits, self._current = request.limits, request

    async def _answer(self, sample: Sample, turn: Turn, request: Request) -> None:
        answer = await self._parsed(sample, turn, request)
        if not request.answered.done():
            request.answered.set_result(answer)

    async def _parsed(self, sample: Sample, turn: Turn, request: Request) -> dict[str, Any]:
        """Return the answer of a turn and record its digest."""
        answer = await self._make_answer(sample, self._turns.index(turn), turn, request)
        turn.answer, turn.length = request.answer_digest(answer)
        return answer

    async def _observation(self, sample: Sample, request: Request) -> Observation | None:
        """Return the observation of a request, or None if the recorded answer was repeated. Raises RequestInvalid."""
        repeated = next((turn for turn in reversed(self._turns) if turn.request_digest == request.request_digest), None)
        if repeated is not None and request.is_retry:
            await self._answer(sample, repeated, request)
            return None
        if len(self._turns) >= self._max_turns:
            raise RequestInvalid(
                f"the episode has reached rollout.max_turns = {self._max_turns}: end it, or raise the limit"
            )
        base = repeated or await self._base(sample, request)
        if base is None:
            return self._new_part(sample, request, await in_thread(request.start))
        if base is repeated:  # another answer to the same request
            return self._new_part(sample, request, sample.tokens[base.part : base.start])
        generated = sample.tokens[base.start : base.end]
        more = await in_thread(lambda: request.continuation(base.size, base.length, generated))
        if more is None:
            return self._new_part(sample, request, await in_thread(request.start))
        if base is not self._turns[-1]:
            return self._new_part(sample, request, sample.tokens[base.part : base.end] + more)
        self._fitting(more, base.end - base.part)
        self._begin(request, base.part, base.end + len(more))
        return Observation(tokens=more)

    async def _base(self, sample: Sample, request: Request) -> Turn | None:
        """Find the latest turn that a request continues."""
        earlier = [turn for turn in reversed(self._turns) if turn.size < request.size]
        for turn in await in_thread(lambda: [one for one in earlier if request.digest(one.size) == one.request_digest]):
            if not turn.answer:
                await self._parsed(sample, turn, request)
            if request.continues(turn.size, turn.answer, turn.length):
                return turn
        return None

    def _new_part(self, sample: Sample, request: Request, context: list[int]) -> Observation:
        if len(sample.parts) + 1 >= MAX_PARTS:
            raise RequestInvalid(
                f"the history was rewritten {MAX_PARTS} times, but an episode has at most {MAX_PARTS} parts: extend "
                "the history instead of changing it"
            )
        part = len(sample.tokens)
        self._fitting(context)
        self._begin(request, part, part + len(context))
        return Observation(tokens=context, new_part=True)

    def _fitting(self, tokens: list[int], before: int = 0) -> list[int]:
        """Return ``tokens``; raise RequestInvalid unless they and an answer fit after ``before`` tokens of a part."""
        if before + len(tokens) >= self._max_context:
            raise RequestInvalid(
                f"context_length_exceeded: the context has {before + len(tokens)} tokens, but at most "
                f"{self._max_context - 1} are allowed (rollout.max_context_tokens, and the engine's context length)"
            )
        if not tokens:
            raise RequestInvalid("the request adds no token to the history: send a new message")
        return tokens

    def _finish(self, end: End, sample: Sample) -> None:
        self._end = end
        if end.error:
            raise EpisodeFailed(utf8_safe(end.error[:MAX_ERROR]))
        if end.reward is not None:
            sample.reward = end.reward
        sample.reward_info = {**sample.reward_info, **(end.info or {})}


def read_end(body: Any) -> End:
    """Parse the body of ``POST /finish`` or ``/fail``. Raises RequestInvalid."""
    if not isinstance(body, dict):
        raise RequestInvalid("the request is not a JSON object")
    reward, info, error = body.get("reward"), body.get("info") or {}, body.get("error", "")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise RequestInvalid(f"reward is {safe_repr(reward)}: give a number, or null to have it computed")
    if not isinstance(info, dict) or not isinstance(error, str):
        raise RequestInvalid("info must be an object, and error a string")
    try:
        is_large = len(orjson.dumps(info)) > MAX_INFO_BYTES
    except TypeError as exc:  # parsed from JSON, so only too deep nesting can fail
        raise RequestInvalid("info is nested too deeply") from exc
    if is_large:
        raise RequestInvalid(f"info is larger than {MAX_INFO_BYTES:,} bytes: send less")
    return End(None if reward is None else float(reward), info, error)
