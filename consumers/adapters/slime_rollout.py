"""Provide a rollout function for slime's own RolloutManager.

    --rollout-function-path penstock.consumers.adapters.slime_rollout.generate_rollout

    slime's data source ─> a prompt per group ─> a run's workers ─> slime's Samples, which slime converts and splits
    slime's trainer ─weights on disk─> weights_written (links) ─> published before the next prompts are submitted

From slime's configuration (``--custom-config-path``, a YAML file) it reads ``penstock_run``, the name of a run, or
``penstock_config``, the path of its run.yaml. The run needs a Redis, ``penstock buffer`` and ``penstock worker``s, but
no producer or trainer. The workers compute the rewards and call the functions of slime's flags (slime_flags.py).
"""

import atexit
import copy
import os
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.adapters.rows import RowArrays, label, plain
from penstock.consumers.adapters.slime_flags import (
    check_eval_dataset,
    check_flags,
    check_weights,
    eval_sampling,
    reward_of,
    rewarded,
    train_sampling,
)
from penstock.errors import ConfigError
from penstock.redis.saved_config import config_of

#: Name of the subscription and of the dataset of its prompts.
NAME = "slime"
#: Folders of linked weights, next to slime's own.
LINKED = "penstock_"


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Generate the groups of one rollout, or slime's evaluation; called by slime. Blocks until all answers arrived.

    Training: ``rollout_batch_size`` groups of ``data_source`` that pass ``dynamic_sampling_filter_path``. Evaluation:
    all of ``eval_datasets``, in lane eval. ``rollout_sample_filter_path`` and ``rollout_all_samples_process_path`` are
    called like in slime.

    Raises:
        ConfigError: the run is missing, a flag would have no effect (slime_flags.py), workers sampled at another
        temperature than ``--rollout-temperature`` (T6), or a prompt is not only text or already has an answer.
        ProtocolError: a prompt is dead-lettered, with the reason.
    """
    return _rollouts(args).evaluate() if evaluation else _rollouts(args).generate(rollout_id, data_source)


def weights_written(args: Namespace, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Link the weights that slime wrote until they are published (``--custom-update-weight-post-write-path``).

    slime deletes its folder once its own engines have loaded it, so the links are next to it. Every rank calls this.
    Raises ConfigError if slime writes deltas instead of complete weights.
    """
    import torch.distributed as dist

    check_weights(args)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    written = Path(version_dir)
    linked = written.with_name(LINKED + written.name)
    # Remove links of killed processes; only one process on this host writes.
    for left in written.parent.glob(f".{LINKED}*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = linked.with_name(f".{linked.name}")
    temporary.mkdir()
    for file in written.glob("*.safetensors"):
        os.link(file, temporary / file.name)
    shutil.rmtree(linked, ignore_errors=True)
    temporary.rename(linked)


class SlimeRollouts:
    """Connect slime's rollouts to a run's buffer for the life of the process."""

    def __init__(self, args: Namespace, config: Config) -> None:
        from slime.utils.processing_utils import load_tokenizer

        self._args = args
        self._tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self._train = Requests(config, name=NAME)
        self._eval = Requests(config, name=f"{NAME}-validation", lane="eval")
        self._train.__enter__()
        self._eval.__enter__()

    def close(self) -> None:
        """Release the subscriptions. Blocks briefly."""
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
            groups, _ = self._answer(self._train, groups, train_sampling(args))
            everything += groups
            for group in groups:
                found = passes(args, group)
                # Only the missing groups were submitted, so dropping any leaves too few.
                if getattr(found, "keep", found) or getattr(found, "keep_when_insufficient", False):
                    kept.append(group)
                elif reason := getattr(found, "reason", None):
                    dropped[f"rollout/dynamic_filter/drop_{reason}"] += 1
        for groups in (kept, everything):
            groups.sort(key=lambda group: _each(group)[0].index)
        if any(isinstance(one, list) for group in kept for one in group):
            # slime flattens nested lists, which must have the same depth everywhere.
            kept = [[one if isinstance(one, list) else [one] for one in group] for group in kept]
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
            check_eval_dataset(self._args, dataset, self._eval.config)
            groups = self._eval_groups(dataset)
            groups, answers = self._answer(self._eval, groups, eval_sampling(self._args, dataset), dataset)
            self._eval.record_evaluation(dataset.name, answers)
            samples = [sample for group in groups for sample in _each(group)]
            data[dataset.name] = {
                "rewards": [_number(sample.reward) for sample in samples],
                "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
        return RolloutFnEvalOutput(data=data)

    def _eval_groups(self, dataset: Any) -> list[list[Any]]:
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
        """Publish the newest weights that slime wrote, unless already published."""
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
        self, lane: Requests, groups: Sequence[Sequence[Any]], sampling: dict[str, Any], dataset: Any = None
    ) -> tuple[list[list[Any]], list[list[RowArrays]]]:
        """Fill ``groups`` of prompts with answers; return them with the rows of each group.

        An answer is the filled sample, or a list of copies if it has several parts.
        """
        requests = [self._request(lane, group, sampling, dataset) for group in groups]
        answers = lane.answer(requests, takes_parts=True)
        filled = []
        for group, rows in zip(groups, answers, strict=True):
            of_sample = [list(found) for _, found in groupby(rows, lambda row: row.row.k)]
            filled.append([self._filled(one, found, lane) for one, found in zip(group, of_sample, strict=True)])
        return filled, answers

    def _request(self, lane: Requests, group: Sequence[Any], sampling: dict[str, Any], dataset: Any) -> Request:
        metadata = plain(group[0].metadata or {}, "metadata")
        return Request(
            prompt_ids=self._ids(group[0]),
            n=len(group),
            metadata=metadata,
            sampling=sampling,
            reward=reward_of(self._args, lane.config, metadata, dataset),
            **label(group[0].label),
        )

    def _filled(self, sample: Any, rows: Sequence[RowArrays], lane: Requests) -> Any:
        """Return the sample with its answer, or copies with its parts as one rollout of slime."""
        evaluating = lane is self._eval
        if len(rows) == 1:
            self._fill(sample, rows[0], rows[0].row.reward, evaluating=evaluating)
            return sample
        copies = [copy.deepcopy(sample) for _ in rows]
        by_group = lane.config.reward.group is not None and not evaluating
        for one, row in zip(copies, rows, strict=True):
            own = row.row.reward if by_group or row.part_reward is None else row.part_reward
            self._fill(one, row, own, evaluating=evaluating)
        return copies

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

    def _fill(self, sample: Any, row: RowArrays, reward: float, *, evaluating: bool) -> None:
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
        sample.reward = rewarded(args, reward, evaluating=evaluating)
        sample.status = type(sample).Status(row.row.status)
        if sample.rollout_id is None:
            sample.rollout_id = sample.index


def _each(group: Sequence[Any]) -> list[Any]:
    """Return the samples of a group, with the parts of an answer as separate samples."""
    return [one for answer in group for one in (answer if isinstance(answer, list) else [answer])]


def _number(reward: Any) -> Any:
    """Return the reward, or the first value of a map of rewards, which are all equal."""
    return next(iter(reward.values())) if isinstance(reward, dict) else reward


def _linked(folder: Path) -> list[Path]:
    """Return linked weights, newest last, by time, because slime counts from 1 again after a restart."""
    return sorted(folder.glob(f"{LINKED}*"), key=lambda path: path.stat().st_mtime_ns)


_made: dict[str, SlimeRollouts] = {}


def _rollouts(args: Namespace) -> SlimeRollouts:
    """Return the rollouts of the process, created on the first call and closed at exit."""
    run, path = getattr(args, "penstock_run", None), getattr(args, "penstock_config", None)
    key = f"{path}:{run}"
    if key not in _made:
        config = config_of(path, run, "--custom-config-path with penstock_run")
        check_flags(args, config)
        _made[key] = SlimeRollouts(args, config)
        atexit.register(_made[key].close)
    return _made[key]
