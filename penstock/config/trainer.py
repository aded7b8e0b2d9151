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
    #: Add it to the advantages of the rewards; false: use it alone, and only measure rewards.
    with_rewards: bool = False


class ProcessConfig(Section):
    """Process supervision: rewards of steps, side array ``step_rewards``, are advantages (docs/rewards.md)."""

    #: The advantage of a token is weight times the sum of the normalised rewards of the steps that end with it or
    #: later.
    weight: Annotated[float, Field(gt=0)] = 1.0
    #: Add it to the advantages of the rewards of answers; false: use it alone, and only measure those.
    with_rewards: bool = False


class KLConfig(Section):
    """A penalty on the distance to a reference policy: ``rollout.reference``, or else the policy in ``model.path``, of
    which the trainer then holds a second copy (docs/trainer.md)."""

    #: Factor of the estimate.
    weight: Annotated[float, Field(gt=0)]
    #: Schulman's estimators of KL(π || reference) per token (consumers/grpo/losses.py). k1 in the loss has a
    #: gradient with mean 0.
    estimator: KLEstimator = "k3"
    #: loss: added to the loss of each token, of π_θ. reward: the sum over all generated tokens of a sample, of
    #: the policy that generated them, is subtracted from its reward before advantages are computed.
    place: Literal["loss", "reward"] = "loss"


