"""Score one given sequence (compute_log_prob): the logprobs of its response, and the one version they belong to."""

import time

from penstock.errors import ConfigError, EngineError
from penstock.protocol.score_jobs import check_temperature, read_given
from penstock.records.job import Job
from penstock.records.sample import FinishReason, Sample, SampleStatus
from penstock.workers.engine import Engine, Scores
from penstock.workers.jobs.valves import Valves

#: Attempts to score a sequence whose request is aborted or whose weights change during it.
MAX_TRIES = 20


async def score_sample(engine: Engine, valves: Valves, job: Job, k: int) -> Sample:
    """Score sequence ``k`` of a scoring job. Blocks for a prefill, and while ``valves`` are closed by a weight change.

    Returns:
        A sample with its tokens, their logprobs from the start on, nothing generated, reward 0, and the version in
        ``reward_info["version"]``.

    Raises:
        ProtocolError, ConfigError, EngineRefused: it can never be scored.
        EngineDied, EngineError: as ``Engine.score``.
    """
    if (temperature := job.sampling.get("temperature")) is not None:
        check_temperature(f"scoring job {job.id}", temperature)
    given = read_given(job, k)
    if engine.vocab_size and max(given.tokens) >= engine.vocab_size:
        raise ConfigError(
            f"sequence {k} of scoring job {job.id} holds id {max(given.tokens)}, and the model has ids below "
            f"{engine.vocab_size}: give token ids of this model."
        )
    sample = Sample(job, k, started_s=time.time())
    started = time.monotonic()
    async with valves.sample():
        scores, version = await score_tokens(engine, valves, given.tokens, given.start, sample.id)
    sample.append(given.tokens)
    sample.prompt_length = given.start
    sample.logprobs[given.start :] = scores.logprobs
    sample.generate_s, sample.drawn_s = time.monotonic() - started, time.time()
    sample.status, sample.finish_reason = SampleStatus.COMPLETED, FinishReason.STOP
    sample.reward, sample.reward_info = 0.0, {"version": version}
    return sample


async def score_tokens(
    engine: Engine, valves: Valves, tokens: list[int], start: int, rid: str, *, with_routing: bool = False
) -> tuple[Scores, int]:
    """Return scores from ``start`` on, and their version; discard a prefill during which the weights changed.

    Blocks; raises as ``Engine.score``.
    """
    for _ in range(MAX_TRIES):
        async with valves.requests:
            scores = await engine.score(tokens, start, rid=rid, with_routing=with_routing)
        if scores.version is not None:
            return scores, scores.version
    raise EngineError(f"{rid}: weights changed during each of {MAX_TRIES} attempts to score it.")
