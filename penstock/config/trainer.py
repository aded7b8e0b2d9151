"""Section ``trainer``: batches, loss, optimizer, publication."""

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from penstock.config.buffer import FilterConfig
from penstock.config.hooks import TransportName
from penstock.config.section import Positive, Seconds, Section, is_a_name
from penstock.config.serving import Host
from penstock.config.staleness import Sampler
from penstock.config.subscription import SubscriptionConfig, Unit
from penstock.config.transport import TRANSPORTS, transport

#: Kinds of devices that torch knows; a number after a colon names one of them.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu")

#: Defaults of each loss; other keys have the default of the field. A clip of None does not exist for the loss: a
#: configuration that sets it is refused. A loss whose correction is truncated takes no ratio, and no other
#: correction.
#:
#: - ppo: clips 0.2 (PPO, arXiv 1707.06347; DAPO, arXiv 2503.14476, raises clip_high to 0.28) and the token mean of DAPO
#: - gspo: clips 3e-4 and 4e-4 and the mean over samples (arXiv 2507.18071). They are of a ratio to π_old by the same
#:   program, as in the paper (section 5.4), so the correction is decoupled: rounding between engine and trainer alone
#:   moves the mean log ratio of a sample by as much as such a clip is wide
#: - cispo: the lower side open and the token mean (arXiv 2506.13585, which names no upper clip); weights up to 5
#:   (ScaleRL, arXiv 2510.13786); both sides bound a losing token, so there is no dual clip
#: - reinforce: no ratio, so no clip; weight_cap bounds it, by the one correction that fits
LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sample"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token", "dual_clip": None, "correction": "bypass"},
    "reinforce": {"clip_low": None, "clip_high": None, "dual_clip": None, "correction": "truncated"},
}


#: Schulman's estimators of KL(π || reference) per token (consumers/grpo/losses.py).
KLEstimator = Literal["k1", "k2", "k3"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)


class DistillConfig(Section):
    """On-policy distillation: the advantage of each generated token follows from the teacher's logprob.

    See docs/trainer.md.
    """

    #: The advantage of a token is -weight * (log π - log teacher).
    weight: Annotated[float, Field(gt=0)] = 1.0
    #: Add this advantage to those of the rewards; false: use it alone, and only measure rewards.
    with_rewards: bool = False


class ProcessConfig(Section):
    """Process supervision: advantages from step rewards, the side array ``step_rewards`` (docs/rewards.md)."""

    #: The advantage of a token is weight times the sum of the normalised rewards of all steps that end at or after the
    #: token.
    weight: Annotated[float, Field(gt=0)] = 1.0
    #: Add this advantage to those of the answers' rewards; false: use it alone, and only measure those rewards.
    with_rewards: bool = False


class KLConfig(Section):
    """A penalty on the distance to a reference policy: ``rollout.reference``, or else the policy in ``model.path``, of
    which the trainer then keeps a copy (docs/trainer.md)."""

    #: Factor of the estimate.
    weight: Annotated[float, Field(gt=0)]
    #: Schulman's estimators of KL(π || reference) per token (consumers/grpo/losses.py). k1 in the loss has a
    #: gradient with mean 0.
    estimator: KLEstimator = "k3"
    #: loss: add the estimate for π_θ to the loss of each token. reward: subtract the sum of the estimates over all
    #: generated tokens, for the policy that generated them, from the sample's reward before advantages are computed.
    place: Literal["loss", "reward"] = "loss"


