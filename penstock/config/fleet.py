"""Section ``fleet``: which engines of which models run on which machines; and ``engine.router``."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.config.section import Positive, Seconds, Section, is_a_name

WorkerType = Literal["regular", "prefill", "decode", "encoder", "placeholder"]
Port = Annotated[int, Field(gt=0, le=65535)]


def _checked_url(url: str) -> str:
    """Return the address of an engine without a slash at its end; raise ValueError if it is invalid."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the address of a server; write http://HOST:PORT")
    if "@" in url:
        raise ValueError("an engine's address cannot hold a password: write http://HOST:PORT")
    return url.rstrip("/")


EngineUrl = Annotated[str, AfterValidator(_checked_url)]


class MemberConfig(Section):
    """One engine behind a router."""

    #: Its address, http://HOST:PORT.
    url: EngineUrl
    #: Complete generation, or one half of a pair of prefill and decode.
    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    #: Port from which decode engines fetch KV; prefill only.
    bootstrap_port: Port | None = None

    @model_validator(mode="after")
    def _bootstrap_is_of_prefill(self) -> Self:
        if (self.bootstrap_port is not None) != (self.worker_type == "prefill"):
            raise ValueError(
                f"{self.url}: bootstrap_port is for engines of worker_type prefill, and each of them needs one"
            )
        return self


class RouterOptions(Section):
    """How a router spreads requests over engines."""

    #: How sglang-router chooses an engine for a request.
    policy: Literal["cache_aware", "round_robin", "random", "power_of_two", "manual"] = "cache_aware"
    #: More arguments of sglang-router, names without dashes; true stands for a bare flag.
    args: dict[str, Any] = Field(default_factory=dict)


class RouterConfig(RouterOptions):
    """A router of the worker's own, and the engines behind it when it starts."""

    engines: Annotated[list[MemberConfig], Field(min_length=1)]
    #: Address it listens at.
    host: str = "127.0.0.1"
    #: Port it listens at; 0 takes a free one.
    port: Annotated[int, Field(ge=0, le=65535)] = 0

    @model_validator(mode="after")
    def _modes_are_whole(self) -> Self:
        urls = [engine.url for engine in self.engines]
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"engines names {twice} twice: name each engine once")
        kinds = {engine.worker_type for engine in self.engines}
        if kinds & {"prefill", "decode"} and kinds != {"prefill", "decode"}:
            raise ValueError(
                f"engines has {' and '.join(sorted(kinds))}: a router serves regular engines, or prefill with decode"
            )
        return self


class GroupConfig(Section):
    """Engines of one kind of one model."""

    #: Its name in the fleet; None: worker_type and its place.
    name: Annotated[str, is_a_name("group")] | None = None
    #: placeholder occupies GPUs (of a trainer, say) and starts nothing.
    worker_type: WorkerType = "regular"
    #: GPUs of the group. An engine takes num_gpus_per_engine of them; 0: engines without GPUs, num_engines of them.
    num_gpus: Annotated[int, Field(ge=0)] = 0
    #: GPUs of one engine; None: 1, or 0 where the group has none.
    num_gpus_per_engine: Annotated[int, Field(ge=0)] | None = None
    #: Engines of a group without GPUs.
    num_engines: Positive | None = None
    #: Exactly these GPU ids of ``host``; None: the next free ones.
    gpus: list[Annotated[int, Field(ge=0)]] | None = None
    #: Machine of ``fleet.nodes`` that the group is on; None: wherever there is room.
    host: str | None = None
    #: Servers that run already: nothing is started, no GPU reserved.
    urls: list[EngineUrl] = Field(default_factory=list)
    #: Arguments of sglang.launch_server; they win over engine.args.
    overrides: dict[str, Any] = Field(default_factory=dict)
    #: Environment variables; they win over engine.env, and are masked as those are.
    env: dict[str, str] = Field(default_factory=dict)
    #: worker.slots of each worker of the group; None: that of the run.
    slots: Positive | None = None

    @field_validator("env")
    @classmethod
    def _env_leaves_the_kind_of_logprobs(cls, env: dict[str, str]) -> dict[str, str]:
        if ORIGINAL_LOGPROB in env:
            raise ValueError("the kind of logprobs is one for all engines: set engine.logprob_kind instead")
        return env

    @property
    def per_engine(self) -> int:
        """GPUs of one engine."""
        return self.num_gpus_per_engine if self.num_gpus_per_engine is not None else min(1, self.num_gpus)

    @property
    def count(self) -> int:
        """Engines to start."""
        return self.num_gpus // self.per_engine if self.per_engine else (self.num_engines or 0)

    @model_validator(mode="after")
    def _numbers_agree(self) -> Self:
        if self.urls:
            return self._external()
        if self.num_gpus == 0:
            if self.worker_type == "placeholder":
                raise ValueError("a placeholder occupies GPUs: set num_gpus")
            if self.num_gpus_per_engine or self.gpus:
                raise ValueError("num_gpus is 0, so num_gpus_per_engine and gpus have nothing to divide: set num_gpus")
            if self.num_engines is None:
                raise ValueError("set num_gpus, or num_engines for engines without GPUs, or urls for running ones")
            return self
        if self.num_engines is not None:
            raise ValueError("num_engines is for engines without GPUs: set num_gpus and num_gpus_per_engine alone")
        if self.per_engine == 0 or self.num_gpus % self.per_engine:
            raise ValueError(
                f"num_gpus {self.num_gpus} cannot be divided into engines of {self.per_engine} GPUs: "
                "make it a multiple of num_gpus_per_engine"
            )
        if self.gpus is not None and (len(self.gpus) != self.num_gpus or len(set(self.gpus)) != len(self.gpus)):
            raise ValueError(
                f"gpus names {self.gpus}, and num_gpus is {self.num_gpus}: name each GPU of the group once"
            )
        return self

    def _external(self) -> Self:
        given = [
            name
            for name in ("num_gpus", "num_gpus_per_engine", "num_engines", "gpus", "host", "overrides", "env")
            if not self.is_default(name)
        ]
        if given:
            raise ValueError(
                f"urls names servers that run already, so {', '.join(given)} would change nothing: remove it"
            )
        if self.worker_type != "regular":
            raise ValueError(f"urls takes regular engines; start {self.worker_type} engines with the fleet")
        return self