class TrainerConfig(Section):
    """The reference GRPO trainer."""

    #: Name of the subscription.
    name: Annotated[str, is_a_name("trainer")] = "actor"
    #: How the subscription takes groups, where that is not set by ``staleness`` and ``batch_groups``.
    subscription: SubscriptionConfig = SubscriptionConfig()
    #: Groups per batch.
    batch_groups: Positive = 32
    #: Batches per publication.
    batches_per_version: Positive = 1
    #: Groups admitted beyond the gate, so that a batch is full although filters drop some.
    over_sampling_groups: Annotated[int, Field(ge=0)] = 0
    #: Groups that must be complete before the first batch is cut.
    min_groups_before_first_batch: Annotated[int, Field(ge=0)] = 0
    #: Which groups it trains on.
    filter: FilterConfig = FilterConfig()
    #: Batches of the run, each trained in minibatches x epochs optimizer steps.
    steps: Positive = 100
    #: Optimizer steps per pass over a batch: it is divided by whole groups, evenly.
    minibatches: Positive = 1
    #: Passes over a batch.
    epochs: Positive = 1
    #: Learning rate (AdamW), constant after the warm-up.
    lr: Annotated[float, Field(ge=0)] = 1e-4
    #: Optimizer steps over which the learning rate rises to ``lr``.
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    #: Gradients are scaled down to this norm.
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    #: Clips of the ratio, 1 - clip_low to 1 + clip_high; the defaults are those of ``loss`` (LOSS_DEFAULTS). null: of
    #: reinforce alone, which takes no ratio.
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = 0.2
    #: See ``clip_low``.
    clip_high: Annotated[float, Field(ge=0)] | None = 0.2
    #: A losing token (advantage below 0) that has become this many times as likely is not pushed further (dual
    #: clip, arXiv 1912.09729); of ppo and gspo, whose clips leave that open. null: no such bound.
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    #: How rewards become advantages (consumers/batch/advantages.py).
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"] = "grpo"
    #: Learn from ``rollout.teacher``; null: from rewards alone.
    distill: DistillConfig | None = None
    #: Learn from rewards of steps; null: from those of whole answers alone.
    process: ProcessConfig | None = None
    #: Stay near a reference policy; null: no penalty.
    kl: KLConfig | None = None
    #: Loss per token (consumers/grpo/losses.py); it brings its own clips, aggregation and correction where they are not
    #: given.
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    #: One correction, never two (docs/internals/truth.md, T9). The default is truncated for reinforce, bypass for
    #: cispo, decoupled for the others: with bypass a clip holds a token near the policy that generated it, for as many
    #: steps as the token is old, which halves the learning from samples four versions old (docs/trainer.md).
    correction: Literal["bypass", "decoupled", "truncated"] = "decoupled"
    #: C of decoupled and truncated; None is 2. bypass has no weight to cap.
    weight_cap: Annotated[float, Field(gt=0)] | None = None
    #: Equal weight of tokens within: the batch (token), their sample (sample), or a constant answer (constant).
    #: The default is that of ``loss``.
    aggregation: Literal["token", "sample", "constant"] = "token"
    #: Tokens of the constant answer, the longest there can be; only with aggregation constant.
    constant_tokens: Positive | None = None
    #: Tokens staler than this bear no loss, whatever the bound of the cut is; None: the cut alone decides.
    max_token_staleness: Annotated[int, Field(ge=0)] | None = None
    #: Tokens per micro-batch; None: the whole rank's share at once.
    max_tokens: Positive | None = None
    #: Ranks of the trainer, each with 1/N of weights, gradients and optimizer state (FSDP2; gloo on CPU, nccl on GPUs):
    #: processes that `penstock trainer` starts, or that torchrun did.
    dp_size: Positive = 1
    #: Longest wait of one rank for another: before a step, for payloads that a replica broadcasts, and before the parts
    #: of published weights are gathered.
    rank_timeout_s: Seconds = 600.0
    #: A checkpoint every so many steps, and at the end.
    checkpoint_every: Positive = 5
    #: Trackers that its figures are logged to (docs/loop.md); each needs the extra of its name.
    report_to: list[TrackerName] = Field(default_factory=list)
    #: Weight folders kept.
    keep_versions: Annotated[int, Field(ge=2)] = 3
    #: Folder of published weights; None: runs/NAME/weights.
    weights_dir: str | None = None
    #: How new weights reach engines that are ready: one of penstock's own (docs/workers.md has the table), or yours,
    #: module:Class. An engine that misses a transfer loads the folder.
    transport: TransportName = "disk"
    #: False: a version is announced and sent from a copy in memory, and its folder is written afterwards, so that
    #: publish() does not wait for the disk; takes memory for two copies. True: its folder is written before it is
    #: announced. null: false, but true with transport delta, which refuses false. The first
    #: publication of a trainer is always folder first.
    folder_first: bool | None = None
    #: With transport delta: store of complete versions and changes for workers, of this run alone: a folder that
    #: trainer and workers share, or an URL that fsspec knows (s3://BUCKET/RUN, with the package s3fs). null: ``deltas``
    #: in ``weights_dir``.
    delta_store: str | None = None
    #: Longest wait for workers to be ready for a transfer, and longest transfer; after it that version goes by disk.
    transfer_timeout_s: Seconds = 30.0
    #: `penstock run`: engines run on the trainer's GPUs (on rank 0's with cuda_ipc); leave room for both by
    #: engine.args.mem-fraction-static. None: with transport cuda_ipc.
    colocate: bool | None = None
    #: nccl and gloo: address of this machine at which engines meet the trainer; its port is a free one.
    transfer_address: Host = "127.0.0.1"
    #: Most bytes gathered for one file, and sent at once.
    bucket_bytes: Positive = 1024**3
    #: Most bytes a second that the trainer sends of weights over HTTP (section ``serving``), to all workers together;
    #: None: as fast as its network is.
    serve_bytes_per_s: Positive | None = None
    #: cpu, cuda or cuda:N, on which the reference trainer computes.
    device: str = "cpu"
    #: Type that the forward and backward pass compute in: auto (bfloat16 on a GPU, float32 on a CPU), bfloat16 or
    #: float32. Weights, gradients and optimizer are float32 either way. float32 matrix products use TF32 on a GPU,
    #: unless this is float32.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    #: torch threads; 0 leaves torch's choice.
    num_threads: Annotated[int, Field(ge=0)] = 1
    #: Stop when held-out accuracy has reached this, if the version generated at least 0.95 of the evaluated tokens
    #: itself (see ``data.eval_pinned``); None: train all steps.
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def sends_to_own_gpu(self) -> bool:
        """Whether weights are sent to engines on the trainer's own GPU, that of rank 0, and to no others."""
        return transport(self.transport).on_trainers_gpu

    @field_validator("delta_store")
    @classmethod
    def _store_can_be_written(cls, place: str | None) -> str | None:
        scheme, colon, rest = (place or "").partition(":/")
        if place == "":
            raise ValueError("this is empty: name a folder or an URL, or null for one in weights_dir")
        if scheme in ("http", "https"):
            raise ValueError(
                f"what is at {scheme}:// can be read and not be written: name an object store, or a folder, which "
                "workers fetch from the trainer with serving.enabled"
            )
        if colon and scheme.isalnum() and not rest.startswith("/"):
            raise ValueError(f"{place!r} has one slash too few: write {scheme}://{rest}")
        if colon and not rest.strip("/"):
            raise ValueError(f"{place!r} names no place: write {scheme}://BUCKET/FOLDER")
        return place

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
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

    def _lacks(self, name: str) -> bool:
        """Return whether the loss has no such clip."""
        own = LOSS_DEFAULTS.get(self.loss, {})
        return name in own and own[name] is None

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        takes_ratio = LOSS_DEFAULTS.get(self.loss, {}).get("correction") != "truncated"
        if self.correction == "truncated" and takes_ratio:
            raise ValueError(
                f"correction truncated weighs by π_θ / μ, and loss {self.loss} takes a ratio of its own: that corrects "
                "twice; choose loss reinforce, or correction bypass or decoupled"
            )
        if self.correction != "truncated" and not takes_ratio:
            raise ValueError(
                f"loss {self.loss} takes no ratio, so correction {self.correction} would leave stale data uncorrected; "
                "choose correction truncated, or loss ppo"
            )
        if self.correction == "bypass" and self.weight_cap is not None:
            raise ValueError(
                "weight_cap caps a weight that correction bypass does not have, and a second one would correct "
                "twice: remove it, or choose correction decoupled"
            )
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and self._lacks(name):
                raise ValueError(
                    f"{name} clips a ratio that loss {self.loss} does not take: remove it and set weight_cap, or "
                    "choose loss ppo"
                )
            if value is None and not self._lacks(name):
                raise ValueError(f"{name} is null, and loss {self.loss} has a clip: give a number, or remove it")
        if self.dual_clip is not None and self._lacks("dual_clip"):
            raise ValueError(
                f"dual_clip bounds a ratio that loss {self.loss} does not take, whose weight is capped either way: "
                "remove it, or choose loss ppo or gspo"
            )
        if (self.aggregation == "constant") != (self.constant_tokens is not None):
            raise ValueError("aggregation constant and constant_tokens belong together: set both, or neither")
        return self

    @property
    def alone(self) -> str:
        """The key used alone, so that rewards of answers are measured but not trained on; '': none."""
        if self.distill is not None and not self.distill.with_rewards:
            return "distill"
        return "process" if self.process is not None and not self.process.with_rewards else ""

    @model_validator(mode="after")
    def _rewards_are_learned_from(self) -> Self:
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
                f"kl.place reward takes the penalty off rewards, and {alone} alone learns from none of them: choose "
                f"place loss, or set {alone}.with_rewards"
            )
        if self.advantage != "grpo":
            raise ValueError(
                f"advantage {self.advantage} makes advantages of rewards, and {alone} alone learns from none of them: "
                f"remove it, or set {alone}.with_rewards"
            )
        return self

    @model_validator(mode="after")
    def _priority_is_asked_for(self) -> Self:
        # Only if it is given: the sampler of an existing subscription may be changed back and forth.
        own = self.subscription
        for name in ("priority", "exponent"):
            value = getattr(own, name)
            if own.sampler is not Sampler.PRIORITIZED and not own.is_default(name):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise ValueError(
                    f"subscription.{name} {shown} is what sampler prioritized draws by, and the sampler is another: "
                    "choose prioritized, or remove it"
                )
        return self

    @property
    def groups_per_batch(self) -> int:
        """Groups of a batch; 0: not known in advance, if its size is in samples or tokens."""
        return (self.subscription.size or self.batch_groups) if self.subscription.unit is Unit.GROUPS else 0

    @model_validator(mode="after")
    def _transport_heeds_them(self) -> Self:
        name = self.transport
        if name not in TRANSPORTS:
            return self  # the user's own may read what it likes
        if self.folder_first is False and name == "delta":
            raise ValueError(
                f"folder_first false has no effect with transport {name}, whose versions begin with their folder: "
                "remove it, or choose another transport"
            )
        owners = {"delta_store": ["delta"], "transfer_address": ["nccl", "gloo"]}
        for key, of in owners.items():
            if name not in of and not self.is_default(key):
                raise ValueError(
                    f"{key} is of transport {' and '.join(of)}, and transport is {name}: set transport, or remove {key}"
                )
        return self

    @model_validator(mode="after")
    def _minibatches_have_groups(self) -> Self:
        groups = self.groups_per_batch
        if groups and self.minibatches > groups:
            raise ValueError(
                f"minibatches is {self.minibatches}, and a batch has {groups} groups, which stay whole: lower "
                "minibatches or raise batch_groups"
            )
        return self
