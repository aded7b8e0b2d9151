"""The configuration of a run: one YAML file, then the environment, then ``--a.b=c``. Unknown keys are refused."""

import platform
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.agents import AgentsConfig
from penstock.config.buffer import BufferConfig
from penstock.config.data import DataConfig
from penstock.config.engine import EngineConfig, preset_of_machine
from penstock.config.fleet import FleetConfig
from penstock.config.hooks import HooksConfig
from penstock.config.redis import RedisConfig
from penstock.config.reward import RewardConfig, ScoringModelConfig
from penstock.config.rollout import RolloutConfig
from penstock.config.sampling import is_temperature, temperature_of
from penstock.config.section import Positive, Seconds, Section, is_a_name
from penstock.config.serving import Host, MetricsConfig, NotifyConfig, ServingConfig
from penstock.config.staleness import StalenessConfig
from penstock.config.trainer import TrainerConfig
from penstock.config.transport import TRANSPORTS, transport
from penstock.config.worker import WorkerConfig
from penstock.errors import ConfigError
from penstock.names import AGENT, ROUTED_EXPERTS, STEP_REWARDS
from penstock.system.logs import LogFormat
from penstock.text import MASK


class HistoryConfig(Section):
    """The history: rows that the recorder (`penstock recorder`) writes to the run's folder ``history``."""

    #: Whether ``penstock run`` starts a recorder.
    enabled: bool = True
    #: Keep answers and tokens of one in this many groups, in the order of admission; 1: of all groups. Samples of the
    #: other groups have a row without answer and tokens.
    keep_every: Positive = 1
    #: Maximum number of groups that wait in Redis to be recorded; further groups are deleted without rows, and counted.
    #: Set it to at least the number of groups between two checkpoints, because these retire together.
    backlog: Positive = 4096
    #: Time in seconds that groups wait if no recorder is running; then they are deleted without rows, and counted.
    patience_s: Seconds = 60.0
    #: Maximum number of bytes of the files; the oldest files are deleted first.
    max_bytes: Annotated[int, Field(ge=16 * 2**20)] = 16 * 2**30


#: Types that torch and SGLang both accept.
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")


class ModelConfig(Section):
    #: Name of the model and of its stream of publications.
    name: str = "policy"
    #: Hugging Face folder of the first policy (config, tokenizer, weights), or its id at the Hub; the model is then
    #: read from the Hub's local cache.
    path: str
    #: Data type of the engines' weights: auto (the type in the folder), bfloat16, float16 or float32. The reference
    #: trainer publishes weights in this type (auto: float32), but trains float32 weights (``trainer.dtype``).
    dtype: str = "auto"

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, dtype: str) -> str:
        if dtype not in _DTYPES:
            raise ValueError(f"{dtype!r} is not a dtype of weights: use {', '.join(_DTYPES)}")
        return dtype


class LogsConfig(Section):
    #: text: a readable line per entry; json: an object per line. Engines and routers use their own formats.
    format: LogFormat = LogFormat.TEXT
    #: Size in bytes above which a log in the run's folder is rotated to ``PART.log.1``.
    max_bytes: Annotated[int, Field(ge=64 * 1024)] = 64 * 1024**2


class DebugConfig(Section):
    """Record and replay batches, or generate without training."""

    #: Path for a recording of every batch that a trainer receives, with ``{rollout_id}``, and with ``{rank}`` for
    #: several ranks.
    save_batches: str | None = None
    #: Path of a recording from which ``penstock trainer`` reads its batches, without engines, buffer or Redis.
    load_batches: str | None = None
    #: Cut, record and commit batches without training; every version has the same weights.
    rollout_only: bool = False

    @model_validator(mode="after")
    def _check_modes(self) -> Self:
        if self.load_batches is not None and (self.rollout_only or self.save_batches is not None):
            raise ValueError(
                "load_batches trains recorded batches without rollouts or recording: remove the other keys"
            )
        return self