class TrainerConfig(Section):
    """The reference GRPO trainer."""

    #: Name of the subscription.
    name: Annotated[str, is_a_name("trainer")] = "actor"
    #: Settings of the subscription that ``staleness`` and ``batch_groups`` do not determine.
    subscription: SubscriptionConfig = SubscriptionConfig()
    #: Number of groups per batch.
    batch_groups: Positive = 32
    #: Number of batches per publication.
    batches_per_version: Positive = 1
    #: Number of groups admitted beyond the gate, so that batches are full even if filters drop some groups.
    over_sampling_groups: Annotated[int, Field(ge=0)] = 0
    #: Number of groups that must be complete before the first batch is cut.
    min_groups_before_first_batch: Annotated[int, Field(ge=0)] = 0
    #: Selection of the groups to train on.
    filter: FilterConfig = FilterConfig()
    #: Number of batches of the run; each is trained in minibatches x epochs optimizer steps.
    steps: Positive = 100
    #: Number of optimizer steps per pass over a batch, which is divided evenly into parts of complete groups.
    minibatches: Positive = 1
    #: Number of passes over a batch.
    epochs: Positive = 1
    #: Learning rate (AdamW), constant after the warm-up.
    lr: Annotated[float, Field(ge=0)] = 1e-4
    #: Number of optimizer steps over which the learning rate rises to ``lr``.
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    #: Maximum norm of the gradients; larger ones are scaled down.
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    #: Clips of the ratio, 1 - clip_low to 1 + clip_high. The defaults depend on ``loss`` (LOSS_DEFAULTS). None is
    #: allowed only for reinforce, which uses no ratio.
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = 0.2
    #: See ``clip_low``.
    clip_high: Annotated[float, Field(ge=0)] | None = 0.2
    #: Dual clip (arXiv 1912.09729), for ppo and gspo: a token with a negative advantage gets no further gradient once
    #: it has become this many times more likely. None: no dual clip.
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    #: Method that computes advantages from rewards (consumers/batch/advantages.py).
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"] = "grpo"
    #: Distillation from ``rollout.teacher``; None: learn only from rewards.
    distill: DistillConfig | None = None
    #: Process supervision by step rewards; None: learn only from rewards of complete answers.
    process: ProcessConfig | None = None
    #: Penalty on the distance to a reference policy; None: no penalty.
    kl: KLConfig | None = None
    #: Loss per token (consumers/grpo/losses.py). It determines the defaults of clips, aggregation and correction.
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    #: Correction for stale data; exactly one applies (docs/internals/truth.md, T9). The default is truncated for
    #: reinforce, bypass for cispo and decoupled for the others. With bypass the clip keeps the policy close to the
    #: policy that generated the token, which halves the learning from samples four versions old (docs/trainer.md).
    correction: Literal["bypass", "decoupled", "truncated"] = "decoupled"
    #: Maximum weight (C) of decoupled and truncated; None: 2. bypass has no weight.
    weight_cap: Annotated[float, Field(gt=0)] | None = None
    #: Units of equal weight: tokens of the batch (token), samples (sample), or answers of constant length (constant).
    #: The default depends on ``loss``.
    aggregation: Literal["token", "sample", "constant"] = "token"
    #: Length in tokens of the constant answer, which should be the maximum length; only with aggregation constant.
    constant_tokens: Positive | None = None
    #: Maximum staleness of tokens that bear loss, in addition to the bound of the cut; None: only the bound of the cut
    #: applies.
    max_token_staleness: Annotated[int, Field(ge=0)] | None = None
    #: Maximum number of tokens per micro-batch; None: the rank's complete share is one micro-batch.
    max_tokens: Positive | None = None
    #: Number of ranks of the trainer. Each has 1/N of weights, gradients and optimizer state (FSDP2; gloo on CPU, nccl
    #: on GPUs). ``penstock trainer`` or torchrun starts the processes.
    dp_size: Positive = 1
    #: Time limit in seconds for the wait of one rank for another: before a step, for payloads that a replica
    #: broadcasts, and before the shards of published weights are gathered.
    rank_timeout_s: Seconds = 600.0
    #: Number of steps between checkpoints; another checkpoint is written at the end.
    checkpoint_every: Positive = 5
    #: Trackers that receive the trainer's figures (docs/loop.md); each needs the extra of its name.
    report_to: list[TrackerName] = Field(default_factory=list)
    #: Number of weight folders to keep.
    keep_versions: Annotated[int, Field(ge=2)] = 3
    #: Folder of published weights; None: runs/NAME/weights.
    weights_dir: str | None = None
    #: Method by which new weights reach engines that are ready: a built-in transport (listed in docs/workers.md), or
    #: your own, module:Class. An engine that misses a transfer loads the folder.
    transport: TransportName = "disk"
    #: false: announce and send a version from a copy in memory, and write its folder afterwards, so that publish() does
    #: not wait for the disk; this needs memory for two copies. true: write the folder before the announcement. None:
    #: false, but true with transport delta, which refuses false. For the first publication of a trainer the folder is
    #: always written first.
    folder_first: bool | None = None
    #: With transport delta: store of complete versions and deltas. Use it for this run only. It is a folder that
    #: trainer and workers share, or a URL that fsspec supports (s3://BUCKET/RUN, with the package s3fs). None:
    #: ``deltas`` in ``weights_dir``.
    delta_store: str | None = None
    #: Time limit in seconds for workers to become ready for a transfer, and for the transfer itself; after it workers
    #: load that version from disk.
    transfer_timeout_s: Seconds = 30.0
    #: For ``penstock run``: run engines on the trainer's GPUs (with cuda_ipc, on rank 0's). Set
    #: engine.args.mem-fraction-static so that both fit. None: true with transport cuda_ipc, otherwise false.
    colocate: bool | None = None
    #: nccl and gloo: address of this machine at which engines connect to the trainer, on a free port.
    transfer_address: Host = "127.0.0.1"
    #: Maximum number of bytes that are gathered for one file, and sent at once.
    bucket_bytes: Positive = 1024**3
    #: Maximum number of bytes per second of weights that the trainer sends over HTTP (section ``serving``), to all
    #: workers together; None: no limit.
    serve_bytes_per_s: Positive | None = None
    #: Device of the reference trainer: cpu, cuda or cuda:N.
    device: str = "cpu"
    #: Data type of the forward and backward pass: auto (bfloat16 on a GPU, float32 on a CPU), bfloat16 or float32.
    #: Weights, gradients and optimizer state are always float32. On a GPU, float32 matrix products use TF32 unless this
    #: is float32.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    #: Number of torch threads; 0: torch's default.
    num_threads: Annotated[int, Field(ge=0)] = 1
    #: Stop when held-out accuracy reaches this value, provided that the evaluated version itself generated at least
    #: 0.95 of the tokens (see ``data.eval_pinned``); None: train all steps.
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def sends_to_own_gpu(self) -> bool:
        """Return whether weights are sent only to engines on the GPU of the trainer's rank 0."""
        return transport(self.transport).on_trainers_gpu

    @field_validator("delta_store")
    @classmethod
    def _check_delta_store(cls, place: str | None) -> str | None:
        scheme, colon, rest = (place or "").partition(":/")
        if place == "":
            raise ValueError("the value is empty: use a folder or a URL, or null for a folder in weights_dir")
        if scheme in ("http", "https"):
            raise ValueError(
                f"{scheme}:// is read-only: use an object store, or a folder, which "
                "workers fetch from the trainer with serving.enabled"
            )
        if colon and scheme.isalnum() and not rest.startswith("/"):
            raise ValueError(f"{place!r} has one slash too few: write {scheme}://{rest}")
        if colon and not rest.strip("/"):
            raise ValueError(f"{place!r} has no bucket: write {scheme}://BUCKET/FOLDER")
        return place

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        kind, _, number = device.partition(":")
        if kind == "gpu":
            raise ValueError(f"device {device!r} is not a torch device: write {device.replace('gpu', 'cuda')}")
        if kind not in _DEVICES or (":" in device and not number.isdigit()):
            raise ValueError(f"device {device!r} is not a torch device: write {', '.join(_DEVICES)}, or cuda:NUMBER")
        return device

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high", "dual_clip", "aggregation", "correction"})

    @model_validator(mode="after")
    def _defaults_by_loss(self) -> Self:
        own = LOSS_DEFAULTS.get(self.loss, {})
        self._follow(**{name: value for name, value in own.items() if name not in self.model_fields_set})
        return self

    def _has_no_clip(self, name: str) -> bool:
        """Return whether the loss has no clip of this name."""
        own = LOSS_DEFAULTS.get(self.loss, {})
        return name in own and own[name] is None

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        takes_ratio = LOSS_DEFAULTS.get(self.loss, {}).get("correction") != "truncated"
        if self.correction == "truncated" and takes_ratio:
            raise ValueError(
                f"correction truncated weighs by π_θ / μ, and loss {self.loss} takes a ratio of its own: that corrects "
                "twice; choose loss reinforce, or correction bypass or decoupled"
            )
        if self.correction != "truncated" and not takes_ratio:
            raise ValueError(
                f"loss {self.loss} uses no ratio, so correction {self.correction} would leave stale data uncorrected; "
                "choose correction truncated, or loss ppo"
            )
        if self.correction == "bypass" and self.weight_cap is not None:
            raise ValueError(
                "weight_cap caps a weight that correction bypass does not have, and a second one would correct "
                "twice: remove it, or choose correction decoupled"
            )
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and self._has_no_clip(name):
                raise ValueError(
                    f"{name} clips a ratio that loss {self.loss} does not use: remove it and set weight_cap, or "
                    "choose loss ppo"
                )
            if value is None and not self._has_no_clip(name):
                raise ValueError(f"{name} is null, but loss {self.loss} has this clip: set a number, or remove {name}")
        if self.dual_clip is not None and self._has_no_clip("dual_clip"):
            raise ValueError(
                f"dual_clip bounds a ratio that loss {self.loss} does not use, since its weight is always capped: "
                "remove it, or choose loss ppo or gspo"
            )
        if (self.aggregation == "constant") != (self.constant_tokens is not None):
            raise ValueError("aggregation constant and constant_tokens belong together: set both, or neither")
        return self

    @property
    def alone(self) -> str:
        """Return the key that is used alone, so that rewards are measured but not trained on; '' if there is none."""
        if self.distill is not None and not self.distill.with_rewards:
            return "distill"
        return "process" if self.process is not None and not self.process.with_rewards else ""

    @model_validator(mode="after")
    def _check_rewards_are_used(self) -> Self:
        alone = self.alone
        if not alone:
            return self
        if alone == "distill" and self.process is not None:
            raise ValueError(
                "process learns from rewards of steps, and distill alone from none: remove process, or set "
                "distill.with_rewards"
            )
        if self.kl is not None and self.kl.place == "reward":
            raise ValueError(
                f"kl.place reward subtracts the penalty from rewards, but {alone} alone ignores rewards: set kl.place "
                f"to loss, or set {alone}.with_rewards"
            )
        if self.advantage != "grpo":
            raise ValueError(
                f"advantage {self.advantage} is computed from rewards, but {alone} alone ignores rewards: remove "
                f"advantage, or set {alone}.with_rewards"
            )
        return self

    @model_validator(mode="after")
    def _check_priority(self) -> Self:
        # Only if set explicitly: the sampler of an existing subscription may be changed back and forth.
        own = self.subscription
        for name in ("priority", "exponent"):
            value = getattr(own, name)
            if own.sampler is not Sampler.PRIORITIZED and not own.is_default(name):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise ValueError(
                    f"subscription.{name} {shown} requires sampler prioritized, but another sampler is set: "
                    "choose prioritized, or remove it"
                )
        return self

    @property
    def groups_per_batch(self) -> int:
        """Return the number of groups of a batch; 0 if unknown in advance (unit samples or tokens)."""
        return (self.subscription.size or self.batch_groups) if self.subscription.unit is Unit.GROUPS else 0

    @model_validator(mode="after")
    def _check_transport_keys(self) -> Self:
        name = self.transport
        if name not in TRANSPORTS:
            return self  # a user's transport may use any key
        if self.folder_first is False and name == "delta":
            raise ValueError(
                f"folder_first false has no effect with transport {name}, which always writes the folder first: "
                "remove it, or choose another transport"
            )
        owners = {"delta_store": ["delta"], "transfer_address": ["nccl", "gloo"]}
        for key, of in owners.items():
            if name not in of and not self.is_default(key):
                raise ValueError(
                    f"{key} requires transport {' or '.join(of)}, but transport is {name}: set it, or remove {key}"
                )
        return self

    @model_validator(mode="after")
    def _check_minibatches(self) -> Self:
        groups = self.groups_per_batch
        if groups and self.minibatches > groups:
            raise ValueError(
                f"minibatches is {self.minibatches}, but a batch has only {groups} groups, which are not split: lower "
                "minibatches or raise batch_groups"
            )
        return self
