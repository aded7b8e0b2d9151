"""Interpret slime's flags for a rollout function, and refuse flags without effect.

- a function that generates, or rewards a group: must match the run's configuration, as the workers call it;
- ``--custom-rm-path``, ``--rm-type``, the ``rm_type`` of metadata, and those of a data set: the reward of each request;
- sampling: the parameters of each request.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from penstock.config import Config
from penstock.config.hooks import BOXED, REWARDS
from penstock.config.sampling import hidden_by
from penstock.errors import ConfigError

#: Flags without effect -> what to do instead.
ELSEWHERE: dict[str, str] = {
    "use_rollout_routing_replay": "leave it out",
    "multimodal_keys": "let penstock's producer read prompts with images, and train by its RolloutManager",
    "sglang_enable_deterministic_inference": "leave it out",
}
#: Sampling parameter -> slime's flag.
_TRAIN = {
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_new_tokens": "rollout_max_response_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
}
#: Sampling parameter -> attribute of a dataset, and the flag used in its absence.
_EVAL: dict[str, tuple[str, str | None]] = {
    "temperature": ("temperature", None),
    "top_p": ("top_p", None),
    "top_k": ("top_k", None),
    "max_new_tokens": ("max_response_len", None),
    "min_new_tokens": ("min_new_tokens", "eval_min_new_tokens"),
    "repetition_penalty": ("repetition_penalty", None),
    "stop": ("stop", "rollout_stop"),
    "stop_token_ids": ("stop_token_ids", "rollout_stop_token_ids"),
    "skip_special_tokens": ("skip_special_tokens", None),
    "no_stop_trim": ("no_stop_trim", None),
}


def check_flags(args: Namespace, config: Config) -> None:
    """Raise ConfigError for the first rollout flag of slime that would have no or a wrong effect.

    Flags of slime's data source, trainer, engines and logs do not concern a rollout function.

    Args:
        config: the run's configuration.
    """
    hooks, reward = config.hooks, config.reward
    for name, instead in ELSEWHERE.items():
        if getattr(args, name, None):
            raise ConfigError(f"{_flag(name)} has no effect where penstock generates: {instead}.")
    check_weights(args)
    _check_named("--custom-generate-function-path", _path(args, "custom_generate_function_path"),
                 [hooks.generate, hooks.rollout], "hooks.generate")  # fmt: skip
    for path in getattr(args, "rollout_sample_hook_path", None) or ():
        _check_named("--rollout-sample-hook-path", import_path(path), hooks.sample, "hooks.sample")
    if (url := getattr(args, "rm_url", None)) and url != reward.remote.url:
        raise ConfigError(f"--rm-url {url} is not where the run's workers send answers: set reward.remote.url to it.")
    if getattr(args, "group_rm", False) and (path := _path(args, "custom_rm_path")):
        _check_named("--group-rm with --custom-rm-path", path, [reward.group], "reward.group")
    else:
        _check_reward(args, "--custom-rm-path", _path(args, "custom_rm_path"), config)
    _check_type("--rm-type", getattr(args, "rm_type", None))
    if (hidden := hidden_by(train_sampling(args))) is not None:
        name, value = hidden
        raise ConfigError(
            f"{_flag(_TRAIN[name])} {value!r} draws from another distribution than the one that is trained on: "
            "leave it out of training; --eval-config takes it."
        )


def check_weights(args: Namespace) -> None:
    """Raise ConfigError if slime would write deltas instead of complete weights."""
    if getattr(args, "update_weight_mode", "full") != "full":
        raise ConfigError("penstock publishes whole weights: set --update-weight-mode full.")


def check_eval_dataset(args: Namespace, dataset: Any, config: Config) -> None:
    """Raise ConfigError for settings of one of slime's ``eval_datasets`` that would have no effect."""
    what = f"of slime's data set {dataset.name!r}"
    if getattr(dataset, "multimodal_keys", None):
        raise ConfigError(
            f"multimodal_keys {what} has no effect where penstock generates: its prompts are text alone; let "
            "penstock's producer read them, in data.eval."
        )
    _check_named(f"custom_generate_function_path {what}", _path(dataset, "custom_generate_function_path"),
                 [config.hooks.eval or config.hooks.generate], "hooks.eval")  # fmt: skip
    _check_reward(args, f"custom_rm_path {what}", _path(dataset, "custom_rm_path"), config)
    _check_type(f"rm_type {what}", getattr(dataset, "rm_type", None))


def reward_of(args: Namespace, config: Config, metadata: Mapping[str, Any], dataset: Any = None) -> str | None:
    """Return the reward of a prompt in slime's order: a function, the ``rm_type`` of its metadata, ``--rm-type``.

    None means the run's own reward. Only flags override a user function named in the run.

    Args:
        dataset: entry of ``eval_datasets`` with the prompt; None in training.

    Raises:
        ConfigError: the reward in the metadata does not exist.
    """
    path = _path(args if dataset is None else dataset, "custom_rm_path")
    if path is not None:
        return None if dataset is None and getattr(args, "group_rm", False) else path
    named: Any = getattr(args, "rm_type", None)
    if named or all(":" not in name for name in config.reward.names):
        named = metadata.get("rm_type") or named
        _check_type("rm_type of a prompt's metadata", named)
    return named.strip() if named else None


def train_sampling(args: Namespace) -> dict[str, Any]:
    """Return the sampling parameters for training in SGLang's names."""
    return _given({name: getattr(args, flag, None) for name, flag in _TRAIN.items()})


def eval_sampling(args: Namespace, dataset: Any) -> dict[str, Any]:
    """Return the sampling parameters of an entry of ``eval_datasets`` in SGLang's names."""
    values = {}
    for name, (attribute, flag) in _EVAL.items():
        own = getattr(dataset, attribute, None)
        values[name] = getattr(args, flag, None) if own is None and flag is not None else own
    return _given(values)


def rewarded(args: Namespace, reward: float, *, evaluating: bool) -> Any:
    """Return a reward in slime's form: a number, or a map if a flag such as ``--reward-key`` sets a key."""
    keys = {args.reward_key, getattr(args, "eval_reward_key", None) if evaluating else None}
    return {key: reward for key in keys if key} or reward


def import_path(path: str) -> str:
    """Convert slime's ``package.module.function`` to ``package.module:function``."""
    module, _, name = path.rpartition(".")
    return path if ":" in path else f"{module}:{name}"


def _path(of: Any, name: str) -> str | None:
    found = getattr(of, name, None)
    return import_path(found) if found else None


def _check_named(flag: str, path: str | None, named: Collection[str | None], key: str) -> None:
    if path is not None and path not in named:
        raise ConfigError(
            f"{flag} names {path}, and the run's workers call only what their own configuration names: set {key} to it."
        )


def _check_reward(args: Namespace, flag: str, path: str | None, config: Config) -> None:
    """Raise ConfigError unless workers may call the function and read its number under slime's key."""
    reward = config.reward
    _check_named(flag, path, [*reward.names, *config.worker.rewards], "reward.function, or add it to worker.rewards,")
    keys = {args.reward_key, getattr(args, "eval_reward_key", None)} if path is not None else set()
    if wrong := sorted(key for key in keys if key and key != reward.key):
        raise ConfigError(
            f"--reward-key {wrong[0]} is not the entry with the number that the run's workers read, {reward.key}: set "
            "reward.key to it."
        )


def _check_type(flag: str, name: Any) -> None:
    if name and (not isinstance(name, str) or name.strip().removeprefix(BOXED) not in REWARDS):
        raise ConfigError(f"{flag} {name!r} is no reward of penstock's: use {', '.join(REWARDS)}, or a function.")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
