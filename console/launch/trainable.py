"""What the reference trainer and its rollouts could never do: refused before anything is started.

A trainer of the user's own may do some of it (groups of one for a critic, say), so the configuration as such takes it.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from penstock.config import Config
from penstock.config.sampling import hidden_by
from penstock.errors import ConfigError
from penstock.system.gpus import visible_gpus

_CUDA_VERSION = re.compile(r"^(?:cuda|hip)\b[^=\n]*=\s*'", re.MULTILINE)


def check_rollouts(config: Config) -> None:
    """Refuse with ConfigError sampling that no trainer can train on (T7)."""
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
    """Refuse with ConfigError groups of one, whose answers are compared with themselves: every advantage is 0."""
    if config.trainer.distill is not None:
        return  # tokens have advantages of their own
    for index, dataset in enumerate(config.data.train):
        if (dataset.n or config.rollout.n) == 1:
            where = f"data.train.{index}.n" if dataset.n else "rollout.n"
            raise ConfigError(
                f"{where} is 1, and trainer.advantage {config.trainer.advantage} compares the answers to a prompt with "
                "each other, so every advantage would be 0: set it to 2 or more."
            )


def check_device(config: Config) -> None:
    """Refuse with ConfigError a trainer on CUDA where torch or the machine has none. Does not import torch."""
    if not config.trainer.device.startswith("cuda"):
        return
    where = f"trainer.device is {config.trainer.device}"
    if not _torch_has_cuda():
        raise ConfigError(f"{where}, and the torch of this environment was built without it: install one with CUDA.")
    if not visible_gpus():
        raise ConfigError(f"{where}, and this machine shows no GPU: start where one is, or set trainer.device=cpu.")


def _torch_has_cuda() -> bool:
    """What ``torch/version.py`` says; importing torch takes seconds. True where it does not say."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return True
    return _CUDA_VERSION.search(file.read_text()) is not None
