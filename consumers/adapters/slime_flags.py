"""Check slime's rollout flags: translate those that apply, reject by name those that have no effect.

Flags of slime's data source, trainer, engines and logs do not concern a rollout function.
"""

from argparse import Namespace
from typing import Any

from penstock.config import Config
from penstock.config.sampling import hidden_by
from penstock.errors import ConfigError

#: Flags that generate or reward by slime's own means -> the equivalent here; None: there is no equivalent.
ELSEWHERE: dict[str, str | None] = {
    "custom_generate_function_path": "hooks.generate",
    "rollout_sample_hook_path": "hooks.sample",
    "custom_rm_path": "reward.function",
    "rm_type": "reward.function",
    "rm_url": "reward.remote, or rollout.teacher",
    "group_rm": "reward.group",
    "use_rollout_routing_replay": None,
    "multimodal_keys": None,
    "sglang_enable_deterministic_inference": None,
}
#: The same for one of slime's evaluation datasets.
ELSEWHERE_OF_EVAL = ("custom_generate_function_path", "custom_rm_path", "multimodal_keys")
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


def check_flags(args: Namespace) -> None:
    """Raise ConfigError for the first flag that would have no effect, or a wrong one."""
    for name, instead in ELSEWHERE.items():
        if getattr(args, name, None):
            raise ConfigError(_no_effect(_flag(name), instead))
    check_weights(args)
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


def check_eval_dataset(dataset: Any, config: Config) -> None:
    """Raise ConfigError for settings of one of slime's ``eval_datasets`` that would have no effect."""
    for name in ELSEWHERE_OF_EVAL:
        if getattr(dataset, name, None):
            raise ConfigError(_no_effect(f"{name} of slime's data set {dataset.name!r}", ELSEWHERE[name]))
    if getattr(dataset, "rm_type", None) and not config.reward.by_metadata:
        raise ConfigError(
            f"rm_type of slime's data set {dataset.name!r} names a reward by the metadata of its prompts: set "
            "reward.by_metadata in the run's configuration."
        )


def train_sampling(args: Namespace) -> dict[str, Any]:
    """Return the sampling parameters of training, in SGLang's names."""
    return _given({name: getattr(args, flag, None) for name, flag in _TRAIN.items()})


def eval_sampling(args: Namespace, dataset: Any) -> dict[str, Any]:
    """Return the sampling parameters of one of ``eval_datasets``, in SGLang's names."""
    values = {}
    for name, (attribute, flag) in _EVAL.items():
        own = getattr(dataset, attribute, None)
        values[name] = getattr(args, flag, None) if own is None and flag is not None else own
    return _given(values)


def rewarded(args: Namespace, reward: float, *, evaluating: bool) -> Any:
    """Return a reward as slime expects it: the number, or a map if ``--reward-key`` or the like names a key."""
    keys = {args.reward_key, getattr(args, "eval_reward_key", None) if evaluating else None}
    return {key: reward for key in keys if key} or reward


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _no_effect(what: str, instead: str | None) -> str:
    does = f"say it in the run's configuration, {instead}" if instead else "leave it out"
    return f"{what} has no effect where penstock generates: {does}."
