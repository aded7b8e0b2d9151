"""Score the given sequences of a job (compute_log_prob), or its given answers, which become samples of its group.

A given answer (a demonstration, supervised data, the output of another policy) is scored under the engine's current
weights, rewarded and committed like any sample. Status ``given`` marks tokens that count as generated although the
policy did not sample them: logprobs and version come from the weights that scored them, at temperature 1 (T6).
"""

import time

from penstock.errors import ConfigError, EngineError, ProtocolError
from penstock.names import Lane
from penstock.protocol.score_jobs import check_temperature, read_given
from penstock.records.job import Job
from penstock.records.sample import FinishReason, Sample, SampleStatus
from penstock.workers.engine import Scores
from penstock.workers.jobs.generate import Source, prompt_ids
from penstock.workers.jobs.routed_experts import add_rows

#: Attempts to score a sequence if requests are aborted or weights change meanwhile.
MAX_TRIES = 20


async def score_sample(source: Source, job: Job, k: int) -> Sample:
    """Score sequence ``k`` of a scoring job. Blocks for a prefill, and while a weight change keeps the valves closed.

    Returns:
        A sample with the tokens, logprobs from the start index on, no generated tokens, reward 0, and the version in
        ``reward_info["version"]``.

    Raises:
        ProtocolError, ConfigError, EngineRefused: the sequence can never be scored.
        EngineDied, EngineError: see ``Engine.score``.
    """
    if (temperature := job.sampling.get("temperature")) is not None:
        check_temperature(f"scoring job {job.id}", temperature)
    given, engine = read_given(job, k), source.engine
    if engine.vocab_size and max(given.tokens) >= engine.vocab_size:
        raise ConfigError(
            f"sequence {k} of scoring job {job.id} has token id {max(given.tokens)}, but the model's ids are below "
            f"{engine.vocab_size}: use token ids of this model."
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
    """Return scores from ``start`` on and their version; discard prefills during which the weights changed.

    Blocks; raises like ``Engine.score``.
    """
    for _ in range(MAX_TRIES):
        async with source.valves.requests:
            scores = await source.engine.score(tokens, start, rid=rid, with_routing=with_routing)
        if scores.version is not None:
            return scores, scores.version
    raise EngineError(f"{rid}: weights changed during each of {MAX_TRIES} scoring attempts.")


def check_answers(job: Job) -> None:
    """Raise ProtocolError or ConfigError if the given answers of a job are invalid."""
    if not isinstance(job.answers, list) or not all(_is_answer(answer) for answer in job.answers):
        raise ProtocolError(f"job {job.id}: answers must be text or lists of token ids.")
    if len(job.answers) > job.n:
        raise ConfigError(
            f"job {job.id} gives {len(job.answers)} answers for a group of {job.n}: raise n (rollout.n, or the "
            "dataset's), or remove answers."
        )
    if job.images and (job.answers or job.lane == Lane.SCORE):
        raise ConfigError(
            f"job {job.id} has images and also answers or sequences to score, but scoring uses tokens alone: let the "
            "engine generate the answers."
        )
    if job.answers and job.environment:
        raise ConfigError(f"job {job.id} has answers and an environment: given answers have a single turn, remove one.")


async def give_sample(source: Source, job: Job, k: int) -> Sample:
    """Create sample ``k`` from its given answer. Blocks for a prefill, and while a weight change closes the valves.

    Text is tokenized and gets the tokenizer's eos; token ids are used unchanged.

    Returns:
        A sample with status ``given``, reward not yet set.

    Raises:
        ConfigError, EngineRefused: the answer can never be scored.
        EngineDied, EngineError: see ``Engine.score``.
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
            f"job {job.id}: the prompt has {len(prompt)} tokens and given answer {k} has {len(ids)}; both must have at "
            f"least one, and rollout.max_context_tokens and the engine's context length allow {limit} together."
        )
    sample = Sample(job, k, started_s=time.time())
    started = time.monotonic()
    async with source.valves.sample():
        scores, version = await score_tokens(source, prompt + ids, len(prompt), sample.id, with_routing=True)
    sample.append(prompt)
    sample.prompt_length = len(prompt)
    sample.append(ids, version=version, logprobs=scores.logprobs)
    if scores.experts is not None:
        add_rows(sample, scores.experts)
    sample.generate_s, sample.drawn_s = time.monotonic() - started, time.time()
    sample.text = answer if isinstance(answer, str) else tokenizer.decode(ids, skip_special_tokens=True)
    sample.turns = [sample.text]
    sample.status, sample.finish_reason = SampleStatus.GIVEN, FinishReason.GIVEN
    return sample


def _is_answer(answer: object) -> bool:
    if isinstance(answer, list):
        return all(type(token) is int and token >= 0 for token in answer)
    return isinstance(answer, str)
