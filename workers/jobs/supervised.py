"""Make one sample from a given answer: demonstrations, supervised data, answers of another policy.

The engine scores it under its current weights, the reward is computed, and it is committed like any sample of its
group. Status ``given`` says that its tokens count as generated although no policy sampled them: their logprobs and
version are those of the weights that scored them, at temperature 1 (T6).
"""

import time

from penstock.errors import ConfigError, ProtocolError
from penstock.model.tokenizer import Tokenizer
from penstock.names import Lane
from penstock.records.job import Job
from penstock.records.sample import FinishReason, Sample, SampleStatus
from penstock.workers.engine import Engine
from penstock.workers.jobs.generate import prompt_ids
from penstock.workers.jobs.routed_experts import keep_rows
from penstock.workers.jobs.scoring import score_tokens
from penstock.workers.jobs.valves import Valves


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


async def give_sample(
    engine: Engine, valves: Valves, job: Job, k: int, *, tokenizer: Tokenizer, max_context: int
) -> Sample:
    """Make sample ``k`` of its given answer. Blocks for a prefill, and while ``valves`` are closed by a weight change.

    A text is tokenized and ended by the tokenizer's eos; token ids are used unchanged.

    Args:
        max_context: most tokens of prompt and answer together.

    Returns:
        A sample with status ``given``, reward not yet set.

    Raises:
        ConfigError, EngineRefused: it can never be scored.
        EngineDied, EngineError: as ``Engine.score``.
    """
    prompt, answer = prompt_ids(job, tokenizer), job.answers[k]
    if isinstance(answer, str):
        eos = tokenizer.eos_token_id
        ids = [*tokenizer.encode(answer, add_special_tokens=False), *([eos] if eos is not None else [])]
    else:
        ids = list(answer)
    limit = min(max_context, engine.info.max_context)
    if not prompt or not ids or len(prompt) + len(ids) > limit:
        raise ConfigError(
            f"job {job.id}: prompt and given answer {k} have {len(prompt)} and {len(ids)} tokens; "
            f"rollout.max_context_tokens and the engine's own context allow {limit} together, and neither may be empty."
        )
    sample = Sample(job, k, started_s=time.time())
    started = time.monotonic()
    async with valves.sample():
        scores, version = await score_tokens(engine, valves, prompt + ids, len(prompt), sample.id, with_routing=True)
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
