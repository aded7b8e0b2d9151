"""Wrap the engine for a custom generate function: record the answers for a sample, to verify what it returns.

function ─> handle, or HTTP address (maker.py) ─> generate_sample on the worker's engine ─> EngineAnswer, recorded
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.sampling import NEUTRAL, check_sampling, hidden_by, temperature_of
from penstock.errors import ConfigError, EngineError
from penstock.model.tokenizer import Tokenizer
from penstock.names import Lane
from penstock.records.job import Job
from penstock.records.sample import Drawn, FinishReason, Sample
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.sampling import sampling_for

#: Seconds between log entries of the same failure.
LOG_INTERVAL_S = 60.0
#: Most distinct failures remembered; the oldest is dropped first.
MAX_FAILURES = 256

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Logged:
    at: float
    since: int = 0


class Repeats:
    """Log rate-limited warnings of one worker."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, ...], _Logged] = {}

    def warn(self, failure: BaseException | None, message: str, reason: str = "") -> None:
        """Log ``message`` with the traceback of ``failure``, unless the same failure was logged within a minute."""
        key, now = (reason, *_key_of(failure)), time.monotonic()
        logged = self._logged.get(key)
        if logged is not None and now - logged.at < LOG_INTERVAL_S:
            logged.since += 1
            return
        more = f" ({logged.since} similar failures since the last entry)" if logged and logged.since else ""
        self._logged.pop(key, None)
        if len(self._logged) >= MAX_FAILURES:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = _Logged(now)
        log.warning("%s%s", message, more, exc_info=failure)


def _key_of(failure: BaseException | None) -> tuple[str, ...]:
    """Return the key of a failure: exception types and lines along the chain of causes."""
    found: list[str] = []
    while failure is not None and len(found) < 16:
        at = failure.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at is not None else ""
        found.append(f"{type(failure).__name__} {where}")
        failure = failure.__cause__
    return tuple(found)


