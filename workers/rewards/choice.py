"""Select the rewards of a sample, with their weights."""

from collections.abc import Mapping

from penstock.config import RewardConfig
from penstock.errors import ConfigError
from penstock.protocol.records.job import Job
from penstock.text import safe_repr
from penstock.workers.rewards.kinds.registry import NAMES

#: Metadata entry of a prompt that names its reward (slime's).
BY_METADATA = "rm_type"


def chosen(job: Job, config: RewardConfig) -> Mapping[str, float]:
    """Return reward -> weight for samples of a job: the job's own; else the run's if it is a user function; else the
    one named in the metadata (``reward.by_metadata``); else the run's. Imports nothing.

    Raises:
        ConfigError: the metadata name a reward that is not built in.
    """
    if job.reward:
        return {job.reward: 1.0}
    if config.by_metadata and all(name in NAMES for name in config.names) and (named := _named(job)):
        return {named: 1.0}
    return config.parts or {config.function: 1.0}


def _named(job: Job) -> str:
    """Return the reward named in the metadata; '' if there is no such entry."""
    found = job.metadata.get(BY_METADATA)
    name = found.strip() if isinstance(found, str) else found
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or name not in NAMES:
        raise ConfigError(
            f"job {job.id}: {BY_METADATA} {safe_repr(found)} of its metadata is no reward of penstock's "
            "own: correct it, "
            "or name a function of yours as the dataset's reward, or set reward.by_metadata: false."
        )
    return name
