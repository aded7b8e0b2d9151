"""Generate one sample from token ids, turn by turn, through aborts and weight changes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.config import RolloutConfig
from penstock.errors import ConfigError, EngineError
from penstock.model.pictures import Pictures
from penstock.model.tokenizer import Tokenizer
from penstock.names import ROUTED_EXPERTS
from penstock.records.job import Job
from penstock.records.publication import is_abandoned
from penstock.records.sample import MAX_PARTS, MAX_PAUSES, Drawn, FinishReason, Sample, SampleStatus
from penstock.records.worker_causes import CodeCalled, EnvironmentCall
from penstock.text import safe_repr
from penstock.workers.engine import ABORT_AGAIN_S, Engine, Segment
from penstock.workers.jobs.environments import Environment, Observation, step
from penstock.workers.jobs.episodes import packed_state, reset, resume, snapshot, unpacked_state
from penstock.workers.jobs.routed_experts import add_rows, check_rows, has_all_routing
from penstock.workers.jobs.sampling import sampling_for
from penstock.workers.jobs.stops import StopRule, as_list
from penstock.workers.jobs.valves import Valves

log = logging.getLogger(__name__)

#: Longest wait for the tokens of a cancelled sample.
_COLLECT_S = 5.0
#: Consecutive aborts without a usable token or new weights before the engine is considered broken.
_MAX_IDLE_ABORTS = 50


def prompt_ids(job: Job, tokenizer: Tokenizer) -> list[int]:
    """[P] Return the prompt of a job. Raises ConfigError if it has none."""
    if job.prompt_ids is not None:
        return list(job.prompt_ids)
    if job.prompt is None:
        raise ConfigError(f"job {job.id} has neither prompt nor prompt_ids: set one of them.")
    return list(_encode(tokenizer, job.prompt))


@lru_cache(maxsize=64)
def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokenize a prompt, once for all samples of its group."""
    # The chat template has already added all special tokens.
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Source:
    """Bundle the engine, valves, tokenizer and settings that generate samples."""

    engine: Engine
    #: Closed while the engine's weights change.
    valves: Valves
    tokenizer: Tokenizer
    rollout: RolloutConfig
    #: Called with each engine answer, and whether its request was resent; must not block.
    answered: Callable[[Segment, bool], None] = lambda segment, is_resent: None


async def generate_sample(
    source: Source,
    sample: Sample,
    *,
    environment: Environment | None = None,
    interval: int = 0,
    on_growth: Callable[[], None] = lambda: None,
    store: Callable[[], Awaitable[None]] | None = None,
    account: Drawn | None = None,
) -> Sample:
    """Generate a sample from its current tokens, initially the prompt.

    Blocks until the sample is finished, and while a weight change keeps the valves closed.

    ``max_new_tokens`` bounds each turn, ``rollout.max_context_tokens`` the sequence; tokens are stored as the engine
    returned them and never tokenized again. Aborted requests resume from their prefix with the rest of the budget.

    Args:
        sample: modified in place. A cancelled call first fetches the tokens generated so far into the sample and sets
        status "aborted" (within 5 s; a second cancellation takes effect at once).
        interval: number of tokens between streamed updates of ``sample``, which survive a death of the engine; their
        versions are never newer than proven. 0: complete answers only.
        on_growth: called whenever ``sample`` has new tokens; must not block.
        store: stores ``sample``; awaited before the environment acts on a turn, and before the turn after an
        observation. Only for environments that another worker can continue.
        account: counts tokens generated in this call and discarded, and requests without an answer.
        environment: environment of the sample; None: a single turn.

    Returns:
        ``sample``, with status "completed" or "truncated", reward not yet set. Status "aborted": this call used up
        ``rollout.lease_tokens``, and another call has to continue the sample.

    Raises:
        ConfigError: invalid sampling parameters for training, a prompt that is too long, or a missing environment.
        EnvironmentTimeout, EnvironmentRaised: the environment timed out or raised.
        EngineDied, EngineError: see ``Engine.generate``; ``sample`` has the tokens of earlier requests.
    """
    job, valves = sample.job, source.valves
    if environment is None and job.environment:
        raise ConfigError(f"job {job.id} needs environment {safe_repr(job.environment)}: pass it as environment.")
    maker = _Generation(source, sample, interval, on_growth, store, account or Drawn())
    async with valves.sample():
        began_s = time.time()
        await maker.run(environment)
    sample.drawn_s = time.time()
    closed = valves.requests.closed_within(began_s, time.time())[-MAX_PAUSES:]
    sample.pauses = [[round(1000 * (at - sample.started_s)), round(1000 * (end - at))] for at, end in closed]
    return sample