#: Returns a context manager that holds a slot during a request.
Slot = Callable[[], AbstractAsyncContextManager[object]]
#: Most requests per sample.
MAX_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """Hold one recorded answer of the engine."""

    #: Prompt and answer, with logprobs and versions.
    sample: Sample
    #: Reason not to train on the answer (T6, T7), or ''.
    unfit: str

    @property
    def input_ids(self) -> list[int]:
        return self.sample.tokens[: self.sample.prompt_length]

    @property
    def output_ids(self) -> list[int]:
        return self.sample.tokens[self.sample.prompt_length :]

    def answer(self, sampling: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        """Format the answer like SGLang's ``/generate`` with ``return_logprob``."""
        sample, at, ids = self.sample, self.sample.prompt_length, self.output_ids
        text = sample.text
        if sampling.get("no_stop_trim"):
            text = tokenizer.decode(ids, skip_special_tokens=bool(sampling.get("skip_special_tokens", True)))
        kind = FinishReason.LENGTH if sample.finish_reason == FinishReason.LENGTH else FinishReason.STOP
        meta = {
            "id": sample.id,
            "finish_reason": {"type": str(kind)},
            "prompt_tokens": at,
            "completion_tokens": len(ids),
            "cached_tokens": sample.cached_tokens,
            "weight_version": str(max(sample.versions, default=-1)),
            "output_token_logprobs": [[lp, token, None] for lp, token in zip(sample.logprobs[at:], ids, strict=True)],
        }
        return {"text": text, "output_ids": ids, "meta_info": meta}


class RecordedEngine:
    """Send requests for one sample to the worker's engine, and record the answers.

    Args:
        account: counts all generated tokens as discarded until a returned sample is verified.
        slot: returns a context manager that holds a slot during a request.
    """

    def __init__(self, source: Source, sample: Sample, account: Drawn, slot: Slot = nullcontext) -> None:
        self.made: list[EngineAnswer] = []
        self.tokenizer = source.tokenizer
        #: Error of an engine that was lost during a request; set once.
        self.lost: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._job, self._k = sample.job, sample.k
        # A lease that ran out of tokens hands back a prefix, which a custom function does not have.
        self._source = replace(source, rollout=source.rollout.model_copy(update={"lease_tokens": None}))
        self._sampling = sampling_for(sample.job, source.rollout)
        self._account, self._slot = account, slot
        self._num_requests = 0
        #: Text of prompt and answer -> its tokens, so that a continued text is not tokenized again (T8).
        self._texts: dict[str, list[int]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        #: HTTP requests run in tasks outside the sample; this context puts them inside its valve.
        self._context = contextvars.copy_context()

    async def generate(
        self, input_ids: list[int] | str, sampling_params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Generate after ``input_ids`` or a text. Blocks until done, through aborts and weight changes.

        Args:
            input_ids: [P] complete sequence so far. A text that starts with an earlier prompt and answer keeps their
            tokens; the rest is encoded without special tokens.
            sampling_params: SGLang's sampling parameters, which override those of run and job.

        Returns:
            Answer in SGLang's form: ``text``, ``output_ids``, ``meta_info`` with ``output_token_logprobs`` and
            ``finish_reason`` (stop or length).

        Raises:
            ConfigError: the request is invalid.
            EngineError: see ``Engine.generate``; the sample fails with it.
        """
        work = self._generate(input_ids, dict(sampling_params or {}))
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await task

    def __deepcopy__(self, _: dict[int, Any]) -> "RecordedEngine":
        """Return self: user functions copy ``args``, and all copies must send requests for the same sample."""
        return self

    async def close(self) -> None:
        """Cancel requests in flight and count their tokens. Blocks until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.lost.cancel()

    async def _generate(self, prompt: list[int] | str, sampling: dict[str, Any]) -> dict[str, Any]:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        what = f"sample {self._job.id}/{self._k}, request {number}"
        if number >= MAX_REQUESTS:
            raise ConfigError(f"{what}: a sample may send at most {MAX_REQUESTS} requests.")
        try:
            check_sampling(sampling)
        except ValueError as exc:
            raise ConfigError(f"{what}: {exc}.") from exc
        ids = self._encoded(prompt) if isinstance(prompt, str) else _ids(prompt, what)
        unfit = self._unfit(self._sampling | sampling)
        # Untrainable sampling is still allowed: use a lane without rules for sampling.
        job = Job(
            f"{self._job.id}/{self._k}", 1, prompt_ids=ids, sampling=self._sampling | sampling,
            lane=Lane.SCORE if unfit else self._job.lane,
        )  # fmt: skip
        sample = await self._record(Sample(job, number))
        draw = EngineAnswer(sample, unfit)
        self.made.append(draw)
        answer = draw.answer(self._sampling | sampling, self.tokenizer)
        if isinstance(prompt, str):
            self._texts[prompt + answer["text"]] = list(sample.tokens)
        return answer

    async def _record(self, sample: Sample) -> Sample:
        account = Drawn()
        try:
            async with self._slot():
                return await generate_sample(self._source, sample, account=account)
        except EngineError as exc:
            if not self.lost.done():
                self.lost.set_result(exc)
            raise
        finally:
            total = self._account
            total.behind_stop += account.behind_stop
            total.rewound += account.rewound
            total.lost_turn += account.lost_turn + sum(sample.generated)
            total.unheard += account.unheard

    def _encoded(self, text: str) -> list[int]:
        known = max((one for one in self._texts if text.startswith(one)), key=len, default="")
        rest = self.tokenizer.encode(text[len(known) :], add_special_tokens=False)
        return [*self._texts.get(known, ()), *rest]

    def _unfit(self, sampling: dict[str, Any]) -> str:
        """Return why this sampling must not be trained on; '' if it may, or is not for training."""
        if self._job.lane != Lane.TRAIN:
            return ""
        if (hidden := hidden_by(NEUTRAL | sampling)) is not None:
            return f"{hidden[0]} = {hidden[1]!r} samples from another distribution than the logprobs describe"
        if temperature_of(sampling) != self._sampling["temperature"]:
            return f"its temperature differs from the job's {self._sampling['temperature']:g}"
        return ""


def _ids(prompt: Any, what: str) -> list[int]:
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise ConfigError(f"{what}: input_ids must be a non-empty list of token ids.")
    return list(prompt)
