"""The configuration of a run: one YAML file, then the environment, then ``--a.b=c``. Unknown keys are refused."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock import sentinel
from penstock.code_names import EnvironmentName, FilterName, RewardName
from penstock.dataset_path import parse_path
from penstock.errors import ConfigError
from penstock.fleet_config import FleetConfig, RouterConfig
from penstock.keys import check_name
from penstock.messages import MAX_ANSWERS
from penstock.payload_folder import is_folder, path_of
from penstock.pool_config import PoolConfig
from penstock.redaction import MASK
from penstock.sampling import ORIGINAL_LOGPROB
from penstock.sampling_names import check_sampling
from penstock.section import Positive, Seconds, Section
from penstock.subscription_config import SubscriptionConfig

#: Most versions between drawing and training that a mode allows; async takes what is given.
MODE_BOUND = {"sync": 0, "one_step": 1}


#: How SGLang reads ``ORIGINAL_LOGPROB``.
_IS_ORIGINAL = {"1": True, "true": True, "0": False, "false": False}

#: Tokens between two looks at a running answer, where a checkpoint may be due at any time.
STREAM_TOKENS = 16

#: Those that torch and SGLang both take.
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
#: Kinds of devices that torch knows; a number behind a colon names one of them.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu")


def _checked_name(kind: str, name: str) -> str:
    try:
        return check_name(kind, name)
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc


def check_url(url: str) -> str:
    """``url`` if it may be the address of a Redis; else ValueError that says what to write."""
    if f":{MASK}@" in url or f"password={MASK}" in url.lower():
        raise ValueError(
            "has a masked password; set the real URL, for instance by PENSTOCK_REDIS__URL, or null for the run's own "
            "server"
        )
    if sentinel.is_sentinel(url):
        sentinel.parse(url)
    elif not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("is not the address of a Redis; write redis://[:PASSWORD@]HOST:PORT/DB")
    return url


def check_store_url(url: str) -> str:
    """``url`` if payloads may be stored there, a Redis or a folder; else ValueError that says what to write."""
    if is_folder(url):
        path_of(url)
        return url
    return check_url(url)


class RedisConfig(Section):
    """The control Redis, and the payload servers beside it."""

    #: redis://[:password@]host:port/db, or redis+sentinel://[:password@]host:port,host:port/NAME; None starts a server
    #: of our own under the run's folder.
    url: str | None = None
    #: Port of our own server; 0 takes a free one. Only without ``url``.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: AOF fsync of our own server.
    appendfsync: Literal["everysec", "always"] = "everysec"
    #: maxmemory of our own server in bytes; 0 sets none.
    max_memory_bytes: Annotated[int, Field(ge=0)] = 0
    #: Refuse a control Redis without an append-only file: when it dies, all that it holds is lost.
    require_aof: bool = True
    #: Name -> URL of payload servers, redis://... or file:///FOLDER, a folder that all machines share; empty: payloads
    #: live on the control Redis, under the name "control".
    payload_servers: dict[str, str] = Field(default_factory=dict)
    #: A payload server that has not answered the buffer for so many seconds counts as lost, as after `penstock payloads
    #: lose`: its samples become rows with mask 0. null: never by itself.
    payload_patience_s: Annotated[float, Field(gt=0)] | None = None

    @field_validator("url")
    @classmethod
    def _url_is_redis(cls, url: str | None) -> str | None:
        return url if url is None else check_url(url)

    @field_validator("payload_servers")
    @classmethod
    def _urls_are_stores(cls, servers: dict[str, str]) -> dict[str, str]:
        return {name: check_store_url(url) for name, url in servers.items()}

    @model_validator(mode="after")
    def _one_redis(self) -> Self:
        if self.url is not None and self.port:
            raise ValueError("port is for a server of our own, and url names another one: leave one of them away")
        return self


class DatasetConfig(Section):
    """Prompts from one file."""

    #: Name in job ids.
    name: str
    #: JSONL (``.jsonl``, ``.jsonl.gz``) or parquet file; ``path@[a:b]`` takes a slice of its lines.
    path: str
    #: Column of the prompt: text, or a list of chat messages.
    input_key: str = "prompt"
    #: Column of what the reward compares with, any JSON value; None: there is none.
    label_key: str | None = "label"
    #: Column of answers that are given: text, token ids, or a list of those; None: all are drawn.
    answer_key: str | None = None
    #: Column handed through to rewards; None: none.
    metadata_key: str | None = None
    #: Render chat messages with the model's chat template.
    apply_chat_template: bool = False
    shuffle: bool = True
    #: Overrides of ``rollout.sampling`` for this dataset.
    sampling: dict[str, Any] = Field(default_factory=dict)
    #: Answers per prompt for this dataset; None takes ``rollout.n`` (train) or 1 (eval).
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    reward: RewardName | None = None
    environment: EnvironmentName | None = None

    @field_validator("name")
    @classmethod
    def _name_is_a_name(cls, name: str) -> str:
        return _checked_name("dataset", name)

    @field_validator("path")
    @classmethod
    def _slice_holds_lines(cls, path: str) -> str:
        parse_path(path)
        return path

    @field_validator("sampling")
    @classmethod
    def _sampling_is_known(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        check_sampling(sampling)
        return sampling


class DataConfig(Section):
    train: list[DatasetConfig] = Field(min_length=1)
    eval: list[DatasetConfig] = Field(default_factory=list)
    #: Passes over the train data, after which the run ends; null: prompts come again for as long as somebody trains.
    #: May be raised from one start to the next, and lowered to what was not admitted yet.
    epochs: Positive | None = None
    #: What becomes of the groups that are left at the end of the data and are fewer than a batch: ``drop`` leaves
    #: them untrained, so that every step is of the size that the learning rate was chosen for; ``train`` makes one
    #: smaller batch of them.
    last_batch: Literal["train", "drop"] = "drop"
    #: Evaluate at every so many versions, and at the first and the last; 0: only first and last.
    eval_every: Annotated[int, Field(ge=0)] = 0
    #: Weights that come while a version is being evaluated are loaded when its evaluation is through, so that it alone
    #: draws it. Training goes on with what the version draws, as far as the bound allows, and waits then.
    eval_pinned: bool = False
    #: Longest wait for the last evaluation; the trainer then ends with exit code 1, and one that is started again waits
    #: for the same evaluation. None: it waits, and `penstock why` says for what.
    eval_timeout_s: Seconds | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [dataset.name for dataset in (*self.train, *self.eval)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two datasets are named {name!r}, and job ids need names that differ: rename one")
        return self


class ModelConfig(Section):
    #: Name of the weights stream.
    name: str = "policy"
    #: Hugging Face folder of the first policy: config, tokenizer, weights.
    path: str
    dtype: str = "auto"

    @field_validator("dtype")
    @classmethod
    def _dtype_is_known(cls, dtype: str) -> str:
        if dtype not in _DTYPES:
            raise ValueError(f"{dtype!r} is no dtype of weights: write {', '.join(_DTYPES)}")
        return dtype


class RolloutConfig(Section):
    """How answers are drawn."""

    #: Answers per prompt (size of a group).
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 8
    #: SGLang names. top_p < 1, top_k, min_p, penalties and grammars are refused for training (docs/truth.md, T7).
    sampling: dict[str, Any] = Field(default_factory=lambda: {"max_new_tokens": 256, "temperature": 1.0})
    #: Drawn for evaluation; overrides of ``sampling``.
    eval_sampling: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0.0})
    #: Most tokens of prompt and answer together.
    max_context_tokens: Positive = 32768
    #: Most turns of a sample with an environment.
    max_turns: Positive = 8
    #: Side arrays (``sample.sides``) that every sample must have; one without fails (docs/truth.md, T17).
    sides: list[str] = Field(default_factory=list)
    #: A group takes too long when its first lease is so long ago; None: never.
    group_timeout_s: Seconds | None = None
    #: What becomes of it: wait (and say so), train with the samples that are there, or drop it.
    on_group_timeout: Literal["wait", "train", "drop"] = "wait"
    #: Fewest samples of a group that is trained without the rest.
    min_group: Positive = 2
    #: Longest wait for a reset or a step of an environment; the job then fails as ``environment_timeout``.
    environment_timeout_s: Seconds = 300.0
    #: Most tokens that a sample draws under one lease; then it goes back to the queue with its prefix, at no charge,
    #: and is gone on with by whoever is free. None: no limit.
    lease_tokens: Positive | None = None
    #: No loss on tokens of a finished sample that are older than its newest one.
    mask_offpolicy_in_partial_rollout: bool = False

    #: It is held against ``n`` only where it is given.
    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"min_group"})

    @field_validator("sampling", "eval_sampling")
    @classmethod
    def _sampling_is_known(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        check_sampling(sampling)
        return sampling


class StalenessConfig(Section):
    """The policy object of gate and cut (docs/truth.md, T2 to T5)."""

    mode: Literal["sync", "one_step", "async"] = "async"
    #: Most versions between drawing a token and training it; sync means 0 and one_step 1.
    bound: Annotated[int, Field(ge=0)] = 4
    #: What happens to what would be too old: wait for what is due, mask tokens, or drop groups. None: by mode.
    on_expiry: Literal["wait", "mask", "drop"] | None = None

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"bound"})

    @model_validator(mode="after")
    def _bound_by_mode(self) -> Self:
        if "bound" not in self.model_fields_set and self.mode in MODE_BOUND:
            self._follow(bound=MODE_BOUND[self.mode])
        return self

    @model_validator(mode="after")
    def _bound_fits_mode(self) -> Self:
        wanted = MODE_BOUND.get(self.mode, self.bound)
        if self.bound != wanted:
            raise ValueError(
                f"mode {self.mode} means bound {wanted}, and bound is {self.bound}: "
                "leave bound away, or choose mode async"
            )
        return self


class EngineConfig(Section):
    """The SGLang server under a worker."""

    #: Address of an external server (http://HOST:PORT); None spawns one. It is never started, stopped or killed.
    url: str | None = None
    #: Engines behind an sglang-router of the worker's own, which stand for one; beside it neither url nor args.
    router: RouterConfig | None = None
    #: Address that a spawned server listens at, and its port; 0 takes a free one.
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Interpreter of the environment that has sglang; spawned servers only.
    python: str = ".engine/bin/python"
    #: Arguments of sglang.launch_server, names without dashes in front; true stands for a bare flag. They are checked
    #: against the installed release before anything starts.
    args: dict[str, Any] = Field(default_factory=dict)
    #: Environment variables of the server.
    env: dict[str, str] = Field(default_factory=dict)
    #: Longest start.
    start_timeout_s: Seconds = 600.0
    #: Longest load of new weights; an engine that takes longer is taken to be dead.
    load_timeout_s: Seconds = 300.0
    #: No health check for so long after a start.
    health_first_wait_s: Annotated[float, Field(ge=0)] = 0.0
    #: Between two health checks; none are made while weights change or memory is released.
    health_interval_s: Seconds = 2.0
    #: Longest answer to a health check.
    health_timeout_s: Seconds = 10.0
    #: Failures in a row until the engine is restarted.
    health_failures: Positive = 3
    #: A lost engine is started again at once; after a second failure in a row so much later, which doubles with each.
    restart_wait_s: Seconds = 1.0
    #: The longest such wait.
    max_restart_wait_s: Seconds = 30.0
    #: So many failures (deaths before anything was finished, starts in vain) within the window are a crash loop: the
    #: worker hands its jobs back, leases none, says why, and tries again every ``max_restart_wait_s``.
    crash_loop_failures: Annotated[int, Field(ge=2)] = 5
    crash_loop_window_s: Seconds = 600.0
    #: Longest wait for one answer.
    request_timeout_s: Seconds = 3600.0
    #: A request of which nothing was heard for so long is named by `penstock why`, with its worker and job.
    slow_request_s: Seconds = 120.0
    #: None: as the server shows. false: treat it as one that does not report version spans.
    reports_spans: bool | None = None
    #: Whether logprobs are after temperature (scaled) or before it. None: as ``env`` has it, else scaled; for a server
    #: at a URL what it returns, which is looked at. One that returns something else than what stands here is refused.
    logprob_kind: Literal["scaled", "original"] | None = None

    @model_validator(mode="after")
    def _one_logprob_kind(self) -> Self:
        given = self.env.get(ORIGINAL_LOGPROB)
        if given is None:
            return self
        if given.lower() not in _IS_ORIGINAL:
            raise ValueError(f"env.{ORIGINAL_LOGPROB} is {given!r}: write 1 or 0, or set logprob_kind instead")
        kind = "original" if _IS_ORIGINAL[given.lower()] else "scaled"
        if self.logprob_kind not in (None, kind):
            raise ValueError(
                f"logprob_kind is {self.logprob_kind}, and env.{ORIGINAL_LOGPROB} {given} says {kind}: leave the "
                "variable away"
            )
        self._follow(logprob_kind=kind)
        return self

    @model_validator(mode="after")
    def _router_has_its_engines(self) -> Self:
        given = [name for name in ("url", "args", "env", "port") if getattr(self, name)]
        if self.router is not None and given:
            raise ValueError(
                f"{' and '.join(given)} are of one engine, and router names several that are there already: give them "
                "to those servers, or leave router away"
            )
        return self

    @model_validator(mode="after")
    def _external_is_not_ours_to_start(self) -> Self:
        if self.url is None:
            return self
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} is not the address of a server; write http://HOST:PORT")
        given = [name for name in ("args", "env") if getattr(self, name)]
        if given:
            raise ValueError(
                f"{' and '.join(given)} are for a server that penstock starts, and url names one that is there "
                "already: give them to that server, or leave url away"
            )
        return self


class FaultsConfig(Section):
    """Drills: what goes wrong between a worker and its engine, on purpose. All off; never in a run that counts.

    Requests for tokens are counted per start of an engine; where several are due the first named here is done.
    """

    #: Every so many requests: answered with status 500; 0: never.
    error_every: Annotated[int, Field(ge=0)] = 0
    #: ... never answered, until ``engine.request_timeout_s``.
    hang_every: Annotated[int, Field(ge=0)] = 0
    #: ... answered with what is not JSON.
    garbage_every: Annotated[int, Field(ge=0)] = 0
    #: ... answered with one logprob fewer than tokens.
    short_logprobs_every: Annotated[int, Field(ge=0)] = 0
    #: The engine is killed after so many tokens, again and again; an external one is cut off instead. 0: never.
    die_after_tokens: Annotated[int, Field(ge=0)] = 0

    @property
    def any(self) -> bool:
        return any(self.model_dump().values())


class WorkerConfig(Section):
    #: Worker processes that ``penstock run`` starts.
    count: Positive = 1
    #: Samples generated at once per worker.
    slots: Positive = 64
    #: How new weights are applied (docs/workers.md): in_place (running answers go on under them), abort
    #: (they stop and are resumed under them) or drain (they end first); one_step always drains.
    apply: Literal["in_place", "abort", "drain"] = "in_place"
    #: A lease not renewed for so long is taken over.
    lease_s: Seconds = 15.0
    heartbeat_s: Seconds = 2.0
    #: A worker whose event loop made no step for so long renews its leases no more: others take its jobs.
    stuck_s: Seconds = 120.0
    #: Longest wait for running samples after SIGTERM; then partial ones are handed back.
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    #: Tries of a job that fails, before it is buried.
    max_attempts: Positive = 3
    #: Wait before the first retry; doubles, up to ``max_retry_s``.
    retry_s: Seconds = 1.0
    #: The longest such wait.
    max_retry_s: Seconds = 60.0
    #: A sample's prefix is kept in Redis after so many new tokens, so that a kill costs no more than these; None: only
    #: when the worker hands it back or its engine dies.
    checkpoint_tokens: Positive | None = None
    #: The same after so many seconds; either that is due first.
    checkpoint_s: Seconds | None = None
    #: Rewards and environments, ``module:name``, that jobs may name beside those of ``reward`` and ``data``. A worker
    #: imports nothing else: a job comes from Redis, and whoever writes there must not choose what is run here.
    rewards: list[RewardName] = Field(default_factory=list)
    environments: list[EnvironmentName] = Field(default_factory=list)
    #: Port of Prometheus metrics; 0 takes a free one, None: none.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"apply"})

    @property
    def stream_interval(self) -> int:
        """Tokens between two looks at a running answer; 0: it is looked at when it is done."""
        if self.checkpoint_s is not None:
            return min(STREAM_TOKENS, self.checkpoint_tokens or STREAM_TOKENS)
        return self.checkpoint_tokens or 0

    @model_validator(mode="after")
    def _renewed_in_time(self) -> Self:
        if self.heartbeat_s * 2 > self.lease_s:
            raise ValueError(
                f"heartbeat_s {self.heartbeat_s:g} is more than half of lease_s {self.lease_s:g}, so one lost "
                "heartbeat loses every lease: lower heartbeat_s or raise lease_s"
            )
        return self


class RewardConfig(Section):
    #: ``exact_match``, ``math_verify``, or ``module:function``: sync or async; gives a number, or a dict with ``key``.
    function: RewardName = "exact_match"
    #: Where a reward returns a dict, the entry that is the number.
    key: str = "score"
    timeout_s: Seconds = 30.0
    #: Tries of a reward that raises.
    max_attempts: Positive = 2
    #: CPU time of one math_verify check; an answer that needs more is worth 0 (docs/truth.md, T11).
    check_cpu_s: Positive = 5
    #: Admission stops when more than this share of a dataset's jobs died of the user's code (reward, environment), of
    #: the last ``died_window`` that ended, from ``died_from`` on; 1: never.
    max_died_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    died_window: Annotated[int, Field(ge=1, le=10_000)] = 100
    died_from: Positive = 20
    #: Verifier processes of math_verify per worker, with pool.kind process.
    processes: Positive = 2
    #: Where rewards are computed.
    pool: PoolConfig = PoolConfig()


class FilterConfig(Section):
    """Which completed groups a subscription trains on (dynamic sampling)."""

    #: Asked in this order when a group completes; the first that rejects it counts. ``nonzero_std`` (rewards must
    #: differ), or ``module:function``: gets a penstock.CompletedGroup, gives keep or (keep, reason).
    functions: list[FilterName] = Field(default_factory=list)
    #: What becomes of a group whose filter raises: keep it (counted, with a warning), drop it, or stop cutting.
    on_error: Literal["keep", "drop", "stop"] = "keep"
    #: Hold rejects back, and train on them after all when too few other groups remain to fill a batch.
    keep_when_few: bool = False


class BufferConfig(Section):
    #: Leadership is lost when not renewed for so long.
    lease_s: Seconds = 5.0
    #: A group whose subscriptions are done with it but have no checkpoint past it goes after so long; None: never.
    retention_s: Seconds | None = None
    #: oldest_version | fifo | cohort; None: by mode (cohort for sync and one_step).
    sampler: Literal["oldest_version", "fifo", "cohort"] | None = None
    #: Payloads that nobody commits vanish after so long.
    payload_ttl_s: Positive = 86400
    #: Results of scoring jobs that nobody collects are deleted after so long.
    score_ttl_s: Seconds = 3600.0
    #: Filters (module:function) that subscriptions may name beside those of ``trainer.filter``.
    filters: list[FilterName] = Field(default_factory=list)
    #: Longest run of one filter on one group; one that takes longer is taken to have raised.
    filter_timeout_s: Seconds = 1.0


#: What a loss takes where the configuration does not say; other losses take the defaults of the fields.
#:
#: - ppo: clips 0.2 (PPO, arXiv 1707.06347; DAPO, arXiv 2503.14476, raises clip_high to 0.28) and the token mean of DAPO
#: - gspo: clips 3e-4 and 4e-4 and the mean over samples (arXiv 2507.18071). They are of a ratio to π_old by the same
#:   program, as in the paper (section 5.4), so the correction is decoupled: rounding between engine and trainer alone
#:   moves the mean log ratio of a sample by as much as such a clip is wide
#: - cispo: the lower side open and the token mean (arXiv 2506.13585, which names no upper clip); weights up to 5
#:   (ScaleRL, arXiv 2510.13786); both sides bound a losing token, so there is no dual clip
#: - reinforce: no ratio, so no clip; weight_cap bounds it, by the one correction that fits
LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sample", "correction": "decoupled"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token", "dual_clip": None},
    "reinforce": {"clip_low": None, "clip_high": None, "dual_clip": None},
}


class TrainerConfig(Section):
    """The reference GRPO trainer."""

    #: Name of the subscription.
    name: str = "actor"
    #: How the subscription takes groups, where that is not told by ``staleness`` and ``batch_groups``.
    subscription: SubscriptionConfig = SubscriptionConfig()
    #: Groups per batch.
    batch_groups: Positive = 32
    #: Batches per publication.
    batches_per_version: Positive = 1
    #: Groups admitted beyond what the gate lets in, so that a batch is full although filters drop some.
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
    lr: Annotated[float, Field(ge=0)] = 1e-4
    #: Optimizer steps over which the learning rate rises to ``lr``.
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    #: An optimizer step whose gradient is not finite is skipped, its batch committed; after so many batches in a row
    #: with such a step the run stops, when the last one is committed, and names them. null: never.
    max_skipped_steps: Positive | None = 3
    #: Clips of the ratio, 1 - clip_low to 1 + clip_high; the defaults are those of ``loss`` (LOSS_DEFAULTS). null: of
    #: reinforce alone, which takes no ratio.
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = 0.2
    clip_high: Annotated[float, Field(ge=0)] | None = 0.2
    #: Where a losing token (advantage below 0) has become this many times as likely, it is not pushed further (dual
    #: clip, arXiv 1912.09729); of ppo and gspo, whose clips leave that open. null: no such bound.
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    #: How rewards become advantages (consumers/advantages.py).
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"] = "grpo"
    #: Loss per token (consumers/losses.py); it brings its own clips and aggregation where they are not given.
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    #: One correction, never two (docs/truth.md, T9). reinforce takes truncated, the others take the rest; the default
    #: is that of ``loss``.
    correction: Literal["bypass", "decoupled", "truncated"] = "bypass"
    #: C of decoupled and truncated; None is 2. bypass has no weight to cap.
    weight_cap: Annotated[float, Field(gt=0)] | None = None
    #: What every token weighs the same by: the batch (token), its sample (sample), or a constant answer (constant).
    #: The default is that of ``loss``.
    aggregation: Literal["token", "sample", "constant"] = "token"
    #: Tokens of the constant answer, the longest there can be; only with aggregation constant.
    constant_tokens: Positive | None = None
    #: Tokens staler than this bear no loss, whatever the bound of the cut is; None: the cut alone decides.
    max_token_staleness: Annotated[int, Field(ge=0)] | None = None
    #: Tokens per micro-batch; None: the whole rank's share at once.
    max_tokens: Positive | None = None
    #: Processes of the trainer (torchrun-like, gloo on CPU, nccl on GPU).
    dp_size: Positive = 1
    #: Longest wait of one rank for another, before a step and for payloads that a replica broadcasts.
    rank_timeout_s: Seconds = 600.0
    #: A checkpoint every so many steps, and at the end.
    checkpoint_every: Positive = 5
    #: Weight folders kept.
    keep_versions: Annotated[int, Field(ge=2)] = 3
    #: Folder of published weights; None: runs/NAME/weights.
    weights_dir: str | None = None
    #: How new weights reach engines that are ready: disk, nccl or gloo (a process group of trainer and engines),
    #: cuda_ipc (engines on the trainer's GPU), or checkpoint_engine (its parameter servers on the engines' GPUs). The
    #: folder is written first either way; who misses a transfer loads it.
    transport: Literal["disk", "nccl", "gloo", "cuda_ipc", "checkpoint_engine"] = "disk"
    #: Longest wait for workers to be ready for a transfer, and longest transfer; after it that version goes by disk.
    transfer_timeout_s: Seconds = 30.0
    #: `penstock run`: engines run on the trainer's GPUs (on rank 0's with cuda_ipc); leave room for both by
    #: engine.args.mem-fraction-static. None: with transport cuda_ipc, and checkpoint_engine without
    #: parameter_server_gpus.
    colocate: bool | None = None
    #: checkpoint_engine: the GPUs, as the trainer counts them, on which engines run, one engine process on each; None:
    #: the trainer's own.
    parameter_server_gpus: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    #: Address of this machine at which engines meet the trainer; its port is a free one.
    transfer_address: str = "127.0.0.1"
    #: Most bytes gathered for one file, and sent at once.
    bucket_bytes: Positive = 1024**3
    device: str = "cpu"
    #: torch threads; 0 leaves torch's choice.
    num_threads: Annotated[int, Field(ge=0)] = 1
    #: Stop when held-out accuracy has reached this, where the version drew at least 0.95 of the evaluated tokens itself
    #: (see ``data.eval_pinned``); None: train all steps.
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None

    @field_validator("name")
    @classmethod
    def _name_is_a_name(cls, name: str) -> str:
        return _checked_name("trainer", name)

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        kind, _, number = device.partition(":")
        if kind == "gpu":
            raise ValueError(f"device {device!r} is none of torch's: write {device.replace('gpu', 'cuda')}")
        if kind not in _DEVICES or (":" in device and not number.isdigit()):
            raise ValueError(f"device {device!r} is none of torch's: write {', '.join(_DEVICES)}, or cuda:NUMBER")
        return device

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"clip_low", "clip_high", "dual_clip", "aggregation"})

    @model_validator(mode="after")
    def _defaults_by_loss(self) -> Self:
        own = LOSS_DEFAULTS.get(self.loss, {})
        self._follow(**{name: value for name, value in own.items() if name not in self.model_fields_set})
        return self

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        if self.correction == "truncated" and self.loss != "reinforce":
            raise ValueError(
                f"correction truncated weighs by π_θ / μ, and loss {self.loss} takes a ratio of its own: that corrects "
                "twice; choose loss reinforce, or correction bypass or decoupled"
            )
        if self.loss == "reinforce" and self.correction != "truncated":
            raise ValueError(
                f"loss reinforce takes no ratio, so correction {self.correction} would leave stale data uncorrected; "
                "choose correction truncated, or loss ppo"
            )
        if self.correction == "bypass" and self.weight_cap is not None:
            raise ValueError(
                "weight_cap caps a weight that correction bypass does not have, and a second one would correct "
                "twice: leave it away, or choose correction decoupled"
            )
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if self.loss == "reinforce" and value is not None:
                raise ValueError(
                    f"{name} clips a ratio that loss reinforce does not take: leave it away and set weight_cap, or "
                    "choose loss ppo"
                )
            if self.loss != "reinforce" and value is None:
                raise ValueError(f"{name} is null, and loss {self.loss} has a clip: give a number, or leave it away")
        if self.dual_clip is not None and self.loss in ("cispo", "reinforce"):
            raise ValueError(
                f"dual_clip bounds a ratio that loss {self.loss} does not take, whose weight is capped either way: "
                "leave it away, or choose loss ppo or gspo"
            )
        if (self.aggregation == "constant") != (self.constant_tokens is not None):
            raise ValueError("aggregation constant and constant_tokens belong together: set both, or neither")
        return self

    @model_validator(mode="after")
    def _minibatches_have_groups(self) -> Self:
        groups = self.subscription.size or self.batch_groups
        if self.subscription.unit == "groups" and self.minibatches > groups:
            raise ValueError(
                f"minibatches is {self.minibatches}, and a batch has {groups} groups, which stay whole: lower "
                "minibatches or raise batch_groups"
            )
        return self


class DebugConfig(Section):
    """Parts of a run by themselves."""

    #: Record every batch that a trainer is handed: a path with ``{rollout_id}``, and with ``{rank}`` for several ranks.
    save_batches: str | None = None
    #: Train only: `penstock trainer` takes its batches from such a recording; no engines, buffer or Redis.
    load_batches: str | None = None
    #: Rollout only: batches are cut, recorded and committed, nothing is trained; every version has the same weights.
    rollout_only: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.load_batches is not None and (self.rollout_only or self.save_batches is not None):
            raise ValueError(
                "load_batches trains a recording, so nothing is rolled out or recorded: leave the others away"
            )
        return self


class Config(Section):
    """A whole run."""

    #: Namespace in Redis and folder under ``directory``.
    run: str
    directory: Path = Path("runs")
    #: A script and its arguments, which ``penstock run`` runs before each start with our own interpreter, in the
    #: script's folder; what is there already is for the script to see.
    prepare: Annotated[list[str], Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    staleness: StalenessConfig = StalenessConfig()
    engine: EngineConfig = EngineConfig()
    worker: WorkerConfig = WorkerConfig()
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    debug: DebugConfig = DebugConfig()
    faults: FaultsConfig = FaultsConfig()
    fleet: FleetConfig = FleetConfig()

    @field_validator("run")
    @classmethod
    def _run_is_a_name(cls, run: str) -> str:
        return _checked_name("run", run)

    @model_validator(mode="after")
    def _rollouts_can_be_had(self) -> Self:
        rollout = self.rollout
        most_n = max(dataset.n or rollout.n for dataset in self.data.train)
        if "min_group" in rollout.model_fields_set and rollout.min_group > most_n:
            raise ValueError(
                f"rollout.min_group is {rollout.min_group}, and a group has at most {most_n} samples (rollout.n): "
                "lower min_group or raise n"
            )
        asked = rollout.sampling.get("max_new_tokens") or 0
        if rollout.max_context_tokens < asked:
            raise ValueError(
                f"rollout.max_context_tokens is {rollout.max_context_tokens}, and rollout.sampling.max_new_tokens "
                f"alone {asked}: raise the first, which bounds prompt and answer together, or lower the second"
            )
        if self.trainer.stop_at_accuracy is not None and not self.data.eval:
            raise ValueError(
                "trainer.stop_at_accuracy needs an evaluation, and data.eval names no file: name one, or leave it away"
            )
        return self

    @model_validator(mode="after")
    def _groups_have_a_deviation(self) -> Self:
        if "nonzero_std" not in self.trainer.filter.functions:
            return self
        for dataset in self.data.train:
            if (dataset.n or self.rollout.n) == 1:
                key = f"data.train {dataset.name!r} has n" if dataset.n else "rollout.n is"
                raise ValueError(
                    f"{key} 1, and trainer.filter.functions has nonzero_std: a group of one has no deviation, so every "
                    "group would be dropped; raise n, or leave nonzero_std out"
                )
        return self

    @model_validator(mode="after")
    def _one_step_drains(self) -> Self:
        if self.staleness.mode != "one_step" or self.worker.apply == "drain":
            return self
        if "apply" in self.worker.model_fields_set:
            raise ValueError(
                f"worker.apply is {self.worker.apply}, and staleness.mode one_step always drains: "
                "leave worker.apply away, or choose mode async"
            )
        worker = self.worker.model_copy()
        worker._follow(apply="drain")
        self._follow(worker=worker)
        return self

    @model_validator(mode="after")
    def _transport_can_work(self) -> Self:
        transport, on_cpu = self.trainer.transport, self.engine.args.get("device") == "cpu"
        gpus = self.trainer.parameter_server_gpus
        if gpus is not None and transport != "checkpoint_engine":
            raise ValueError(
                f"trainer.parameter_server_gpus is for trainer.transport checkpoint_engine, and that is {transport}: "
                "leave it away"
            )
        if gpus is not None and len(set(gpus)) < len(gpus):
            raise ValueError(f"trainer.parameter_server_gpus {gpus} names a GPU twice: one parameter server is on each")
        if transport in ("nccl", "cuda_ipc", "checkpoint_engine") and (on_cpu or self.trainer.device == "cpu"):
            raise ValueError(
                f"trainer.transport {transport} moves weights between GPUs, and trainer.device is "
                f"{self.trainer.device}{' and engine.args.device cpu' if on_cpu else ''}: use disk, or gloo on CPUs"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.directory / self.run