class Config(Section):
    """The configuration of a run."""

    #: Name of the run: its namespace in Redis, and its folder in ``directory``.
    run: Annotated[str, is_a_name("run")]
    #: Folder that contains the folders of runs.
    directory: Path = Path("runs")
    #: A script and its arguments. ``penstock run`` runs the script before each start, with penstock's interpreter and
    #: in the script's folder. The script itself must detect and skip finished work.
    prepare: Annotated[list[str], Field(min_length=1)] | None = None
    #: Seed for the order of the data and, if the engine samples with seeds, for every sample.
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    #: Name or address at which other machines reach this one, for parts that do not only listen on loopback
    #: (``serving``, ``agents``, ``metrics``). None: their ``host``, or the machine's name if ``host`` is a wildcard.
    reached_at: Host | None = None
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    staleness: StalenessConfig = StalenessConfig()
    engine: EngineConfig = EngineConfig()
    worker: WorkerConfig = WorkerConfig()
    reward: RewardConfig = RewardConfig()
    agents: AgentsConfig = AgentsConfig()
    hooks: HooksConfig = HooksConfig()
    buffer: BufferConfig = BufferConfig()
    history: HistoryConfig = HistoryConfig()
    trainer: TrainerConfig = TrainerConfig()
    serving: ServingConfig = ServingConfig()
    logs: LogsConfig = LogsConfig()
    debug: DebugConfig = DebugConfig()
    fleet: FleetConfig = FleetConfig()
    metrics: MetricsConfig = MetricsConfig()
    notify: NotifyConfig = NotifyConfig()

    @model_validator(mode="after")
    def _set_engine_preset(self) -> Self:
        engine = self.engine
        if not (engine.preset or engine.url or engine.router or self.fleet.models or "device" in engine.args):
            engine = engine.model_copy()
            engine._follow(preset="cuda" if self.trainer.device.startswith("cuda") else preset_of_machine())
            self._follow(engine=engine)
        return self

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        rollout = self.rollout
        most_n = max(dataset.n or rollout.n for dataset in self.data.train)
        is_asked = rollout.on_group_timeout == "train" and "min_group" in rollout.model_fields_set
        if is_asked and rollout.min_group > most_n:
            raise ValueError(
                f"rollout.min_group is {rollout.min_group}, but a group has at most {most_n} samples (rollout.n): "
                "lower min_group or raise n"
            )
        asked = rollout.sampling.get("max_new_tokens") or 0
        if rollout.max_context_tokens < asked:
            raise ValueError(
                f"rollout.max_context_tokens is {rollout.max_context_tokens}, but rollout.sampling.max_new_tokens "
                f"alone {asked}: raise max_context_tokens, which bounds prompt and answer, or lower max_new_tokens"
            )
        if self.trainer.stop_at_accuracy is not None and not self.data.eval:
            raise ValueError(
                "trainer.stop_at_accuracy requires an evaluation set, but data.eval is empty: add a dataset, or remove "
                "trainer.stop_at_accuracy"
            )
        for key, does in (("eval", "makes samples of"), ("eval_log", "is called after")):
            if getattr(self.hooks, key) is not None and not self.data.eval:
                raise ValueError(
                    f"hooks.{key} {does} evaluations, but data.eval is empty: add a dataset, or remove the hook"
                )
        return self

    @model_validator(mode="after")
    def _check_checkpoint_tokens(self) -> Self:
        given = [] if self.worker.checkpoint_tokens is None else ["worker.checkpoint_tokens"]
        if given and ROUTED_EXPERTS in self.rollout.sides:
            raise ValueError(
                f"worker.checkpoint_tokens has no effect with {ROUTED_EXPERTS} in rollout.sides, which prefixes cannot "
                f"include: remove checkpoint_tokens, or {ROUTED_EXPERTS}"
            )
        if not self.rollout.is_default("lease_tokens"):
            given.append("rollout.lease_tokens")
        if given and (maker := self.hooks.maker) is not None:
            are, them = ("are", "them") if given[1:] else ("is", "it")
            raise ValueError(
                f"{' and '.join(given)} {are} for samples that the worker generates, but hooks.{maker} generates them: "
                f"remove {them}"
            )
        return self

    @model_validator(mode="after")
    def _check_judges(self) -> Self:
        frozen = {one.name for one in self.fleet.models} - {self.model.name}
        for judge in self.reward.judges:
            if judge.url is None and judge.name not in frozen:
                raise ValueError(
                    f"judge {judge.name!r} (reward.judges) has no url, and fleet.models has no frozen model of this "
                    "name: set its url, or add the model"
                )
        return self

    @model_validator(mode="after")
    def _check_scoring_models(self) -> Self:
        frozen = {one.name: one for one in self.fleet.models if one.name != self.model.name}
        for key, model in self.rollout.scoring_models().items():
            if model.url is None and model.name not in frozen:
                raise ValueError(
                    f"rollout.{key} {model.name!r} has no url, and fleet.models has no frozen model of this name: set "
                    "its url, or add the model"
                )
            if model.path is None and (model.name not in frozen or frozen[model.name].model_path is None):
                raise ValueError(
                    f"rollout.{key} {model.name!r} has no path, so its tokenizer cannot be compared with the policy's: "
                    "set path to its folder"
                )
        if self.trainer.distill is not None and self.rollout.teacher is None:
            raise ValueError(
                "trainer.distill requires a teacher, but rollout.teacher is not set: set it, or remove trainer.distill"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards_are_used(self) -> Self:
        alone = self.trainer.alone
        if not alone:
            return self
        if self.hooks.rewards is not None:
            raise ValueError(
                f"hooks.rewards computes advantages from rewards, but trainer.{alone} alone ignores rewards: "
                f"remove the hook, or set trainer.{alone}.with_rewards"
            )
        if "nonzero_std" in self.trainer.filter.functions:
            raise ValueError(
                "trainer.filter.functions has nonzero_std, which drops groups with equal rewards, but "
                f"trainer.{alone} alone ignores rewards: remove nonzero_std, or set trainer.{alone}.with_rewards; to "
                "filter groups by rewards anyway, use your own function"
            )
        return self

    @model_validator(mode="after")
    def _check_step_rewards(self) -> Self:
        if self.trainer.process is not None and STEP_REWARDS not in self.rollout.sides:
            raise ValueError(
                f"trainer.process requires step rewards: add {STEP_REWARDS} to rollout.sides, so that a sample "
                "without them fails"
            )
        return self

    @model_validator(mode="after")
    def _check_advantages(self) -> Self:
        if self.hooks.rewards is not None and self.trainer.advantage != "grpo":
            raise ValueError(
                f"hooks.rewards computes the advantages instead of trainer.advantage {self.trainer.advantage}: remove "
                "one of them"
            )
        if self.trainer.kl is not None and self.trainer.kl.place == "reward" and self.hooks.rewards is not None:
            raise ValueError(
                "trainer.kl.place reward has no effect with hooks.rewards, which computes the advantages: subtract the "
                "penalty in the hook, or set trainer.kl.place to loss"
            )
        return self

    @model_validator(mode="after")
    def _check_temperatures(self) -> Self:
        for key in self.rollout.scoring_models():
            for dataset in self.data.train:
                sampling = self.rollout.sampling | dataset.sampling
                if not is_temperature(sampling.get("temperature") or 0):
                    continue  # the check of the dataset's sampling reports it
                if (temperature := temperature_of(sampling)) != 1:
                    raise ValueError(
                        f"rollout.{key} returns log-probabilities at temperature 1, as engines do for existing tokens, "
                        f"but dataset {dataset.name!r} samples at {temperature:g}: set its temperature to 1, or remove "
                        f"rollout.{key}"
                    )
        return self

    @model_validator(mode="after")
    def _check_generators(self) -> Self:
        hooks = self.hooks
        if hooks.generate is not None and hooks.rollout is not None:
            raise ValueError("hooks.generate and hooks.rollout both generate samples: remove one of them")
        maker = hooks.maker
        of_eval = "eval" if hooks.eval is not None else maker
        made = [(one, maker) for one in self.data.train] + [(one, of_eval) for one in self.data.eval]
        for dataset, key in made:
            if key is not None and dataset.environment is not None:
                raise ValueError(
                    f"hooks.{key} generates samples, but dataset {dataset.name!r} has an environment: remove one"
                )
        return self

    @model_validator(mode="after")
    def _check_agents(self) -> Self:
        run_by_agents = [one.name for one in (*self.data.train, *self.data.eval) if one.environment == AGENT]
        if run_by_agents and ROUTED_EXPERTS in self.rollout.sides:
            raise ValueError(
                f"dataset {run_by_agents[0]!r} is run by agents, whose turns are stored, but turns with "
                f"{ROUTED_EXPERTS} (rollout.sides) cannot be: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_all_samples_hook(self) -> Self:
        if self.hooks.all_samples is not None and not self.history.enabled:
            raise ValueError(
                "hooks.all_samples is called by the recorder, but history.enabled is false: set it to true, or remove "
                "the hook"
            )
        return self

    @model_validator(mode="after")
    def _check_nonzero_std(self) -> Self:
        if "nonzero_std" not in self.trainer.filter.functions:
            return self
        for dataset in self.data.train:
            if (dataset.n or self.rollout.n) == 1:
                key = f"data.train {dataset.name!r} has n" if dataset.n else "rollout.n is"
                raise ValueError(
                    f"{key} 1, but trainer.filter.functions has nonzero_std: a group of one has no deviation, so every "
                    "group would be dropped; raise n, or remove nonzero_std"
                )
        return self

    @model_validator(mode="after")
    def _check_apply(self) -> Self:
        if not self.staleness.rules.drains or self.worker.apply == "drain":
            return self
        if "apply" in self.worker.model_fields_set:
            raise ValueError(
                f"worker.apply is {self.worker.apply}, and staleness.mode {self.staleness.mode} always drains: "
                "remove worker.apply, or set staleness.mode to async"
            )
        worker = self.worker.model_copy()
        worker._follow(apply="drain")
        self._follow(worker=worker)
        return self

    @model_validator(mode="after")
    def _check_serving_rate(self) -> Self:
        if self.trainer.serve_bytes_per_s is not None and "enabled" not in self.serving.model_fields_set:
            raise ValueError(
                "trainer.serve_bytes_per_s limits serving over HTTP, but serving.enabled is not set: set it, "
                "or remove trainer.serve_bytes_per_s"
            )
        return self

    @model_validator(mode="after")
    def _check_delta_keys(self) -> Self:
        name = self.trainer.transport
        if name not in TRANSPORTS:
            return self  # the user's own may read what it likes
        if name == "delta" and self.serving.enabled:
            raise ValueError(
                "serving.enabled serves complete versions over HTTP, but with trainer.transport delta workers read "
                "trainer.delta_store: set it to a folder or URL that workers can read, and remove serving.enabled"
            )
        for mine, whole in (("copies_dir", "folder"), ("copies_bytes", "max_bytes")):
            if name != "delta" and not self.worker.is_default(mine):
                raise ValueError(
                    f"worker.{mine} requires trainer.transport delta, but trainer.transport is {name}: remove it, or "
                    f"set serving.{whole} for complete versions"
                )
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        engine = self.engine
        # A detected preset is that of this process, which may see no GPU although the engine has one.
        args = engine.server_args if "preset" in engine.model_fields_set else engine.args
        name, on_cpu = self.trainer.transport, args.get("device") == "cpu"
        if transport(name).needs_gpu and (on_cpu or self.trainer.device == "cpu"):
            raise ValueError(
                f"trainer.transport {name} moves weights between GPUs, but trainer.device is "
                f"{self.trainer.device}{' and the engine on a CPU' if on_cpu else ''}: use disk, or gloo on CPUs"
            )
        return self

    def folder_of(self, model: ScoringModelConfig) -> str:
        """Return the model folder of a scoring model."""
        of_fleet = next((one.model_path for one in self.fleet.models if one.name == model.name), None)
        return model.path or of_fleet or ""

    @property
    def run_dir(self) -> Path:
        return self.directory / self.run

    @property
    def delta_store(self) -> str:
        """Return the folder or URL of anchors and deltas. Raises ConfigError if its password is masked."""
        if MASK in (self.trainer.delta_store or ""):
            raise ConfigError(
                "trainer.delta_store is masked in this file: set the variable PENSTOCK_TRAINER__DELTA_STORE."
            )
        weights = Path(self.trainer.weights_dir or self.run_dir / "weights").absolute()
        return self.trainer.delta_store or str(weights / "deltas")

    @property
    def copies_dir(self) -> Path:
        """Return the folder of this machine's copies of versions."""
        return Path(self.worker.copies_dir or self.run_dir / "copies" / platform.node()).absolute()