class _Abandoned(Exception):
    """Signal that an abandoned version generated tokens of a sample with several turns."""


class _Generation:
    """Hold the state of generating one sample."""

    def __init__(
        self,
        source: Source,
        sample: Sample,
        interval: int,
        on_growth: Callable[[], None],
        store: Callable[[], Awaitable[None]] | None,
        account: Drawn,
    ) -> None:
        engine, rollout, tokenizer = source.engine, source.rollout, source.tokenizer
        sampling = sampling_for(sample.job, rollout)
        self.engine = engine
        self.valves = source.valves
        self.sample = sample
        self.tokenizer = tokenizer
        self.pictures: Pictures | None = sample.pictures
        # An answer must not contain an image placeholder: engine and trainer would look for a missing image.
        self.sampling = self.run_sampling = sampling if self.pictures is None else self.pictures.stopping(sampling)
        self.stops = StopRule.of(self.sampling, tokenizer, engine.eos_token_ids)
        self.max_turns = rollout.max_turns
        self.max_context = min(rollout.max_context_tokens, engine.info.max_context)
        self.max_new = self.run_max_new = int(sampling.get("max_new_tokens") or self.max_context)
        #: Index of the first token of the current turn.
        self.turn_start = sample.last_turn_start
        #: Index of the first token of the current request; later tokens come from its stream.
        self.request_start = len(sample.tokens)
        #: Number of earlier tokens whose version is not proven.
        self.unproven_before = sample.num_unproven
        self.interval = interval
        self.on_growth = on_growth
        self.store = store
        self.account = account
        #: Tokens generated by the current request, and tokens cut off in earlier ones.
        self.requested = 0
        self.cut_off = account.behind_stop
        self.answered = source.answered
        self.is_resent = False  # whether the current request resumes after an aborted answer
        self.environment_timeout_s = rollout.environment_timeout_s
        self.lease_tokens = rollout.lease_tokens
        #: Sample length at which the lease's token budget ends; None: no limit, or the sample cannot be handed back.
        self.lease_end: int | None = None
        #: Whether the environment sets limits per turn, and therefore also gets truncated turns.
        self.has_limits = False
        self.has_environment = False

    async def run(self, environment: Environment | None) -> None:
        self.has_environment = environment is not None
        self.begin()
        while True:
            try:
                is_ended = await self.run_turns(environment)
                break
            except _Abandoned:
                self.sample.sides.clear()
                self.start_over()
        if not is_ended:
            self.sample.status = SampleStatus.ABORTED
            return
        is_cut = self.sample.finish_reason == FinishReason.LENGTH
        self.sample.status = SampleStatus.TRUNCATED if is_cut else SampleStatus.COMPLETED
        if self.engine.returns_routing:
            check_rows(self.sample)

    async def run_turns(self, environment: Environment | None) -> bool:
        """Generate turns until the sample ends; return False if the lease's tokens ran out. Raises _Abandoned."""
        sample = self.sample
        self.drop_abandoned()
        if environment is not None and not sample.is_over:
            await self.enter(environment)
            self.use_limits(environment)
        while not sample.is_over:
            if not await self.generate_turn():
                return False
            is_cut = sample.finish_reason == FinishReason.LENGTH and not self.has_limits
            if environment is None or is_cut or (self.pictures is not None and self.pictures.ended(sample)):
                break
            await self.take_step(environment)
        return True

    async def enter(self, environment: Environment) -> None:
        """Bring a new environment to the sample's current turn; restart the sample if that is impossible."""
        sample, timeout_s = self.sample, self.timeout_of(environment)
        if any(sample.generated):
            if await resume(environment, sample, self.tokens_of, timeout_s, self.call_of):
                return
            self.account.lost_turn += sum(sample.generated)
            self.start_over()
        prompt = await reset(environment, sample, timeout_s, self.call_of)
        if prompt is not None:
            self.use_prompt(self.tokens_of(prompt))
            sample.state = await snapshot(environment, sample, timeout_s, self.call_of("snapshot"))

    def timeout_of(self, environment: Environment) -> float:
        """Return the time limit for calls of the environment, in seconds."""
        return float(getattr(environment, "timeout_s", self.environment_timeout_s))

    def use_limits(self, environment: Environment) -> None:
        """Apply the environment's limits to the next turn."""
        limits: dict[str, Any] | None = getattr(environment, "turn_limits", None)
        self.has_limits = limits is not None
        if limits is None:
            return
        stop = [*as_list(self.run_sampling.get("stop")), *as_list(limits.get("stop"))]
        self.sampling = self.run_sampling | ({"stop": stop} if stop else {})
        self.stops = StopRule.of(self.sampling, self.tokenizer, self.engine.eos_token_ids)
        self.max_new = min(self.run_max_new, limits.get("max_new_tokens") or self.run_max_new)
        # An agent waits for this turn, and other samples of the job, which must end before a hand-back, may need it.
        self.lease_end = None

    async def take_step(self, environment: Environment) -> None:
        """Call ``step`` of the environment, whose response may end the sample."""
        sample, timeout_s, store = self.sample, self.timeout_of(environment), self.store
        if store is not None:
            await store()
        observation = await step(environment, sample, timeout_s, self.call_of("step"))
        state, sample.is_over = None, observation is None or observation.done
        if store is None:
            self.lease_end = None  # a hand-back would lose the environment
        elif not sample.is_over:
            # Before the observation: a worker that stops now must not store it without its state.
            state = await snapshot(environment, sample, timeout_s, self.call_of("snapshot"))
        is_last = sample.num_turns >= self.max_turns
        if observation is not None and not sample.is_over and (is_last or not self.observe(observation)):
            sample.is_over, sample.finish_reason = True, FinishReason.LENGTH
        sample.state = packed_state(sample) if sample.is_over else state
        if store is not None:
            await store()
        self.use_limits(environment)

    def call_of(self, code: EnvironmentCall) -> CodeCalled:
        """Describe a call of the sample's environment for waits and errors."""
        return CodeCalled(code, self.sample.job.environment or "given", "sample", self.sample.id)

    def begin(self) -> None:
        """Start from the prompt or a prefix; discard a prefix without its routing."""
        sample = self.sample
        sample.started_s = sample.started_s or time.time()
        sample.status = SampleStatus.PENDING
        is_other = self.pictures is not None and not self.pictures.are_of(sample)
        lacks_routing = self.engine.returns_routing and not has_all_routing(sample)
        if not sample.tokens or is_other or lacks_routing:
            self.account.lost_turn += sum(sample.generated)
            self.start_over()
        elif self.lease_tokens is not None:
            self.lease_end = len(sample.tokens) + self.lease_tokens
        if sample.is_over and sample.state is not None:
            sample.reward, sample.reward_info, _ = unpacked_state(sample.state)

    def drop_abandoned(self) -> None:
        """Restart a sample that has tokens of abandoned versions, because it would be disposed of.

        Raises:
            _Abandoned: the environment has to start over too.
        """
        sample = self.sample
        gone = {v for v in set(sample.versions) if is_abandoned(v, self.engine.abandoned)}
        if not gone:
            return
        log.info("sample %s starts over: version %d was abandoned", sample.id, max(gone))
        self.account.rewound += sum(sample.generated)
        if self.has_environment:
            raise _Abandoned
        self.start_over()

    def start_over(self) -> None:
        """Reset the sample to its prompt."""
        sample, job = self.sample, self.sample.job
        prompt = prompt_ids(job, self.tokenizer) if self.pictures is None else list(self.pictures.prompt)
        sample.num_unproven, sample.first_token_s = 0, 0.0
        if self.engine.returns_routing:
            sample.sides.pop(ROUTED_EXPERTS, None)
        sample.parts, sample.turns, sample.text, sample.finish_reason, sample.num_turns = [], [], "", "", 1
        sample.reward, sample.reward_info, sample.state, sample.is_over = None, {}, None, False
        self.use_prompt(prompt)

    def use_prompt(self, prompt: list[int]) -> None:
        """Replace all tokens of the sample by ``prompt``."""
        sample = self.sample
        if not 0 < len(prompt) < self.max_context:
            raise ConfigError(
                f"job {sample.job.id}: the prompt has {len(prompt)} tokens; rollout.max_context_tokens and the context "
                f"length of the engine allow {self.max_context}: remove the job or raise the limit."
            )
        sample.truncate(0)
        sample.append(prompt)
        sample.prompt_length = self.turn_start = len(prompt)
        if self.lease_tokens is not None:
            self.lease_end = len(prompt) + self.lease_tokens

    def observe(self, observation: Observation) -> bool:
        """Append an observation; return False if no room is left for another token."""
        tokens = self.tokens_of(observation)
        if not tokens:
            raise ConfigError(
                f"job {self.sample.job.id}: the environment returned an empty observation; return None to end."
            )
        if self.pictures is not None:
            self.pictures.check_observation(tokens)
        start = len(self.sample.tokens) if observation.new_part else self.part_start
        if len(self.sample.tokens) - start + len(tokens) >= self.max_context:
            return False
        if observation.new_part:
            self.check_parts()
            self.sample.parts.append(start)
        self.sample.append(tokens)
        self.turn_start = len(self.sample.tokens)
        self.sample.num_turns += 1
        self.sample.finish_reason = ""
        self.sample.state = None  # older than the observation
        return True

    def check_parts(self) -> None:
        """Raise ConfigError if the sample cannot have another part."""
        job = self.sample.job.id
        if self.pictures is not None or self.engine.returns_routing:
            raise ConfigError(
                f"job {job}: the history was rewritten, but samples with images or with rollout.sides routed_experts "
                "have a single part: let the agent only extend its history."
            )
        if len(self.sample.parts) + 1 >= MAX_PARTS:
            raise ConfigError(
                f"job {job}: the history was rewritten {MAX_PARTS} times, and a sample has at most {MAX_PARTS} parts: "
                "let the agent extend its history instead."
            )

    @property
    def part_start(self) -> int:
        """Index of the first token of the last part."""
        return self.sample.parts[-1] if self.sample.parts else 0

    def tokens_of(self, observation: Observation) -> list[int]:
        """Return the tokens of an observation."""
        if observation.tokens is not None:
            return observation.tokens
        return list(self.tokenizer.encode(observation.text or "", add_special_tokens=False))

    async def generate_turn(self) -> bool:
        """Generate until the turn ends and set ``finish_reason``; return False if the lease's tokens ran out."""
        sample, idle = self.sample, 0
        self.is_resent = False
        while sample.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.drop_abandoned()
            spent = len(sample.tokens) - self.turn_start
            budget = min(self.max_new - spent, self.max_context - (len(sample.tokens) - self.part_start))
            if budget <= 0:
                sample.finish_reason = FinishReason.LENGTH
                break
            left = budget if self.lease_end is None else self.lease_end - len(sample.tokens)
            if left <= 0:
                return False
            version = self.engine.version
            async with self.valves.requests:
                segment = await self.request(min(budget, left), spent)
            self.on_answer(segment, cut_short=left < budget)
            self.is_resent = segment.finish_reason == FinishReason.ABORT
            stalled = not segment.output_ids and (segment.num_discarded or self.engine.version == version)
            idle = idle + 1 if stalled else 0
            if idle > _MAX_IDLE_ABORTS:
                hint = "" if segment.num_discarded else "; the usual cause is too little memory for the context"
                raise EngineError(
                    f"sample {sample.id}: the engine returned no usable token in {idle} consecutive requests "
                    f"({segment.message}): check its log{hint}."
                )
        if len(sample.turns) < sample.num_turns:
            stopped = sample.finish_reason == FinishReason.STOP
            sample.turns.append(self.stops.text_of(sample.tokens[self.turn_start :], stopped=stopped))
            sample.text = "".join(sample.turns)
        return True

    async def request(self, budget: int, spent: int) -> Segment:
        """Send one request; on cancellation, collect its tokens before re-raising."""
        sampling = self.sampling | {"max_new_tokens": budget}
        if minimum := sampling.get("min_new_tokens"):
            sampling["min_new_tokens"] = max(0, minimum - spent)
        started = time.monotonic()
        self.request_start, self.unproven_before = len(self.sample.tokens), self.sample.num_unproven
        self.requested, self.cut_off = 0, self.account.behind_stop
        self.account.unheard += 1
        more: dict[str, Any] = {"on_tokens": self.on_stream, "interval": self.interval} if self.interval else {}
        if self.pictures is not None and self.pictures.uris:
            more["images"] = self.pictures.images
        context = self.sample.tokens[self.part_start :]
        task = asyncio.create_task(self.engine.generate(context, sampling, rid=self.sample.id, **more))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.sample.status = SampleStatus.ABORTED
            await self.collect(task)
            raise
        finally:
            task.cancel()
            self.sample.generate_s += time.monotonic() - started

    async def collect(self, task: asyncio.Task[Segment]) -> None:
        """Abort a request and add its tokens to the sample."""
        deadline = time.monotonic() + _COLLECT_S
        try:
            while not task.done() and time.monotonic() < deadline:
                await self.engine.abort(self.sample.id)
                await asyncio.wait({task}, timeout=ABORT_AGAIN_S)
            if task.done():
                self.on_answer(task.result())
        except EngineError as exc:
            log.warning("sample %s was cancelled and lost its last tokens: %s", self.sample.id, exc)

    def on_stream(self, version: int, ids: list[int], logprobs: list[float]) -> None:
        """Append streamed tokens of a running request; only the final answer has the version of each token."""
        sample = self.sample
        self.requested += len(ids)
        if sample.finish_reason == FinishReason.STOP:
            self.count_cut_off()
            return
        num_checked, num_streamed = self.request_start - self.turn_start, len(sample.tokens) - self.request_start
        sample.append(ids, version=version, logprobs=logprobs)
        if ids:
            sample.first_token_s = sample.first_token_s or time.time()
        if num_checked and num_streamed <= self.stops.window:
            # The engine misses a stop string that began before the request; discard all tokens after it.
            end = self.stops.end_of(sample.tokens[self.turn_start :], num_checked, aborted=False)
            if end is not None:
                sample.truncate(self.turn_start + end)
                sample.finish_reason = FinishReason.STOP
        if self.engine.version > version:
            sample.num_unproven += max(0, len(sample.tokens) - self.request_start - num_streamed)
        self.count_cut_off()
        self.on_growth()

    def count_cut_off(self) -> None:
        """Record the number of tokens of this request that were cut off."""
        self.account.behind_stop = self.cut_off + self.requested - (len(self.sample.tokens) - self.request_start)

    def on_answer(self, segment: Segment, *, cut_short: bool = False) -> None:
        """Replace the streamed tokens of a request by its answer, and check whether the turn ended.

        Args:
            cut_short: the request's limit was below that of the turn, so "length" does not end the turn.
        """
        sample = self.sample
        self.answered(segment, self.is_resent)
        sample.truncate(self.request_start)
        num_checked = len(sample.tokens) - self.turn_start
        sample.append(segment.output_ids, version=segment.versions, logprobs=segment.logprobs)
        sample.cached_tokens += segment.cached_tokens
        sample.finish_reason = segment.finish_reason
        aborted = segment.finish_reason == FinishReason.ABORT
        if aborted:
            sample.num_aborts += 1
        if cut_short and segment.finish_reason == FinishReason.LENGTH:
            # SGLang releases differ in whether the last allowed token may be a stop.
            sample.finish_reason, aborted = "", True
        if aborted or num_checked:
            end_of_turn = self.stops.end_of(sample.tokens[self.turn_start :], num_checked, aborted=aborted)
            if end_of_turn is not None:
                sample.truncate(self.turn_start + end_of_turn)
                sample.finish_reason = FinishReason.STOP
        if self.engine.returns_routing:
            add_rows(sample, segment.experts)
        kept = len(sample.tokens) - self.request_start
        self.requested = max(self.requested, len(segment.output_ids) + segment.num_discarded)
        if not segment.was_lost:
            self.account.unheard -= 1
        self.count_cut_off()
        sample.num_unproven = self.unproven_before + sum(segment.unproven[:kept])
        self.request_start, self.unproven_before = len(sample.tokens), sample.num_unproven
        if sample.finish_reason in (FinishReason.ABORT, ""):
            self.on_growth()