class ModelGroups(Section):
    """One model and the groups of engines that serve it."""

    #: Name of the model, and of its weights stream.
    name: Annotated[str, is_a_name("model")]
    #: Its folder, or id at the Hub; None: model.path, for the trained model alone.
    model_path: str | None = None
    #: false: frozen (a reference, a reward model), served beside the trained one. None: true for the trained model.
    update_weights: bool | None = None
    #: One address for all engines. None: for prefill and decode, and for several engines of a frozen model;
    #: set (``{}`` will do): replicas of the trained model are fed by one worker.
    router: RouterOptions | None = None
    server_groups: Annotated[list[GroupConfig], Field(min_length=1)]

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        kinds = [group.worker_type for group in self.server_groups]
        if ("prefill" in kinds) != ("decode" in kinds):
            there, missing = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
            raise ValueError(f"model {self.name} has {there} engines and no {missing}: add a group of them")
        if "prefill" in kinds and "regular" in kinds:
            raise ValueError(f"model {self.name} mixes regular with prefill and decode engines: make two models of it")
        if "encoder" in kinds and not {"prefill", "regular"} & set(kinds):
            raise ValueError(f"model {self.name} has encoders and nothing that they encode for: add prefill and decode")
        names = [name for name in (group.name for group in self.server_groups) if name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"model {self.name} has two groups {twice}: give them different names")
        return self

    def groups(self) -> list[tuple[str, GroupConfig]]:
        """Return the groups with their names, in their order."""
        return [(one.name or f"{one.worker_type}-{index}", one) for index, one in enumerate(self.server_groups)]


class NodeConfig(Section):
    """One machine."""

    #: Name or address of the machine.
    host: str
    #: GPUs of it that the fleet may take.
    num_gpus: Annotated[int, Field(ge=0)] = 0


class AutoscaleConfig(Section):
    """Limits of the number of workers, within which the fleet scales, and its thresholds."""

    #: Fewest workers.
    min_workers: Positive = 1
    #: Most workers.
    max_workers: Positive
    #: Unwanted for so long before they are drained; set it to three starts of an engine where that is longer.
    down_after_s: Seconds = 600.0

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} is more than max_workers {self.max_workers}: swap them")
        return self


class FleetConfig(Section):
    """Engines of the run by groups, and who starts them: ``penstock fleet up``."""

    #: Starts the processes: this machine alone, or a Ray cluster.
    launcher: Literal["local", "ray"] = "local"
    #: Machines; empty: this one with the GPUs that it has, or the nodes of the Ray cluster.
    nodes: list[NodeConfig] = Field(default_factory=list)
    #: First and last port that may be used on every node; below the ephemeral ones of most kernels.
    ports: tuple[Port, Port] = (20000, 29999)
    #: Empty: worker.count regular engines of ``model`` without GPUs.
    models: list[ModelGroups] = Field(default_factory=list)
    #: Have the fleet choose how many engines its one regular group of the trained model has; None: as configured.
    autoscale: AutoscaleConfig | None = None

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: tuple[int, int]) -> tuple[int, int]:
        if ports[0] > ports[1]:
            raise ValueError(f"{list(ports)} is not a range: write [FIRST, LAST]")
        return ports

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        for kind, names in (("model", [m.name for m in self.models]), ("node", [n.host for n in self.nodes])):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{kind} {twice} is listed twice: list each once")
        return self
