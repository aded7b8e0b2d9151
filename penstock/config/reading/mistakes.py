"""Errors of a configuration: one sentence per key that says what to do."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from penstock.config.reading.settings import Key, nearest
from penstock.config.reading.validation_errors import explain
from penstock.text import redact, safe_repr, utf8_safe

_FILES = "data.train, a list of {name, path}"
_ANSWER = "rollout.sampling.max_new_tokens"
_GROUPS = "trainer.batch_groups (groups of rollout.n answers)"
_TP = "engine.args.tp-size"
_MICRO = "trainer.max_tokens (tokens per micro-batch)"
_KL = "trainer.kl (weight, estimator, place)"
_KL_WEIGHT = "trainer.kl.weight (estimator and place beside it)"
_SOURCE = "data.train.0.path (python:module:Class)"
_LONG = "data.train.0.on_long_prompt (error or skip)"
_OVERLONG = "reward.overlong (max_tokens, buffer_tokens, factor)"
_TRACKERS = "trainer.report_to (a list, such as [wandb])"

#: Last part of a key, lower case -> the key of ours, and in brackets what differs.
CALLED = {
    "learning_rate": "trainer.lr",
    "actor_lr": "trainer.lr",
    "optim": "trainer.lr, trainer.warmup_steps and trainer.max_grad_norm",
    "batch_size": _GROUPS,
    "train_batch_size": _GROUPS,
    "per_device_train_batch_size": _GROUPS,
    "global_batch_size": _GROUPS,
    "mask_offpolicy_in_partial_rollout": "trainer.subscription.mask_offpolicy",
    "rollout_batch_size": _GROUPS,
    "generation_batch_size": _GROUPS,
    "gradient_accumulation_steps": _MICRO,
    "ppo_micro_batch_size": _MICRO,
    "ppo_micro_batch_size_per_gpu": _MICRO,
    "max_tokens_per_gpu": _MICRO,
    "ppo_max_token_len_per_gpu": _MICRO,
    "max_steps": "trainer.steps",
    "num_steps": "trainer.steps",
    "total_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "num_rollout": "trainer.steps",
    "num_train_epochs": "data.epochs",
    "num_epochs": "data.epochs",
    "total_epochs": "data.epochs",
    "num_epoch": "data.epochs",
    "drop_last": "data.last_batch (train or drop)",
    "dataloader_drop_last": "data.last_batch (train or drop)",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "group_size": "rollout.n",
    "num_samples": "rollout.n",
    "max_completion_length": _ANSWER,
    "max_response_length": _ANSWER,
    "rollout_max_response_len": _ANSWER,
    "max_new_tokens": _ANSWER,
    "response_length": _ANSWER,
    "max_prompt_length": "rollout.max_context_tokens (prompt and answer together)",
    "max_model_len": "rollout.max_context_tokens (prompt and answer together)",
    "temperature": "rollout.sampling.temperature",
    "top_p": "rollout.eval_sampling.top_p (for evaluation only)",
    "top_k": "rollout.eval_sampling.top_k (for evaluation only)",
    "epsilon": "trainer.clip_low and trainer.clip_high",
    "clip_ratio": "trainer.clip_low and trainer.clip_high",
    "clip_range": "trainer.clip_low and trainer.clip_high",
    "cliprange": "trainer.clip_low and trainer.clip_high",
    "eps_clip": "trainer.clip_low and trainer.clip_high",
    "epsilon_high": "trainer.clip_high",
    "eps_clip_high": "trainer.clip_high",
    "clip_ratio_high": "trainer.clip_high",
    "clip_ratio_low": "trainer.clip_low",
    "grad_clip": "trainer.max_grad_norm",
    "clip_grad": "trainer.max_grad_norm",
    "loss_type": "trainer.loss",
    "policy_loss": "trainer.loss",
    "loss_agg_mode": "trainer.aggregation",
    "adv_estimator": "trainer.advantage",
    "advantage_estimator": "trainer.advantage",
    "scale_rewards": "trainer.advantage (dr_grpo does not divide by the deviation)",
    "norm_adv_by_std_in_grpo": "trainer.advantage (dr_grpo does not divide by the deviation)",
    "output_dir": "directory",
    "default_local_dir": "directory",
    "save": "directory",
    "run_name": "run",
    "experiment_name": "run",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrained": "model.path",
    "hf_checkpoint": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype: bfloat16",
    "fp16": "model.dtype: float16",
    "save_steps": "trainer.checkpoint_every",
    "save_freq": "trainer.checkpoint_every",
    "save_interval": "trainer.checkpoint_every",
    "eval_steps": "data.eval_every",
    "eval_interval": "data.eval_every",
    "test_freq": "data.eval_every",
    "reward_funcs": "reward.function",
    "reward_function": "reward.function",
    "custom_reward_function": "reward.function",
    "custom_rm_path": "reward.function",
    "rm_type": "reward.function",
    "rm_url": "reward.remote.url",
    "train_files": _FILES,
    "dataset": _FILES,
    "dataset_name": _FILES,
    "prompt_data": _FILES,
    "val_files": "data.eval, a list of {name, path}",
    "eval_prompt_data": "data.eval, a list of {name, path}",
    "prompt_key": "data.train.0.input_key",
    "tensor_model_parallel_size": _TP,
    "tensor_parallel_size": _TP,
    "vllm_tensor_parallel_size": _TP,
    "rollout_num_gpus_per_engine": _TP,
    "gpu_memory_utilization": "engine.args.mem-fraction-static",
    "vllm_gpu_memory_utilization": "engine.args.mem-fraction-static",
    "max_staleness": "staleness.bound",
    "max_head_offpolicyness": "staleness.bound",
    "staleness_threshold": "staleness.bound",
    "n_gpus_per_node": "trainer.dp_size (GPUs of the trainer) and worker.count (engines)",
    "max_num_seqs": "worker.slots",
    "metrics_port": "metrics.port",
    "prometheus_port": "metrics.port",
    "max_concurrent_rollouts": "worker.slots",
    "random_seed": "seed",
    "report_to": _TRACKERS,
    "logger": _TRACKERS,
    "log_with": _TRACKERS,
    "beta": _KL_WEIGHT,
    "kl_coef": _KL_WEIGHT,
    "kl_loss_coef": _KL_WEIGHT,
    "init_kl_coef": _KL_WEIGHT,
    "use_kl_loss": _KL,
    "kl_loss_type": "trainer.kl.estimator",
    "sync_ref_model": _KL,
    "ref_model": "rollout.reference",
    "ref_load": "rollout.reference",
    "opd_kl_coef": "trainer.distill.weight",
    "importance_sampling_level": "trainer.loss (gspo weighs whole answers)",
    "clip_ratio_c": "trainer.dual_clip",
    "eps_clip_c": "trainer.dual_clip",
    "group_rm": "reward.group",
    "overlong_buffer": _OVERLONG,
    "overlong_buffer_cfg": _OVERLONG,
    "sandbox_fusion": "reward.jail (reward code)",
    "sandbox": "reward.jail (reward code)",
    "reward_model": "reward.function, or reward.judges (a frozen model that a reward asks)",
    "custom_generate_function_path": "hooks.generate",
    "rollout_function_path": "hooks.rollout (all samples of a group)",
    "eval_function_path": "hooks.eval",
    "rollout_sample_hook_path": "hooks.sample",
    "custom_reward_post_process_path": "hooks.rewards",
    "rollout_sample_filter_path": "hooks.samples",
    "rollout_data_postprocess_path": "hooks.postprocess",
    "rollout_all_samples_process_path": "hooks.all_samples",
    "custom_rollout_log_function_path": "hooks.rollout_log",
    "custom_eval_rollout_log_function_path": "hooks.eval_log",
    "custom_convert_samples_to_train_data_path": "hooks.convert",
    "dynamic_sampling_filter_path": "trainer.filter.functions",
    "buffer_filter_path": "trainer.filter.functions",
    "data_source_path": _SOURCE,
    "custom_cls": _SOURCE,
    "rollout_shuffle": "data.train.0.shuffle",
    "filter_overlong_prompts": _LONG,
    "truncation": _LONG,
    "multimodal_keys": "data.train.0.image_key",
    "image_column": "data.train.0.image_key",
    "images": "data.train.0.image_key",
    "tool_key": "data.train.0.tools_key",
    "tools": "data.train.0.tools_key",
    "tool_config_path": "data.train.0.environment",
    "multi_turn": "data.train.0.environment (rollout.max_turns bounds it)",
    "n_samples_per_eval_prompt": "data.eval.0.n",
    "eval_temperature": "rollout.eval_sampling.temperature",
    "eval_top_p": "rollout.eval_sampling.top_p",
    "eval_top_k": "rollout.eval_sampling.top_k",
    "eval_max_response_len": "rollout.eval_sampling.max_new_tokens",
    "update_weight_transfer_mode": "trainer.transport",
    "update_weight_mode": "trainer.transport",
    "weight_transfer": "trainer.transport",
    "weight_sync": "trainer.transport",
    "weights": "trainer.transport, and serving for weights over HTTP",
    "checkpoint_engine": "trainer.transport",
    "update_weight_disk_dir": "trainer.weights_dir",
    "update_weight_buffer_size": "trainer.bucket_bytes",
    "update_weights_bucket_megabytes": "trainer.bucket_bytes",
    "partial_rollout": "worker.apply (in_place and abort continue generated prefixes)",
    "use_rollout_routing_replay": "rollout.sides: [routed_experts]",
    "update_weights_interval": "trainer.batches_per_version",
}

#: Names without a key -> explanation.
ABSENT = {
    "actor_rollout_ref": "verl's model is model here, its actor trainer, its rollout rollout and engine, its ref "
    "rollout.reference",
    "algorithm": "see trainer.advantage, trainer.kl and staleness",
    "critic": "train it in a trainer of your own, with a subscription of its own (docs/loop.md)",
    "ray_kwargs": "see fleet.launcher",
    "global_profiler": "see `penstock trace`",
    "entropy_coeff": "the losses have no entropy term",
    "entropy_coef": "the losses have no entropy term",
    "use_vllm": "answers come from SGLang; see engine",
    "lr_scheduler_type": "the rate is constant after trainer.warmup_steps",
    "weight_decay": "it is 0.01, as AdamW has it",
    "warmup_ratio": "set trainer.warmup_steps",
    "logging_steps": "every step is written to steps.jsonl",
}


def key_hint(name: str) -> str | None:
    """Return what to write for the last part of an unknown key, as an end of a sentence; None if it is not known."""
    name = name.lower().replace("-", "_")
    if name in ABSENT:
        return f"remove it: {ABSENT[name]}."
    return f"here it is {CALLED[name]}." if name in CALLED else None


def sentences(exc: ValidationError, where: dict[Key, str], path: str) -> Iterator[str]:
    """Yield a sentence for each key that was refused.

    Args:
        where: source of each key.
        path: the YAML file, for keys without a source.
    """
    seen: set[str] = set()
    for error in exc.errors(include_url=False):
        key = tuple(str(part) for part in error["loc"])
        source = where.get(key)
        if key[-1:] == ("[key]",):  # the name of an entry of a map
            source, key = where.get(key[:-1]), key[:-2]
        sentence = _sentence(key, error, source or _source(key, error, where, path))
        # A union reports each of its members; the first is enough.
        if ".".join(_declared(key)) not in seen:
            seen.add(".".join(_declared(key)))
            yield sentence


def _source(key: Key, error: Any, where: dict[Key, str], path: str) -> str:
    """Return the source of the key that made a section invalid: of the keys in the sentence, the last setting."""
    under = {at: source for at, source in where.items() if at[: len(key)] == key}
    said = str(error.get("ctx", {}).get("error", ""))
    named = [source for at, source in under.items() if re.search(rf"\b{re.escape(at[-1])}\b", said)]
    later = [source for source in named if source != path]
    return next(iter(later or named or (under.values() if key else ())), path)


def _declared(key: Key) -> Key:
    return tuple(part for part in key if part.isidentifier() or part.isdigit())


def _sentence(key: Key, error: Any, source: str) -> str:
    name = ".".join(key)
    match error["type"]:
        case "extra_forbidden":
            near = nearest(key)
            hint = key_hint(key[-1]) or (f"did you mean {near}?" if near else "remove it.")
            return f"{name} ({source}): there is no such key; {hint}"
        case "missing":
            return f"{name} is missing in {source}; set it."
        case "value_error":
            text = explain(error).rstrip(".")
            end = "" if text.endswith("?") else "."
            return f"{name} ({source}): {text}{end}" if name else f"{text} ({source})."
        case "list_type" if isinstance(error["input"], str | int | float | dict) and key[:1] != ("redis",):
            return f"{name} ({source}): it should be a list: write {_shown([error['input']])}."
    is_secret = key[:1] == ("redis",) or "env" in key
    return f"{name} ({source}): {explain(error, '' if is_secret else _shown(error['input']))}."


def _shown(value: Any) -> str:
    try:
        text = redact(json.dumps(value, default=str))
    except (TypeError, ValueError, RecursionError):  # a map whose keys are dates, say
        text = redact(safe_repr(value))
    return utf8_safe(text, 60)
