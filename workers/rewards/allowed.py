"""Which rewards a job may name, and the user's own by name."""

from collections.abc import Callable
from typing import Any

from penstock.config import Config
from penstock.config.code_names import REWARDS
from penstock.errors import ConfigError
from penstock.protocol.records.sample import Sample
from penstock.system.user_code import find
from workers.rewards.kinds.registry import is_quick


def allowed_rewards(config: Config) -> frozenset[str]:
    """Rewards that jobs of this configuration may name, beside the quick ones by name, which are always there."""
    datasets = [*config.data.train, *config.data.eval]
    named = {*config.reward.names, *config.reward.pool.functions, *config.worker.rewards}
    named |= {one.reward for one in datasets if one.reward is not None}
    return frozenset(name for name in named if not is_quick(name))


def import_reward(name: str) -> Callable[[Sample], Any]:
    """The reward ``module:function``. Raises ConfigError."""
    if ":" not in name:
        raise ConfigError(f"reward.function {name!r} is not a reward: use {', '.join(REWARDS)} or module:function.")
    found = find(name, "reward.function")
    if not callable(found):
        raise ConfigError(f"reward.function {name} is not a function.")
    function: Callable[[Sample], Any] = found
    return function
