"""Section ``fleet``: which engines of which models run on which machines; and ``engine.router``."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.config.section import Positive, Seconds, Section, is_a_name

WorkerType = Literal["regular", "prefill", "decode", "encoder", "placeholder"]
Port = Annotated[int, Field(gt=0, le=65535)]


def _checked_url(url: str) -> str:
    """Return the address of an engine without a trailing slash; raise ValueError if it is invalid."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not the address of a server; write http://HOST:PORT")
    if "@" in url:
        raise ValueError("an engine's address cannot hold a password: write http://HOST:PORT")
    return url.rstrip("/")


EngineUrl = Annotated[str, AfterValidator(_checked_url)]


class MemberConfig(Section):
    """One engine behind a router."""

    #: Address of the engine, http://HOST:PORT.
    url: EngineUrl
    #: Whether the engine generates alone (regular), or is one half of a prefill and decode pair.
    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    #: Port from which decode engines fetch KV; prefill only.
    bootstrap_port: Port | None = None

    @model_validator(mode="after")
    def _check_bootstrap_port(self) -> Self:
        if (self.bootstrap_port is not None) != (self.worker_type == "prefill"):
            raise ValueError(
                f"{self.url}: bootstrap_port is required for worker_type prefill, and only for it: add or remove it"
            )
        return self


class RouterOptions(Section):
    """Settings of a router, which distributes requests over engines."""

    #: Policy by which sglang-router chooses an engine for a request.
    policy: Literal["cache_aware", "round_robin", "random", "power_of_two", "manual"] = "cache_aware"
    #: Further arguments of sglang-router, without leading dashes; true means a flag without a value.
    args: dict[str, Any] = Field(default_factory=dict)


class RouterConfig(RouterOptions):
    """The worker's own router, and its initial engines."""

    engines: Annotated[list[MemberConfig], Field(min_length=1)]
    #: Address on which the router listens.
    host: str = "127.0.0.1"
    #: Port on which the router listens; 0: a free port.
    port: Annotated[int, Field(ge=0, le=65535)] = 0

    @model_validator(mode="after")
    def _check_engines(self) -> Self:
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
    """A group of engines of one kind, for one model."""

    #: Name of the group in the fleet; None: worker_type and the group's position.
    name: Annotated[str, is_a_name("group")] | None = None
    #: Kind of the engines; placeholder reserves GPUs, for example for a trainer, and starts no engine.
    worker_type: WorkerType = "regular"
    #: Number of GPUs of the group; each engine uses num_gpus_per_engine of them. 0: num_engines engines without GPUs.
    num_gpus: Annotated[int, Field(ge=0)] = 0
    #: Number of GPUs of one engine; None: 1, or 0 if the group has no GPUs.
    num_gpus_per_engine: Annotated[int, Field(ge=0)] | None = None
    #: Number of engines of a group without GPUs.
    num_engines: Positive | None = None
    #: Ids of the group's GPUs on ``host``; None: the next free GPUs.
    gpus: list[Annotated[int, Field(ge=0)]] | None = None
    #: Machine of ``fleet.nodes`` for the group; None: any machine with room.
    host: str | None = None
    #: Addresses of running servers, for which no process is started and no GPU reserved.
    urls: list[EngineUrl] = Field(default_factory=list)
    #: Arguments of sglang.launch_server, which override engine.args.
    overrides: dict[str, Any] = Field(default_factory=dict)
    #: Environment variables, which override engine.env and are masked in the same way.
    env: dict[str, str] = Field(default_factory=dict)
    #: worker.slots for each worker of the group; None: the run's value.
    slots: Positive | None = None

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        if ORIGINAL_LOGPROB in env:
            raise ValueError("all engines must report the same kind of logprobs: set engine.logprob_kind instead")
        return env

    @property
    def per_engine(self) -> int:
        """Return the number of GPUs of one engine."""
        return self.num_gpus_per_engine if self.num_gpus_per_engine is not None else min(1, self.num_gpus)

    @property
    def count(self) -> int:
        """Return the number of engines to start."""
        return self.num_gpus // self.per_engine if self.per_engine else (self.num_engines or 0)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.urls:
            return self._check_external()
        if self.num_gpus == 0:
            if self.worker_type == "placeholder":
                raise ValueError("a placeholder occupies GPUs: set num_gpus")
            if self.num_gpus_per_engine or self.gpus:
                raise ValueError("num_gpus is 0, but num_gpus_per_engine or gpus is set: set num_gpus")
            if self.num_engines is None:
                raise ValueError(
                    "the group has no engines: set num_gpus, num_engines (for engines without GPUs) or urls"
                )
            return self
        if self.num_engines is not None:
            raise ValueError(
                "num_engines is for engines without GPUs: remove it, and set num_gpus and num_gpus_per_engine"
            )
        if self.per_engine == 0 or self.num_gpus % self.per_engine:
            raise ValueError(
                f"num_gpus {self.num_gpus} cannot be divided into engines of {self.per_engine} GPUs: "
                "make it a multiple of num_gpus_per_engine"
            )
        if self.gpus is not None and (len(self.gpus) != self.num_gpus or len(set(self.gpus)) != len(self.gpus)):
            raise ValueError(
                f"gpus lists {self.gpus}, but num_gpus is {self.num_gpus}: list each GPU of the group once"
            )
        return self

    def _check_external(self) -> Self:
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
            raise ValueError(f"urls supports regular engines only: let the fleet start {self.worker_type} engines")
        return self


