"""Score what a job gives: a sequence (compute_log_prob), or an answer, which becomes a sample of its group.

An answer (a demonstration, supervised data, that of another policy) is scored under the engine's current weights, gets
its reward and is committed like any sample. Status ``given`` says that its tokens count as generated although no policy
sampled them: their logprobs and version are those of the weights that scored them, at temperature 1 (T6).
"""

import time

from penstock.errors import ConfigError, EngineError, ProtocolError
from penstock.names import Lane
from penstock.protocol.score_jobs import check_temperature, read_given
from penstock.records.job import Job
from penstock.records.sample import FinishReason, Sample, SampleStatus
from penstock.workers.engine import Scores
from penstock.workers.jobs.generate import Source, prompt_ids
from penstock.workers.jobs.routed_experts import keep_rows

#: Attempts to score a sequence whose request is aborted or whose weights change during it.
MAX_TRIES = 20


async def score_sample(source: Source, job: Job, k: int) -> Sample:
    """Score sequence ``k`` of a scoring job. Blocks for a prefill, and while the valves are closed by a weight change.

    Returns:
        A sample with its tokens, their logprobs from the start on, nothing generated, reward 0, and the version in
        ``reward_info["version"]``.

    Raises:
        ProtocolError, ConfigError, EngineRefused: it can never be scored.
        EngineDied, EngineError: as ``Engine.score``.
    """
    if (temperature := job.sampling.get("temperature")) is not None:
        check_temperature(f"scoring job {job.id}", temperature)
    given, engine = read_given(job, k), source.engine
    if engine.vocab_size and max(given.tokens) >= engine.vocab_size:
        raise ConfigError(
            f"sequence {k} of scoring job {job.id} holds id {max(given.tokens)}, and the model has ids below "
            f"{engine.vocab_size}: give token ids of this model."
        )
    sample = Sample(job, k, started_s=time.time())
    started = time.monotonic()
    async with source.valves.sample():
        scores, version = await score_tokens(source, given.tokens, given.start, sample.id)
    sample.append(given.tokens)
    sample.prompt_length = given.start
    sample.logprobs[given.start :] = scores.logprobs
    sample.generate_s, sample.drawn_s = time.monotonic() - started, time.time()
    sample.status, sample.finish_reason = SampleStatus.COMPLETED, FinishReason.STOP
    sample.reward, sample.reward_info = 0.0, {"version": version}
    return sample


async def score_tokens(
    source: Source, tokens: list[int], start: int, rid: str, *, with_routing: bool = False
) -> tuple[Scores, int]:
    """Return scores from ``start`` on, and their version; discard a prefill during which the weights changed.

    Blocks; raises as ``Engine.score``.
    """
    for _ in range(MAX_TRIES):
        async with source.valves.requests:
            scores = await source.engine.score(tokens, start, rid=rid, with_routing=with_routing)
        if scores.version is not None:
            return scores, scores.version
    raise EngineError(f"{rid}: weights changed during each of {MAX_TRIES} attempts to score it.")


def check_answers(job: Job) -> None:
    """Raise ProtocolError or ConfigError if a job's given answers cannot be samples of it."""
    if not isinstance(job.answers, list) or not all(_is_answer(answer) for answer in job.answers):
        raise ProtocolError(f"job {job.id} gives answers that are neither text nor lists of token ids.")
    if len(job.answers) > job.n:
        raise ConfigError(
            f"job {job.id} gives {len(job.answers)} answers for a group of {job.n}: raise n (rollout.n, or that of the "
            "dataset), or leave some out."
        )
    if job.images and (job.answers or job.lane == Lane.SCORE):
        raise ConfigError(
            f"job {job.id} has images, and gives answers or sequences to be scored, which are scored by their tokens "
            "alone: let the engine generate its answers."
        )
    if job.answers and job.environment:
        raise ConfigError(f"job {job.id} gives answers and names an environment: a given answer has a single turn.")


async def give_sample(source: Source, job: Job, k: int) -> Sample:
    """Make sample ``k`` of its given answer. Blocks for a prefill, and while the valves are closed by a weight change.

    A text is tokenized and ended by the tokenizer's eos; token ids are used unchanged.

    Returns:
        A sample with status ``given``, reward not yet set.

    Raises:
        ConfigError, EngineRefused: it can never be scored.
        EngineDied, EngineError: as ``Engine.score``.
    """
    tokenizer = source.tokenizer
    prompt, answer = prompt_ids(job, tokenizer), job.answers[k]
    if isinstance(answer, str):
        eos = tokenizer.eos_token_id
        ids = [*tokenizer.encode(answer, add_special_tokens=False), *([eos] if eos is not None else [])]
    else:
        ids = list(answer)
    limit = min(source.rollout.max_context_tokens, source.engine.info.max_context)
    if not prompt or not ids or len(prompt) + len(ids) > limit:
        raise ConfigError(
            f"job {job.id}: prompt and given answer {k} have {len(prompt)} and {len(ids)} tokens; "
            f"rollout.max_context_tokens and the engine's own context allow {limit} together, and neither may be empty."
        )
    sample = Sample(job, k, started_s=time.time())
    started = time.monotonic()
    async with source.valves.sample():
        scores, version = await score_tokens(source, prompt + ids, len(prompt), sample.id, with_routing=True)
    sample.append(prompt)
    sample.prompt_length = len(prompt)
    sample.append(ids, version=version, logprobs=scores.logprobs)
    if scores.experts is not None:
        keep_rows(sample, scores.experts)
    sample.generate_s, sample.drawn_s = time.monotonic() - started, time.time()
    sample.text = answer if isinstance(answer, str) else tokenizer.decode(ids, skip_special_tokens=True)
    sample.turns = [sample.text]
    sample.status, sample.finish_reason = SampleStatus.GIVEN, FinishReason.GIVEN
    return sample


def _is_answer(answer: object) -> bool:
    if isinstance(answer, list):
        return all(type(token) is int and token >= 0 for token in answer)
    return isinstance(answer, str)
