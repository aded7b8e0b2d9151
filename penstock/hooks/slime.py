"""Arguments of functions with slime's signatures: ``args``, and samples with slime's attributes.

If such a function's module has imported slime's own ``Sample``, samples are of that class, so that
``isinstance(sample, Sample)`` holds; else of :class:`SlimeSample`. Penstock itself does not import slime.
"""

import hashlib
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from penstock.config import Config
from penstock.records.sample import Sample, SampleStatus

#: Module of slime's own class.
_THEIRS = "slime.utils.types"


class SlimeStatus(Enum):
    """State of a sample, in slime's words."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SlimeSample:
    """A sample with slime's attributes. Lists of the response have ``response_length`` (R) entries."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    #: [P + R] prompt and response.
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    #: [R] 1 on tokens to train; None: all.
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    #: [R] log-probability with which each token was generated; 0 for other tokens.
    rollout_log_probs: list[float] | None = None
    #: [R] log-probability of each token by a teacher; None: there is no teacher.
    teacher_log_probs: Any = None
    #: [P + R - 1, layers, experts per token]; None if none were recorded.
    rollout_routed_experts: Any = None
    #: Tokens that top_p kept; None, since trained tokens are sampled from the complete distribution.
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    #: True: it is not trained.
    remove_sample: bool = False
    status: SlimeStatus = SlimeStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    #: Functions write ``Sample.Status.COMPLETED``.
    Status: ClassVar[type[SlimeStatus]] = SlimeStatus

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward as a number: if it is a map, its entry ``args.reward_key``."""
        return self.reward[args.reward_key] if getattr(args, "reward_key", None) else self.reward

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens that were generated (``trainable``, with their logprobs), or given ones (mask 0).

        Args:
            meta_info: the engine's metadata; its ``finish_reason`` becomes the status.

        Raises:
            ValueError: lists of different lengths.
        """
        ids = [int(token) for token in tokens or ()]
        if trainable and ids and (log_probs is None or len(log_probs) != len(ids)):
            raise ValueError(f"{len(ids)} generated tokens need as many log_probs")
        if not trainable and log_probs is not None:
            raise ValueError("tokens that were not generated have no log_probs")
        drawn = [float(value) for value in log_probs] if log_probs is not None else [0.0] * len(ids)
        before = self.response_length
        self.loss_mask = ([1] * before if self.loss_mask is None else self.loss_mask) + [int(trainable)] * len(ids)
        self.rollout_log_probs = ([0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs) + drawn
        self.tokens = self.tokens + ids
        self.response_length = before + len(ids)
        self.response += text or ""
        if meta_info is not None and update_terminal_info:
            self._end(meta_info)

    def _end(self, meta_info: dict[str, Any]) -> None:
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        ended = {"length": SlimeStatus.TRUNCATED, "abort": SlimeStatus.ABORTED, "stop": SlimeStatus.COMPLETED}
        kind = str((meta_info.get("finish_reason") or {}).get("type"))
        self.status = ended.get(kind, self.status)


def args_of(config: Config) -> Namespace:
    """Return the ``args`` of a run, by slime's names; ``hooks.args`` takes precedence over the run's values."""
    rollout, sampling = config.rollout, config.rollout.sampling
    found = {
        "hf_checkpoint": config.model.path,
        "n_samples_per_prompt": rollout.n,
        "rollout_batch_size": config.trainer.batch_groups,
        "rollout_seed": config.seed,
        "rollout_temperature": sampling.get("temperature", 1.0),
        "rollout_top_p": sampling.get("top_p", 1.0),
        "rollout_top_k": sampling.get("top_k", -1),
        "rollout_max_response_len": sampling.get("max_new_tokens"),
        "rollout_max_context_len": rollout.max_context_tokens,
        "eval_max_context_len": rollout.max_context_tokens,
        "rollout_stop": sampling.get("stop"),
        "rollout_stop_token_ids": sampling.get("stop_token_ids"),
        "rollout_skip_special_tokens": False,
        "reward_key": None,
        "eval_reward_key": None,
        "group_rm": False,
        "rm_type": None,
        "rm_url": None,
        "custom_rm_path": None,
        "custom_generate_function_path": None,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "use_rollout_routing_replay": False,
        "ci_test": False,
        "sglang_server_concurrency": config.worker.slots,
        "sglang_dp_size": 1,
        "sglang_speculative_algorithm": None,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "rollout_num_engines": 1,
        "use_distributed_post": False,
        "context_parallel_size": 1,
        "max_tokens_per_gpu": rollout.max_context_tokens,
    }
    return Namespace(**found | config.hooks.args)


def sample_class() -> type[Any]:
    """Return slime's own class if the user's code has imported it, else :class:`SlimeSample`."""
    theirs = getattr(sys.modules.get(_THEIRS), "Sample", None)
    return theirs if isinstance(theirs, type) else SlimeSample


def number_of(name: str) -> int:
    """Return ``group_index`` of a job, or ``index`` of a sample: derived from its name, so equal in every hook.

    slime counts them in its data source. Here they are 60 bits of a digest, so that those of two datasets or epochs
    differ, without a shared counter.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 4


def begun(sample: Sample, prompt: Any) -> Any:
    """Make slime's form of a sample without generated tokens; kept as ``sample.seen``."""
    job = sample.job.copy_for_user()
    sample.seen = sample_class()(
        group_index=number_of(job.id),
        index=number_of(sample.id),
        prompt=prompt,
        label=job.raw_label,
        metadata=job.metadata,
        session_id=sample.id,
    )
    return sample.seen


def of_row(row: Any, index: int, length: int, about: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """Return slime's form of a recorded sample.

    Args:
        row: a ``Row`` of a batch, or a ``SampleRow`` of the history.
        length: number of its tokens after the prompt.
        about: further metadata.
        fields: further fields of slime's class.
    """
    made = sample_class()(
        index=index,
        response_length=length,
        reward=row.reward,
        metadata={"job": row.job, "k": row.k, "source_name": row.job.rsplit("/", 2)[0], **(about or {})},
        weight_versions=[str(version) for version in sorted({row.oldest, row.newest}) if version >= 0],
        **fields,
    )
    made.group_index = number_of(row.job)
    made.status = made.Status("truncated" if row.status == SampleStatus.TRUNCATED else "completed")
    return made


class PartRewards(list[Any]):
    """Rewards of the samples that a custom generate function returned for one, in order."""


def as_list(made: Any) -> list[Any]:
    """Return what a custom generate function returned, a sample or a list of them, as a list."""
    return made if isinstance(made, list) else [made]


def reward_of(made: Any) -> Any:
    """Return the reward that is set on what a function returned; None unless all of several samples have one."""
    if not isinstance(made, list):
        return made.reward
    rewards = PartRewards(one.reward for one in made)
    return None if None in rewards else rewards


def seen(sample: Sample) -> Any:
    """Return slime's form of a generated sample: what an earlier function got or returned (a list if it returned
    several), or a new one."""
    if sample.seen is None:
        made, at = begun(sample, sample.job.prompt or ""), sample.prompt_length
        made.tokens = list(sample.tokens)
        made.response = sample.text
        made.response_length = len(sample.tokens) - at
        made.loss_mask = sample.loss_mask[at:]
        made.rollout_log_probs = sample.logprobs[at:]
        made.weight_versions = [str(version) for version in dict.fromkeys(sample.versions) if version >= 0]
        made.status = made.Status(_status(sample))
    if not isinstance(sample.seen, list):
        sample.seen.reward = sample.reward
    return sample.seen


def _status(sample: Sample) -> str:
    return SampleStatus.COMPLETED if sample.status == SampleStatus.GIVEN else sample.status
