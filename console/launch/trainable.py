"""Reject before a start what the reference trainer cannot train.

A custom trainer may support some of it (groups of one for a critic, for example), so the configuration accepts it.
"""

import logging
import re
from importlib.util import find_spec
from pathlib import Path

from penstock.config import Config
from penstock.config.sampling import hidden_by
from penstock.errors import ConfigError
from penstock.metrics.gpu_load import visible_gpus

log = logging.getLogger(__name__)

_CUDA_VERSION = re.compile(r"^(?:cuda|hip)\b[^=\n]*=\s*'", re.MULTILINE)


def check_rollouts(config: Config) -> None:
    """Raise ConfigError for sampling that no trainer can train on (T7)."""
    for index, dataset in enumerate(config.data.train):
        hidden = hidden_by(config.rollout.sampling | dataset.sampling)
        if hidden is None:
            continue
        name, value = hidden
        where = f"data.train.{index}.sampling" if name in dataset.sampling else "rollout.sampling"
        raise ConfigError(
            f"{where}.{name} is {value!r}, which draws from another distribution than the logprobs describe, so it "
            "cannot be trained on: remove it, or put it under rollout.eval_sampling."
        )


def check_groups(config: Config) -> None:
    """Raise ConfigError for groups of one with group-relative advantages, which would all be 0."""
    if config.hooks.rewards is not None or config.trainer.alone:
        return  # advantages come from the hook, or per token
    for key in ("distill", "process"):
        if getattr(config.trainer, key) is not None:
            _check_any_group(config, key)
            return
    for index, dataset in enumerate(config.data.train):
        if (dataset.n or config.rollout.n) == 1:
            where = f"data.train.{index}.n" if dataset.n else "rollout.n"
            raise ConfigError(
                f"{where} is 1, and trainer.advantage {config.trainer.advantage} compares the answers to a prompt with "
                "each other, so every advantage would be 0: set it to 2 or more."
            )


def _check_any_group(config: Config, key: str) -> None:
    """Allow groups of one with advantages per token, if other groups have rewards to compare."""
    if all((dataset.n or config.rollout.n) == 1 for dataset in config.data.train):
        raise ConfigError(
            f"rollout.n is 1, and trainer.{key}.with_rewards adds advantages of rewards, which compare the answers to "
            "a prompt with each other, so every one would be 0: set it to 2 or more, or remove with_rewards."
        )


def check_hooks(config: Config) -> None:
    """Raise ConfigError for a hook that the reference trainer does not call."""
    if (convert := config.hooks.convert) is not None:
        raise ConfigError(
            f"hooks.convert {convert} makes train data of slime's (penstock.RolloutManager), and the reference trainer "
            "takes none: use hooks.rewards and hooks.samples, or remove it."
        )


def warn_of_unheeded(config: Config) -> None:
    """Log the findings of ``unheeded``."""
    for found, remedy in unheeded(config):
        log.warning("%s: %s", found, remedy)


def unheeded(config: Config) -> list[tuple[str, str]]:
    """Return settings without effect in the reference trainer that may be mistakes: each with a remedy."""
    found = []
    rollout, trainer = config.rollout, config.trainer
    for key, model, heeds, by in (
        ("teacher", rollout.teacher, trainer.distill, "trainer.distill"),
        ("reference", rollout.reference, trainer.kl, "trainer.kl"),
    ):
        if model is not None and heeds is None and not config.debug.rollout_only:
            found.append(
                (
                    f"rollout.{key} {model.name} scores every sample, and without {by} the reference trainer makes "
                    "nothing of it",
                    f"set {by}, or remove rollout.{key} if no other trainer reads what it says",
                )
            )
    if trainer.kl is not None and (trainer.kl.place, trainer.kl.estimator) == ("loss", "k1"):
        found.append(("trainer.kl.estimator k1 in the loss has a gradient of mean 0: it is noise", "choose k2 or k3"))
    epochs = config.data.epochs
    for dataset in config.data.train:
        if epochs is None or dataset.weight is not None or dataset.curriculum is None:
            continue  # with weights, small datasets come more often than others
        if epochs <= (groups := dataset.curriculum.groups):
            found.append(
                (
                    f"data.epochs is {epochs}, and the curriculum of dataset {dataset.name} skips no prompt before its "
                    f"epoch {groups + 1}",
                    "raise data.epochs, or remove the curriculum if it is never raised",
                )
            )
    return found


def check_device(config: Config) -> None:
    """Raise ConfigError for a CUDA trainer if torch or the machine lacks CUDA. Does not import torch."""
    if not config.trainer.device.startswith("cuda"):
        return
    where = f"trainer.device is {config.trainer.device}"
    if not _torch_has_cuda():
        raise ConfigError(f"{where}, and the torch of this environment was built without it: install one with CUDA.")
    if not visible_gpus():
        raise ConfigError(f"{where}, and this machine shows no GPU: start where one is, or set trainer.device=cpu.")


def _torch_has_cuda() -> bool:
    """Read from ``torch/version.py`` whether torch has CUDA, as importing it takes seconds. True if unknown."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return True
    return _CUDA_VERSION.search(file.read_text()) is not None
