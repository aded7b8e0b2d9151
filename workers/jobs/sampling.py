"""Merge the sampling parameters of run, dataset and job; refuse parameters that bias training (T7)."""

from typing import Any

from penstock.config import RolloutConfig
from penstock.config.sampling import GREEDY_BELOW, NEUTRAL, hidden_by, is_temperature, temperature_of
from penstock.errors import ConfigError
from penstock.names import Lane
from penstock.records.job import Job


def sampling_for(job: Job, rollout: RolloutConfig) -> dict[str, Any]:
    """Merge ``rollout.sampling``, then ``eval_sampling`` in lane eval, then the job's parameters.

    The result always includes the temperature, so that the recorded value is the one used. null means unset.

    Raises:
        ConfigError: the logprobs of a training job would not describe the sampled distribution (T7), the temperature
        is not a number, or ``n`` is set.
    """
    sampling = dict(rollout.sampling)
    if job.lane == Lane.EVAL:
        sampling |= rollout.eval_sampling
    sampling |= job.sampling
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if sampling.pop("n", 1) != 1:
        raise ConfigError(f"job {job.id}: sampling.n is not supported: set rollout.n, the number of samples per group.")
    if not is_temperature(sampling.get("temperature", 0)):
        raise ConfigError(
            f"job {job.id}: invalid sampling.temperature = {sampling['temperature']!r}: set a number, 0 or above."
        )
    sampling["temperature"] = temperature_of(sampling)
    if job.lane == Lane.TRAIN:
        _refuse_hidden(job, sampling)
        sampling = NEUTRAL | sampling
    return sampling


def _refuse_hidden(job: Job, sampling: dict[str, Any]) -> None:
    hidden = hidden_by(sampling)
    if hidden is None:
        return
    name, value = hidden
    reason = "makes the engine sample from another distribution than the logprobs describe"
    if name == "temperature":
        reason = f"cannot be trained on, because an engine samples greedily below {GREEDY_BELOW:g}"
    raise ConfigError(
        f"job {job.id}: sampling.{name} = {value!r} {reason}: remove it from rollout.sampling and the dataset's "
        "sampling, or use it for evaluation only."
    )
