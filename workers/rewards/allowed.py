"""Determine which rewards a job may name, and import user rewards by name."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from penstock.config import Config
from penstock.config.hooks import REWARDS
from penstock.errors import ConfigError
from penstock.hooks.signatures import Form, check_hook, is_async
from penstock.hooks.slime import PartRewards, seen
from penstock.records.sample import Sample
from penstock.system.user_code import find_function
from penstock.workers.rewards.kinds.registry import is_quick

_SLIME = Form(("args", "sample"))


def allowed_rewards(config: Config) -> frozenset[str]:
    """Return the rewards that jobs of this configuration may name, besides the quick built-in ones."""
    datasets = [*config.data.train, *config.data.eval]
    named = {*config.reward.names, *config.worker.rewards}
    named |= {one.reward for one in datasets if one.reward is not None}
    return frozenset(name for name in named if not is_quick(name))


def import_reward(name: str, args: Namespace | None = None) -> Callable[[Sample], Any]:
    """Import the reward ``module:function``; slime's signature (args, sample, **kwargs) works too. Raises ConfigError.

    Args:
        args: first argument of functions with slime's signature.
    """
    if ":" not in name:
        raise ConfigError(f"reward.function {name!r} is not a reward: use {', '.join(REWARDS)} or module:function.")
    function = find_function(name, "reward.function")
    check_hook("reward.function", name, function)
    return _of_slime(function, args or Namespace()) if is_of_slime(function) else function


def is_of_slime(function: Callable[..., Any]) -> bool:
    """Return whether a reward has slime's signature: ``args``, and a sample, or the samples of a group."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["args"] and _SLIME.takes(function)


def _of_slime(function: Callable[..., Any], args: Namespace) -> Callable[[Sample], Any]:
    """Call ``function`` as slime does: with each sample that a generate function returned, and that has no reward."""

    async def asked(sample: Sample) -> Any:
        made = seen(sample)
        if not isinstance(made, list):
            return await function(args, made)
        return PartRewards([await function(args, one) if one.reward is None else one.reward for one in made])

    def called(sample: Sample) -> Any:
        made = seen(sample)
        if not isinstance(made, list):
            return function(args, made)
        return PartRewards(function(args, one) if one.reward is None else one.reward for one in made)

    return asked if is_async(function) else called
