"""A rollout function for slime's own RolloutManager.

    --rollout-function-path penstock.consumers.adapters.slime_rollout.generate_rollout

    slime's data source ─> a prompt per group ─> a run's workers ─> slime's Samples, which slime converts and splits
    slime's trainer ─weights on disk─> weights_written (links) ─> published before the next prompts are asked

From slime's configuration (``--custom-config-path``, a YAML file) it reads ``penstock_run``, the name of a run, or
``penstock_config``, the path of its run.yaml. The run needs a Redis, ``penstock buffer`` and ``penstock worker``s, and
neither producer nor trainer. Its workers compute the rewards.
"""

import atexit
import os
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.config.sampling import hidden_by
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.adapters.rows import RowArrays, label, plain
from penstock.errors import ConfigError
from penstock.redis.saved_config import config_of

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
    """Raise ConfigError for the first rollout flag of slime that would have no effect, or a wrong one.

    Flags of slime's data source, trainer, engines and logs do not concern a rollout function.
    """
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


#: Name of the subscription, and of the dataset of its prompts.
NAME = "slime"
#: Folders of linked weights, next to slime's own.
LINKED = "penstock_"


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return the groups of one rollout, or slime's evaluation; called by slime. Blocks until all answers arrived.

    Training: ``rollout_batch_size`` groups of ``data_source`` that pass ``dynamic_sampling_filter_path``. Evaluation:
    all of ``eval_datasets``, as lane eval. ``rollout_sample_filter_path`` and ``rollout_all_samples_process_path`` are
    called as slime calls them.

    Raises:
        ConfigError: no run is named, or a flag would have no effect (slime_rollout.py); workers sampled at another
            temperature than ``--rollout-temperature`` (T6); a prompt holds more than text, or has an answer already.
        ProtocolError: a prompt is dead-lettered, with the reason.
    """
    return _rollouts(args).evaluate() if evaluation else _rollouts(args).generate(rollout_id, data_source)


def weights_written(args: Namespace, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Link the weights that slime wrote until they are published (``--custom-update-weight-post-write-path``).

    slime deletes its folder once its own engines have loaded it; the links are next to it. Every rank calls this.
    Raises ConfigError if slime writes deltas instead of complete weights.
    """
    import torch.distributed as dist

    check_weights(args)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    written = Path(version_dir)
    linked = written.with_name(LINKED + written.name)
    # Links of killed processes on this host: only one process writes.
    for left in written.parent.glob(f".{LINKED}*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = linked.with_name(f".{linked.name}")
    temporary.mkdir()
    for file in written.glob("*.safetensors"):
        os.link(file, temporary / file.name)
    shutil.rmtree(linked, ignore_errors=True)
    temporary.rename(linked)


class SlimeRollouts:
    """Connections of slime's rollouts to a run's buffer, for the life of the process."""

    def __init__(self, args: Namespace, config: Config) -> None:
        from slime.utils.processing_utils import load_tokenizer

        self._args = args
        self._tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self._train = Requests(config, name=NAME)
        self._eval = Requests(config, name=f"{NAME}-validation", lane="eval")
        self._train.__enter__()
        self._eval.__enter__()

    def close(self) -> None:
        """Release the subscriptions. Blocks shortly."""
        self._eval.close()
        self._train.close()

    def generate(self, rollout_id: int, data_source: Any) -> Any:
        """Return a ``RolloutFnTrainOutput``."""
        from slime.rollout.base_types import RolloutFnTrainOutput
        from slime.utils.misc import load_function

        args = self._args
        path = args.dynamic_sampling_filter_path
        passes = load_function(path) if path is not None else lambda *_: True
        self._publish(rollout_id)
        kept: list[list[Any]] = []
        everything: list[list[Any]] = []
        dropped: Counter[str] = Counter()
        while len(kept) < args.rollout_batch_size:
            groups = data_source.get_samples(args.rollout_batch_size - len(kept))
            self._answer(self._train, groups, train_sampling(args))
            everything += groups
            for group in groups:
                found = passes(args, group)
                # Only the missing groups were submitted, so dropping any leaves too few.
                if getattr(found, "keep", found) or getattr(found, "keep_when_insufficient", False):
                    kept.append(group)
                elif reason := getattr(found, "reason", None):
                    dropped[f"rollout/dynamic_filter/drop_{reason}"] += 1
        for groups in (kept, everything):
            groups.sort(key=lambda group: group[0].index)
        if path := getattr(args, "rollout_sample_filter_path", None):
            load_function(path)(args, kept)
        if path := getattr(args, "rollout_all_samples_process_path", None):
            load_function(path)(args, everything, data_source)
        return RolloutFnTrainOutput(samples=kept, metrics=dict(dropped))

    def evaluate(self) -> Any:
        """Return a ``RolloutFnEvalOutput``: ``rewards``, ``truncated``, ``samples`` by dataset; also in eval.jsonl."""
        from slime.rollout.base_types import RolloutFnEvalOutput
        from slime.utils.types import Sample

        data = {}
        for dataset in self._args.eval_datasets or []:
            check_eval_dataset(dataset, self._eval.config)
            groups = self._eval_groups(dataset)
            answers = self._answer(self._eval, groups, eval_sampling(self._args, dataset))
            self._eval.record_evaluation(dataset.name, answers)
            samples = [sample for group in groups for sample in group]
            data[dataset.name] = {
                "rewards": [_number(sample.reward) for sample in samples],
                "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
        return RolloutFnEvalOutput(data=data)

    def _eval_groups(self, dataset: Any) -> list[list[Any]]:
        import copy

        from slime.utils.data import Dataset

        def of(name: str) -> Any:
            own = getattr(dataset, name, None)
            return own if own is not None else getattr(self._args, name)

        prompts = Dataset(
            path=dataset.path,
            tokenizer=self._tokenizer,
            processor=None,
            max_length=self._args.eval_max_prompt_len,
            prompt_key=dataset.input_key,
            label_key=dataset.label_key,
            metadata_key=dataset.metadata_key,
            tool_key=dataset.tool_key,
            apply_chat_template=of("apply_chat_template"),
            apply_chat_template_kwargs=of("apply_chat_template_kwargs"),
        ).samples
        groups = [[copy.deepcopy(one) for _ in range(dataset.n_samples_per_eval_prompt)] for one in prompts]
        for index, sample in enumerate(sample for group in groups for sample in group):
            sample.index = index
            sample.metadata = dataset.inject_metadata(sample.metadata)
        return groups

    def _publish(self, rollout_id: int) -> None:
        """Publish the newest weights that slime wrote, unless they are published already."""
        folder = self._args.update_weight_disk_dir
        found = _linked(Path(folder)) if folder else []
        if not found:
            if self._train.version == 0 and not self._args.debug_rollout_only:
                raise ConfigError(
                    "slime has written no weights to publish: give it --update-weight-transport disk, "
                    "--update-weight-disk-dir, and --custom-update-weight-post-write-path "
                    f"{__name__}.weights_written."
                )
            return
        from safetensors.torch import load_file

        weights = {name: tensor for file in sorted(found[-1].glob("*")) for name, tensor in load_file(file).items()}
        self._train.publish(weights, step=rollout_id)
        for one in found:
            shutil.rmtree(one, ignore_errors=True)

    def _answer(
        self, lane: Requests, groups: Sequence[Sequence[Any]], sampling: dict[str, Any]
    ) -> list[list[RowArrays]]:
        """Fill the samples of ``groups``, which have their prompts; return the answers."""
        requests = [
            Request(
                prompt_ids=self._ids(group[0]),
                n=len(group),
                metadata=plain(group[0].metadata or {}, "metadata"),
                sampling=sampling,
                **label(group[0].label),
            )
            for group in groups
        ]
        answers = lane.answer(requests)
        for group, rows in zip(groups, answers, strict=True):
            for sample, row in zip(group, rows, strict=True):
                self._fill(sample, row, evaluating=lane is self._eval)
        return answers

    def _ids(self, sample: Any) -> list[int]:
        if not isinstance(sample.prompt, str) or sample.multimodal_inputs:
            raise ConfigError(
                "A prompt of slime's data is not text: set --apply-chat-template, and keep to text alone."
            )
        if getattr(sample, "response_length", 0):
            raise ConfigError(
                f"Sample {sample.index} of slime's data source has an answer already: penstock draws whole answers, so "
                "put back prompts alone."
            )
        return [int(token) for token in self._tokenizer.encode(sample.prompt, add_special_tokens=False)]

    def _fill(self, sample: Any, row: RowArrays, *, evaluating: bool) -> None:
        args, response = self._args, row.response("tokens").tolist()
        sample.tokens = row.tokens.tolist()
        sample.response = self._tokenizer.decode(
            response, skip_special_tokens=bool(getattr(args, "rollout_skip_special_tokens", False))
        )
        sample.response_length = len(response)
        sample.loss_mask = row.response("loss_mask").astype(int).tolist()
        sample.rollout_log_probs = row.response("logprobs").tolist()
        if row.teacher_logprobs is not None:
            sample.teacher_log_probs = row.response("teacher_logprobs").tolist()
        sample.weight_versions = [str(version) for version in sorted({row.row.oldest, row.row.newest})]
        sample.reward = rewarded(args, row.row.reward, evaluating=evaluating)
        sample.status = type(sample).Status(row.row.status)
        if sample.rollout_id is None:
            sample.rollout_id = sample.index


def _number(reward: Any) -> Any:
    """Return the reward, or the first value of a map of rewards, which are all equal."""
    return next(iter(reward.values())) if isinstance(reward, dict) else reward


def _linked(folder: Path) -> list[Path]:
    """Return linked weights, newest last: by time, because slime counts from 1 again after a restart."""
    return sorted(folder.glob(f"{LINKED}*"), key=lambda path: path.stat().st_mtime_ns)


_made: dict[str, SlimeRollouts] = {}


def _rollouts(args: Namespace) -> SlimeRollouts:
    """Return the process's rollouts, created at the first call and closed at exit."""
    run, path = getattr(args, "penstock_run", None), getattr(args, "penstock_config", None)
    key = f"{path}:{run}"
    if key not in _made:
        check_flags(args)
        _made[key] = SlimeRollouts(args, config_of(path, run, "--custom-config-path with penstock_run"))
        atexit.register(_made[key].close)
    return _made[key]
