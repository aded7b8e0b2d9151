"""Merge the sampling parameters of a job: run, dataset and its own; refuse those that bias training (T7)."""

from typing import Any

from penstock.config import RolloutConfig
from penstock.config.sampling import GREEDY_BELOW, NEUTRAL, hidden_by, is_temperature, temperature_of
from penstock.errors import ConfigError
from penstock.names import Lane
from penstock.records.job import Job


def sampling_for(job: Job, rollout: RolloutConfig) -> dict[str, Any]:
    """Return the sampling parameters: ``rollout.sampling``, then ``eval_sampling`` in lane eval, then the job's own.

    They always include the temperature, so that the recorded one is the one used. null counts as left out.

    Raises:
        ConfigError: a parameter hides the distribution from the logprobs and the job is for training (T7), the
            temperature is not a number, or several answers are requested at once.
    """
    sampling = dict(rollout.sampling)
    if job.lane == Lane.EVAL:
        sampling |= rollout.eval_sampling
    sampling |= job.sampling
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if sampling.pop("n", 1) != 1:
        raise ConfigError(
            f"job {job.id}: sampling.n cannot be set; use rollout.n, penstock asks for answers one by one."
        )
    if not is_temperature(sampling.get("temperature", 0)):
        raise ConfigError(
            f"job {job.id}: sampling.temperature = {sampling['temperature']!r} is not a temperature: "
            "give a number, 0 or above."
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
    does = "draws from another distribution than the logprobs describe"
    if name == "temperature":
        does = f"cannot be trained on, because an engine draws greedily below {GREEDY_BELOW:g}"
    raise ConfigError(
        f"job {job.id}: sampling.{name} = {value!r} {does}: leave it out of rollout.sampling and the dataset's "
        "sampling, or use it for evaluation only."
    )