class ModelGroups(Section):
    """One model and the groups of engines that serve it."""

    #: Name of the model, and of its weights stream.
    name: Annotated[str, is_a_name("model")]
    #: Folder of the model, or its id at the Hub; None: model.path, allowed only for the trained model.
    model_path: str | None = None
    #: false: serve a frozen model (a reference, a reward model) beside the trained one. None: true for the trained
    #: model, otherwise false.
    update_weights: bool | None = None
    #: Router that gives all engines one address. If set (``{}`` suffices), one worker drives all replicas of the
    #: trained model. None: a router only for prefill and decode, and for several engines of a frozen model.
    router: RouterOptions | None = None
    server_groups: Annotated[list[GroupConfig], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        kinds = [group.worker_type for group in self.server_groups]
        if ("prefill" in kinds) != ("decode" in kinds):
            there, missing = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
            raise ValueError(f"model {self.name} has {there} engines but no {missing} engines: add a group of them")
        if "prefill" in kinds and "regular" in kinds:
            raise ValueError(
                f"model {self.name} mixes regular with prefill and decode engines: split it into two models"
            )
        if "encoder" in kinds and not {"prefill", "regular"} & set(kinds):
            raise ValueError(
                f"model {self.name} has encoders but no engines that use them: add prefill and decode engines"
            )
        names = [name for name in (group.name for group in self.server_groups) if name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"model {self.name} has two groups {twice}: give them different names")
        return self

    def groups(self) -> list[tuple[str, GroupConfig]]:
        """Return (name, group) of each group in order."""
        return [(one.name or f"{one.worker_type}-{index}", one) for index, one in enumerate(self.server_groups)]


class NodeConfig(Section):
    """One machine."""

    #: Name or address of the machine.
    host: str
    #: Number of its GPUs that the fleet may use.
    num_gpus: Annotated[int, Field(ge=0)] = 0


class AutoscaleConfig(Section):
    """Limits and thresholds for scaling the number of workers."""

    #: Minimum number of workers.
    min_workers: Positive = 1
    #: Maximum number of workers.
    max_workers: Positive
    #: Time in seconds that engines must be surplus before they are drained. If starting an engine takes long, set it to
    #: at least three times that.
    down_after_s: Seconds = 600.0

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} is more than max_workers {self.max_workers}: swap them")
        return self


class FleetConfig(Section):
    """Groups of engines of the run, which ``penstock fleet up`` or ``penstock run`` starts."""

    #: Whether to start the processes on this machine (local) or on a Ray cluster.
    launcher: Literal["local", "ray"] = "local"
    #: Machines of the fleet; empty: this machine with its GPUs, or the nodes of the Ray cluster.
    nodes: list[NodeConfig] = Field(default_factory=list)
    #: First and last port that the fleet may use on every node, ten by each process; the default is below the ephemeral
    #: ports of most kernels.
    ports: tuple[Port, Port] = (20000, 29999)
    #: Models that the fleet serves. Empty: worker.count regular engines of ``model`` without GPUs.
    models: list[ModelGroups] = Field(default_factory=list)
    #: Let the fleet choose the number of engines of the only regular group of the trained model; None: the configured
    #: number.
    autoscale: AutoscaleConfig | None = None

    @field_validator("ports")
    @classmethod
    def _check_ports(cls, ports: tuple[int, int]) -> tuple[int, int]:
        if ports[0] > ports[1]:
            raise ValueError(f"ports {list(ports)} is not a range: write [FIRST, LAST]")
        return ports

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        for kind, names in (("model", [m.name for m in self.models]), ("node", [n.host for n in self.nodes])):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{kind} {twice} is listed twice: list each once")
        return self
